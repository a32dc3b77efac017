"""The frontier of peak and time made better, one budget after the other.

Small budgets come first: what is found for one budget fits the next, so it is a start for that one too, beside the
fastest given program that fits. The budgets do not depend on the user's, the work is counted and every random choice
is seeded: the same model always has the same frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fxremat.progress import progress
from fxremat.search.improve import improve
from fxremat.search.skeleton import Skeletons
from fxremat.step.costs import Costs
from fxremat.step.program import Order, Program

EFFORT = 10.0  # seconds, about
PAGES = 2_000_000  # that a search replays in a second, about
STEP = 1.02  # from one budget to the next
SMALLER = 30  # steps below the least given peak, at most


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchResult:
    """A program, and which of the given ones the search began with."""

    peak: int
    time: float
    program: Program
    began: int
    order: Order | None = None  # None for the given one itself


def search(
    given: Sequence[tuple[int, float]], begin: Callable[[int], SearchResult], costs: Costs, *, effort: float
) -> Iterator[SearchResult]:
    """Faster programs for budgets between the least and the largest peak of the given ones; some need less still.

    Args:
        given: peak in bytes and time in seconds of each, fastest first.
        begin: the program of the given one at a place.
        costs: of the ops.
        effort: seconds, about, that the search takes.
    """
    best = begin(len(given) - 1)
    skeletons = Skeletons(best.program.layout.joint, costs)
    work = int(effort * PAGES / len(budgets(given[-1][0], given[0][0])))
    for smaller in _smaller(best, skeletons, work):
        best = smaller
        yield best
    steps = budgets(best.peak, given[0][0])
    for seed, budget in enumerate(progress(steps, "refining the plan")):
        fitting = (place for place, (peak, _) in enumerate(given) if peak <= budget)
        place = next(fitting, None)
        start = best if place is None or best.time <= given[place][1] else begin(place)
        best = refine(start, skeletons, budget, work, seed)
        if best is not start:
            yield best


def _smaller(start: SearchResult, skeletons: Skeletons, work: int) -> Iterator[SearchResult]:
    """Programs with less and less memory, however slow, until no further one is found."""
    in_vain = 0
    for seed in range(SMALLER):
        found = refine(start, skeletons, int(start.peak / STEP), work, seed)
        in_vain = 0 if found.peak < start.peak else in_vain + 1
        if in_vain == 3:
            return
        if found.peak <= start.peak:
            start = found
            yield found


def budgets(least: int, most: int) -> list[int]:
    """From the least to the most, each a little more than the one before."""
    found = [least]
    while found[-1] < most:
        found.append(min(most, int(found[-1] * STEP) + 1))
    return found


def refine(start: SearchResult, skeletons: Skeletons, budget: int, work: int, seed: int) -> SearchResult:
    """A faster program within the budget; where the given one does not fit, one with a lower peak; or the given one."""
    skeleton = skeletons.around(start.program)
    choice = skeleton.choice.copy()
    peak, time = improve(skeleton.tape, choice, budget, work, seed)
    if (choice == skeleton.choice).all():
        return start
    order = skeleton.order(choice)
    return SearchResult(peak=peak, time=time, program=order.program(), began=start.began, order=order)
