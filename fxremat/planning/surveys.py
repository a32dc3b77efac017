"""Surveys: the costs of a step's ops, and the Pareto frontier of ways to run it (time against peak memory).

    facts       seconds and bytes of every op
    frontier    candidate programs with exact peaks, improved op by op up to the budget
    limit       the budget in bytes

"Keep-all" is the program that recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fxremat.cost.updates import units_of, with_own_sizes
from fxremat.graphs.accounting import device_of
from fxremat.graphs.captured import Captured
from fxremat.options import Options
from fxremat.passes.compress import Compression
from fxremat.planning.facts import assumed_facts, facts_of
from fxremat.planning.frontier_cache import NO_GRAPH, FrontierCache
from fxremat.planning.limits import Limit
from fxremat.planning.step import Step
from fxremat.planning.wishes import check_meant, dear, fair, obedient, run_once
from fxremat.search.candidate import Candidate, Frontier
from fxremat.search.lower_bound import lower_bound
from fxremat.search.refine import Ladder, lowered
from fxremat.search.replan import judged_again
from fxremat.search.survey import kept, survey
from fxremat.slices.rewrite import SlicedJoint
from fxremat.step.costs import Costs
from fxremat.step.liveness import retained_peak
from fxremat.transfers.network import beside_ops, communicates
from fxremat.transfers.weight_updates import resident_peak
from fxremat.units import Percent

ABOVE = 1.4  # op-by-op programs with a peak of up to this times the budget are tried in compiled regions
# programs found for another loss are taken, without a new search, if their time is within this factor of a lower bound
NEAR_BOUND = 1.03
NO_TIME = 1.01  # a program within this factor of the seconds without recomputation counts as recomputing nothing


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """A step with the costs of its ops and the Pareto frontier of peak and time; times are not calibrated yet."""

    step: Step
    costs: Costs
    frontier: Frontier
    limit: Limit  # the budget, with its bytes already computed
    # the rewritten graph, if ops of the step run in slices; None: the step as captured
    sliced: SlicedJoint | None = None
    compression: Compression | None = None  # which values are stored in fewer bytes; None: the step as captured
    measured: bool = True  # False: the costs of ops that were never measured are estimates
    # the candidates before they were improved op by op, fastest first: some may reserve less than those of the frontier
    begun: tuple[Candidate, ...] = ()

    def scaled(self, factor: float) -> Survey:
        """Return the survey with every time multiplied by `factor`, which corrects predicted to measured times."""
        return replace(
            self,
            frontier=self.frontier.scaled(factor),
            costs=self.costs.scaled(factor),
            begun=tuple(replace(candidate, time=candidate.time * factor) for candidate in self.begun),
        )

    @property
    def blocked(self) -> tuple[str, ...]:
        """The reasons why ops that need much memory cannot run in slices; () for a step without slices."""
        return self.sliced.blocked if self.sliced else ()

    @property
    def keep_all(self) -> int:
        """The peak in bytes without recomputation, which a budget in percent refers to."""
        return keep_all_of(self.step, self.costs, self.frontier)

    def seconds_within(self, mem: int) -> float:
        """Return the seconds of the fastest candidate whose peak is at most `mem` bytes.

        If there is none, return 1e6 plus the least budget in bytes, which sorts surveys by the memory that they
        need.
        """
        fitting = [c.time for c in self.frontier.candidates if c.peak <= mem]
        return min(fitting) if fitting else 1e6 + self.frontier.minimum

    def fits_without_more(self, mem: int) -> bool:
        """Tell whether a candidate that recomputes hardly anything has a peak of at most `mem` bytes."""
        return self.seconds_within(mem) <= NO_TIME * self.frontier.keep_all.time


def surveyed(
    step: Step,
    options: Options,
    limit: Limit,
    sliced: SlicedJoint | None = None,
    rate: float | None = None,
    like: Captured | None = None,
) -> Survey:
    """Find the costs of a step's ops, and the Pareto frontier of its programs up to the budget.

    Args:
        sliced: the rewritten graph, if ops of the step run in slices.
        rate: None: measure the ops. A number: run nothing; ops that were never measured are estimated, and their
            seconds multiplied by it.
        like: see `facts_of`.
    """
    measured = rate is None or not options.measures
    if measured:
        costs = facts_of(step, options, partial(limit.order_of, step), like)
    else:
        costs = assumed_facts(step.graph, options, rate or 1.0)
    frontier, begun = _frontier(step, costs, options, limit)
    limit = limit.of(partial(keep_all_of, step, costs, frontier, retained=options.retained))
    return Survey(
        step=step,
        costs=costs,
        frontier=frontier,
        limit=limit,
        sliced=sliced,
        measured=measured,
        begun=begun.candidates,
    )


def kept_alone(step: Step, options: Options, limit: Limit, rate: float = 1.0) -> Survey:
    """Return a survey whose only program recomputes nothing, without a search.

    Nothing is run either, unless the budget is in percent of the measured peak.

    Args:
        rate: multiplies the estimated seconds of ops that were never measured.
    """
    if not options.measures or isinstance(options.budget, Percent):
        costs = facts_of(step, options, partial(limit.order_of, step))
    else:
        costs = assumed_facts(step.graph, options, rate)
    frontier = kept(step.graph, costs)
    limit = limit.of(partial(keep_all_of, step, costs, frontier, retained=options.retained))
    return Survey(step=step, costs=costs, frontier=frontier, limit=limit)


def keep_all_of(step: Step, costs: Costs, frontier: Frontier, *, retained: int = 0) -> int:
    """Return the peak in bytes without recomputation; it includes weights that the step updates, with optimizer state.

    Args:
        retained: number of backwards of a call that run with retain_graph=True.
    """
    if step.trained is None:
        kept_all = frontier.keep_all
        return retained_peak(kept_all.program(), costs.sizes, retained) if retained else kept_all.peak
    costs = with_own_sizes(step.graph, costs)
    trained = step.trained
    units = units_of(step.graph, trained.optimizer, costs, numbers=trained.numbers, later=trained.weights.later)
    return resident_peak(frontier.keep_all, units, costs)


def _frontier(step: Step, costs: Costs, options: Options, limit: Limit) -> tuple[Frontier, Frontier]:
    """Return the Pareto frontier, improved op by op up to the budget, and as it was before.

    The first rank searches and sends the result to the other ranks.
    """
    graph, alone = step.graph, len(step.ranks.ranks) == 1
    counted = beside_ops(graph, costs) if communicates(graph) else costs
    once = run_once(graph, options.wishes)
    check_meant(graph, options.wishes)

    def search() -> tuple[int, Ladder]:
        highest, ladder = _searched(graph, dear(counted, once) if once else counted, options, limit, once)
        return highest, ladder if alone else ladder.on(NO_GRAPH)

    highest, ladder = step.ranks.from_first("planning", search)
    ladder = ladder if alone else ladder.on(graph)
    found = ladder.frontier(highest), ladder.given
    return (fair(found[0], counted, once), fair(found[1], counted, once)) if once else found


def _searched(
    graph: Captured, costs: Costs, options: Options, limit: Limit, once: frozenset[int]
) -> tuple[int, Ladder]:
    """Return the peak in bytes up to which programs were improved, and the search's state, from which it can go on.

    With offloading the search goes up to the peak without recomputation, since copies to the host lower the
    peaks.
    """
    settings: dict[str, Any] = {
        "solver": options.solver,
        "slots": options.search.slots,
        "effort": options.search.seconds,
    }
    if options.offloads_by_chain:
        settings |= {"solver": "auto", "effort": 0.0}
    how = "measure" if options.measures else "estimate"
    of_costs, loss = (how, str(options.device), str(device_of(graph)), once), _loss(options)
    known = FrontierCache(graph, costs, (settings, of_costs), loss)
    hosted = options.host is not None
    ladder = known.get()
    if ladder is not None and ladder.near_bound_at not in (None, _bytes(limit, ladder)):
        ladder = None  # at this budget others may be faster
    if ladder is None and not (hosted or options.pure):
        ladder = known.of_other_sizes()
    if ladder is not None and ladder.of_other_sizes and (hosted or ladder.given.minimum > _bytes(limit, ladder)):
        ladder = None  # programs of these sizes may need less
    if ladder is None and not (hosted or options.pure) and settings["solver"] == "auto":
        near = known.of_other_loss()
        if near is not None:
            ladder = _near_bound(near, graph, costs, _bytes(limit, near), settings["effort"])
    if ladder is None:
        ladder = Ladder(given=_surveyed(graph, costs, settings, of_costs, loss, once))
    highest = _searched_up_to(_bytes(limit, ladder), ladder.given.keep_all.peak, options)
    if settings["solver"] == "auto":
        ladder = ladder.to(highest, costs, effort=settings["effort"])
    known.put(ladder)
    return highest, ladder


def _near_bound(ladder: Ladder, graph: Captured, costs: Costs, budget: int, effort: float) -> Ladder | None:
    """Return programs found for another loss, improved up to the budget, if no search could find a much faster one.

    None if none of them fits, or the fastest that does is not within `NEAR_BOUND` of the lower bound.
    """
    if ladder.given.minimum > budget:
        return None
    improved = ladder.to(budget, costs, effort=effort)
    least = min(each.time for each in improved.frontier(budget).candidates if each.peak <= budget)
    return replace(improved, near_bound_at=budget) if least <= NEAR_BOUND * lower_bound(graph, costs, budget) else None


def _loss(options: Options) -> object:
    return options.loss_outside.size, options.loss_seen


def estimated_least(graph: Captured, costs: Costs, options: Options) -> int:
    """Return the least peak in bytes that blocks give, with what the user wants never to be recomputed."""
    once = run_once(graph, options.wishes)
    dearer, settings = dear(costs, once) if once else costs, {"solver": "auto", "effort": 0.0}
    return _surveyed(graph, dearer, settings, None, _loss(options), once).minimum


def _bytes(limit: Limit, ladder: Ladder) -> int:
    return limit.of(lambda: ladder.given.keep_all.peak).bytes


def searched_again(known: Frontier, costs: Costs, budget: int, options: Options) -> Frontier:
    """Evaluate the programs of a frontier with new costs of the same ops, then improve them op by op up to the budget.
    """
    again = judged_again(known.keep_all, known.candidates, known.keep_all.layout.graph, costs)
    if options.solver != "auto":
        return again
    highest = _searched_up_to(budget, again.keep_all.peak, options)
    return Ladder(given=again).to(highest, costs, effort=options.search.seconds).frontier(highest)


def _searched_up_to(budget: int, keep_all: int, options: Options) -> int:
    """Return the peak in bytes up to which programs are improved.

    That is the budget; or more, where offloading or compiled regions may lower the peak of a program that
    exceeds it.
    """
    if options.host:
        return keep_all
    return max(budget, min(keep_all, int(ABOVE * budget))) if options.compiles else budget


def _surveyed(
    graph: Captured,
    costs: Costs,
    settings: Mapping[str, Any],
    of_costs: object,
    loss: object,
    once: frozenset[int],
) -> Frontier:
    """Return the Pareto frontier of a graph; if one without op-by-op improvement is cached, improve that.

    Args:
        loss: what is known of the loss outside the model.
        once: ops that must not be recomputed: programs that run one of them twice are left out.
    """
    effort = settings["effort"] if settings["solver"] == "auto" else 0.0
    if once:
        whole = survey(graph, costs, **{**settings, "effort": 0.0})
        left = obedient(whole.candidates, once)
        return replace(whole, candidates=obedient(lowered(left, costs, effort=effort), once) if effort else left)
    quick = FrontierCache(graph, costs, ({**settings, "effort": 0.0}, of_costs), loss).get() if effort else None
    if quick is None:
        return survey(graph, costs, **settings)
    return replace(quick.given, candidates=lowered(quick.given.candidates, costs, effort=effort))
