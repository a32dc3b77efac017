"""The costs of a captured step, and what memory buys of it: every candidate, before times are calibrated.

    costs      seconds and bytes of every op, measured on the step's real values or estimated
    frontier   candidate programs, judged by exact liveness, searched op by op up to the budget
    budget     bytes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fxremat.capture.accounting import budget_in_bytes, device_of, outside_bytes
from fxremat.capture.captured import Captured
from fxremat.cost.devices import Device
from fxremat.cost.estimate import cost_of, estimate
from fxremat.cost.measure import fresh_as_known, known_costs, measure
from fxremat.cost.updates import units_of, with_own_sizes
from fxremat.errors import BudgetTooSmall
from fxremat.options import Options
from fxremat.planning.captured import CapturedStep
from fxremat.planning.frontier_cache import NO_GRAPH, FrontierCache
from fxremat.search.candidate import Candidate, Frontier
from fxremat.search.executions import keep_all_peak
from fxremat.search.floor import floor_of
from fxremat.search.refine import Ladder, lowered
from fxremat.search.replan import judged_again
from fxremat.search.survey import kept, order_within, survey
from fxremat.slices.rewrite import SlicedJoint
from fxremat.step.costs import Costs
from fxremat.step.step_graph import Kind, StepGraph
from fxremat.transfers.network import beside_ops, communicates
from fxremat.transfers.weight_updates import resident_peak
from fxremat.units import Budget, Percent

ABOVE = 1.4  # times the budget: programs of single ops that need more are not looked at for compiled regions
NO_TIME = 1.01  # times what keeping everything takes: whatever is searched for gains less


@dataclass(frozen=True, kw_only=True, eq=False)
class Searched:
    """A step with its costs and what memory buys of it, before times are calibrated."""

    step: CapturedStep
    costs: Costs
    frontier: Frontier
    budget: int  # bytes
    sliced: SlicedJoint | None = None  # where regions of it run in slices
    measured: bool = True  # False: costs that were not known are estimates

    @property
    def blocked(self) -> tuple[str, ...]:
        """Why ops that need much do not run in slices."""
        return self.sliced.blocked if self.sliced else ()

    def everything(self) -> int:
        """Bytes of keeping everything, as percentages refer to them."""
        if self.step.trained is None:
            return self.frontier.keep_all.peak
        costs = with_own_sizes(self.step.joint, self.costs)
        units = units_of(self.step.joint, self.step.trained.optimizer, costs)
        return resident_peak(self.frontier.keep_all, units, costs)

    def bytes_for(self, options: Options) -> int:
        """The budget in bytes."""
        if isinstance(options.budget, Percent):
            return int(self.everything() * options.budget.of_keep_all / 100)
        return self.budget

    def seconds_within(self, mem: int) -> float:
        """Seconds of the fastest candidate that fits; of those with the least memory where none does, and more."""
        fitting = [c.time for c in self.frontier.candidates if c.peak <= mem]
        return min(fitting) if fitting else 1e6 + self.frontier.minimum

    def fits_without_more(self, mem: int) -> bool:
        """Whether hardly anything is run again within these bytes."""
        return self.seconds_within(mem) <= NO_TIME * self.frontier.keep_all.time


def search(
    step: CapturedStep, options: Options, sliced: SlicedJoint | None = None, rate: float | None = None
) -> Searched:
    """Find the costs of a step, and what memory buys.

    Args:
        rate: run nothing: what was not measured before takes so many times the estimated seconds.
    """
    measured = rate is None or options.cost == "estimate"
    if measured:
        costs = _cost_model(step, options)
    else:
        costs = with_loss(step.joint, known_costs(step.joint, rate or 1.0), options)
    frontier, budget = what_memory_buys(step, costs, options)
    return Searched(step=step, costs=costs, frontier=frontier, budget=budget, sliced=sliced, measured=measured)


def rate_of(searched: Searched, options: Options) -> float:
    """Measured over estimated seconds of what runs in slices: whole ops that were not run are taken for as slow."""
    if options.cost == "estimate":
        return 1.0
    joint, costs = searched.step.joint, searched.costs
    rough = Device.named(device_of(joint).type)
    cut = [op for op in joint.ops if op.kind is Kind.SLICED]
    estimated = sum(cost_of(op, joint, rough).seconds for op in cut)
    return costs.time_of(op.index for op in cut) / estimated if estimated else 1.0


def unsearched(step: CapturedStep, options: Options, rate: float = 1.0) -> Searched:
    """A step that keeps everything, by what is known of its costs; nothing is searched.

    Nothing is run either, unless the budget is in percent: that refers to the measured peak.

    Args:
        rate: times the estimated seconds that ops take which were not measured.
    """
    if options.cost == "estimate" or isinstance(options.budget, Percent):
        costs = _cost_model(step, options)
    else:
        costs = with_loss(step.joint, known_costs(step.joint, rate), options)
    frontier = kept(step.joint, costs)
    budget = budget_in_bytes(options.budget, frontier.keep_all.peak, step.joint)
    return Searched(step=step, costs=costs, frontier=frontier, budget=budget)


def with_loss(joint: Captured, costs: Costs, options: Options) -> Costs:
    """The costs with what the user says that a loss outside the model takes, and what steps have shown of it."""
    said, seen, sizes = options.loss_size, options.loss_seen, costs.sizes
    if seen is None or not sizes.outside:
        return costs if said is None else replace(costs, sizes=replace(sizes, outside=said))
    assumed = outside_bytes(joint)
    outside = max(said or 0, math.ceil(assumed * seen.peak))
    root = max(0, math.ceil(assumed * seen.held))
    return replace(costs, sizes=replace(sizes, outside=outside, root=root))


def _cost_model(step: CapturedStep, options: Options) -> Costs:
    joint = step.joint
    if options.cost == "estimate":
        costs = estimate(joint, estimated_device(joint, options), fresh_as_known(joint))
    else:
        costs = measure(joint, step.inputs, order=partial(_order_within, joint, options.budget), ranks=step.ranks)
    return with_loss(joint, costs, options)


def _order_within(joint: Captured, budget: Budget) -> Sequence[int]:
    """The ops in an order in which the step fits into the budget, as far as estimates tell."""
    costs = estimate(joint, Device.named(device_of(joint).type))
    return order_within(joint, costs, budget_in_bytes(budget, keep_all_peak(joint, costs), joint))


def what_memory_buys(step: CapturedStep, costs: Costs, options: Options) -> tuple[Frontier, int]:
    """What memory buys, and the budget in bytes, up to which that was searched op by op: by the first rank, for all."""
    joint, alone = step.joint, len(step.ranks.ranks) == 1

    def search() -> tuple[int, int, Ladder]:
        counted = beside_ops(joint, costs) if communicates(joint) else costs
        budget, searched, ladder = _searched(joint, counted, options)
        return budget, searched, ladder if alone else ladder.on(NO_GRAPH)

    budget, searched, ladder = step.ranks.from_first("planning", search)
    return (ladder if alone else ladder.on(joint)).frontier(searched), budget


def _searched(joint: Captured, costs: Costs, options: Options) -> tuple[int, int, Ladder]:
    """The budget, how far was searched for it, and what was found.

    What leaves for the host is chosen from programs that need more than the budget: all are searched for it.
    """
    settings: dict[str, Any] = {"solver": options.solver, "slots": options.slots, "effort": options.effort}
    if options.offloads_by_chain:
        settings |= {"solver": "auto", "effort": 0.0}
    of_costs = (options.cost, str(options.device), str(device_of(joint)), options.loss_size, options.loss_seen)
    known = FrontierCache(joint, costs, (settings, of_costs))
    hosted = bool(options.offload or options.offload_weights)
    ladder = known.get()
    if ladder is None:
        ladder = None if hosted else known.of_other_sizes()
        if ladder is None or ladder.given.minimum > _bytes(options, ladder):
            ladder = Ladder(given=_surveyed(joint, costs, settings, of_costs))
    budget = _bytes(options, ladder)
    searched = _searched_up_to(budget, ladder.given.keep_all.peak, options)
    if settings["solver"] == "auto":
        ladder = ladder.to(searched, costs, effort=settings["effort"])
    known.put(ladder)
    return budget, searched, ladder


def searched_again(known: Frontier, costs: Costs, budget: int, options: Options) -> Frontier:
    """What memory buys at other seconds of the same ops: known programs are judged anew, and improved on op by op."""
    again = judged_again(known.keep_all, known.candidates, known.keep_all.layout.graph, costs)
    if options.solver != "auto":
        return again
    searched = _searched_up_to(budget, again.keep_all.peak, options)
    return Ladder(given=again).to(searched, costs, effort=options.effort).frontier(searched)


def _searched_up_to(budget: int, everything: int, options: Options) -> int:
    """Bytes up to which programs are improved on: above the budget where they may need less than that in the end."""
    if options.offload or options.offload_weights:
        return everything
    return max(budget, min(everything, int(ABOVE * budget))) if options.compiles else budget


def _surveyed(joint: Captured, costs: Costs, settings: Mapping[str, Any], of_costs: object) -> Frontier:
    """The survey of a graph; what a quick one has found is taken from there."""
    effort = settings["effort"]
    quick = FrontierCache(joint, costs, ({**settings, "effort": 0.0}, of_costs)).get() if effort else None
    if quick is None or settings["solver"] != "auto":
        return survey(joint, costs, **settings)
    return replace(quick.given, candidates=lowered(quick.given.candidates, costs, effort=effort))


def _bytes(options: Options, ladder: Ladder) -> int:
    keep_all = ladder.given.keep_all
    return budget_in_bytes(options.budget, keep_all.peak, keep_all.layout.graph)


def estimated_device(graph: StepGraph, options: Options) -> Device:
    return Device.named(options.device or device_of(graph).type)


def whole_of(joint: Captured, options: Options) -> int:
    """Bytes that keeping everything takes, by estimate: nothing is run, however large the sizes are."""
    costs = with_loss(joint, estimate(joint, estimated_device(joint, options)), options)
    return keep_all_peak(joint, costs)


def fastest_within(budget: int, frontier: Frontier, costs: Costs, options: Options) -> Candidate:
    """The fastest candidate that fits. Raises `BudgetTooSmall`, with the op that needs the least budget."""
    try:
        return frontier.within(budget)
    except BudgetTooSmall as error:
        reason = str(floor_of(frontier.candidates[-1].program(), costs))
        raise in_the_users_terms(error, frontier.keep_all.peak, options, reason) from None


def in_the_users_terms(
    error: BudgetTooSmall, whole: int, options: Options, reason: str = ""
) -> BudgetTooSmall:
    """The error in percent of keeping everything, where the budget is in percent."""
    share = options.budget.of_keep_all if isinstance(options.budget, Percent) else None
    return error.explained(share=share, whole=whole, reason=reason)
