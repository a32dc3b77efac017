"""Finds the shortest period of a given contiguous allocation, scheduled by 1F1B*.

1F1B* divides the stages into groups; those at period T depend on which runs of consecutive elements last at
most T, so memory is a step function of T that falls at sums of such runs alone. The answer is the least of
those sums, from the longest element on, at which every device fits, found by bisection. A. Shilova's thesis
(2021), Algorithm 7, bisects over numbers instead. O(n^2 log n).

An element is a stage, or the copies between two stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.errors import BudgetTooSmall
from fxremat.solvers.pipeline.groups import Element, alive, elements_of, groups_of
from fxremat.solvers.pipeline.model import PlannedStage
from fxremat.solvers.pipeline.stage_costs import Job


def ticks(elements: Sequence[Element]) -> list[float]:
    """Return every period in seconds, from the shortest possible one on, at which the groups of 1F1B* may change."""
    longest = max(element.seconds for element in elements)
    sums = {longest}
    for first in range(len(elements)):
        seconds = 0.0
        for element in elements[first:]:
            seconds += element.seconds
            sums.add(seconds)
    return sorted(seconds for seconds in sums if seconds >= longest)


def memory_at(job: Job, stages: Sequence[PlannedStage], tick: float, skip: int = 0) -> list[float]:
    """Return the bytes of each stage's device if the stages run by 1F1B*.

    `tick`: seconds between two slots for micro-batches, of which every (skip + 1)-th stays empty; 0: none does.
    """
    groups = groups_of(elements_of(job, stages), tick)[::2]
    return [
        job.fixed(stage.first, stage.last) + stage.way.bytes(alive(group, skip))
        for stage, group in zip(stages, groups, strict=True)
    ]


def shortest_tick(job: Job, stages: Sequence[PlannedStage], *, skip: int = 0) -> float:
    """Return the shortest tick, the seconds between slots for micro-batches, at which all devices have enough memory.

    Every (skip + 1)-th slot stays empty; 0: none does.

    Raises:
        BudgetTooSmall: one micro-batch at a time does not fit; `.minimum` is the number of bytes that it needs.
    """
    candidates = ticks(elements_of(job, stages))
    least = max(memory_at(job, stages, candidates[-1], skip))
    if not job.fits(least):
        raise BudgetTooSmall(minimum=int(-(-least // 1)), budget=int(job.machines.memory))
    low, high = -1, len(candidates) - 1  # index `high` is known to fit, `low` not to
    while high - low > 1:
        middle = (low + high) // 2
        if job.fits(max(memory_at(job, stages, candidates[middle], skip))):
            high = middle
        else:
            low = middle
    return candidates[high]
