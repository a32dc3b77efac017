"""Random models under random budgets: the peak holds, and every number is plain PyTorch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

import fxremat
from benchmarks.meter import peak_bytes
from tests.dags import Dag, Layer, Recipe, batch, few, recipes

pytestmark = pytest.mark.usefixtures("torch_ready")


def train_once(model: nn.Module, trained: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs, gradients and buffers of one step, and the generator's state after it."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    given = inputs(trained)
    outputs = model(*given)
    loss: Any = outputs["loss"] if isinstance(outputs, dict) else outputs
    loss.backward()
    tensors = [leaf.detach().clone() for leaf in tree_leaves(outputs) if leaf is not None]
    tensors += [t.grad.clone() for t in (*model.parameters(), *given) if t.grad is not None]
    tensors += [buffer.clone() for buffer in model.buffers()]
    return tensors, torch.get_rng_state()


def inputs(trained: bool) -> list[torch.Tensor]:
    """The batch; where it is trained, gradients flow to it."""
    return [value.requires_grad_(trained) for value in batch()]


def check(recipe: Recipe, share: int, trained: bool = False, **options: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Dag(recipe).train()
    model = copy.deepcopy(plain)
    everything = fxremat.plan(model, inputs(trained), mem=10**9, progress=False, effort=1, **options)
    budget = everything.minimum + share * (everything.keep_all_peak - everything.minimum) // 100
    compiled = fxremat.compile(model, mem=budget, progress=False, effort=1, **options)
    (ours, our_state), (theirs, their_state) = train_once(compiled, trained), train_once(plain, trained)
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(our_state, their_state)
    compiled.zero_grad(set_to_none=True)
    given = inputs(trained)
    measured = peak_bytes(lambda: train_once_quietly(compiled, given))
    assert measured <= compiled.plan.budget
    if (
        not recipe.outputs
    ):  # gradients of outputs that the loss does not use are planned for, and may not come
        assert measured >= 0.98 * compiled.plan.predicted_peak


def train_once_quietly(model: nn.Module, given: list[torch.Tensor]) -> object:
    outputs = model(*given)
    loss: Any = outputs["loss"] if isinstance(outputs, dict) else outputs
    loss.backward()
    return outputs


@few(6)
@given(recipes, st.integers(0, 100), st.booleans())
@example(Recipe((Layer("batch_norm", 0, 0), Layer("dropout", 0, 0), Layer("cat", 0, 2)), 2, True), 0, False)
@example(Recipe((Layer("add", 0, 1), Layer("linear", 0, 0), Layer("add", 0, 1)), 0, False), 0, True)
def test_random_models_small(recipe: Recipe, share: int, trained: bool) -> None:
    check(recipe, share, trained)


@few(3)
@given(recipes, st.integers(0, 100), st.sampled_from(["auto", "keep_all"]))
def test_random_models_that_offload_small(recipe: Recipe, share: int, solver: str) -> None:
    check(recipe, share, solver=solver, offload=True)


@pytest.mark.long
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes, st.integers(0, 100), st.sampled_from(["auto", "keep_all", "autocapper"]))
def test_random_models_that_offload(recipe: Recipe, share: int, solver: str) -> None:
    check(recipe, share, solver=solver, offload=True)


@pytest.mark.long
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes, st.integers(0, 100), st.booleans())
def test_random_models(recipe: Recipe, share: int, trained: bool) -> None:
    check(recipe, share, trained)
