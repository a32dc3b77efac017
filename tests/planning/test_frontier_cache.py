"""Surveys that are remembered: another budget costs no second survey, and what comes back fits the new graph."""

from __future__ import annotations

import pytest
import torch

import fxremat
from fxremat.planning import frontier_cache as memo
from fxremat.search import survey as planner
from fxremat.search.refine import Ladder
from fxremat.settings import Search
from fxremat.step.liveness import live_bytes
from tests.planning.test_means import Deep as Dropped
from tests.test_planner import INPUTS, Deep

pytestmark = pytest.mark.usefixtures("torch_ready")


def test_a_second_budget_needs_no_second_survey(surveys: list[int]) -> None:
    plain = Deep()
    plain(*INPUTS).backward()
    for mem in ("90%", "50%"):
        model = Deep()
        model.load_state_dict(plain.state_dict())
        compiled = fxremat.compile(model, mem=mem, costs="estimate")
        compiled(*INPUTS).backward()
        grads = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in grads)  # type: ignore[arg-type]
        assert compiled.plan.predicted_peak <= compiled.plan.budget
    assert len(surveys) == 1


def test_sizes_far_away_costs_and_settings_are_surveyed_anew(surveys: list[int]) -> None:
    fxremat.plan(Deep(), INPUTS, mem="90%", costs="estimate")
    fxremat.plan(Deep(), (torch.ones(2000, 16),), mem="90%", costs="estimate")
    fxremat.plan(Deep(), INPUTS, mem="90%", search=Search(seconds=0), costs="estimate")
    fxremat.plan(Wide(), INPUTS, mem="90%", costs="estimate")
    assert len(surveys) == 4
    fxremat.plan(Deep(), INPUTS, mem="80%", search=Search(seconds=0), costs="estimate")
    assert len(surveys) == 4


class Wide(Deep):
    """The same values by another op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x.square().mean()


def test_the_least_budget_is_that_of_the_sizes_themselves() -> None:
    """Programs that were found for other sizes serve budgets in which they fit, and say nothing of the least."""
    search = Search(seconds=0.0, progress=False)
    fxremat.plan(Dropped(layers=14), (torch.randn(256, 32),), mem="90%", costs="H100", search=search)
    near = fxremat.capture(Dropped(layers=14), (torch.randn(300, 32),), costs="H100", search=search)
    known = near.plan("90%")
    alone = planner.survey(known.graph, known.costs, effort=0.0).minimum
    assert known.alternatives.minimum > alone  # the programs of the other sizes
    assert near.plan("min").budget <= alone


@pytest.mark.parametrize("sizes", [(300,), pytest.param((200, 400), marks=pytest.mark.long)])
def test_other_sizes_are_planned_from_the_programs_that_are_known(sizes: tuple[int, ...], surveys: list[int]) -> None:
    """Judged exactly: what is measured is what was predicted, and no slower than a survey's by more than a little."""
    fxremat.plan(Deep(), INPUTS, mem="50%", costs="estimate")
    for rows in sizes:
        near = fxremat.plan(Deep(), (torch.ones(rows, 16),), mem="50%", costs="estimate")
        memory = live_bytes(near.program, near.costs.sizes)
        assert near.predicted_peak == memory.peak <= near.budget
        assert near.predicted_time == near.costs.time(near.program)
        alone = Ladder(given=planner.survey(near.graph, near.costs)).to(near.budget, near.costs, effort=3)
        assert near.predicted_time <= 1.01 * alone.frontier(near.budget).within(near.budget).time
    assert len(surveys) == 1
    compiled = fxremat.compile(Deep(), mem="50%", costs="estimate")
    plain = Deep()
    plain.load_state_dict(compiled.state_dict())
    for rows in (250, 270):
        inputs = torch.randn(rows, 16)
        for model in (compiled, plain):
            model.zero_grad()
            model(inputs).backward()
        grads = zip(compiled.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in grads)  # type: ignore[arg-type]
    assert len(surveys) == 1


def test_a_plan_tells_of_other_budgets_and_captures_nothing_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fxremat.plan(Deep(), INPUTS, mem="60%")
    known = {mem: fxremat.plan(Deep(), INPUTS, mem=mem) for mem in ("45%", 1 << 30)}
    monkeypatch.setattr("fxremat.api.drop_in", None)
    for mem, wanted in known.items():
        other = plan.within(mem)
        assert (other.budget, other.predicted_peak) == (wanted.budget, wanted.predicted_peak)
        assert str(other.schedule) == str(wanted.schedule)
        assert other.within("60%").predicted_peak == plan.predicted_peak
    with pytest.raises(fxremat.BudgetTooSmall):
        plan.within(1)
    with pytest.raises(fxremat.InvalidBudget):
        plan.within("much")


def test_other_budgets_of_a_plan_that_offloads() -> None:
    plan = fxremat.plan(Deep(), INPUTS, mem="60%", offload=True, costs="estimate")
    wanted = fxremat.plan(Deep(), INPUTS, mem="30%", offload=True, costs="estimate")
    assert plan.within("30%").predicted_peak == wanted.predicted_peak
    assert plan.within("30%").tier is plan.tier


def test_where_no_known_program_fits_the_model_is_surveyed_again(
    surveys: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxremat.planning.what_slices_buy", lambda *_: "")  # surveys the step in slices
    coarse = fxremat.plan(Deep(), INPUTS, mem="90%", costs="estimate")
    with pytest.raises(fxremat.BudgetTooSmall):
        fxremat.plan(Deep(), (torch.ones(300, 16),), mem=coarse.minimum // 2, costs="estimate")
    assert len(surveys) == 2


@pytest.mark.usefixtures("surveys")
def test_nothing_of_an_old_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "AT_MOST", 2)
    fxremat.plan(Deep(), INPUTS, mem="90%", costs="estimate")
    (kept,) = memo._latest.values()
    given, found = kept.given, [candidate for _, candidate in kept.found]
    kept_candidates = (given.keep_all, *given.candidates, *found)
    assert all(candidate.layout.graph is memo.NO_GRAPH for candidate in kept_candidates)
    assert all(candidate.order().layout.graph is memo.NO_GRAPH for candidate in found)
    for number in range(memo.AT_MOST + 1):
        fxremat.plan(Deep(), (torch.ones(32 + number, 16),), mem="100%", search=Search(seconds=0), costs="estimate")
    assert len(memo._latest) == memo.AT_MOST


class Head(Deep):
    """Returns the last layer's result, whose loss is outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(("budget", "searches"), [("95%", 1), ("90%", 2)])
def test_programs_that_were_found_for_another_loss_are_taken_if_nothing_is_much_faster(
    budget: str, searches: int, surveys: list[int]
) -> None:
    search = Search(progress=False)
    step = fxremat.capture(Head(), INPUTS, costs="estimate", search=search, loss="64KiB")
    step.plan(budget)
    less = fxremat.capture(Head(), INPUTS, costs="estimate", search=search, loss="8KiB").plan(budget)
    assert len(surveys) == searches
    assert less.predicted_peak == live_bytes(less.program, less.costs.sizes).peak <= less.budget
    alone = Ladder(given=planner.survey(less.graph, less.costs)).to(less.budget, less.costs, effort=3)
    assert less.predicted_time <= 1.02 * alone.frontier(less.budget).within(less.budget).time
