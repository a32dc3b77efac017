"""From a captured step to the plan that runs it inside a budget: `plan_step`, the whole way in one function.

    searched    costs of every op, and what memory buys: candidate programs, judged by exact liveness
    in_slices   the same of the step with regions in slices, where the user allows that
    finished    times calibrated, transfers placed: the fastest candidate that fits

Everything here is a value; what is captured and what runs is in `fxremat.runtime`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fxremat import kernels
from fxremat.agreement import Agreement
from fxremat.budget import free_bytes
from fxremat.capture.accounting import budget_in_bytes, device_of, largest_tensor
from fxremat.capture.captured import Captured
from fxremat.cost.device_memory import DeviceMemory, memory_on
from fxremat.cost.estimate import estimate
from fxremat.cost.measure import fresh_as_known, measure
from fxremat.cost.resized import resized
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidBudget, PlanMismatch
from fxremat.host.default import default_tier
from fxremat.options import Options
from fxremat.planning.captured import CapturedStep
from fxremat.planning.compiled import with_compiled_kernels
from fxremat.planning.finished import finished, plan_of
from fxremat.planning.in_slices import best_in_slices, what_slices_buy
from fxremat.planning.searched import NO_TIME, Searched, estimated_device, search, with_loss
from fxremat.plans import Plan
from fxremat.progress import bars, planning
from fxremat.search.candidate import Candidate
from fxremat.search.executions import keep_all_peak
from fxremat.search.replan import is_near, judged_again
from fxremat.step.costs import Costs
from fxremat.step.step_graph import StepGraph
from fxremat.transfers.network import communicates
from fxremat.units import Auto, Percent

log = logging.getLogger(__name__)
NEAREST = 3  # plans whose candidates are judged at other sizes

Choice = Callable[[Sequence[Candidate]], Candidate]  # of candidates that fit, fastest first


def plan_step(step: CapturedStep, options: Options) -> Plan:
    """The plan of a captured step, told of in the log.

    Raises:
        BudgetTooSmall: no candidate fits; in percent too, where the budget is in percent.
    """
    if options.compiles and communicates(step.joint):
        raise FxrematError('kernels="inductor" compiles steps of one device; this one communicates with other ranks')
    if options.plan is not None and options.loss_seen is None and (saved := _saved(step, options)) is not None:
        return saved
    kernels.ready()  # before anything is measured, which a compiler would disturb
    shown = options.progress and step.ranks.rank == step.ranks.ranks[0]
    if isinstance(options.budget, Auto) and options.device is not None:
        return _within_what_is_left(step, options)
    options = _with_least_free(step, options)
    if step.as_eager is not None and isinstance(options.budget, Percent):
        return _within_share(step, step.as_eager, options, options.budget)
    with bars(shown=shown), planning(_what(step, options)) as planned:
        plan = best_in_slices(step, options) if options.slices else _best_of_whole_ops(step, options)
        if options.compiles:
            plan = with_compiled_kernels(plan, step, options)
        _check_equal(plan, step.ranks)
        planned(plan.headline)
    return _with_others(plan, step, options)


def _saved(step: CapturedStep, options: Options) -> Plan | None:
    """The plan that was given, for this step; None where it does not belong to it, and another is to be made."""
    plan, reason = None, ""
    with planning(_what(step, options)) as planned:
        try:
            plan = options.saved.on(step.joint)
        except PlanMismatch as error:
            reason = str(error)
        reason = next(filter(None, step.ranks.gathered(reason, "reading plans")), "")
        planned(reason or (plan.headline if plan else ""))
    if reason or plan is None:
        if options.strict:
            raise PlanMismatch(f"{reason}; with mem another is made in its place")
        log.warning("%s: another plan is made", reason)
        return None
    _check_equal(plan, step.ranks)
    tier = (options.tier or default_tier(device_of(plan.graph))) if plan.chosen.transfers else None
    return _with_others(replace(plan, tier=tier), step, replace(options, plan=None))


def _within_what_is_left(step: CapturedStep, options: Options) -> Plan:
    """The plan within what is left of the memory of a device that is planned for by name."""
    memory, budget = _left_on_device(step.joint, options)
    try:
        return plan_step(replace(step, within=step.within or f"what {memory.device} has left"), budget)
    except BudgetTooSmall as error:
        raise error.explained(note=memory.shortage(error.minimum)) from None


def _left_on_device(joint: Captured, options: Options) -> tuple[DeviceMemory, Options]:
    """What a device holds, and the options with what is left there in the place of mem="auto"."""
    memory = memory_on(estimated_device(joint, options), joint, options.optimizer)
    if memory.device.memory is None:
        raise InvalidBudget(
            f'mem="auto" plans for what a device has left, and the memory of {memory.device} is not stated; '
            'give bytes, such as mem="4GiB", or a Device(..., memory=...)'
        )
    return memory, replace(options, mem=max(1, memory.auto))


def _within_share(step: CapturedStep, as_eager: Captured, options: Options, share: Percent) -> Plan:
    """The plan within a share of what keeping everything takes with eager PyTorch's kernels."""
    whole = keep_all_peak(as_eager, with_loss(as_eager, measure(as_eager, step.inputs, ranks=step.ranks), options))
    step = replace(step, within=step.within or str(options.mem))
    try:
        return plan_step(step, replace(options, mem=max(1, int(whole * share.of_keep_all / 100))))
    except BudgetTooSmall as error:
        raise error.explained(share=share.of_keep_all, whole=whole) from None


