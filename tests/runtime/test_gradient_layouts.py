"""Gradients that lie otherwise than their parameters: copies are planned, and `.grad` lies as in plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat.settings import Search

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
