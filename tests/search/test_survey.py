"""Tests of surveys, on steps that are kept as numbers."""

from __future__ import annotations

import pytest

from fxremat.search.survey import least_of, survey
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
