"""A step graph cut into a chain of blocks: each block's ops, and the values that blocks pass on and save.

    boundary l   values computed in blocks 1..l that the forward of later blocks reads, without the held values
    held         values that are kept from their forward to their last use whatever the plan: long skip connections,
                 values that depend on nothing trained (masks, positions), outputs
    saved l, o   values that block l keeps for its backward under option o; option 0 is all that the backward reads

Blocks are numbered 0..n-1 here, but from 1 in schedules. Sizes and times are not part of a layout.
`linearize.lay_out` makes layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from fxremat.step.step_graph import StepGraph, bits_of


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """One block of a chain: indices of its ops in `StepGraph.ops`, and of its values in `StepGraph.values`."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    boundary: frozenset[int]  # the block's output: values computed up to this block that later blocks' forwards read
    made: frozenset[int]  # all values that the block's forward computes
    # for each option to save the block, the values computed in it that are kept, boundary values included
    saved: tuple[frozenset[int], ...]


class BlockBits(NamedTuple):
    """The ops and values of a block as sets of bits: bit v stands for value v, or for op v."""

    boundary: int
    saved: tuple[int, ...]
    made: int
    ops: int  # the forward ops of the block
    span: int  # the ops from its first to its last forward op, and its backward ops
    near_forward: int  # all computed values that its forward may read, write or look for
    near_backward: int  # the same for its backward, which may run forward ops again


class Ran(NamedTuple):
    """A record of one forward or backward of a block: the ops that it ran, and what that changed."""

    ops: tuple[int, ...]
    made: int  # bits of the values that became available
    ran: int  # bits of the ops that ran
    waiting: tuple[int, ...]  # backward ops that wait for a gradient which is not computed yet


class _Needs(dict[tuple[int, int, bool], frozenset[int]]):
    """The values that the forward of a block must leave in memory, by (block, save option, is it the first run).

    Option -1 keeps only the block's output.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __missing__(self, key: tuple[int, int, bool]) -> frozenset[int]:
        block, option, first = key
        place, graph = self.layout.blocks[block], self.layout.graph
        needed = place.boundary & place.made
        if option >= 0:
            needed |= place.saved[option]
        if first:
            needed |= place.made & (self.layout.held | graph.output_values)
        self[key] = needed
        return needed


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """A step graph as a chain of blocks: the ops and values of each block."""

    graph: StepGraph
    blocks: tuple[BlockLayout, ...]
    held: frozenset[int]  # values that every plan keeps from their forward to their last use

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A name for each block, made from the names of the modules that its ops belong to."""
        return tuple(self.graph.span(block.forward) for block in self.blocks)

    def boundary_before(self, block: int) -> frozenset[int]:
        """Return the values that a block reads from earlier blocks: the previous block's output, or none for the first.
        """
        return self.blocks[block - 1].boundary if block else frozenset()

    @cached_property
    def needs(self) -> _Needs:
        """The values that a block's forward must leave in memory, by (block, save option, is it the first run).

        Entries are computed when they are first read.
        """
        return _Needs(self)

    @cached_property
    def bits(self) -> tuple[BlockBits, ...]:
        """The ops and values of each block as sets of bits."""
        return tuple(map(self._bits_of, self.blocks))

    def _bits_of(self, block: BlockLayout) -> BlockBits:
        ops = self.graph.bits
        span = range(block.forward[0], block.forward[-1] + 1) if block.forward else range(0)
        boundary, saved, made = bits_of(block.boundary), tuple(map(bits_of, block.saved)), bits_of(block.made)
        forward = boundary | made
        for values in saved:
            forward |= values
        for index in span:
            forward |= ops.reads[index] | ops.again_reads[index] | ops.writes[index]
        backward = forward
        for index in block.backward:
            backward |= ops.reads[index] | ops.again_reads[index]
        return BlockBits(
            boundary=boundary,
            saved=saved,
            made=made,
            ops=bits_of(block.forward),
            span=bits_of((*span, *block.backward)),
            near_forward=forward & ops.computed,
            near_backward=backward & ops.computed,
        )

    @cached_property
    def held_bits(self) -> int:
        """The held values as a set of bits."""
        return bits_of(self.held)

    @cached_property
    def ran(self) -> dict[tuple[object, ...], Ran]:
        """A cache of what forwards and backwards of blocks ran, by all that decides it; `step.order` fills it."""
        return {}

    def with_options(self, options: Sequence[Sequence[frozenset[int]]]) -> Layout:
        """Return this layout with more save options (1, 2, ...) for each block: sets of values kept for its backward.
        """
        blocks = [
            replace(block, saved=(block.saved[0], *more))
            for block, more in zip(self.blocks, options, strict=True)
        ]
        return replace(self, blocks=tuple(blocks))
