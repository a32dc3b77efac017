"""Labels that tell how each tensor is cut into slices.

A region (a group of ops) runs in slices of one axis of `count` rows. In each tensor that is cut, the axis is a
group of neighbouring dimensions, flattened: `count` rows of some elements each, after dimensions whose product
is `outer`.

    [B, T, V]    B * T rows    outer 1, dims 0..1, each 1          the logits of tokens
    [B * T, V]   B rows        outer 1, dims 0..0, each T          the logits of entire sequences
    [B, H, T, T] T rows        outer B * H, dims 2..2, each 1      rows of attention scores

`outer` alone identifies the axis, since a reshape that keeps the order of elements keeps `outer` and `count`.
In a slice, the group is reduced to its last dimension with the slice's rows, after ones: the rank stays, and so
do the indices of the other dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Mark(Enum):
    """The part that a slice has of a tensor that is not cut."""

    WHOLE = "whole"  # the whole tensor, equal in all slices
    SUM = "sum"  # one summand of the tensor, which is the sum over all slices


WHOLE, SUM = Mark.WHOLE, Mark.SUM
Part = int | Mark  # product of the dimensions before the cut ones, or a mark for a tensor that is not cut


@dataclass(frozen=True)
class Place:
    """The dimensions along which a tensor is cut: `dims` of them from `dim` on, with `each` elements of them in a row.
    """

    dim: int
    dims: int
    each: int

    @property
    def end(self) -> int:
        """The first dimension after the dimensions of the axis."""
        return self.dim + self.dims

    def holds(self, dimension: int) -> bool:
        """Tell whether a dimension belongs to the axis."""
        return self.dim <= dimension < self.end


def place(shape: Sequence[int], outer: Part, count: int) -> Place | None:
    """Return the fewest dimensions of a shape that can be cut into `count` rows, preceded by `outer` elements.

    None if no dimensions can, or if `outer` is a mark, which means that the tensor is not cut.
    """
    if isinstance(outer, Mark):
        return None
    before, dim = 1, 0
    while dim < len(shape) and (before < outer or shape[dim] == 1):
        before *= shape[dim]
        dim += 1
    if before != outer:
        return None
    size = 1
    for end in range(dim, len(shape)):
        size *= shape[end]
        if size and size % count == 0:
            return Place(dim, end - dim + 1, size // count)
    return None


def axes(shape: Sequence[int], count: int) -> Iterator[tuple[int, Place]]:
    """Yield each way to cut a tensor of this shape into `count` rows.

    A way is (product of the dimensions before the cut ones, the cut dimensions).
    """
    for outer in dict.fromkeys(math.prod(shape[:dim]) for dim in range(len(shape))):
        found = place(shape, outer, count)
        if found is not None:
            yield outer, found


def slice_shape(shape: Sequence[int], at: Place, rows: int) -> list[int]:
    """Return the shape of a slice of `rows` rows of a tensor with this shape, which is cut along `at`."""
    return [*shape[: at.dim], *[1] * (at.dims - 1), rows * at.each, *shape[at.end :]]
