"""Programs of calls that no plan knows yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxremat.options import options_of
from fxremat.planning.paths import PathPlans
from fxremat.search.paths import Node
from tests.search.test_paths import program


def chosen(mem: int | str, known: int | None) -> int:
    """Return which of three programs runs in a call whose lowest peak is 50: it saves 10, the others nothing."""
    plans = PathPlans(options_of(mem=mem), "Model", "", torch.device("cpu"))
    if known is not None:
        plans.limit = plans.limit or SimpleNamespace(bytes=known)  # type: ignore[assignment]
    programs = [program(1, 10, 20, 40), program(2, 0, 15, 90), program(3, 0, 30, 80)]
    at: Any = SimpleNamespace(programs=programs, run_again=programs)
    return plans.number(Node("graph"), at, 0)


@pytest.mark.parametrize(
    ("mem", "known", "expected"),
    [
        ("min", None, 2),  # nothing is known: the one of the lowest peak among those that save nothing
        ("min", 100, 2),
        ("min", 60, 0),  # it fits alone
        ("min", 30, 0),  # nothing fits, and the budget grows with what the step needs
        (30, None, 1),  # nothing fits: perhaps no backward will run, and this forward needs least
    ],
)
def test_a_call_without_a_plan_needs_little(mem: int | str, known: int | None, expected: int) -> None:
    assert chosen(mem, known) == expected
