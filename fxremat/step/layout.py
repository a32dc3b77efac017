"""A step graph laid out as a chain: which block each op belongs to, and which values blocks pass on and save.

    boundary l   the values made in blocks 1..l and read by the forward of later blocks, without the held ones
    held         values that are kept from their forward to their last use: carried skips, anchors, outputs
    saved l, o   what block l keeps for its backward under option o; option 0 is everything that B_l reads

Blocks are numbered 0..n-1 here (tokens of a schedule count from 1). Sizes and times are not known at this level.
`linearize.lay_out` makes layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxremat.step.step_graph import StepGraph


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """One block: its ops (numbers into `StepGraph.ops`) and its values (numbers into `StepGraph.values`)."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    boundary: frozenset[int]  # a_l, the block's output: the values made in blocks 1..l that later forwards read
    made: frozenset[int]  # every value that the forward of this block writes
    saved: tuple[frozenset[int], ...]  # for each option the values made here that it saves, boundary values included


class _Needs(dict[tuple[int, int, bool], frozenset[int]]):
    """The values that a block's forward must leave in memory, by (block, option, whether it runs for the first time).

    Option -1 keeps the block's output alone.
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
    held: frozenset[int]  # values that are kept from their forward to their last use, whatever the plan

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A name for each block: that of the modules that its ops belong to."""
        return tuple(self.graph.span(block.forward) for block in self.blocks)

    def boundary_before(self, block: int) -> frozenset[int]:
        """Return the values that enter a block, the output of the one before (a_{l-1}); none for the first block."""
        return self.blocks[block - 1].boundary if block else frozenset()

    @cached_property
    def needs(self) -> _Needs:
        """The values that each forward of a block must leave in memory, computed on first use."""
        return _Needs(self)

    @cached_property
    def runs(self) -> dict[tuple[int, frozenset[int], frozenset[int]], list[int]]:
        """A cache of the ops to run, by (block, wanted values, values of the block that are available already)."""
        return {}

    @cached_property
    def uniform(self) -> frozenset[int]:
        """The blocks all of whose ops read the same values when they are recomputed as when they run first."""
        ops = self.graph.ops
        return frozenset(
            number
            for number, block in enumerate(self.blocks)
            if all(ops[op].reads == ops[op].again_reads for op in block.forward)
        )

    def with_options(self, options: Sequence[Sequence[frozenset[int]]]) -> Layout:
        """Return this layout with further save sets (options 1, 2, ...) for each block."""
        blocks = [
            replace(block, saved=(block.saved[0], *more))
            for block, more in zip(self.blocks, options, strict=True)
        ]
        return replace(self, blocks=tuple(blocks))
