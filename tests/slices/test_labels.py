"""Tests of the place of a region's axis in a tensor, by hand and against slices of the flattened elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxremat.slices.body import _Cut
from fxremat.slices.labels import SUM, WHOLE, Part, Place, axes, place, slice_shape

pytestmark = pytest.mark.usefixtures("torch_ready")


@pytest.mark.parametrize(
    ("shape", "outer", "count", "expected"),
    [
        # Logits of tokens: B = 2, T = 3, V = 5.
        ((2, 3, 5), 1, 6, Place(0, 2, 1)),
        ((2, 3, 5), 1, 2, Place(0, 1, 1)),
        ((2, 3, 5), 2, 3, Place(1, 1, 1)),
        ((2, 3, 5), 6, 5, Place(2, 1, 1)),
        ((2, 3, 5), 1, 3, Place(0, 2, 2)),
        ((2, 3, 5), 1, 30, Place(0, 3, 1)),
        ((2, 3, 5), 1, 4, None),
        ((2, 3, 5), 3, 5, None),
        ((2, 3, 5), 30, 2, None),
        # The same, flattened: tokens, whole sequences.
        ((6, 5), 1, 6, Place(0, 1, 1)),
        ((6, 5), 1, 2, Place(0, 1, 3)),
        ((6, 5), 1, 3, Place(0, 1, 2)),
        ((6, 5), 6, 5, Place(1, 1, 1)),
        ((30,), 1, 6, Place(0, 1, 5)),
        # Rows of attention scores: B = 2, H = 4, T = 3.
        ((2, 4, 3, 3), 8, 3, Place(2, 1, 1)),
        ((2, 4, 3, 3), 1, 8, Place(0, 2, 1)),
        ((8, 3, 3), 8, 3, Place(1, 1, 1)),
        # Dimensions of size 1 are never the first of the axis.
        ((1, 6, 5), 1, 6, Place(1, 1, 1)),
        ((2, 1, 3), 2, 3, Place(2, 1, 1)),
        ((2, 1, 3), 1, 6, Place(0, 3, 1)),
        ((2, 3, 1), 6, 1, None),
        ((1, 1), 1, 2, None),
        ((), 1, 2, None),
        ((), 2, 2, None),
        # Rows of several elements, across two dimensions.
        ((4, 6), 1, 6, Place(0, 2, 4)),
        # Nothing to cut.
        ((0, 3), 1, 3, None),
        ((2, 3, 5), WHOLE, 6, None),
        ((2, 3, 5), SUM, 6, None),
    ],
)
def test_places_by_hand(shape: Sequence[int], outer: Part, count: int, expected: Place | None) -> None:
    assert place(shape, outer, count) == expected


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [
        ((2, 3, 5), 6, {1: Place(0, 2, 1)}),
        ((2, 3, 5), 2, {1: Place(0, 1, 1)}),
        ((2, 3, 5), 3, {1: Place(0, 2, 2), 2: Place(1, 1, 1)}),
        ((2, 3, 5), 5, {1: Place(0, 3, 6), 2: Place(1, 2, 3), 6: Place(2, 1, 1)}),
        ((2, 3, 5), 7, {}),
        ((1, 4, 1, 4), 4, {1: Place(1, 1, 1), 4: Place(3, 1, 1)}),
        ((), 2, {}),
    ],
)
def test_axes_by_hand(shape: Sequence[int], count: int, expected: dict[int, Place]) -> None:
    assert dict(axes(shape, count)) == expected


def test_the_shape_of_a_slice_by_hand() -> None:
    assert slice_shape((2, 3, 5), Place(0, 2, 1), 4) == [1, 4, 5]
    assert slice_shape((2, 3, 5), Place(1, 1, 1), 2) == [2, 2, 5]
    assert slice_shape((6, 5), Place(0, 1, 3), 1) == [3, 5]
    assert slice_shape((4, 6, 2), Place(0, 2, 4), 2) == [1, 8, 2]


shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, Place]:
    """A shape, `outer`, rows, and the place."""
    shape = draw(shapes)
    numel = math.prod(shape)
    count = draw(st.sampled_from([rows for rows in range(1, numel + 1) if numel % rows == 0]))
    found = list(axes(shape, count))
    if not found:
        return (2,), 1, 2, Place(0, 1, 1)
    outer, at = draw(st.sampled_from(found))
    return shape, outer, count, at


def slices(tensor: torch.Tensor, at: Place, count: int, rows: int) -> list[torch.Tensor]:
    cut = _Cut(at.dim, at.dims, at.each)
    prepared = cut.prepared(tensor)
    return [cut.slice(prepared, first, min(rows, count - first)) for first in range(0, count, rows)]


@given(cuts(), st.integers(1, 5))
def test_slices_are_rows_of_the_axis_and_make_the_tensor_together(
    cut: tuple[tuple[int, ...], int, int, Place], rows: int
) -> None:
    shape, outer, count, at = cut
    tensor = torch.arange(math.prod(shape)).view(shape)
    by_rows = tensor.view(outer, count, -1)
    made = slices(tensor, at, count, rows)
    for number, each in enumerate(made):
        first, end = number * rows, min(number * rows + rows, count)
        assert list(each.shape) == slice_shape(shape, at, end - first)
        assert torch.equal(each.reshape(outer, end - first, -1), by_rows[:, first:end])
        assert each.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert torch.equal(torch.cat(made, at.end - 1).reshape(shape), tensor)


@given(cuts(), st.integers(1, 5), st.permutations(range(4)))
def test_slices_of_a_tensor_of_any_layout_are_those_of_a_contiguous_one(
    cut: tuple[tuple[int, ...], int, int, Place], rows: int, order: list[int]
) -> None:
    shape, _, count, at = cut
    tensor = torch.arange(math.prod(shape)).view(shape)
    inside = [dim for dim in order if dim < len(shape)]
    turned = tensor.permute(inside).contiguous().permute([inside.index(dim) for dim in range(len(shape))])
    for mine, right in zip(slices(turned, at, count, rows), slices(tensor, at, count, rows), strict=True):
        assert torch.equal(mine, right)


@given(cuts(), shapes)
def test_a_place_is_the_fewest_dimensions_that_hold_the_rows(
    cut: tuple[tuple[int, ...], int, int, Place], other: tuple[int, ...]
) -> None:
    _, outer, count, _ = cut
    found = [
        Place(dim, end - dim, math.prod(other[dim:end]) // count)
        for dim in range(len(other))
        for end in range(dim + 1, len(other) + 1)
        if other[dim] != 1 and math.prod(other[:dim]) == outer and math.prod(other[dim:end]) % count == 0
    ]
    if count > 1:
        assert place(other, outer, count) == min(found, key=lambda at: at.dims, default=None)


@given(cuts(), st.integers(1, 5), st.data())
def test_a_reshape_keeps_outer_and_rows(
    cut: tuple[tuple[int, ...], int, int, Place], rows: int, data: st.DataObject
) -> None:
    """Slices hold the same elements in the same order in both shapes, where both have the axis."""
    shape, outer, count, at = cut
    tensor = torch.arange(math.prod(shape)).view(shape)
    ends = sorted(data.draw(st.sets(st.integers(0, len(shape)))) | {0, len(shape)})
    merged = [math.prod(shape[begin:end]) for begin, end in itertools.pairwise(ends)]
    halved = [part for size in merged for part in ((2, size // 2) if size % 2 == 0 else (1, size))]
    for other in (merged, halved):
        there = place(other, outer, count)
        if there is None:
            continue
        again = tensor.reshape(other)
        for mine, right in zip(
            slices(again, there, count, rows), slices(tensor, at, count, rows), strict=True
        ):
            assert torch.equal(mine.flatten(), right.flatten())
