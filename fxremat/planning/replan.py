"""Fast plans at new input sizes: the programs of plans for other sizes of the same ops are re-evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fxremat.options import Options
from fxremat.planning import what
from fxremat.planning.choosing import plan_of
from fxremat.planning.facts import facts_at_other_sizes
from fxremat.planning.limits import limit_of
from fxremat.planning.means import with_means_of
from fxremat.planning.step import Step
from fxremat.planning.surveys import NO_TIME
from fxremat.plans import Plan
from fxremat.progress import planning
from fxremat.search.candidate import Candidate
from fxremat.search.replan import FURTHEST, is_near, judged_again
from fxremat.step.step_graph import StepGraph
from fxremat.units import Least

NEAR_LEAST = 1.25  # as `FURTHEST`, for mem="min"
NEAREST = 3  # number of known plans, those nearest in input sizes, that contribute candidates to a new plan

Choice = Callable[[Sequence[Candidate]], Candidate]  # chooses from the candidates that fit, which come fastest first


def replan(step: Step, known: Sequence[Plan], options: Options, choose: Choice) -> Plan | None:
    """Plan a step with programs from plans for other sizes; plans with copies to the host cannot be reused.

    It takes milliseconds if no op has to be measured.

    Args:
        known: plans of the same ops at other sizes, at least one.
        choose: chooses a candidate from those that fit, which come fastest first.

    Returns:
        the plan; None if the step needs a new search: no known candidate fits, or the known sizes are too different,
            and all that fit recompute, or the least is asked for.
    """
    near = sorted(known, key=lambda plan: _distance(plan.graph, step.graph))
    nearest, limit = near[0], limit_of(step, options, replayed=False)
    with planning(f"{what(step, limit)} from known programs") as planned:
        costs = facts_at_other_sizes(step.graph, nearest, options)
        others = [candidate for plan in near[:NEAREST] for candidate in plan.alternatives.candidates]
        frontier = judged_again(nearest.alternatives.keep_all, others, step.graph, costs)
        least = isinstance(options.budget, Least)
        budget = frontier.minimum if least else limit.of(lambda: frontier.keep_all.peak).bytes
        fitting = [candidate for candidate in frontier.candidates if candidate.peak <= budget]
        grown = frontier.keep_all.peak / nearest.alternatives.keep_all.peak
        near_enough = is_near(grown, NEAR_LEAST if least else FURTHEST)
        is_fast = not least and bool(fitting) and fitting[0].time <= NO_TIME * frontier.keep_all.time
        if not fitting or not (near_enough or is_fast):
            planned("no known program is near enough")
            return None
        plan = with_means_of(nearest, plan_of(choose(fitting), frontier, costs, budget, options))
        planned(plan.headline)
    return plan


def order_of_least(known: Sequence[Plan], graph: StepGraph) -> Sequence[int] | None:
    """Return the order of ops that takes least in the plan nearest in sizes to a graph; None if none is near.

    At far smaller sizes nothing may be worth recomputing.
    """
    near = min(known, key=lambda plan: _distance(plan.graph, graph), default=None)
    if near is None or _distance(near.graph, graph) > math.log(FURTHEST):
        return None
    return near.alternatives.candidates[-1].order().ops


def _distance(one: StepGraph, other: StepGraph) -> float:
    """Return the absolute logarithm of the ratio of all bytes in two graphs of the same ops."""
    bytes_ = [1 + sum(value.bytes for value in graph.values) for graph in (one, other)]
    return abs(math.log(bytes_[0] / bytes_[1]))
