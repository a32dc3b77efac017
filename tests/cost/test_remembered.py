"""Measurements of whole programs are kept for those programs alone, and beyond the process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fxremat.cost.remembered import remembered
from fxremat.search.candidate import Frontier
from fxremat.search.survey import survey
from tests.saved_steps import saved


@pytest.fixture
def frontier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Frontier:
    """Programs of a small model, and an empty cache."""
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    return survey(*saved("deep"), effort=0.0)


def nothing() -> None:
    raise AssertionError("these numbers are known")


def test_numbers_are_measured_once(frontier: Frontier) -> None:
    programs = [frontier.candidates[0].program(), frontier.candidates[-1].program()]
    assert remembered("seconds", programs, 2, lambda: [1.0, 2.0]) == [1.0, 2.0]
    again = [frontier.candidates[0].program(), frontier.candidates[-1].program()]
    assert remembered("seconds", again, 2, nothing) == [1.0, 2.0]
    assert remembered("seconds", programs[::-1], 2, lambda: [3.0, 4.0]) == [3.0, 4.0]
    assert remembered("bytes", programs, 1, lambda: [5.0]) == [5.0]


def test_what_cannot_be_measured_is_not_kept(frontier: Frontier) -> None:
    program = frontier.keep_all.program()
    assert remembered("seconds", [program], 1, lambda: None) is None
    assert remembered("seconds", [program], 1, lambda: [1.0]) == [1.0]


def test_the_same_ops_in_another_order_are_another_program(frontier: Frontier) -> None:
    programs = [candidate.program() for candidate in frontier.candidates]
    assert len(programs) > 2
    for place, program in enumerate(programs):
        numbers = [1.0 + place]
        assert remembered("seconds", [program], 1, partial(list, numbers)) == numbers
