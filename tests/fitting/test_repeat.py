"""Repeated layers of a captured step: equal to a capture of all of them, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.fitting.repeat import NotPeriodic, Windows, repeated
from fxremat.fitting.stacks import Stack, shortened, stacks
from fxremat.settings import Search
from tests.fitting.test_configs import canonical

pytestmark = pytest.mark.usefixtures("torch_ready")

WIDTH = 8


class Layer(nn.Module):
    """A layer that reads what the layer before made, a mask, and a context that all layers share."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.scale = scale

    def forward(self, x: Tensor, mask: Tensor, context: Tensor) -> Tensor:
        return x + self.scale * self.dropout(self.inner(x * mask).relu()) + self.side(context)


class Stacked(nn.Module):
    """A stack of layers between a first and a last one."""

    def __init__(self, layers: int, *, far: bool = False, scales: bool = False, kinds: str = "") -> None:
        super().__init__()
        self.of_kinds = list(kinds)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer(1.0 + scales * number) for number in range(layers))
        self.far = far

    def forward(self, x: Tensor) -> Tensor:
        context, mask = self.first(x), (x > 0).float()
        seen, h = [], context
        masks = {"": mask, "a": mask, "b": 1 - mask}
        for layer, kind in zip(self.layers, self.of_kinds or [""] * len(self.layers), strict=False):
            h = layer(h, masks[kind], context)
            seen.append(h)
        return self.last(h + seen[2] if self.far else h).sum()


def step(model: nn.Module) -> Any:
    x = torch.zeros(3, WIDTH)
    return fxremat.capture(model, x, costs="estimate", dynamic=False, search=Search(seconds=0, progress=False)).graph


def longer(model: Stacked, captured: int = 5) -> Any:
    (stack,) = stacks(model, captured)
    with shortened(model, [stack]):
        few = step(model).step
    assert len(model.layers) == len(stack.kinds)
    return repeated(few, stack.windows).graph


def test_a_lengthened_step_is_the_captured_one() -> None:
    model = Stacked(7)
    made = longer(model)
    assert canonical(made) == canonical(step(model).step)
    assert len(made.parameters) == 2 * len(list(model.parameters()))
    assert [value.index for value in made.values] == list(range(len(made.values)))
    assert [op.index for op in made.ops] == list(range(len(made.ops)))
    assert made.values[made.ops[-1].writes[0]].producer == len(made.ops) - 1


def test_a_layer_in_the_middle_that_something_else_reads_is_refused() -> None:
    with pytest.raises(NotPeriodic, match="layer"):
        longer(Stacked(7, far=True))


def test_layers_of_two_kinds_that_have_the_same_ops_are_copied_from_layers_of_their_kind() -> None:
    model = Stacked(15, kinds="aabaabaabaabaab")
    (stack,) = stacks(model, 5)
    assert (stack.kinds[:6], stack.head, stack.tail) == ((0, 0, 1, 0, 0, 1), 4, 2)
    made = longer(model)
    assert canonical(made) == canonical(step(model).step)


def test_too_few_windows_are_refused() -> None:
    graph = step(Stacked(4)).step
    with pytest.raises(NotPeriodic, match="2 periods are too few"):
        repeated(graph, Windows(path="layers", first=0, period=1, kinds=(0, 0), before=1, copies=(0,)))


def test_a_stack_that_no_op_belongs_to_is_left_as_it_is() -> None:
    graph = step(Stacked(4)).step
    others = Windows(path="others", first=0, period=1, kinds=(0, 0, 0, 0), before=2, copies=(0,))
    assert repeated(graph, others).graph is graph


def test_layers_with_other_settings_are_not_equal() -> None:
    assert stacks(Stacked(7, scales=True)) == ()
    (stack,) = stacks(Stacked(7))
    assert stack == Stack(path="layers", first=0, period=1, kinds=(0,) * 7, head=2, tail=2)


def test_numbers_of_layers_in_settings_around_are_part_of_them() -> None:
    model: Any = Stacked(16)
    model.config = {"full_layers": [3, 7, 11, 15], "width": [64]}
    (stack,) = stacks(model, 3, mixed=False)
    assert (stack.period, len(stack.kinds)) == (4, 4)
    (stack,) = stacks(model)
    assert stack.kinds == (0, 0, 0, 1) * 4
    del model.config
    model.kinds = ["a", "b"] * 8
    (stack,) = stacks(model, mixed=False)
    assert (stack.period, len(stack.kinds)) == (2, 8)
