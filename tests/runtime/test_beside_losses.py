"""Memory that a program keeps beside a loss that the model returns counts after the first steps."""

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
from tests.runtime.test_dropped_outputs import FAST, LOGITS, TOKENS, WORDS, cross_entropy
from tests.training import gradients_of, unequal

pytestmark = pytest.mark.usefixtures("torch_ready")


class Language(nn.Module):
    """Returns its loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)
        )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden)
        return cross_entropy(logits, tokens), logits


TEACHER = Language().requires_grad_(requires_grad=False)
Held = list[Tensor]


def keeps(model: nn.Module, tokens: Tensor, held: Held) -> Tensor:
    loss, logits = model(tokens)
    held += [logits, logits.detach().softmax(-1)]
    return loss


def looks(model: nn.Module, tokens: Tensor, held: Held) -> Tensor:
    loss, logits = model(tokens)
    with torch.no_grad():
        held += [logits, (logits.softmax(-1).exp().log().argmax(-1) == tokens).float().mean()]
    return loss


def is_taught(model: nn.Module, tokens: Tensor, held: Held) -> Tensor:
    loss, logits = model(tokens)
    held += [logits, *TEACHER(tokens)]
    return loss


def adds(model: nn.Module, tokens: Tensor, held: Held) -> Tensor:
    loss, logits = model(tokens)
    del logits
    held += [torch.ones(LOGITS // 4)]
    return loss + 1


STEPS = [keeps, looks, is_taught, adds]
Step = Callable[[nn.Module, Tensor, Held], Tensor]


def peaks(model: Any, step: Step, count: int, tokens: Tensor = TOKENS) -> list[int]:
    """The peak of each of some steps."""
    found = []

    def train() -> None:
        held = Held()
        step(model, tokens, held).backward()

    for _ in range(count):
        model.zero_grad()
        found.append(peak_bytes(train))
    return found


def trained(model: Any, step: Step, count: int, tokens: Tensor = TOKENS) -> None:
    for _ in range(count):
        model.zero_grad()
        held = Held()
        step(model, tokens, held).backward()


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "between the model's forward" in each.getMessage()]


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "sized"])
@pytest.mark.parametrize("mem", ["min", "bytes", "85%"])
@pytest.mark.parametrize("step", STEPS)
def test_it_counts_from_the_second_step_on(
    step: Step, mem: str, dynamic: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Language()
    budget = int(0.9 * peaks(plain, step, 2)[-1]) if mem == "bytes" else mem
    compiled = fxremat.compile(copy.deepcopy(plain), mem=budget, dynamic=dynamic, **FAST)
    with caplog.at_level(logging.INFO, "fxremat"):
        trained(compiled, step, 3)
        assert len(notes(caplog)) <= 1
        found = peaks(compiled, step, 3)
    plan: Any = compiled.plan
    assert max(found) <= plan.budget
    assert max(found) <= plan.predicted_peak <= 1.02 * max(found)
    trained(plain, step, 1)
    assert unequal(gradients_of(compiled), gradients_of(plain)) == []
    assert len(notes(caplog)) <= 1
    if dynamic is None:
        plan.check()


def test_it_grows_with_the_sizes(caplog: pytest.LogCaptureFixture) -> None:
    compiled: Any = fxremat.compile(Language(), mem="85%", dynamic=True, **FAST)
    for rows in (2, 4, 3, 2, 4, 3):
        trained(compiled, keeps, 2, TOKENS[:rows].contiguous())
    caplog.clear()
    for rows in (2, 4, 3):
        (found,) = peaks(compiled, keeps, 1, TOKENS[:rows].contiguous())
        assert found <= compiled.plan.predicted_peak <= 1.02 * found
    assert notes(caplog) == []


REPLACED = Held()  # by the next step


def replaces(model: nn.Module, tokens: Tensor, held: Held) -> Tensor:
    loss, logits = model(tokens)
    held.append(logits)
    REPLACED[:] = [logits.detach().softmax(-1)]
    return loss


@pytest.mark.parametrize("mem", ["min", "bytes", "85%"])
@pytest.mark.parametrize("step", [replaces, keeps])
def test_what_only_the_first_step_has_does_not_count(step: Step, mem: str) -> None:
    REPLACED.clear()
    least: Any = fxremat.compile(Language(), mem="min", **FAST)
    trained(least, looks, 3)
    budget = least.plan.minimum + LOGITS // 4 if mem == "bytes" else mem
    compiled: Any = fxremat.compile(Language(), mem=budget, **FAST)
    trained(compiled, step, 1)
    trained(compiled, looks if step is keeps else step, 3)
    assert compiled.plan.minimum == least.plan.minimum
    if step is keeps:  # a profiler does not count what is freed of earlier steps
        found = peaks(compiled, looks, 2)[-1]
        assert found <= compiled.plan.predicted_peak <= 1.02 * found


def test_what_does_not_grow_is_not_scaled() -> None:
    compiled: Any = fxremat.compile(Language(), mem=3_000_000, dynamic=True, **FAST)
    for rows in (2, 2, 4, 4, 3, 4):
        trained(compiled, adds, 1, TOKENS[:rows].contiguous())
    for rows in (2, 3, 4):
        (found,) = peaks(compiled, adds, 1, TOKENS[:rows].contiguous())
        assert found <= compiled.plan.predicted_peak <= 1.02 * found


def test_nothing_is_planned_anew_where_nothing_runs_between(caplog: pytest.LogCaptureFixture) -> None:
    compiled: Any = fxremat.compile(Language(), mem="min", **FAST)

    def scaled(model: nn.Module, tokens: Tensor, held: Held) -> Tensor:
        loss, logits = model(tokens)
        held.append(logits)
        return 3 * loss / 2

    with caplog.at_level(logging.INFO, "fxremat"):
        trained(compiled, scaled, 1)
        before = compiled.plan
        trained(compiled, scaled, 8)
    assert compiled.plan is before
    assert notes(caplog) == []


def test_a_budget_that_it_exceeds_is_refused_with_its_bytes() -> None:
    alone: Any = fxremat.compile(Language(), mem="min", **FAST)

    def holds(model: nn.Module, tokens: Tensor, held: Held) -> Tensor:
        loss, logits = model(tokens)
        held.append(logits)
        return loss

    trained(alone, holds, 3)
    compiled = fxremat.compile(Language(), mem=alone.plan.minimum, **FAST)
    trained(compiled, keeps, 2)
    with pytest.raises(fxremat.BudgetTooSmall, match=r"250\.0 KiB for what runs between"):
        trained(compiled, keeps, 1)
    wide = fxremat.compile(Language(), mem=alone.plan.minimum + LOGITS + 100, **FAST)
    trained(wide, keeps, 3)
    assert max(peaks(wide, keeps, 2)) <= alone.plan.minimum + LOGITS + 100
    said: Any = fxremat.compile(Language(), mem="min", loss=LOGITS, **FAST)
    first = peaks(said, looks, 1)
    assert first[0] <= said.plan.budget
