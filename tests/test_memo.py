"""Surveys that are remembered: another budget costs no second survey, and what comes back fits the new graph."""

from __future__ import annotations

import pytest
import torch

import fxremat
from fxremat import planning
from fxremat.search import frontier_cache as memo
from fxremat.search import survey as planner
from fxremat.search.candidate import Frontier
from tests.test_planner import INPUTS, Deep

pytestmark = pytest.mark.usefixtures("torch_ready")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each survey that is really made."""
    made: list[int] = []

    def survey(*arguments: object, **options: object) -> Frontier:
        made.append(1)
        return planner.survey(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "survey", survey)
    memo._latest.clear()
    return made


def test_a_second_budget_needs_no_second_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    plain = Deep()
    plain(*INPUTS).backward()
    for mem in ("90%", "70%", "50%"):
        model = Deep()
        model.load_state_dict(plain.state_dict())
        compiled = fxremat.compile(model, mem=mem, cost="estimate")
        compiled(*INPUTS).backward()
        grads = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in grads)  # type: ignore[arg-type]
        assert compiled.plan.predicted_peak <= compiled.plan.budget
    assert len(made) == 1


def test_other_shapes_costs_and_settings_are_surveyed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    fxremat.plan(Deep(), INPUTS, mem="90%", cost="estimate")
    fxremat.plan(Deep(), (torch.ones(128, 16),), mem="90%", cost="estimate")
    fxremat.plan(Deep(), INPUTS, mem="90%", cost="estimate", device="H100")
    fxremat.plan(Deep(), INPUTS, mem="90%", cost="estimate", effort=0)
    assert len(made) == 4
    fxremat.plan(Deep(), INPUTS, mem="80%", cost="estimate", effort=0)
    assert len(made) == 4


def test_nothing_of_an_old_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch)
    fxremat.plan(Deep(), INPUTS, mem="90%", cost="estimate")
    (kept,) = memo._latest.values()
    given, found = kept.given, [candidate for _, candidate in kept.found]
    kept_candidates = (given.keep_all, *given.candidates, *found)
    assert all(candidate.layout.joint is memo._NO_GRAPH for candidate in kept_candidates)
    assert all(candidate.order().layout.joint is memo._NO_GRAPH for candidate in found)
    for number in range(memo.AT_MOST + 1):
        fxremat.plan(Deep(), (torch.ones(32 + number, 16),), mem="100%", cost="estimate", effort=0)
    assert len(memo._latest) == memo.AT_MOST
