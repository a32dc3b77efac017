"""`strides_of_view` gives the strides of `Tensor.view`, and None exactly where that refuses."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxremat.torch_private import strides_of_view
from tests.draws import everyday

sizes = st.sampled_from([1, 1, 2, 2, 3, 4, 6])


@st.composite
def tensors(draw: Any) -> Tensor:
    """Tensors with elements, laid out in all ways that views of a contiguous one have."""
    shape = draw(st.lists(sizes, min_size=0, max_size=4))
    tensor = torch.empty(shape)
    for _ in range(draw(st.integers(0, 4))):
        last = tensor.dim() - 1
        if last < 0:
            tensor = tensor.unsqueeze(0)
            continue
        place = draw(st.integers(0, last))
        match draw(st.sampled_from(["permute", "narrow", "step", "unsqueeze", "expand", "squeeze", "flatten"])):
            case "permute":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            case "narrow":
                length = draw(st.integers(1, tensor.shape[place]))
                tensor = tensor.narrow(place, draw(st.integers(0, tensor.shape[place] - length)), length)
            case "step":
                tensor = tensor[(slice(None),) * place + (slice(None, None, 2),)]
            case "unsqueeze" if last < 5:
                tensor = tensor.unsqueeze(draw(st.integers(0, last + 1)))
            case "expand":
                shape = [*tensor.shape]
                shape[place] = draw(sizes) if shape[place] == 1 else shape[place]
                tensor = tensor.expand(shape)
            case "squeeze":
                tensor = tensor.squeeze(place)
            case "flatten" if place < last:
                tensor = tensor.flatten(place, place + 1)
    return tensor


@st.composite
def shapes(draw: Any, count: int) -> list[int]:
    """Shapes of so many elements, with sizes of 1 anywhere."""
    found: list[int] = []
    while count > 1:
        divisors = [size for size in range(2, count + 1) if count % size == 0]
        found.append(draw(st.sampled_from(divisors)))
        count //= found[-1]
    for _ in range(draw(st.integers(0, 2))):
        found.insert(draw(st.integers(0, len(found))), 1)
    return found


@st.composite
def views(draw: Any) -> tuple[Tensor, list[int]]:
    """A tensor and a shape of as many elements: any, or one close to the tensor's own."""
    tensor = draw(tensors())
    if draw(st.booleans()):
        return tensor, draw(shapes(tensor.numel()))
    shape = [*tensor.shape]
    if shape and draw(st.booleans()):
        place = draw(st.integers(0, len(shape) - 1))
        shape[place : place + 1] = draw(shapes(shape[place]))
    if len(shape) > 1 and draw(st.booleans()):
        place = draw(st.integers(0, len(shape) - 2))
        shape[place : place + 2] = [math.prod(shape[place : place + 2])]
    return tensor, shape


@settings(max_examples=everyday(2000), deadline=None)
@given(views())
@example((torch.empty(()), [1, 1]))
@example((torch.empty(1, 1), []))
@example((torch.empty(1, 4).t(), [4, 1, 1]))
@example((torch.empty(6, 1).expand(6, 4), [24]))
def test_strides_are_those_of_torch(case: tuple[Tensor, list[int]]) -> None:
    tensor, shape = case
    try:
        wanted = [*tensor.view(shape).stride()]
    except RuntimeError:
        wanted = None
    assert strides_of_view(tensor.shape, tensor.stride(), shape) == wanted, (tensor.shape, tensor.stride(), shape)


def test_a_shape_of_another_number_of_elements_has_none() -> None:
    for shape in ([5], [2, 2], [2, 3, 2], []):
        assert strides_of_view([2, 3], [3, 1], shape) is None, shape
