"""An op-by-op search that improves the frontier of peak and time, up to the budget of the user: `Ladder`.

    least             programs that need less than any schedule of blocks, searched for once for a step graph
    rung 1, 2, 3 ...  a search at each budget of a ladder, from the least to that of the user, 2 % apart

The result of one rung fits the next, which starts from it or from the fastest schedule that fits. The rungs do not
depend on the budget of the user; only how many are climbed does, and a plan is chosen from the results of the rungs up
to its budget. So more memory never leads to a slower plan, and no plan depends on earlier budgets; the work is counted
and every random choice is seeded: the same model always has the same plan.
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

EFFORT = 3.0  # seconds, about
PAGES = 2_000_000  # pages (of 64 executions) that a search replays in a second, about
RUNGS = 110  # rungs among which the seconds of an effort are divided: a tenfold budget is about so many rungs away
STEP = 1.02  # ratio of a rung to the one before
NEAR = 1.002  # times the time without recomputation: a program that is as fast is not improved
SMALLER = 1.05  # factor by which one try lowers the least peak
IN_VAIN = 3  # tries without success after which the least peak is not lowered further
LOWERED = 30  # tries to lower the least peak, at most
PATIENT = 5  # times the work of a rung: the work of one try to lower the least peak


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A frontier, and the result of the search on each rung that was climbed, by increasing budget."""

    given: Frontier
    found: tuple[tuple[int, Candidate], ...] = ()  # a rung in bytes, and its result
    climbed: int = 0  # bytes: the highest rung so far

    @property
    def rungs(self) -> list[int]:
        """Budgets from the least to the peak of keep-all, in bytes."""
        least, most = self.given.minimum, self.given.keep_all.peak
        rungs = [least]
        while rungs[-1] < most:
            rungs.append(min(most, int(rungs[-1] * STEP) + 1))
        return rungs

    def to(self, budget: int, costs: Costs, *, effort: float) -> Ladder:
        """Return the ladder climbed up to a budget in bytes; rungs that were climbed before are skipped.

        Climbing the entire ladder takes about `effort` seconds.
        """
        rungs = [rung for rung in self.rungs if self.climbed < rung <= budget]
        if not rungs or not effort:
            return self
        search = _Search(self, costs, int(effort * PAGES / RUNGS))
        for rung in progress(rungs, "refining the plan"):
            search.climb(rung)
        return replace(self, found=tuple(search.found), climbed=rungs[-1])

    def frontier(self, budget: int) -> Frontier:
        """Return the frontier up to a budget: the given candidates, and the results of the rungs up to there."""
        found = [candidate for rung, candidate in self.found if rung <= budget]
        return replace(self.given, candidates=tuple(unbeaten([*self.given.candidates, *found])))

    def on(self, graph: StepGraph) -> Ladder:
        """Return the ladder with its candidates as candidates of `graph`, which is equal to the graph they were for."""
        moved = exchanged(graph)
        found = tuple((rung, moved(candidate)) for rung, candidate in self.found)
        return replace(self, given=self.given.each(moved), found=found)


def lowered(candidates: tuple[Candidate, ...], costs: Costs, *, effort: float) -> tuple[Candidate, ...]:
    """Search for programs with a lower peak than any of `candidates`; return all that are unbeaten, fastest first.

    It takes up to a few times the seconds of one rung of a ladder climbed with this `effort`.
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
    """A search up the rungs of a ladder: each starts from the result of the one before, or a faster given candidate."""

    def __init__(self, ladder: Ladder, costs: Costs, work: int) -> None:
        self.found = list(ladder.found)
        self._given, self._costs, self._work = ladder.given, costs, work
        self._near = NEAR * ladder.given.keep_all.time
        self._skeletons = Skeletons(ladder.given.keep_all.layout.graph, costs)
        self._skeleton: tuple[Candidate, Skeleton] | None = None  # the last start and its skeleton, which is reused

    def climb(self, rung: int) -> None:
        """Search for a faster program within one rung's budget, in bytes, and add it to `found` if there is one."""
        start = self._given.within(rung)
        if self.found and self.found[-1][1].time < start.time:  # each result is faster than those before
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
    """Return the candidate that runs the chosen executions of a skeleton, with `start` as its origin."""
    order = skeleton.order(choice)
    return start.refined_to(order, peak, costs.time_of(order.ops))
