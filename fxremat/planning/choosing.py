"""Choosing a plan from the Pareto frontier of a step: correct its times, schedule copies, take the fastest that fits.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from fxremat.cost.allocator import allocator_of, assumed_allocator
from fxremat.cost.calibrate import calibration
from fxremat.cost.device_memory import DeviceMemory, memory_on
from fxremat.cost.estimate import assumptions
from fxremat.cost.link import measure_link, typical_size
from fxremat.cost.updates import units_of, with_own_sizes
from fxremat.device import device_name
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.graphs.accounting import device_of
from fxremat.graphs.captured import Captured, captured_of
from fxremat.host.default import default_tier
from fxremat.host.tier import HostTier
from fxremat.ops.parameters import kind_of_optimizer
from fxremat.options import Options
from fxremat.passes.lower import Handles
from fxremat.planned_step import WeightBudget
from fxremat.planning.facts import estimated_device, source_of_times
from fxremat.planning.step import TrainedParameters, named
from fxremat.planning.surveys import Survey
from fxremat.planning.wishes import staying
from fxremat.plans import Plan
from fxremat.search.candidate import Candidate, Frontier
from fxremat.search.floor import floor_of
from fxremat.step.caching_allocator import LARGE_SEGMENT, SMALL_SEGMENT
from fxremat.step.costs import Costs, Link
from fxremat.step.kinds import MemoryKind
from fxremat.step.liveness import retained_peak
from fxremat.step.reserved import AllocatorState
from fxremat.transfers.network import communicates, with_overlap
from fxremat.transfers.offloading import with_offloading, with_schedules
from fxremat.transfers.weight_updates import best_within, resident_peak
from fxremat.units import format_bytes

log = logging.getLogger(__name__)

# bytes that a budget of reserved bytes leaves free: a segment of each pool, since an op may allocate its workspace in
# parts, or in another order than is assumed
SPARE = SMALL_SEGMENT + LARGE_SEGMENT
OF_ONE_CALL = (
    "gradients of parameters are most of it, and a percentage is of one call: give bytes if the model is called "
    "several times before one backward"
)
RETAINED = "with retain_graph=True the step takes %d bytes, and %d are allowed: no schedule fits"


def chosen(survey: Survey, options: Options) -> Plan:
    """Plan with the fastest candidate of a step's frontier that fits the budget. Raises `BudgetTooSmall` if none does.
    """
    allocator = allocator_at(survey.step.graph, options)
    survey = _calibrated(survey, options, allocator)
    return survey.step.ranks.together("planning", partial(_chosen, survey, options, allocator))


def allocator_at(graph: Captured, options: Options) -> AllocatorState | None:
    """Return the state of the device's caching allocator now, or of a named device's; None if it has none."""
    if options.device is not None:
        return assumed_allocator(estimated_device(graph, options))
    return allocator_of(device_of(graph))


def _chosen(survey: Survey, options: Options, allocator: AllocatorState | None) -> Plan:
    """Schedule copies to the host and communication with other ranks beside the ops, and choose the fastest that fits.
    """
    if communicates(survey.step.graph) and not options.offloads:
        overlapping = with_overlap(survey.frontier, survey.costs, survey.limit.bytes)
        survey = replace(survey, frontier=overlapping)
    if survey.step.trained:
        return _plan_with_weights(survey, survey.step.trained, options)
    if options.offloads:
        return _plan_with_offloading(survey, options)
    best = _fastest(survey, options, allocator)
    further = {"allocator": allocator, "reserving": survey.limit.reserving}
    made = plan_of(best, survey.frontier, survey.costs, survey.limit.bytes, options, **further)
    if options.retained and made.predicted_peak > made.budget:
        log.warning(RETAINED, made.predicted_peak, made.budget)
    return made


def _calibrated(survey: Survey, options: Options, allocator: AllocatorState | None) -> Survey:
    """Run one program whose peak is near the budget, and scale all times by its measured over its predicted seconds.

    Estimated costs stay as they are. Without offloading, `BudgetTooSmall` is raised before anything runs.
    """
    near = survey.frontier.nearest(survey.limit.bytes)
    if options.host is None:
        best = _fastest(survey, options, allocator)  # raises `BudgetTooSmall` before anything runs, if nothing fits
        near = best if survey.limit.reserving else near
    if not options.measures:
        return survey
    factor = calibration(near.program(), survey.costs, survey.step.inputs, survey.step.ranks)
    return survey.scaled(factor)


def _fastest(survey: Survey, options: Options, allocator: AllocatorState | None = None) -> Candidate:
    """Return the fastest candidate that fits. Raises `BudgetTooSmall`, which names the op at which memory is largest.
    """
    if survey.limit.reserving:
        return _fastest_reserving(survey, allocator)
    if options.retained:
        return _fastest_retaining(survey, options.retained)
    try:
        return survey.frontier.within(survey.limit.bytes)
    except BudgetTooSmall as error:
        floor = floor_of(survey.frontier.candidates[-1].program(), survey.costs)
        returned = dict(floor.kinds).get(MemoryKind.RESULTS, 0)
        note = OF_ONE_CALL if survey.limit.share is not None and returned > floor.bytes / 2 else ""
        raise survey.limit.explained(error.explained(note=note), str(floor)) from None


def _fastest_retaining(survey: Survey, retained: int) -> Candidate:
    """Return the fastest candidate that fits if its backward runs several times; else the one that needs least then.

    A budget that holds for one backward goes on to be accepted.

    Args:
        retained: number of backwards of a call that run with retain_graph=True.

    Raises:
        BudgetTooSmall: not even one backward fits; `.minimum` is the least budget in which several do.
    """
    sizes, limit = survey.costs.sizes, survey.limit.bytes
    candidates = sorted({*survey.frontier.candidates, *survey.begun}, key=lambda each: (each.time, each.peak))
    peaks = list[int]()
    for candidate in candidates:
        peaks.append(retained_peak(candidate.program(), sizes, retained))
        if peaks[-1] <= limit:
            return candidate
    least = min(peaks)
    if survey.frontier.minimum > limit:
        raise survey.limit.explained(BudgetTooSmall(minimum=least, budget=limit, note="that is with retain_graph=True"))
    return candidates[peaks.index(least)]


def _fastest_reserving(survey: Survey, allocator: AllocatorState | None) -> Candidate:
    """Return the fastest candidate for which the allocator reserves no more bytes than the budget.

    Raises:
        BudgetTooSmall: there is none; `.minimum` is the least number of bytes that is reserved for one.
        FxrematError: the bytes that are reserved are not known.
    """
    costs, limit = survey.costs, survey.limit.bytes - SPARE
    candidates = sorted({*survey.frontier.candidates, *survey.begun}, key=lambda each: (each.time, each.peak))

    def reserved(candidate: Candidate, at_most: int | None = None) -> int:
        found = allocator.reserved_by(candidate.program(), costs, at_most) if allocator else None
        if found is None:
            raise FxrematError(
                'count="reserved" is about the caching allocator of a CUDA device, and a step that does not '
                f"communicate; this one is on {survey.step.graph.device}"
            )
        return found

    for candidate in candidates:
        if candidate.peak <= limit and reserved(candidate, limit) <= limit:
            return candidate
    smallest = min(candidates, key=reserved)
    least = reserved(smallest) + SPARE
    if least <= survey.limit.bytes + survey.limit.spare:
        log.warning(
            "the least plan reserves %s, which leaves %s of the device free: mem=\"auto\" would leave %s",
            format_bytes(least),
            format_bytes(survey.limit.bytes + survey.limit.spare - least),
            format_bytes(survey.limit.spare),
        )
        return smallest
    note = f"these are reserved bytes, {SPARE} of them to spare"
    raise survey.limit.explained(BudgetTooSmall(minimum=least, budget=survey.limit.bytes, note=note))


def plan_of(
    candidate: Candidate, frontier: Frontier, costs: Costs, budget: int, options: Options, **further: Any
) -> Plan:
    """Make a plan from the chosen candidate and the Pareto frontier that it was chosen from.

    Args:
        budget: bytes.
        further: other fields of the plan, such as `link`.
    """
    graph = captured_of(candidate.layout.graph)
    target = None if options.measures else estimated_device(graph, options)
    assumed = [assumptions(graph, target) if target else "", source_of_times(graph, options)]
    return Plan(
        budget=budget,
        chosen=candidate,
        alternatives=frontier,
        costs=costs,
        device=str(target) if target else device_name(device_of(graph)),
        assumed="; ".join(filter(None, assumed)),
        on_device=_memory(graph, options),
        retained=options.retained,
        timed="measured" if options.measures else "estimated",
        **({"allocator": allocator_at(graph, options)} | further),
    )


def _memory(graph: Captured, options: Options) -> DeviceMemory | None:
    """Return what the device's memory is used for; None if the user named neither the device nor `device_mem`."""
    if options.division is not None:
        return options.division.of(graph).memory
    return memory_on(options.device, graph, options.optimizer) if options.device is not None else None


