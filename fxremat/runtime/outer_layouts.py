"""Tells how the gradients lie in memory that a loss outside hands in, whenever that or the plan changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fxremat.graphs.captured import lie_as_traced
from fxremat.plans import Plan


class OuterLayouts:
    """The layouts of the gradients of a step's outputs, as its backwards get them.

    Args:
        tell: called with the plan, and whether these gradients lie as traced, so that nothing copies them.
    """

    def __init__(self, tell: Callable[[Plan, bool], None]) -> None:
        self._tell = tell
        self._told: tuple[Plan, bool] | None = None  # what that was called with last

    @property
    def copies_nothing(self) -> bool:
        """True if the gradients lay as traced when they were last looked at."""
        return self._told is not None and self._told[1]

    def look(self, plan: Plan, gradients: Sequence[Any]) -> None:
        """Look at the gradients that a backward gets, in a call with this plan."""
        as_traced = lie_as_traced(gradients, plan.captured)
        if self._told is None or self._told[0] is not plan or self._told[1] != as_traced:
            self._told = plan, as_traced
            self._tell(plan, as_traced)
