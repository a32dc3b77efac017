"""Errors are values: they keep their fields through pickle and say their numbers."""

import pickle

import pytest

from fxremat import errors


def test_budget_too_small_says_what_would_work():
    error = errors.BudgetTooSmall(minimum=365, budget=50)
    assert str(error) == "no schedule fits in 50 bytes; the least that does is 365 bytes"


@pytest.mark.parametrize(
    "error",
    [
        errors.BudgetTooSmall(365, 50),
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
