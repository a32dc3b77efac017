"""From the candidates of a step to its plan: times calibrated, transfers placed, the fastest that fits chosen."""

from __future__ import annotations

from functools import partial
from typing import Any

from fxremat.capture.accounting import device_of
from fxremat.capture.captured import Captured, captured_of
from fxremat.cost.calibrate import calibration
from fxremat.cost.device_memory import memory_on
from fxremat.cost.estimate import assumptions
from fxremat.cost.link import measure_link, typical_size
from fxremat.cost.updates import units_of, with_own_sizes
from fxremat.device import device_name
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.host.default import default_tier
from fxremat.host.tier import HostTier
from fxremat.options import Options
from fxremat.passes.lower import Handles
from fxremat.planned_step import WeightBudget
from fxremat.planning.captured import CapturedStep, TrainedParameters, named
from fxremat.planning.searched import Searched, estimated_device, fastest_within, in_the_users_terms
from fxremat.plans import Plan
from fxremat.search.candidate import Candidate, Frontier
from fxremat.step.costs import Costs, Link
from fxremat.transfers.network import communicates, with_overlap
from fxremat.transfers.offloading import with_offloading, with_schedules
from fxremat.transfers.weight_updates import best_within, resident_peak
from fxremat.units import Percent


def finished(searched: Searched, options: Options) -> Plan:
    """The plan of a searched step, its times calibrated."""
    step, budget = searched.step, searched.budget
    frontier, costs = _calibrated(searched.frontier, searched.costs, budget, step, options)
    return step.ranks.together("planning", partial(_chosen, frontier, costs, budget, step, options))


def _chosen(frontier: Frontier, costs: Costs, budget: int, step: CapturedStep, options: Options) -> Plan:
    """The plan of a searched step, whatever its transfers are of."""
    if communicates(step.joint) and not options.offload:
        frontier = with_overlap(frontier, costs, budget)
    if step.trained:
        return _plan_with_weights(frontier, costs, budget, step, step.trained, options)
    if options.offload:
        return _plan_with_offloading(frontier, costs, budget, options)
    return plan_of(fastest_within(budget, frontier, costs, options), frontier, costs, budget, options)


def _calibrated(
    frontier: Frontier, costs: Costs, budget: int, step: CapturedStep, options: Options
) -> tuple[Frontier, Costs]:
    """Multiply all times by the measured over the predicted time of a program near the budget."""
    if not (options.offload or options.offload_weights):
        fastest_within(budget, frontier, costs, options)  # raises before anything runs
    if options.cost == "estimate":
        return frontier, costs
    factor = calibration(frontier.nearest(budget).program(), costs, step.inputs, step.ranks)
    return frontier.scaled(factor), costs.scaled(factor)


def plan_of(
    chosen: Candidate, frontier: Frontier, costs: Costs, budget: int, options: Options, **further: Any
) -> Plan:
    joint = captured_of(chosen.layout.graph)
    measured = options.cost == "measure"
    target = None if measured else estimated_device(joint, options)
    return Plan(
        budget=budget,
        chosen=chosen,
        alternatives=frontier,
        costs=costs,
        device=str(target) if target else device_name(device_of(joint)),
        assumed=assumptions(joint, target) if target else "",
        on_device=memory_on(target, joint, options.optimizer) if target and options.device else None,
        timed=f"{options.cost}d",
        **further,
    )


def _plan_with_offloading(frontier: Frontier, costs: Costs, budget: int, options: Options) -> Plan:
    """The plan where values may wait on the host."""
    joint = captured_of(frontier.keep_all.layout.graph)
    tier = options.tier or default_tier(device_of(joint))
    link = _link(tier, joint, options)
    if options.offloads_by_chain:
        offloaded = with_schedules(frontier, costs, link, options.solver, options.slots, options.host_limit)
    else:
        offloaded = with_offloading(frontier, costs, link, options.host_limit)
    if communicates(joint):
        offloaded = with_overlap(offloaded, costs, budget)
    try:
        chosen = fastest_within(budget, offloaded, costs, options)
    except BudgetTooSmall as error:
        raise _naming_the_limit(error, frontier, costs, link, options) from None
    return plan_of(chosen, offloaded, costs, budget, options, tier=tier, link=link)


def _plan_with_weights(
    frontier: Frontier,
    costs: Costs,
    budget: int,
    step: CapturedStep,
    trained: TrainedParameters,
    options: Options,
) -> Plan:
    """The plan of a step that updates its weights, some of which live on the host."""
    joint, tier = step.joint, trained.weights.tier
    link = measure_link(tier, device_of(joint), typical_size(joint))
    costs = with_own_sizes(joint, costs)
    units = units_of(joint, trained.optimizer, costs)
    everything = resident_peak(frontier.keep_all, units, costs)
    if isinstance(options.budget, Percent):
        budget = int(everything * options.budget.of_keep_all / 100)
    if shown := sorted(unit.value for unit in units if unit.stays and unit.value in (trained.settled or ())):
        raise FxrematError(
            f"forward returns a view of {named(trained, shown)}, which lives on the host since the plan for other "
            "inputs; plan with these inputs first, example_inputs=..., or return a copy"
        )
    try:
        best = best_within(
            frontier,
            units,
            costs,
            link,
            budget,
            settled=trained.settled,
            values_too=bool(options.offload),
            host_mem=options.host_limit,
        )
    except BudgetTooSmall as error:
        raise in_the_users_terms(error, everything, options) from None
    weights = WeightBudget(
        handles=Handles(name=trained.weights.name, numbers=trained.numbers),
        keep_all_peak=everything,
        minimum=best.minimum,
        hosted=frozenset(best.choice.hosted),
    )
    return plan_of(best.candidate, frontier, costs, budget, options, tier=tier, link=link, weights=weights)


def _link(tier: HostTier, joint: Captured, options: Options) -> Link:
    """The speeds of the copies to the tier and back, measured where costs are."""
    if options.cost == "measure":
        return measure_link(tier, device_of(joint), typical_size(joint))
    speed = estimated_device(joint, options).link
    return Link(to_host=speed, from_host=speed, in_powers=tier.in_powers)


def _naming_the_limit(
    error: BudgetTooSmall, frontier: Frontier, costs: Costs, link: Link, options: Options
) -> BudgetTooSmall:
    """The error, with the host's limit named where that is what binds."""
    if options.host_limit is None:
        return error
    free = with_offloading(frontier, costs, link).minimum
    if free > error.budget:
        return error
    return error.explained(
        note=f"host_mem={options.host_mem!r} is what binds: with more of it, {free} bytes would do"
    )
