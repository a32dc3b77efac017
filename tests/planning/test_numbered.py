"""Steps of numbers alone are planned as those that were captured."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import fxremat
from fxremat.errors import FxrematError
from tests.exported import Deep, rows

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.2, progress=False)


def as_json(model: nn.Module) -> str:
    return fxremat.capture(model, (rows(),), costs="estimate", search=QUICK).graph.to_json()


def test_a_step_as_json_is_planned_without_torch() -> None:
    step = fxremat.capture(fxremat.StepGraph.from_json(as_json(Deep())), costs=lambda op: 1.0, search=QUICK)
    everything, least = step.plan("100%"), step.plan("min")
    assert everything.predicted_time == len(step.graph.ops)
    assert least.predicted_peak < 0.7 * everything.predicted_peak
    assert least.predicted_time == len(least.program.executions)
    assert step.least() == least.budget
    assert "fxremat plan" in str(least)
    with pytest.raises(fxremat.BudgetTooSmall) as error:
        step.plan(step.least() - 1)
    assert error.value.minimum == step.least()


def test_it_has_the_peaks_of_the_captured_step_but_for_workspaces() -> None:
    captured = fxremat.capture(Deep(), (rows(),), costs="A100", search=QUICK)
    known = captured.plan("100%")
    numbers = fxremat.capture(fxremat.StepGraph.from_json(captured.graph.to_json()), costs="A100", search=QUICK)
    peak = known.predicted_peak - known.costs.sizes.root  # numbers that a program may make of the loss
    assert numbers.plan("100%").predicted_peak == pytest.approx(peak, rel=0.02)
    assert numbers.plan("60%").program.recomputed


def test_a_plan_of_numbers_is_saved_and_read(tmp_path: Path) -> None:
    step = fxremat.capture(fxremat.StepGraph.from_json(as_json(Deep())), costs=lambda op: 1.0, search=QUICK)
    plan = step.plan("60%")
    plan.save(tmp_path / "plan.json")
    read = fxremat.Plan.load(tmp_path / "plan.json")
    assert [each.op for each in read.program.steps] == [each.op for each in plan.program.steps]


def test_what_is_no_number_of_seconds_is_refused() -> None:
    graph = fxremat.StepGraph.from_json(as_json(Deep()))
    with pytest.raises(FxrematError, match="is said to take None; it is seconds, 0 or more"):
        fxremat.capture(graph, costs=lambda op: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(FxrematError, match="a step of numbers is on none"):
        fxremat.capture(graph, search=QUICK).plan("auto")
