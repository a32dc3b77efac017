"""Plans for whole steps: the least budget that is announced works, and every plan stays inside its budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.errors import BudgetTooSmall
from fxremat.graphs.captured import Captured, with_updates_inside
from fxremat.search.survey import survey
from fxremat.step.costs import Link, ParameterUpdate
from fxremat.transfers import clock
from fxremat.transfers.weight_updates import best_within, resident_peak
from fxremat.transfers.weights import hosted
from tests.dags import Dag, Layer, Recipe, batch, capture, estimated, few, recipes
from tests.draws import everyday

pytestmark = pytest.mark.usefixtures("torch_ready")


def made_up_units(joint: Captured, seed: int) -> list[ParameterUpdate]:
    """Updates of every kind: with and without state, some with a large workspace."""
    random = np.random.default_rng(seed)
    return [
        ParameterUpdate(
            value=value,
            bytes=joint.values[value].bytes,
            state_bytes=int(random.choice([0, 1, 2])) * joint.values[value].bytes,
            workspace=int(random.choice([0, 8, joint.values[value].bytes, 2000])),
            seconds=1e-6,
        )
        for value in joint.updates_of
    ]


@few(everyday(10, least=2))
@given(
    recipes,
    st.integers(0, 1 << 16),
    st.sampled_from([1e6, 1e9, 1e12]),
    st.booleans(),
    st.sampled_from([None, 0, 300, 3000]),
)
def test_the_least_budget_that_is_announced_works(
    recipe: Recipe, seed: int, speed: float, values_too: bool, host_mem: int | None
) -> None:
    joint = capture(Dag(recipe), *batch())
    joint = with_updates_inside(joint, {joint.value_of[primal] for primal in joint.primals[:-2]})
    costs, units = estimated(joint), made_up_units(joint, seed)
    frontier = survey(joint, costs, slots=60, effort=0)
    link = Link(to_host=speed, from_host=speed / 2)

    def peak(budget: int) -> int:
        found = best_within(
            frontier, units, costs, link, budget, values_too=values_too, host_mem=host_mem
        )
        assert found.candidate.peak <= budget
        return found.minimum

    with pytest.raises(BudgetTooSmall) as small:
        peak(1)
    least, most = small.value.minimum, resident_peak(frontier.keep_all, units, costs)
    assert least <= most
    for budget in (least, least + 4, *np.linspace(least, most, 5).astype(int).tolist()):
        assert peak(budget) <= least


def test_it_works_where_no_other_choice_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock keeps below a limit where it can; what it does with no room at all is what the least budget is."""
    joint = capture(Dag(Recipe((Layer("linear", 0, 0),) * 4, 0, False)), *batch())
    joint = with_updates_inside(joint, {joint.value_of[primal] for primal in joint.primals[:-2]})
    costs, units, link = estimated(joint), made_up_units(joint, 0), Link(to_host=1e9, from_host=1e9)
    frontier = survey(joint, costs, slots=60, effort=0)
    with pytest.raises(BudgetTooSmall) as small:
        best_within(frontier, units, costs, link, 1)
    least = small.value.minimum

    def larger(*arguments: Any) -> Any:
        found = hosted(*arguments)
        found.log.counts[clock._PEAK] += 1
        return found

    monkeypatch.setattr("fxremat.transfers.weight_updates.hosted", larger)
    found = best_within(frontier, units, costs, link, least)
    assert (found.candidate.peak, found.minimum) == (least, least)
    with pytest.raises(BudgetTooSmall):
        best_within(frontier, units, costs, link, least - 1)