def _best_of_whole_ops(step: CapturedStep, options: Options) -> Plan:
    """The plan of a step none of whose ops runs in slices."""
    searched = search(step, options)
    try:
        return finished(searched, options)
    except BudgetTooSmall as error:
        if error.note or len(step.ranks.ranks) > 1:
            raise
        raise error.explained(note=_noted(searched, error, options)) from None


def _noted(searched: Searched, error: BudgetTooSmall, options: Options) -> str:
    """What slices would buy; "" where that cannot be told, which is no reason to hide the error."""
    try:
        return what_slices_buy(searched, error, options)
    except Exception as trouble:
        log.info("what slices would buy is not known: %s: %s", type(trouble).__name__, trouble)
        return ""


def _check_equal(plan: Plan, ranks: Agreement) -> None:
    """Raise `FxrematError` where ranks would run their collectives in different orders, and wait for ever."""
    if len(ranks.ranks) == 1:
        return
    joint = plan.graph
    order = [s.op for s in plan.chosen.program().steps if s.op is not None and joint.ops[s.op].communicates]
    if any(other != order for other in ranks.gathered(order, "comparing plans")):
        raise FxrematError(
            "the ranks have made different plans: give every rank the same options, and the same optimizer"
        )


def _with_least_free(step: CapturedStep, options: Options) -> Options:
    """The options, with what the fullest rank has free in the place of mem="auto"."""
    if not isinstance(options.budget, Auto) or len(step.ranks.ranks) == 1:
        return options
    free = free_bytes(device_of(step.joint), largest_tensor(step.joint))
    least = step.ranks.maximum([-float(free)], "comparing free memory")
    return replace(options, mem=int(-least[0]))


def _with_others(plan: Plan, step: CapturedStep, options: Options) -> Plan:
    """The plan, which can be asked for others of its step; the inputs of the call are not kept for that."""
    again = replace(step, inputs=(), within="")

    def another(mem: int | str, **changed: Any) -> Plan:
        return plan_step(again, replace(options, mem=mem, **changed))

    return replace(plan, another=another)


def _what(step: CapturedStep, options: Options) -> str:
    """What is being planned, for the log."""
    called_with = f" for inputs of {step.called_with}" if step.called_with else ""
    return f"{len(step.joint.ops)} ops within {step.within or options.mem}{called_with}"


def replan_step(step: CapturedStep, known: Sequence[Plan], options: Options, choose: Choice) -> Plan | None:
    """The plan of a step from plans of the same ops at other sizes, whose candidates are judged at these.

    Nothing is searched. Takes milliseconds where none of the ops has to run. Not for plans with transfers.

    Args:
        known: plans of other sizes, one at least.
        choose: which of the candidates that fit, fastest first, to take.

    Returns:
        the plan; None where the step is to be planned from nothing: no known candidate fits, or all are known from
        sizes far away, and take time here.
    """
    near = sorted(known, key=lambda plan: _distance(plan.graph, step.joint))
    nearest = near[0]
    if isinstance(options.budget, Auto) and options.device is not None:
        _, options = _left_on_device(step.joint, options)
    with planning(f"{_what(step, options)} from known programs") as planned:
        costs = _resized(step.joint, nearest, options)
        others = [candidate for plan in near[:NEAREST] for candidate in plan.alternatives.candidates]
        frontier = judged_again(nearest.alternatives.keep_all, others, step.joint, costs)
        budget = budget_in_bytes(options.budget, frontier.keep_all.peak, step.joint)
        fitting = [candidate for candidate in frontier.candidates if candidate.peak <= budget]
        near_enough = is_near(frontier.keep_all.peak / nearest.alternatives.keep_all.peak)
        if not fitting or not (near_enough or fitting[0].time <= NO_TIME * frontier.keep_all.time):
            planned("no known program is near enough")
            return None
        plan = plan_of(choose(fitting), frontier, costs, budget, options)
        planned(plan.headline)
    return _with_others(plan, step, options)


def _distance(one: StepGraph, other: StepGraph) -> float:
    """How far apart the sizes of two graphs of the same ops are."""
    bytes_ = [1 + sum(value.bytes for value in joint.values) for joint in (one, other)]
    return abs(math.log(bytes_[0] / bytes_[1]))


def _resized(joint: Captured, known: Plan, options: Options) -> Costs:
    if options.cost == "estimate":
        costs = estimate(joint, estimated_device(joint, options), fresh_as_known(joint))
    else:
        costs = resized(joint, known.captured, known.costs)
    return with_loss(joint, costs, options)
