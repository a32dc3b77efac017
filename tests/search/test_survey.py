"""Tests of surveys, on steps that are kept as numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.search import survey as of_survey
from fxremat.search.executions import Executions
from fxremat.search.refine import EFFORT, Ladder
from fxremat.search.survey import _thin, least_of, order_of_least, order_within, survey
from fxremat.step.verify import verify
from tests.saved_steps import NAMES, VARIED, saved, surveyed

pytestmark = pytest.mark.usefixtures("torch_ready")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("random")])
def test_one_way_to_cut_comes_near_the_least_of_all(name: str) -> None:
    step = saved(name)
    assert least_of(step.graph, step.costs).peak <= 1.5 * survey(step.graph, step.costs, effort=0.0).minimum


@pytest.mark.parametrize("name", VARIED)
def test_each_candidate_runs_the_step(name: str) -> None:
    frontier = surveyed(name)
    for candidate in (frontier.keep_all, *frontier.candidates):
        verify(candidate.order().program())


@pytest.mark.parametrize("name", ["random_0", "shared_pair", "siamese", "three_towers", "unet"])
def test_a_step_is_measured_in_an_order_of_nearly_the_least_memory(name: str) -> None:
    """Compare with the least of the survey: an order by blocks alone takes 1.28 to 1.65 of it."""
    step, least = saved(name), surveyed(name).minimum
    order = order_of_least(step.graph, step.costs)
    split = next(place for place, op in enumerate(order) if op >= step.graph.forward_count)
    peak, _ = Executions(step.graph, step.costs).judge_ops(order, split)
    assert peak <= 1.05 * least
    assert order_within(step.graph, step.costs, peak) is not None
    assert order_within(step.graph, step.costs, peak // 2) is None


@pytest.mark.parametrize("name", ["deep_chain", "inception"])
def test_a_third_of_the_blocks_do_nearly_as_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare budgets and times: the least memory is looked for with all blocks, other programs improve op by op."""
    step = saved(name)

    def least_and_times() -> tuple[int, list[float]]:
        given = survey(step.graph, step.costs)
        budgets = [given.keep_all.peak * percent // 100 for percent in (40, 60, 80)]
        ladder = Ladder(given=given).to(budgets[-1], step.costs, effort=EFFORT)
        return given.minimum, [ladder.frontier(budgets[-1]).within(budget).time for budget in budgets]

    least, times = least_and_times()
    monkeypatch.setattr(of_survey, "MOST_BLOCKS", 12)
    with_few, slower = least_and_times()
    assert with_few <= 1.05 * least
    assert all(few <= 1.03 * many for few, many in zip(slower, times, strict=True))


def test_a_named_solver_decides_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step = saved("deep")
    monkeypatch.setattr(of_survey, "MOST_BLOCKS", 3)
    monkeypatch.setattr(of_survey, "_least", lambda *_: pytest.fail("the default solver was asked"))
    assert survey(step.graph, step.costs, solver="persistent").candidates


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 6))
def test_merged_blocks_are_as_even_as_can_be(works: list[int], most: int) -> None:
    """Compare with all choices of as many positions, of which the last stays."""
    ends = range(len(works))
    work = [float(sum(works[:count])) for count in range(len(works) + 1)]

    def largest(chosen: tuple[int, ...]) -> float:
        return max(work[end + 1] - work[before + 1] for before, end in itertools.pairwise((-1, *chosen)))

    count = min(most, len(works))
    every = ((*chosen, ends[-1]) for chosen in itertools.combinations(ends[:-1], count - 1))
    thinned = _thin(ends, work, most)
    assert len(thinned) <= most
    assert thinned[-1] == ends[-1]
    assert largest(tuple(thinned)) <= min(map(largest, every)) + 1e-3 * work[-1] / most
