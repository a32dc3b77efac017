"""The best of several greedy choices: more memory left free than needed, and units that come back earlier or later.

Algorithm 1 leaves no slack where memory is tight, so that a copy back cannot overlap there, and each such op waits for
one. Choosing for less memory than there is (by some multiples of the largest unit) makes room for copies; the clock
decides, with the memory there is.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.weight_reference.cycle import Cycle, Gap
from benchmarks.weight_reference.cycle_clock import TimedCycle, run
from benchmarks.weight_reference.selection import select
from fxremat.errors import BudgetTooSmall, InvalidSchedule

MARGINS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)  # in units of the largest one
AHEAD = (None, 1, 2, 3, 4, 6, 8)  # ops


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """The gaps chosen, how early units come back, and the timed run."""

    chosen: tuple[Gap, ...]
    ahead: int | None
    timed: TimedCycle

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.timed.time


def plan(cycle: Cycle, *, discount: bool = True, margins: tuple[float, ...] = MARGINS) -> WeightPlan:
    """The fastest of the greedy choices. It takes seconds for 128 layers.

    Raises:
        BudgetTooSmall: some op does not fit with its own unit.
    """
    best: WeightPlan | None = None
    tried: set[tuple[Gap, ...]] = set()
    for margin in margins:
        try:
            chosen = select(cycle, cycle.memory - margin * max(cycle.units), discount=discount)
        except BudgetTooSmall:
            if margin:
                break
            raise
        if chosen in tried:
            continue
        tried.add(chosen)
        for ahead in AHEAD if chosen else AHEAD[:1]:
            try:
                found = WeightPlan(chosen=chosen, ahead=ahead, timed=run(cycle, chosen, ahead=ahead))
            except InvalidSchedule:
                continue
            if best is None or found.time < best.time * (1 - 1e-12):
                best = found
            if best.time <= cycle.seconds * (1 + 1e-12):
                return best
    assert best is not None, "a choice for the memory there is can always run"
    return best
