"""Floats of Python's that change from call to call: one plan serves them all, like sizes that change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.settings import Search
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0, slots=100)}


class Annealed(nn.Module):
    """Has a temperature, and takes a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)
        self.temperature = 1.0

    def forward(self, x: Tensor, weight: float) -> Tensor:
        logits = self.last(F.gelu(self.first(x)))
        return F.log_softmax(logits / self.temperature, -1).pow(2).mean() + weight * logits.abs().mean()


class Resized(nn.Module):
    """Takes a size from a float, which is a constant then."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        result: Tensor = self.convolution(F.interpolate(x, scale_factor=scale)).square().mean()
        return result


def step(model: nn.Module, x: Tensor, value: float) -> Tensor:
    loss: Tensor = model(x, value)
    loss.backward()
    return loss


def assert_same_steps(model: nn.Module, x: Tensor, values: list[float], **options: Any) -> Any:
    plain = copy.deepcopy(model)
    compiled: Any = fxremat.compile(model, mem="100%", **FAST, **options)
    for call, value in enumerate(values):
        plain.zero_grad()
        compiled.zero_grad()
        assert torch.equal(step(plain, x, value), step(compiled, x, value))
        for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert same(ours.grad, theirs.grad)
        if call > 2:
            compiled.zero_grad()
            assert peak_bytes(lambda value=value: step(compiled, x, value)) <= compiled.plan.budget  # type: ignore[misc]
    return compiled


def test_a_weight_that_changes_is_planned_twice() -> None:
    assert len(assert_same_steps(Annealed(), torch.randn(32, 16), [0.1 * k for k in range(1, 9)]).fxremat.plans) == 2


def test_an_attribute_that_changes_is_planned_twice() -> None:
    model = Annealed()
    compiled: Any = fxremat.compile(model, mem="100%", **FAST)
    plain = copy.deepcopy(model)
    for call in range(6):
        model.temperature = plain.temperature = 1 + 0.1 * call
        assert torch.equal(step(plain, torch.ones(4, 16), 1.0), step(compiled, torch.ones(4, 16), 1.0))
    assert len(compiled.fxremat.plans) == 2


def test_sizes_and_floats_may_change_together() -> None:
    model = Annealed()
    compiled: Any = fxremat.compile(model, mem="100%", **FAST)
    plain = copy.deepcopy(model)
    for call in range(4, 9):
        x = torch.randn(4 * call, 16)
        assert torch.equal(step(plain, x, 0.1 * call), step(compiled, x, 0.1 * call))


def test_a_float_that_gives_a_size_is_a_constant() -> None:
    compiled = assert_same_steps(Resized(), torch.randn(2, 3, 8, 8), [1.0, 1.5, 2.0])
    assert len(compiled.fxremat.plans) == 3
