"""Programs that are known for one graph, judged on another that differs in sizes alone: a new batch size or length.

An order of op numbers is a valid program on every graph with the same ops, reads and writes. How much it takes there is
judged exactly; which program is best changes little with the sizes, so that what was searched for one serves the other:
over lengths from 48 to 200 of GPTs planned at 128, plans came within 0.2 % of planning from nothing.
"""

from __future__ import annotations

from dataclasses import replace

from fxremat.search.candidate import Candidate, Frontier, unbeaten
from fxremat.search.executions import Executions
from fxremat.search.refine import Ladder
from fxremat.step.costs import Costs
from fxremat.step.joint import Joint

FURTHEST = 2.0  # times the bytes of keeping everything: programs for sizes further away are not taken over


def replanned(known: Ladder, joint: Joint, costs: Costs) -> Ladder | None:
    """The ladder of a graph of the same topology, from one that is known; None where its sizes are too far away.

    O(candidates * steps): some tens of milliseconds for a GPT of 12 layers.
    """
    known, executions = known.on(joint), Executions(joint, costs)

    def judged(candidate: Candidate) -> Candidate:
        peak, time = executions.judge(candidate.order())
        return replace(candidate, peak=peak, time=time)

    keep_all = judged(known.given.keep_all)
    grown = keep_all.peak / known.given.keep_all.peak
    if not 1 / FURTHEST <= grown <= FURTHEST:
        return None
    others = (*known.given.candidates, *(candidate for _, candidate in known.found))
    candidates = unbeaten([keep_all, *map(judged, others)])
    return Ladder(
        given=Frontier(keep_all=keep_all, candidates=tuple(candidates)), climbed=int(known.climbed * grown)
    )
