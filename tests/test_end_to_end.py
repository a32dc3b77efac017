"""The promise, on real models: under the budget, as predicted, and the same numbers as plain PyTorch.

Each model is trained at the announced minimum and at some percentages of its keep-everything peak (where that is
no less than the minimum). The runs of one model are made once and looked at by all tests here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

import fxremat
from benchmarks import meter, models
from fxremat.settings import Search
from tests.training import Trace, differences, in_both_sizes, least_budget, state_of, train, unequal

pytestmark = pytest.mark.usefixtures("torch_ready")

PERCENT = {"small": (50, 100), "full": (25, 40, 60, 80, 100)}
EFFORT = {"small": 0.2, "full": 1.0}  # seconds of search: less than users get; no promise depends on it


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """One model trained inside one budget."""

    mem: int | str  # as given by the user
    plan: fxremat.Plan
    measured: int
    trace: Trace

    def __repr__(self) -> str:
        return f"mem={self.mem}: {self.plan.budget=} {self.plan.predicted_peak=} {self.measured=}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Runs:
    plain: Trace
    plain_again: Trace
    minimum: int
    fitting: tuple[Run, ...]  # by growing budget
    refused: tuple[int, ...]  # percentages


@pytest.fixture(params=in_both_sizes(), scope="module")
def runs(request: pytest.FixtureRequest) -> Runs:
    return _runs(*request.param)


@cache
def _runs(size: models.Size, name: str) -> Runs:
    torch.set_num_threads(1)
    case = models.get(name, size)
    least: int | str = "min"
    if size == "full":
        search = Search(seconds=EFFORT[size])
        least = least_budget(case.model(), lambda compiled: compiled(*case.batch()), search=search)
    fitting, refused = [_run(case, least, size)], []
    minimum = fitting[0].plan.minimum
    for percent in PERCENT[size]:
        try:
            fitting.append(_run(case, f"{percent}%", size))
        except fxremat.BudgetTooSmall:
            refused.append(percent)
    return Runs(
        plain=train(case.model(), case),
        plain_again=train(case.model(), case),
        minimum=minimum,
        fitting=tuple(sorted(fitting, key=lambda run: run.plan.budget)),
        refused=tuple(refused),
    )


def _run(case: models.Case, mem: int | str, size: models.Size) -> Run:
    torch._dynamo.reset()
    compiled = fxremat.compile(case.model(), mem=mem, search=Search(seconds=EFFORT[size]))
    trace = train(compiled, case)
    measured = meter.peak_bytes(meter.training_step(compiled, case.batch()))
    return Run(mem=mem, plan=compiled.plan, measured=measured, trace=trace)


def test_plain_pytorch_repeats_itself(runs: Runs) -> None:
    """Without this, comparing bits would say nothing."""
    assert differences(runs.plain_again, runs.plain) == []


def test_measured_peak_is_within_the_budget(runs: Runs) -> None:
    assert [run for run in runs.fitting if run.measured > run.plan.budget] == []


def test_predicted_peak_is_the_measured_one(runs: Runs) -> None:
    off = [run for run in runs.fitting if abs(run.plan.predicted_peak - run.measured) > 0.02 * run.measured]
    assert off == []
    assert [run for run in runs.fitting if run.plan.predicted_peak > run.plan.budget] == []


def test_less_memory_is_never_more_memory(runs: Runs) -> None:
    peaks = [run.measured for run in runs.fitting]
    assert peaks == sorted(peaks), [run.mem for run in runs.fitting]


def test_more_memory_is_never_slower(runs: Runs) -> None:
    times = [run.plan.predicted_time for run in runs.fitting]
    assert times == sorted(times, reverse=True), [run.mem for run in runs.fitting]
    assert times[-1] <= runs.fitting[-1].plan.keep_all_time, "at 100 % nothing needs recomputing"


def test_the_numbers_are_those_of_plain_pytorch(runs: Runs) -> None:
    """Losses, every gradient of every step, parameters, buffers, and the random state at the end."""
    for run in runs.fitting:
        assert differences(run.trace, runs.plain) == [], f"mem={run.mem}"


def test_budgets_are_what_they_say(runs: Runs) -> None:
    whole = runs.fitting[-1].plan.keep_all_peak
    for run in runs.fitting:
        assert run.plan.keep_all_peak == whole, "it does not depend on the budget"
        assert run.plan.minimum == runs.minimum
        if isinstance(run.mem, str) and run.mem.endswith("%"):
            assert run.plan.budget == pytest.approx(whole * int(run.mem.rstrip("%")) / 100, abs=1)
    assert runs.fitting[0].plan.budget == runs.minimum, "a percentage below the minimum must be refused"
    for percent in runs.refused:
        assert whole * percent / 100 < runs.minimum, f"{percent}% was refused and would have fitted"


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.long), "gpt"])
def test_a_budget_too_small_changes_nothing(name: str) -> None:
    case = models.get(name, "small")
    model, batch = case.model(), case.batch()
    before, rng = state_of(model), torch.get_rng_state()
    minimum = least_budget(model, lambda compiled: compiled(*batch), search=Search(seconds=0.0))

    with pytest.raises(fxremat.BudgetTooSmall, match=str(minimum)) as error:
        fxremat.compile(model, mem=minimum - 1, example_inputs=batch, search=Search(seconds=0.0))

    assert error.value.minimum == minimum
    assert unequal(state_of(model), before) == []
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())


def test_the_second_step_needs_no_more_than_the_first() -> None:
    """Nothing of a step outlives it but its loss and gradients."""
    case = models.get("resnet", "small")
    model = fxremat.compile(case.model(), mem="60%", search=Search(seconds=0.0))
    step = meter.training_step(model, case.batch())
    step()
    peaks = []
    for _ in range(3):
        model.zero_grad()
        peaks.append(meter.peak_bytes(step))
    assert len(set(peaks)) == 1
