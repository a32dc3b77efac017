"""A joint graph laid out as a chain: which op belongs to which block, what crosses each boundary, what each saves.

    boundary l   the values made in blocks 1..l and read by the forward of later blocks, held ones apart
    held         values that are kept from their forward to their last use: carried skips, anchors, outputs
    saved l, o   what block l keeps for its backward under option o; option 0 is everything that B_l reads

Blocks are numbered 0..n-1 here (tokens of a schedule count from 1). Sizes and times are not known at this level.
`linearize.lay_out` makes layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxremat.step.joint import Joint


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """One block: its ops (numbers into `Joint.ops`) and its values (numbers into `Joint.values`)."""

    name: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    boundary: frozenset[int]  # a_l
    made: frozenset[int]  # every value that the forward of this block writes
    saved: tuple[frozenset[int], ...]  # made in this block; each holds the boundary values made here


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The chain of blocks of one joint graph."""

    joint: Joint
    blocks: tuple[BlockLayout, ...]
    held: frozenset[int]

    def boundary_before(self, block: int) -> frozenset[int]:
        """The values that enter a block (a_{l-1}); none enter the first: inputs are primals."""
        return self.blocks[block - 1].boundary if block else frozenset()

    def with_options(self, options: Sequence[Sequence[frozenset[int]]]) -> Layout:
        """The same layout with further save sets (options 1, 2, ...) for each block."""
        blocks = [
            replace(block, saved=(block.saved[0], *more))
            for block, more in zip(self.blocks, options, strict=True)
        ]
        return replace(self, blocks=tuple(blocks))
