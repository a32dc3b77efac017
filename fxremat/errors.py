"""The exceptions that fxremat raises; each message tells what happened, with numbers, and what would work."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any


class FxrematError(Exception):
    """The base of every error that fxremat raises on purpose."""


class NotSymbolic(Exception):
    """Raised if a graph holds for one size only, so that it has to be captured with fixed sizes."""


def answer_of(function: Callable[..., Any], *arguments: Any, option: str) -> Any:
    """Call a function that the user gave for an option. Raises `FxrematError` for an exception that it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        inside = traceback.extract_tb(error.__traceback__)[1:]  # empty if it does not take these arguments
        where = f" at {inside[-1].filename}:{inside[-1].lineno}" if inside else ""
        name = getattr(function, "__qualname__", repr(function))
        raise FxrematError(f"{option}: {name} raised {type(error).__name__}{where}: {error}") from error


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
    note: str  # advice that ends the message; "": there is none
    share: float | None  # the budget in percent of `whole`; None: the user gave bytes
    whole: int | None  # peak bytes of the step without any recomputation, which budgets in percent refer to
    reason: str  # what needs `minimum` bytes, a clause such as "x is computed" after "there, "; "": unknown
    means: tuple[Any, ...] = ()  # what the planner tried (`planned_step.Means`), if the user let it choose

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
        """Return a copy of this error in which the given fields are replaced.

        Fields that are None or "" keep their values.
        """
        made = BudgetTooSmall(
            self.minimum,
            self.budget,
            self.unit,
            note or self.note,
            self.share if share is None else share,
            self.whole if whole is None else whole,
            reason or self.reason,
        )
        return made.of_means(self.means)

    def without_weights(self, reason: object) -> BudgetTooSmall:
        """Return this error with the reason why parameters cannot live on the host either."""
        note = "; ".join(filter(None, [self.note, f"weights on the host: not possible, as {reason}"]))
        return self.explained(note=note)

    def of_means(self, means: Iterable[Any]) -> BudgetTooSmall:
        """Return this error, with the means that the planner tried."""
        self.means = tuple(means)
        return self

    @property
    def minimum_share(self) -> float | None:
        """The least budget that works, in percent and rounded up to a tenth; None if the budget was not in percent."""
        if self.share is None or not self.whole:
            return None
        tenths = -(-self.minimum * 1000 // self.whole)
        # rounded in floating point in the same way as a budget in percent
        while int(self.whole * (tenths / 10) / 100) < self.minimum:
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
    """A schedule that cannot be parsed, or that runs an op before the tensors it needs are stored."""


class InvalidChain(FxrematError, ValueError):
    """Chain data that no model can have: a negative size, a NaN time, a misspelt field."""


class InvalidBudget(FxrematError, ValueError):
    """A budget that is not one of the forms "4GiB", "300MB", 4294967296, "60%", "min", "auto"."""


class PlanMismatch(FxrematError):
    """A saved plan that does not belong to this step, device or PyTorch, or a file that holds none."""


class CaptureError(FxrematError):
    """A model that cannot be captured as one graph; the message names the line and a remedy.

    Args:
        place: what ends the graph alone: a line as `file:line in function: code`, a submodule, or a reason; "": the
            message alone tells it.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place
