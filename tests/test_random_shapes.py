"""Random models at random batch sizes: one capture plans each size as a capture of that size does, and trains alike."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import fxremat
from fxremat.search.executions import Executions
from fxremat.settings import Search
from tests.dags import WIDTH, Dag, Layer, Recipe, batch, few, recipes, small_recipes
from tests.steps import Step, differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK: dict[str, Any] = {"mem": "1GB", "search": Search(seconds=0.0, slots=100)}
DIVIDED = {"view": 2, "images": 4}  # layers that bear some numbers of rows alone, and what divides those

batch_sizes = st.lists(st.integers(2, 40), min_size=3, max_size=4, unique=True)
two_sizes = st.lists(st.integers(2, 40), min_size=2, max_size=2, unique=True)


def rows_of(recipe: Recipe, sizes: list[int]) -> list[int]:
    """These numbers of rows, or multiples of them that the model bears.

    The first is not the width: torch takes sizes of inputs that are equal for one and the same, and this one is fixed.
    """
    times = max([1, *(DIVIDED.get(layer.kind, 1) for layer in recipe.layers)])
    return sorted((times * size for size in sizes), key=lambda rows: rows == WIDTH)


def step(model: nn.Module, call: nn.Module, rows: int) -> Step:
    """One training step at a batch size."""

    def loss_of(outputs: Any) -> torch.Tensor:
        loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs
        return loss

    return step_of(model, lambda: call(*batch(rows, rows)), loss_of)


def check(recipe: Recipe, sizes: list[int]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Dag(recipe).train()
    model, fresh = copy.deepcopy(plain), copy.deepcopy(plain)
    first, *others = rows_of(recipe, sizes)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "sizes are taken as fixed")
        compiled = fxremat.compile(model, dynamic=True, **QUICK)
        compiled(*batch(first, first))
    plan = compiled.plan
    assert plan is not None
    assert plan.sizes is not None
    for rows in others:
        there = plan.at(x=rows)
        fixed = fxremat.plan(copy.deepcopy(fresh), batch(rows, rows), dynamic=False, **QUICK)
        assert there.keep_all_peak == fixed.keep_all_peak, rows
        peak, _ = Executions(fixed.graph, fixed.costs).judge(there.chosen.order())
        assert there.predicted_peak == peak, rows
    model.load_state_dict(fresh.state_dict())
    for rows in (*others, first):
        ours, theirs = step(model, compiled, rows), step(plain, plain, rows)
        assert differences(ours, theirs) == [], rows
        assert compiled.plan.sizes is not None


class Pooled(nn.Module):
    """A model that torch captures for sizes that change, and then fixes the length: its pooling takes numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool1d(self.linear(x).transpose(1, 2), 2)
        return y.square().mean()


def test_a_plan_does_not_tell_of_sizes_that_it_is_not_for() -> None:
    model = Pooled()
    compiled = fxremat.compile(model, dynamic=True, **QUICK)
    compiled(torch.randn(5, 6, WIDTH))
    plan = compiled.plan
    assert plan is not None
    with pytest.raises(fxremat.FxrematError, match="takes another way through the model, and is captured by itself"):
        plan.at(x=(9, 14))
    assert plan.at(x=(5, 6)).predicted_peak == plan.predicted_peak


@few(1)
@given(small_recipes, two_sizes)
@example(Recipe((Layer("tokens", 0, 0), Layer("images", 0, 0), Layer("attend", 0, 1)), 1, False), [3, 5])
def test_random_models_at_random_sizes_small(recipe: Recipe, sizes: list[int]) -> None:
    check(recipe, sizes)


@pytest.mark.long
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes, batch_sizes)
def test_random_models_at_random_sizes(recipe: Recipe, sizes: list[int]) -> None:
    check(recipe, sizes)
