"""Learned values written under a mask, `h[mask] = vector`: such steps are one graph, with the bits of plain PyTorch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.ops.masked_writes import masked_sum, write
from fxremat.settings import Search
from tests.training import gradients_of, unequal

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0, slots=100)}


def by_index(hidden: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    hidden[mask] = value
    return hidden


def by_method(hidden: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return hidden.index_put_((mask,), value)


def in_a_view(hidden: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    hidden[:, 1:][mask[:, 1:]] = value
    return hidden


def of_a_row(hidden: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    hidden[mask] = value[None]
    return hidden


def of_a_number(hidden: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    hidden[mask] = value[3]
    return hidden * value


class Masked(nn.Module):
    """Takes [rows, places, 16], and a mask of [rows, places]."""

    def __init__(self, place: Callable[[Tensor, Tensor, Tensor], Tensor], *, broken: bool = False) -> None:
        super().__init__()
        self.place, self.broken = place, broken
        self.first, self.token = nn.Linear(16, 32), nn.Parameter(torch.rand(32))
        self.last = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.last(self.place(hidden, mask, self.token)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", [by_index, by_method, in_a_view, of_a_row, of_a_number])
@pytest.mark.parametrize("broken", [False, True])
def test_the_numbers_are_plain_pytorch_s(
    place: Callable[[Tensor, Tensor, Tensor], Tensor], broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Masked(place, broken=broken)
    compiled = fxremat.compile(copy.deepcopy(plain), mem="100%", fullgraph=not broken, **FAST)
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        x, mask = torch.randn(8, 32, 16, generator=random), torch.rand(8, 32, generator=random) < 0.1 * (seed + 1)
        losses = []
        for model in (plain, compiled):
            model.zero_grad()
            losses.append(loss := model(x, mask))
            loss.backward()
        assert torch.equal(*losses)
        assert not unequal(gradients_of(compiled), gradients_of(plain))
    assert "runs as plain PyTorch" not in caplog.text
    assert compiled.plan is not None


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_the_budget_holds_whatever_the_mask(share: float) -> None:
    compiled, x = fxremat.compile(Masked(by_index), mem="min", **FAST), torch.randn(8, 32, 16)
    compiled(x, torch.rand(8, 32) < 0.1).backward()
    mask = torch.rand(8, 32) < share
    for _ in range(2):
        compiled.zero_grad()
        peak = peak_bytes(lambda: compiled(x, mask).backward())
    assert peak <= compiled.plan.budget
    assert compiled.plan.predicted_peak <= 1.02 * peak
    assert len(compiled.fxremat.plans) == 1


def test_the_op_takes_the_same_memory_whatever_the_mask() -> None:
    gradient = torch.randn(64, 32, 16)
    masks = [torch.rand(64, 32) < share for share in (0.0, 0.3, 1.0)]
    peaks = {peak_bytes(lambda mask=mask: masked_sum(gradient, mask, [16])) for mask in masks}
    assert len(peaks) == 1


def test_gradients_of_gradients() -> None:
    x, mask = torch.randn(4, 8, dtype=torch.double, requires_grad=True), torch.rand(4) < 0.5
    value = torch.randn(8, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, value: write(x * 3, mask, value).square(), (x, value))


def test_values_without_a_gradient_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def place(hidden: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        hidden[mask] = value.detach()
        hidden[mask] = 0.5
        return hidden

    compiled = fxremat.compile(Masked(place), mem="100%", fullgraph=True, **FAST)
    with caplog.at_level(logging.WARNING):
        compiled(torch.randn(8, 32, 16), torch.rand(8, 32) < 0.1).backward()
    assert not any("masked_sum" in op.name for op in compiled.plan.graph.ops)
