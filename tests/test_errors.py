"""Errors are values: they keep their fields through pickle and say their numbers."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat import errors
from fxremat.units import parse_budget


def test_budget_too_small_says_what_would_work():
    error = errors.BudgetTooSmall(minimum=365, budget=50)
    assert str(error) == "no schedule fits in 50 bytes; the least that does is 365 bytes"


def test_budget_too_small_in_the_users_own_terms():
    error = errors.BudgetTooSmall(minimum=913164, budget=191399)
    told = error.explained(share=10.0, whole=1913990, reason="mm_4 (net.py:3) runs with 1 MiB of weights")
    assert str(told) == (
        "no schedule fits in 10% = 191399 bytes; the least that does is 47.8% = 913164 bytes; "
        "there, mm_4 (net.py:3) runs with 1 MiB of weights"
    )
    assert (told.minimum, told.budget, told.minimum_share) == (913164, 191399, 47.8)
    assert str(error.explained(note="host_mem binds")).endswith("913164 bytes; host_mem binds")
    assert error.minimum_share is None
    assert str(error.explained(whole=1913990)) == str(error)  # asked in bytes, answered in bytes


@given(st.integers(1, 2**45), st.integers(1, 2**45))
def test_the_announced_percentage_works_when_typed_in(minimum, whole):
    told = errors.BudgetTooSmall(minimum, 0).explained(share=1.0, whole=whole)
    typed = str(told).split("the least that does is ")[1].split(" = ")[0]
    share = parse_budget(typed).of_keep_all
    assert int(whole * share / 100) >= minimum
    assert int(whole * (share - 0.2) / 100) < minimum


@pytest.mark.parametrize(
    "error",
    [
        errors.BudgetTooSmall(365, 50),
        errors.BudgetTooSmall(365, 50, note="more of it helps").explained(share=3.5, whole=1000, reason="mm runs"),
        errors.InvalidSchedule("op 3, B2: A2 is not stored"),
        errors.InvalidChain("blocks is empty"),
        errors.InvalidBudget("mem=1.5"),
        errors.CaptureError("graph break at line 3"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_survives_pickle(error):
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, errors.FxrematError)
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
