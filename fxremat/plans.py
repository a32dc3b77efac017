"""A plan: what a model will do inside its budget. Printing it shows it."""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.planned_step import PlannedStep
from fxremat.show.page import page
from fxremat.show.text import describe


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(PlannedStep):
    """One training step inside a budget, which shows itself as text and as a page.

    Bytes are above what was allocated when forward began; seconds are those of the device it was planned for.
    """

    def to_html(self) -> str:
        """A page that shows the plan, with its memory over the step as a picture."""
        return page(self)

    def describe(self, *, full: bool = False) -> str:
        """The plan as text of at most 100 columns; `full` has a line for each block and the whole schedule."""
        return describe(self, full=full)

    def __str__(self) -> str:
        return self.describe()
