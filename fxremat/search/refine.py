"""An op-by-op search that improves the Pareto frontier of peak and time, up to the user's budget: `Ladder`.

    least             programs with a lower peak than any schedule of blocks, searched for once for a step graph
    rung 1, 2, 3 ...  a search at each of a series of budgets, 2 % apart, from the least peak to the first one above the
                      user's budget

The result of one rung also fits the next, which starts from it or from the fastest schedule that fits. The
budgets of the rungs do not depend on the user's budget; it decides only how many are searched, and the plan is
chosen from their results that fit. So a larger budget never leads to a slower plan, and no plan depends on budgets that
were asked for earlier. The last rung finds programs that fit although its own budget does not: with the peak of a plan
as the budget, there is that plan. The work of a search is counted in replayed executions instead of seconds,
and random choices are seeded: the same model always gets the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxremat.progress import progress
from fxremat.search.candidate import Candidate, Frontier, exchanged, unbeaten
from fxremat.search.improve import improve
from fxremat.search.replay import Bits
from fxremat.search.skeleton import Skeleton, Skeletons
from fxremat.step.costs import Costs
from fxremat.step.step_graph import StepGraph

EFFORT = 3.0  # seconds that the search takes, about
PAGES = 2_000_000  # approximate number of pages (of 64 executions) that a search simulates per second
# number of searches among which the seconds of an effort are divided, for budgets up to a factor of ten apart
RUNGS = 110
STEP = 1.02  # ratio of the budgets of successive searches
NEAR = 1.002  # programs within this factor of the time without recomputation are not improved
SMALLER = 1.05  # each try searches for a peak that is lower by this factor
IN_VAIN = 3  # after this many tries without success the search for a lower peak ends
LOWERED = 30  # largest number of tries to lower the least peak
PATIENT = 5  # a search for a lower peak simulates this many times as much as another search


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A Pareto frontier, and results of op-by-op searches for a series of increasing budgets, called rungs."""

    given: Frontier
    # (budget in bytes, faster program found by the search), by increasing budget
    found: tuple[tuple[int, Candidate], ...] = ()
    climbed: int = 0  # largest budget in bytes for which a search was done
    of_other_sizes: bool = False  # the programs were found for other sizes: others may need less memory
    # bytes within which hardly any program is faster, for programs found beside another loss; None: found for this one
    near_bound_at: int | None = None

    @property
    def rungs(self) -> list[int]:
        """The budgets of all searches in bytes, from the least peak to the peak without recomputation."""
        least, most = self.given.minimum, self.given.keep_all.peak
        rungs = [least]
        while rungs[-1] < most:
            rungs.append(min(most, int(rungs[-1] * STEP) + 1))
        return rungs

    def to(self, budget: int, costs: Costs, *, effort: float) -> Ladder:
        """Return the results after searching all rungs that count for a budget; rungs searched before are skipped.

        Searching all rungs takes about `effort` seconds.
        """
        rungs = [rung for rung in self.rungs if self.climbed < rung <= self._last(budget)]
        if not rungs or not effort:
            return self
        search = _Search(self, costs, int(effort * PAGES / RUNGS))
        for rung in progress(rungs, "refining the plan"):
            search.climb(rung)
        return replace(self, found=tuple(search.found), climbed=rungs[-1])

    def _last(self, budget: int) -> int:
        """Return the last rung that counts for a budget: the first one above it; the budget itself if there is none."""
        rungs = self.rungs
        return next((rung for rung in rungs if rung > budget), budget) if budget >= rungs[0] else budget

    def frontier(self, budget: int) -> Frontier:
        """Return the Pareto frontier of the given candidates and of the results of rungs that count for a budget."""
        last = self._last(budget)
        found = [candidate for rung, candidate in self.found if rung <= last]
        return replace(self.given, candidates=tuple(unbeaten([*self.given.candidates, *found])))

    def on(self, graph: StepGraph) -> Ladder:
        """Return the results with candidates transferred to `graph`, which is equal to their own graph."""
        moved = exchanged(graph)
        found = tuple((rung, moved(candidate)) for rung, candidate in self.found)
        return replace(self, given=self.given.each(moved), found=found)


def lowered(candidates: tuple[Candidate, ...], costs: Costs, *, effort: float) -> tuple[Candidate, ...]:
    """Search for programs with a lower peak than any of `candidates`; return the Pareto frontier, fastest first.

    The search takes a few times as long as one of the searches for different budgets with this `effort`.
    """
    return tuple(
        unbeaten([*candidates, *_smaller(candidates[-1], costs, int(PATIENT * effort * PAGES / RUNGS))])
    )


def _smaller(start: Candidate, costs: Costs, work: int) -> Iterator[Candidate]:
    graph = start.layout.graph
    skeletons, in_vain = Skeletons(graph, costs), 0
    for seed in range(LOWERED):
        skeleton = skeletons.around(start.order())
        choice = skeleton.choice.copy()
        peak, _ = improve(skeleton.tape, choice, int(start.peak / SMALLER), work, seed)
        in_vain = 0 if peak < start.peak else in_vain + 1
        if in_vain == IN_VAIN:
            return
        if peak <= start.peak:
            start = _candidate(start, skeleton, choice, peak, costs)
            yield start


class _Search:
    """Searches for a series of budgets; each search starts from the previous result, or from a faster candidate."""

    def __init__(self, ladder: Ladder, costs: Costs, work: int) -> None:
        self.found = list(ladder.found)
        self._given, self._costs, self._work = ladder.given, costs, work
        self._near = NEAR * ladder.given.keep_all.time
        self._skeletons = Skeletons(ladder.given.keep_all.layout.graph, costs)
        # the last starting candidate and its preprocessed form, kept for reuse
        self._skeleton: tuple[Candidate, Skeleton] | None = None

    def climb(self, rung: int) -> None:
        """Search for a program within `rung` bytes that is faster than the last one.

        If there is one, append it to `found`.
        """
        start = self._given.within(rung)
        # the last result in `found` has the largest budget, and is the fastest
        if self.found and self.found[-1][1].time < start.time:
            start = self.found[-1][1]
        if start.time <= self._near:
            return
        if self._skeleton is None or self._skeleton[0] is not start:
            self._skeleton = start, self._skeletons.around(start.order())
        skeleton = self._skeleton[1]
        choice = skeleton.choice.copy()
        peak, _ = improve(skeleton.tape, choice, rung, self._work, rung)
        if (choice == skeleton.choice).all():
            return
        found = _candidate(start, skeleton, choice, peak, self._costs)
        if found.time < start.time:
            self.found.append((rung, found))


def _candidate(start: Candidate, skeleton: Skeleton, choice: Bits, peak: int, costs: Costs) -> Candidate:
    """Return the candidate that consists of the chosen executions of ops; `start` tells how it was found."""
    order = skeleton.order(choice)
    return start.refined_to(order, peak, costs.time_of(order.ops))