def _plan_with_offloading(survey: Survey, options: Options) -> Plan:
    """Plan with activations that may be copied to the host after forward and back before backward."""
    frontier, costs = survey.frontier, survey.costs
    graph, limit = survey.step.graph, survey.limit
    tier = options.tier or default_tier(device_of(graph))
    link = link_to(tier, graph, options)
    if options.offloads_by_chain:
        offloaded = with_schedules(frontier, costs, link, options.solver, options.search.slots, options.host_limit)
    else:
        settled = replace(costs, staying=staying(graph, options.kept))
        offloaded = with_offloading(frontier, settled, link, options.host_limit)
    if communicates(graph):
        offloaded = with_overlap(offloaded, costs, limit.bytes)
    try:
        best = _fastest(replace(survey, frontier=offloaded), options)
    except BudgetTooSmall as error:
        raise _naming_the_limit(error, frontier, costs, link, options) from None
    return plan_of(best, offloaded, costs, limit.bytes, options, tier=tier, link=link)


def _plan_with_weights(survey: Survey, trained: TrainedParameters, options: Options) -> Plan:
    """Plan a step that updates its weights, some of which are stored on the host while the step does not use them."""
    graph, frontier, limit, tier = survey.step.graph, survey.frontier, survey.limit, trained.weights.tier
    link = measure_link(tier, device_of(graph), typical_size(graph))
    costs = with_own_sizes(graph, survey.costs)
    units = units_of(graph, trained.optimizer, costs, numbers=trained.numbers, later=trained.weights.later)
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
            limit.bytes,
            settled=trained.settled,
            values_too=options.offloads,
            host_mem=options.host_limit,
        )
    except BudgetTooSmall as error:
        raise limit.explained(error) from None
    weights = WeightBudget(
        handles=Handles(name=trained.weights.name, numbers=trained.numbers),
        keep_all_peak=resident_peak(frontier.keep_all, units, costs),
        minimum=best.minimum,
        hosted=frozenset(best.choice.hosted),
        optimizer=kind_of_optimizer(trained.optimizer),
        later=trained.weights.later,
        step_bytes=best.step_bytes,
    )
    return plan_of(best.candidate, frontier, costs, limit.bytes, options, tier=tier, link=link, weights=weights)


def link_to(tier: HostTier, graph: Captured, options: Options) -> Link:
    """Return the speeds of copies to the host and back: measured, or the device description's if costs are estimated.
    """
    if options.measures:
        return measure_link(tier, device_of(graph), typical_size(graph))
    speed = estimated_device(graph, options).link
    return Link(to_host=speed, from_host=speed, in_powers=tier.in_powers)


def _naming_the_limit(
    error: BudgetTooSmall, frontier: Frontier, costs: Costs, link: Link, options: Options
) -> BudgetTooSmall:
    """Return the error, with a note if the step would fit had the user allowed more host memory."""
    if options.host_limit is None:
        return error
    free = with_offloading(frontier, costs, link).minimum
    if free > error.budget:
        return error
    limit = f"Offload(limit={options.host.limit!r})" if options.host else ""
    return error.explained(note=f"{limit} is what binds: with a higher limit, {free} bytes would do")
