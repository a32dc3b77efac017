"""Every error of the library: what happened, with which numbers, and what would work."""

from __future__ import annotations


class FxrematError(Exception):
    """The base of every error that fxremat raises on purpose."""


class BudgetTooSmall(FxrematError):
    """No schedule fits in `budget` bytes (or slots); `minimum` is the least number that works.

    >>> error = BudgetTooSmall(minimum=913164, budget=191399)
    >>> print(error)
    no schedule fits in 191399 bytes; the least that does is 913164 bytes
    >>> print(error.explained(share=10.0, whole=1913990))
    no schedule fits in 10% = 191399 bytes; the least that does is 47.8% = 913164 bytes
    """

    minimum: int
    budget: int
    unit: str
    note: str  # what else would help; "": nothing is known
    share: float | None  # the budget in percent of `whole`; None: the user gave it in bytes
    whole: int | None  # bytes at the peak of a step that recomputes nothing (keep-all), which percentages refer to
    reason: str  # what needs the minimum, to follow "there, "; "": nothing is known

    def __init__(
        self,
        minimum: int,
        budget: int,
        unit: str = "bytes",
        note: str = "",
        share: float | None = None,
        whole: int | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(minimum, budget, unit, note, share, whole, reason)
        self.minimum = minimum
        self.budget = budget
        self.unit = unit
        self.note = note
        self.share = share
        self.whole = whole
        self.reason = reason

    def explained(
        self, *, share: float | None = None, whole: int | None = None, reason: str = "", note: str = ""
    ) -> BudgetTooSmall:
        """Return a copy of this error with the fields that are given: see the comments at the fields.

        Those that are None or "" stay as they are.
        """
        return BudgetTooSmall(
            self.minimum,
            self.budget,
            self.unit,
            note or self.note,
            self.share if share is None else share,
            self.whole if whole is None else whole,
            reason or self.reason,
        )

    @property
    def minimum_share(self) -> float | None:
        """The least budget that works, in percent and rounded up to a tenth; None if the budget was not in percent."""
        if self.share is None or not self.whole:
            return None
        tenths = -(-self.minimum * 1000 // self.whole)
        while int(self.whole * (tenths / 10) / 100) < self.minimum:  # in floats, as a budget in percent is computed
            tenths += 1
        return tenths / 10

    def __str__(self) -> str:
        given, least = f"{self.budget} {self.unit}", f"{self.minimum} {self.unit}"
        if self.share is not None and self.minimum_share is not None:
            rounded = f"{self.minimum_share:.1f}".removesuffix(".0")
            given, least = f"{self.share:g}% = {given}", f"{rounded}% = {least}"
        parts = [f"no schedule fits in {given}", f"the least that does is {least}"]
        parts += [f"there, {self.reason}"] if self.reason else []
        return "; ".join([*parts, self.note] if self.note else parts)


class InvalidSchedule(FxrematError):
    """A schedule that cannot be read, or that runs an operation before its needs are stored."""


class InvalidChain(FxrematError, ValueError):
    """Chain data that no model can have: a negative size, a NaN time, a misspelt field."""


class InvalidBudget(FxrematError, ValueError):
    """A budget that is not one of the forms "4GiB", "300MB", 4294967296, "60%", "auto"."""


class PlanMismatch(FxrematError):
    """A saved plan that does not belong to this step, device or PyTorch, or a file that holds none."""


class CaptureError(FxrematError):
    """A model that cannot be captured as one graph; the message names the line and a remedy."""
