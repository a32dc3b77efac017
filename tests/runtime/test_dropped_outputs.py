"""Outputs that the caller drops before the backward, as in `model(...).loss.backward()`: learnt, used, and checked."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.runtime.dropped_outputs import WatchedOutputs
from fxremat.settings import Search
from tests.dags import Dag, few, small_recipes
from tests.dags import batch as batch_of
from tests.training import gradients_of, unequal

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0, slots=100)}
WORDS = 500
TOKENS = torch.arange(4 * 32).view(4, 32) * 7 % WORDS
LOGITS = TOKENS.numel() * WORDS * 4


class Language(nn.Module):
    """Returns a loss, logits, from which alone the loss is computed, and hidden states, which the backward reads."""

    def __init__(self, *, loss: bool = True) -> None:
        super().__init__()
        self.loss = loss
        self.words, self.layers = nn.Embedding(WORDS, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = hidden + F.gelu(layer(hidden))
        logits = self.head(hidden)
        return (cross_entropy(logits, tokens), logits, hidden) if self.loss else logits


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def drops(model: nn.Module, tokens: Tensor = TOKENS) -> None:
    model(tokens)[0].backward()


def holds(model: nn.Module, tokens: Tensor = TOKENS) -> None:
    outputs = model(tokens)
    outputs[0].backward()


def language(**options: Any) -> Any:
    torch.manual_seed(0)
    return Language(**options)


def peaks(model: Any, step: Callable[[nn.Module], None], count: int = 4) -> list[int]:
    """The peak of each of some steps."""
    found = []
    for _ in range(count):
        model.zero_grad()
        found.append(peak_bytes(lambda: step(model)))
    return found


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def whole(step: Callable[[nn.Module], None]) -> int:
    """The peak of plain PyTorch."""
    return peaks(language(), step, 2)[-1]


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "sized"])
@pytest.mark.parametrize("mem", ["min", "bytes", "97%"])
def test_the_memory_of_dropped_outputs_is_used(mem: str, dynamic: bool | None) -> None:
    most = whole(drops)
    assert whole(holds) - most == LOGITS
    plain, budget = language(), most if mem == "bytes" else mem
    compiled = fxremat.compile(language(), mem=budget, dynamic=dynamic, **FAST)
    found = peaks(compiled, drops)
    assert max(found) <= most
    drops(plain)
    assert unequal(gradients_of(compiled), gradients_of(plain)) == []
    plan: Any = compiled.plan
    assert found[-1] <= plan.predicted_peak <= 1.02 * found[-1]
    assert plan.minimum < most, "with the logits it takes more"
    assert abs(plan.keep_all_peak - most) < 100
    assert "count as dropped before the backward" in str(plan)
    if dynamic is None:
        plan.check()


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "sized"])
def test_outputs_that_are_held_take_no_step_over_the_budget(dynamic: bool | None) -> None:
    most = whole(drops)
    compiled = fxremat.compile(language(), mem=most, dynamic=dynamic, **FAST)
    refused = list[str]()

    def step(model: nn.Module) -> None:
        outputs = model(TOKENS)
        try:
            outputs[0].backward()
        except fxremat.BudgetTooSmall as error:
            refused.append(str(error))

    with pytest.raises(fxremat.BudgetTooSmall, match="no schedule fits"):
        fxremat.compile(language(), mem=most, dynamic=dynamic, example_inputs=(TOKENS,), **FAST)
    for count in (1, 2):
        assert peaks(compiled, step, 1)[0] <= most
        assert "fits only if 250.0 KiB of outputs are dropped before the backward" in refused[0]
        assert all(parameter.grad is None for parameter in compiled.parameters())
        assert len(refused) == count
        assert max(peaks(compiled, drops, 3)) <= most, "training goes on"
    with pytest.raises(fxremat.BudgetTooSmall) as error:
        holds(compiled)
    assert error.value.minimum > most
    holds(fxremat.compile(language(), mem=error.value.minimum, dynamic=dynamic, **FAST))


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "sized"])
def test_outputs_that_fit_are_held_although_larger_ones_have_to_be_dropped(dynamic: bool | None) -> None:
    most, few = whole(drops), TOKENS[:1, :8].contiguous()
    compiled: Any = fxremat.compile(language(), mem=most, dynamic=dynamic, **FAST)
    assert max(peaks(compiled, drops, 2)) <= most
    assert max(peaks(compiled, lambda model: drops(model, few), 2)) <= most
    assert max(peaks(compiled, lambda model: holds(model, few), 2)) <= most
    assert max(peaks(compiled, drops, 2)) <= most


def test_outputs_in_a_reference_cycle_are_freed_before_the_backward() -> None:
    """Such as that of an error, whose frames hold what they returned."""

    def in_a_cycle(model: nn.Module) -> None:
        loss, *others = model(TOKENS)
        others.append(others)
        del others
        loss.backward()

    most = whole(drops)
    compiled: Any = fxremat.compile(language(), mem=most, **FAST)
    assert max(peaks(compiled, in_a_cycle)) <= most


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "sized"])
def test_a_caller_that_begins_to_hold_outputs_is_told_once(
    dynamic: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    compiled: Any = fxremat.compile(language(), mem="100%", dynamic=dynamic, **FAST)
    peaks(compiled, drops, 2)
    before = compiled.plan.predicted_peak
    assert warnings_in(caplog) == []
    found = peaks(compiled, holds, 3)
    (told,) = warnings_in(caplog)
    assert told.startswith("258.0 KiB of outputs, which earlier calls of Language had dropped before the backward")
    assert compiled.plan.predicted_peak == before + LOGITS
    assert found[-1] <= compiled.plan.predicted_peak <= 1.02 * found[-1]
    peaks(compiled, drops, 4)
    assert compiled.plan.predicted_peak == before + LOGITS, "what was held once may be held again"


def test_held_outputs_are_planned_as_before() -> None:
    compiled: Any = fxremat.compile(language(), mem="min", **FAST)
    found = peaks(compiled, holds)
    assert found[-1] <= compiled.plan.predicted_peak <= 1.02 * found[-1]
    assert not compiled.plan.graph.dropped_outputs
    assert len(compiled.fxremat.plans) == 1


def test_the_first_backward_of_two_does_not_tell() -> None:
    compiled: Any = fxremat.compile(language(), mem="100%", **FAST)
    for _ in range(2):
        loss = compiled(TOKENS)[0]
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
    drops(compiled)
    drops(compiled)
    assert compiled.plan.graph.dropped_outputs


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "sized"])
def test_outputs_of_which_the_caller_computes_the_loss(dynamic: bool | None) -> None:
    """Outputs that are dropped after it still count while it runs."""

    def step(model: nn.Module) -> None:
        cross_entropy(model(TOKENS), TOKENS).backward()

    plain = peaks(language(loss=False), step, 2)[-1]
    compiled: Any = fxremat.compile(language(loss=False), mem="min", dynamic=dynamic, **FAST)
    for _ in range(4):
        step(compiled)
    found = peaks(compiled, step)
    assert found[-1] <= compiled.plan.predicted_peak <= 1.02 * found[-1]
    assert compiled.plan.predicted_peak < plain


def test_a_saved_plan_knows_what_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first: Any = fxremat.compile(language(), mem="min", **FAST)
    peaks(first, drops, 2)
    first.plan.save(tmp_path / "plan.json")
    torch._dynamo.reset()
    again: Any = fxremat.compile(language(), plan=tmp_path / "plan.json")
    found = peaks(again, drops, 2)
    assert found[-1] <= again.plan.predicted_peak == first.plan.predicted_peak
    holds(again)
    (told,) = warnings_in(caplog)
    assert told.startswith("258.0 KiB of outputs, which earlier calls of Language had dropped before the backward")


@few(6)
@given(small_recipes.filter(lambda recipe: recipe.outputs > 0), st.integers(0, 100), st.booleans())
def test_random_models_whose_outputs_are_dropped_small(recipe: Any, share: int, sized: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Dag(recipe).train()
    model = copy.deepcopy(plain)
    batches = [batch_of(seed) for seed in range(3)]

    def step(model: nn.Module, seed: int) -> None:
        model.zero_grad()
        torch.manual_seed(seed)
        model(*batches[seed])["loss"].backward()

    options: Any = {"example_inputs": batches[0], "dynamic": sized or None, **FAST}
    try:
        compiled: Any = fxremat.compile(model, mem=f"{50 + share // 2}%", **options)
    except fxremat.BudgetTooSmall as error:
        compiled = fxremat.compile(model, mem=error.minimum, **options)
    for seed in (0, 1):  # which dynamo traces, with copies of the random state
        step(compiled, seed)
    for seed in range(3):
        assert peak_bytes(lambda seed=seed: step(compiled, seed)) <= compiled.plan.budget  # type: ignore[misc]
    for seed in (0, 1, *range(3)):
        step(plain, seed)
    if differs := unequal(gradients_of(compiled), gradients_of(plain)):
        fresh = copy.deepcopy(plain)
        step(torch.compile(fresh, backend="aot_eager"), 2)
        differs = unequal(gradients_of(compiled), gradients_of(fresh))
    assert differs == []


def test_outputs_on_one_storage_are_dropped_together() -> None:
    base, alone, given = torch.zeros(100), torch.zeros(50), torch.zeros(30)
    outputs: list[Any] = [torch.zeros(()), base[:50], base, alone, given, None]
    del base, alone
    watched = WatchedOutputs.of(outputs, [given])
    assert watched.dropped == {}
    assert watched.held(apart_from=frozenset()) == {1: 400, 2: 0, 3: 200}
    outputs[2] = outputs[3] = None
    assert watched.dropped == {3: 200}
    assert watched.held(apart_from=frozenset()) == {1: 400, 2: 0}
