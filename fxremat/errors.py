"""Every error of the library: what happened, with which numbers, and what would work."""


class FxrematError(Exception):
    """The base of every error that fxremat raises on purpose."""


class BudgetTooSmall(FxrematError):
    """No schedule fits in `budget` bytes (or slots); `minimum` are the least that work, and do work."""

    minimum: int
    budget: int

    def __init__(self, minimum: int, budget: int, unit: str = "bytes", note: str = "") -> None:
        super().__init__(minimum, budget, unit, note)
        self.minimum = minimum
        self.budget = budget
        self.unit = unit
        self.note = note  # what else would help

    def __str__(self) -> str:
        text = f"no schedule fits in {self.budget} {self.unit}; the least that does is {self.minimum} {self.unit}"
        return f"{text}; {self.note}" if self.note else text


class InvalidSchedule(FxrematError):
    """A schedule that cannot be read, or that runs an operation before its needs are stored."""


class InvalidChain(FxrematError, ValueError):
    """Chain data that no model can have: a negative size, a NaN time, a misspelt field."""


class InvalidBudget(FxrematError, ValueError):
    """A budget that is not one of the forms "4GiB", "300MB", 4294967296, "60%", "auto"."""


class CaptureError(FxrematError):
    """A model that cannot be captured as one graph; the message names the line and the way out."""
