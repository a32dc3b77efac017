"""Gradients that lie otherwise than their parameters: copies are planned, and `.grad` lies as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from benchmarks.meter import peak_bytes
from fxremat.settings import Search
from tests.training import gradients_of, unequal

pytestmark = pytest.mark.usefixtures("torch_ready")


class Patches(nn.Module):
    """Convolutions of values that a LayerNorm has left in channels_last, whose gradients are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(512, 4096), nn.LayerNorm(64), nn.Conv2d(512, 64, 1)
        self.down, self.last = nn.Conv2d(64, 512, 2, 2), nn.Conv2d(64, 64, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).view(1, 8, 8, 64)).permute(0, 3, 1, 2)
        x = self.out(self.down(x)).permute(0, 2, 3, 1)
        return self.last(x.permute(0, 3, 1, 2)).square().mean()


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_budget_holds_while_gradients_are_stored(accumulate: bool) -> None:
    torch.manual_seed(0)
    plain, x = Patches(), torch.randn(1, 512)
    ours = fxremat.compile(copy.deepcopy(plain), mem="min", search=Search(seconds=0.0))
    for model in (plain, ours):
        for _ in range(2 if accumulate else 1):
            model(x).backward()
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
        assert mine.grad.stride() == its.grad.stride()
    if not accumulate:
        ours.zero_grad(set_to_none=True)
    measured = meter.peak_bytes(lambda: ours(x).backward())
    assert measured <= ours.plan.budget
    assert accumulate or measured <= ours.plan.predicted_peak <= 1.001 * measured


class Normed(nn.Module):
    """A GroupNorm whose backward needs its gradient in one layout; what follows it, and the loss, have another."""

    def __init__(self, dims: int, breaks: bool, unused: bool) -> None:
        super().__init__()
        convolution = nn.Conv1d if dims == 3 else nn.Conv2d
        self.first, self.norm, self.last = convolution(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Linear(8, 8)
        self.breaks, self.unused = breaks, unused

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        moved = x.movedim(1, -1)
        last = self.last(moved)
        return (last, moved, x) if self.unused else last + moved


def assert_equal_steps(ours: nn.Module, plain: nn.Module, x: Tensor, loss: Callable[[Any], Tensor]) -> None:
    for _ in range(4):
        for model in (plain, ours):
            model.zero_grad()
            loss(model(x)).backward()
        assert unequal(gradients_of(ours), gradients_of(plain)) == []


def squares(outputs: Any) -> Tensor:
    return (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean()


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("dims", [3, 4])
def test_a_group_norm_copies_gradients_that_lie_otherwise(
    dims: int, breaks: bool, unused: bool, form: torch.memory_format
) -> None:
    if dims == 3 and form is torch.channels_last:
        return
    torch.manual_seed(0)
    plain = Normed(dims, breaks, unused).to(memory_format=form)
    x = torch.randn(4, 3, *[16] * (dims - 2)).contiguous(memory_format=form)
    ours = fxremat.compile(copy.deepcopy(plain), mem="min", search=Search(seconds=0.2, progress=False))
    assert_equal_steps(ours, plain, x, squares)
    ours.zero_grad()
    assert peak_bytes(lambda: squares(ours(x)).backward()) <= ours.plan.budget


class ReadAsTraced(nn.Module):
    """Ops that need the layout of their gradient, which the loss reads in another one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.name = nn.Parameter(torch.randn(6, 4, 2)), name
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.name == "weight_norm":
            return self.linear(x), self.linear.weight
        if self.name == "complex":
            return (torch.view_as_real(torch.view_as_complex(self.weight) * 2j),)
        return (torch.cdist(self.weight, self.weight.flip(1)),)


@pytest.mark.parametrize("name", ["weight_norm", "complex", "cdist"])
def test_ops_that_need_a_layout_copy_gradients_that_lie_otherwise(name: str) -> None:
    def loss(outputs: tuple[Tensor, ...]) -> Tensor:
        return sum((output.transpose(0, -1).contiguous().sin().sum() for output in outputs), torch.zeros(()))

    torch.manual_seed(0)
    plain, x = ReadAsTraced(name), torch.randn(5, 4)
    ours = fxremat.compile(copy.deepcopy(plain), mem="100%", search=Search(seconds=0.2, progress=False))
    assert_equal_steps(ours, plain, x, loss)
