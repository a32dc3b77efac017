"""The least budget that a plan names, where means that it does not use would need less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.settings import Search

pytestmark = pytest.mark.usefixtures("torch_ready")


class Blocks(nn.Module):
    """Blocks whose activations are wide, before a loss."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(3))
        self.layers = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("means", [{"slices": True}, {"exact": False, "offload": False}])
def test_a_loose_plan_names_the_least_that_a_refusal_names(means: dict[str, Any]) -> None:
    model, inputs = Blocks(), (torch.randn(512, 32),)
    settings: dict[str, Any] = {"costs": "estimate", "search": Search(seconds=0.1, progress=False), **means}
    plan = fxremat.plan(model, inputs, mem="90%", **settings)
    assert not plan.slices
    assert "or less (plan.minimum searches for it)" in " ".join(str(plan).split())
    with pytest.raises(fxremat.BudgetTooSmall) as refused:
        fxremat.plan(model, inputs, mem=1000, **settings)
    assert plan.minimum == refused.value.minimum < plan.known_minimum
