"""From a captured step to the plan that runs it inside a budget: `plan_step`, the whole way in one function.

    costs      seconds and bytes of every op, measured on the step's real values or estimated
    frontier   candidate programs, judged by exact liveness: what memory buys, searched op by op up to the budget
    budget     bytes
    transfers  what waits on the host, activations or weights: further candidates
    plan       the fastest candidate that fits

Everything here is a value; what is captured and what runs is in `fxremat.runtime`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fxremat import kernels
from fxremat.agreement import ALONE, Agreement
from fxremat.budget import bytes_of, free_bytes
from fxremat.cost.calibrate import calibration
from fxremat.cost.devices import Device
from fxremat.cost.estimate import assumptions, cost_of, estimate
from fxremat.cost.link import measure_link, typical_size
from fxremat.cost.measure import known_costs, measure, trust_known_layouts
from fxremat.cost.resized import resized
from fxremat.cost.updates import units_of, with_own_sizes
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.host.default import default_tier
from fxremat.host.tier import HostTier
from fxremat.ops.parameters import Weights
from fxremat.options import MANY_SLICES, Options
from fxremat.passes.lower import Handles
from fxremat.planned_step import WeightBudget
from fxremat.plans import Plan
from fxremat.progress import bars, planning
from fxremat.search.candidate import Candidate, Frontier, unbeaten
from fxremat.search.executions import keep_all_peak
from fxremat.search.floor import floor_of
from fxremat.search.frontier_cache import NO_GRAPH, FrontierCache
from fxremat.search.refine import Ladder, lowered
from fxremat.search.replan import is_near, judged_again
from fxremat.search.survey import kept, order_for_measuring, survey
from fxremat.slices.body import Sliced
from fxremat.slices.rewrite import SlicedJoint, largest_need
from fxremat.slices.variants import least_of_all, variants
from fxremat.step.collectives import is_collective
from fxremat.step.costs import Costs, Link, device_of
from fxremat.step.joint import Joint
from fxremat.torch_private import device_name
from fxremat.transfers.network import beside_ops, communicates, with_overlap
from fxremat.transfers.offloading import with_offloading, with_schedules
from fxremat.transfers.weight_updates import best_within, resident_peak
from fxremat.units import Auto, Percent

NEAREST = 3  # plans whose candidates are judged at other sizes
NOTED = 1.02  # times the least budget by estimate, which a note tells
WORTH_A_NOTE = 0.9  # of the least budget of whole ops
NO_TIME = 1.01  # times what keeping everything takes: whatever is searched for gains less

Choice = Callable[[Sequence[Candidate]], Candidate]  # of candidates that fit, fastest first


@dataclass(frozen=True, kw_only=True)
class TrainedParameters:
    """The optimizer's parameters in a joint graph, where the step updates them."""

    weights: Weights
    optimizer: torch.optim.Optimizer
    numbers: Mapping[int, int]  # parameter's value -> its place among the optimizer's
    names: Mapping[int, str]  # parameter's value -> its name in the model
    settled: frozenset[int] | None  # values that live on the host since an earlier plan; None: nothing is settled


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """A joint graph, and what is known of the call that it was captured from."""

    joint: Joint
    inputs: Sequence[Any] = ()  # what the captured graph was called with
    trained: TrainedParameters | None = None  # where the step updates its weights
    called_with: str = ""  # the sizes of the inputs, for the log
    within: str = ""  # the budget in words, where the options do not say it
    ranks: Agreement = ALONE  # those that run the step together, each its part


def plan_step(step: CapturedStep, options: Options) -> Plan:
    """The plan of a captured step, told of in the log.

    Raises:
        BudgetTooSmall: no candidate fits; in percent too, where the budget is in percent.
    """
    kernels.ready()  # before anything is measured, which a compiler would disturb
    shown = options.progress and step.ranks.rank == step.ranks.ranks[0]
    options = _with_least_free(step, options)
    with bars(shown=shown), planning(_what(step, options)) as planned:
        plan = _best_in_slices(step, options) if options.slices else _best_of_whole_ops(step, options)
        _check_equal(plan, step.ranks)
        planned(plan.headline)
    return _with_others(plan, step, options)


def _best_of_whole_ops(step: CapturedStep, options: Options) -> Plan:
    """The plan of a step none of whose ops runs in slices."""
    searched = _search(step, options)
    try:
        return _finished(searched, options)
    except BudgetTooSmall as error:
        if error.note or len(step.ranks.ranks) > 1:
            raise
        raise error.explained(note=_what_slices_buy(searched, error, options)) from None


def _best_in_slices(step: CapturedStep, options: Options) -> Plan:
    """The fastest plan that fits, of the step as it is and of it with regions in slices.

    Raises `BudgetTooSmall` with the least budget of them all.
    """
    if communicates(step.joint):
        raise FxrematError(
            "slices do not go with communication between ranks inside the step: leave slices out, or average "
            "gradients outside of it with DistributedDataParallel around the compiled model"
        )
    quick = replace(options, effort=0.0)
    whole = _unsearched(step, options)
    mem = whole.bytes_for(options)
    if whole.fits_without_more(mem):
        whole = _search(step, quick)
        mem = whole.bytes_for(options)
    if whole.fits_without_more(mem):
        return _with_least(_finished(whole, replace(quick, mem=mem)), step, options)
    known: list[_Searched] = []
    every = variants(step.joint, mem, most=options.most_slices, reduce=options.reduce)
    for found in every:
        known.append(_search(replace(step, joint=found.joint), replace(quick, mem=mem), found))
        if len(known) == 1:  # most ops of the step have been measured by now
            whole = _unsearched(step, options, rate=_rate_of(known[0], options))
            mem = whole.bytes_for(options)
        if known[-1].fits_without_more(mem):
            break
    else:
        if not known or largest_need(step.joint) <= mem:
            known.append(_search(step, replace(quick, mem=mem)))
    if not any(searched.sliced for searched in known):
        blocked = least_of_all(step.joint, most=options.most_slices, reduce=options.reduce).blocked
    else:
        blocked = tuple(dict.fromkeys(reason for searched in known for reason in searched.blocked))
    plan = _fastest(known, whole, mem, options, blocked)
    return plan if next(every, None) is None else _with_least(plan, step, options)


def _with_least(plan: Plan, step: CapturedStep, options: Options) -> Plan:
    """The plan, which finds the least budget of ways to slice that were not tried for it when it is asked."""
    return replace(plan, more_slices=partial(_least_in_slices, replace(step, inputs=()), options))


def _least_in_slices(step: CapturedStep, options: Options) -> int:
    """The least budget with as many slices as there may be."""
    found = least_of_all(step.joint, most=options.most_slices, reduce=options.reduce)
    least = replace(options, mem=1, effort=0.0)
    try:
        return _finished(_search(replace(step, joint=found.joint), least, found), least).minimum
    except BudgetTooSmall as error:
        return error.minimum


def _fastest(
    known: Sequence[_Searched], whole: _Searched, mem: int, options: Options, blocked: Sequence[str]
) -> Plan:
    """The plan of the fastest searched step within `mem` bytes, which tells of all of them.

    Args:
        whole: the step as it is, which percentages refer to.
        blocked: why ops that need much are whole.
    """
    errors: list[BudgetTooSmall] = []
    for searched in sorted(known, key=lambda searched: searched.seconds_within(mem)):
        if not searched.fits_without_more(mem):
            searched = _search(searched.step, replace(options, mem=mem), searched.sliced)
        try:
            plan = _finished(searched, replace(options, mem=mem))
        except BudgetTooSmall as error:
            errors.append(error)
            continue
        return _telling_of_all(plan, searched, known, whole)
    least = min(errors, key=lambda error: error.minimum)
    note = f"not in slices: {'; '.join(blocked)}" if blocked else ""
    raise _in_the_users_terms(least, whole.everything(), options).explained(note=note)


def _telling_of_all(plan: Plan, searched: _Searched, known: Sequence[_Searched], whole: _Searched) -> Plan:
    """The plan, whose alternatives are those of all ways to slice the step, and whose whole is that of no slices."""
    factor = plan.keep_all_time / max(1e-12, searched.frontier.keep_all.time)  # of calibration
    scaled = [one.frontier.scaled(factor) for one in known]
    every = (*plan.alternatives.candidates, *(c for frontier in scaled for c in frontier.candidates))
    weights = plan.weights
    return replace(
        plan,
        alternatives=Frontier(keep_all=whole.frontier.scaled(factor).keep_all, candidates=tuple(unbeaten(every))),
        slices=searched.sliced.regions if searched.sliced else (),
        not_sliced=known[-1].blocked,
        weights=weights and replace(weights, keep_all_peak=whole.everything()),
    )


def _what_slices_buy(searched: _Searched, error: BudgetTooSmall, options: Options) -> str:
    """A note on the least budget with regions in slices, by estimate; "" where they do not help."""
    joint = searched.step.joint
    found = least_of_all(joint, most=MANY_SLICES, reduce=None)
    if not found.regions:
        return ""
    device = Device.named(device_of(joint).type) if options.device is None else Device.named(options.device)
    costs = _with_loss(estimate(found.joint, device), options)
    least = int(survey(found.joint, costs, effort=0.0).minimum * NOTED)
    if least > WORTH_A_NOTE * error.minimum:
        return ""
    return (
        f"with slices=True, {least} bytes or fewer would do: gradients that are sums over the slices are then equal "
        "up to rounding"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Searched:
    """A step with its costs and what memory buys of it, before times are calibrated."""

    step: CapturedStep
    costs: Costs
    frontier: Frontier
    budget: int  # bytes
    sliced: SlicedJoint | None = None  # where regions of it run in slices

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


def _search(step: CapturedStep, options: Options, sliced: SlicedJoint | None = None) -> _Searched:
    """Find the costs of a step, and what memory buys."""
    costs = _cost_model(step, options)
    frontier, budget = _frontier(step, costs, options)
    return _Searched(step=step, costs=costs, frontier=frontier, budget=budget, sliced=sliced)


def _rate_of(searched: _Searched, options: Options) -> float:
    """Measured over estimated seconds of what runs in slices: whole ops that were not run are taken for as slow."""
    if options.cost == "estimate":
        return 1.0
    joint, costs = searched.step.joint, searched.costs
    rough = Device.named(device_of(joint).type)
    cut = [op for op in joint.ops if isinstance(op.node.target, Sliced)]
    estimated = sum(cost_of(op, joint, rough).seconds for op in cut)
    return costs.time_of(op.index for op in cut) / estimated if estimated else 1.0


def _unsearched(step: CapturedStep, options: Options, rate: float = 1.0) -> _Searched:
    """A step that keeps everything, by what is known of its costs; nothing is searched.

    Nothing is run either, unless the budget is in percent: that refers to the measured peak.

    Args:
        rate: times the estimated seconds that ops take which were not measured.
    """
    if options.cost == "estimate" or isinstance(options.budget, Percent):
        costs = _cost_model(step, options)
    else:
        costs = _with_loss(known_costs(step.joint, rate), options)
    frontier = kept(step.joint, costs)
    budget = bytes_of(options.budget, frontier.keep_all.peak, device_of(step.joint))
    return _Searched(step=step, costs=costs, frontier=frontier, budget=budget)


def _finished(searched: _Searched, options: Options) -> Plan:
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
    return _planned(_within(budget, frontier, costs, options), frontier, costs, budget, options)


def _check_equal(plan: Plan, ranks: Agreement) -> None:
    """Raise `FxrematError` where ranks would run their collectives in different orders, and wait for ever."""
    if len(ranks.ranks) == 1:
        return
    joint = plan.joint
    order = [s.op for s in plan.chosen.program().steps if s.op is not None and is_collective(joint.ops[s.op].node)]
    if any(other != order for other in ranks.gathered(order, "comparing plans")):
        raise FxrematError(
            "the ranks have made different plans: give every rank the same options, and the same optimizer"
        )


def _with_least_free(step: CapturedStep, options: Options) -> Options:
    """The options, with what the fullest rank has free in the place of mem="auto"."""
    if not isinstance(options.budget, Auto) or len(step.ranks.ranks) == 1:
        return options
    free = step.ranks.maximum([-float(free_bytes(device_of(step.joint)))], "comparing free memory")
    return replace(options, mem=int(-free[0]))


def _with_others(plan: Plan, step: CapturedStep, options: Options) -> Plan:
    """The plan, which can be asked for others of its step; the inputs of the call are not kept for that."""
    again = replace(step, inputs=(), within="")
    return replace(plan, another=lambda mem: plan_step(again, replace(options, mem=mem)))


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
    near = sorted(known, key=lambda plan: _distance(plan.joint, step.joint))
    nearest = near[0]
    with planning(f"{_what(step, options)} from known programs") as planned:
        costs = _resized(step.joint, nearest, options)
        others = [candidate for plan in near[:NEAREST] for candidate in plan.alternatives.candidates]
        frontier = judged_again(nearest.alternatives.keep_all, others, step.joint, costs)
        budget = bytes_of(options.budget, frontier.keep_all.peak, device_of(step.joint))
        fitting = [candidate for candidate in frontier.candidates if candidate.peak <= budget]
        near_enough = is_near(frontier.keep_all.peak / nearest.alternatives.keep_all.peak)
        if not fitting or not (near_enough or fitting[0].time <= NO_TIME * frontier.keep_all.time):
            planned("no known program is near enough")
            return None
        plan = _planned(choose(fitting), frontier, costs, budget, options)
        planned(plan.headline)
    return _with_others(plan, step, options)


def _distance(one: Joint, other: Joint) -> float:
    """How far apart the sizes of two graphs of the same ops are."""
    bytes_ = [1 + sum(value.bytes for value in joint.values) for joint in (one, other)]
    return abs(math.log(bytes_[0] / bytes_[1]))


def _resized(joint: Joint, known: Plan, options: Options) -> Costs:
    if options.cost == "estimate":
        trust_known_layouts(joint)
        costs = estimate(joint, _estimated_device(joint, options))
    else:
        costs = resized(joint, known.joint, known.costs)
    return _with_loss(costs, options)


def _with_loss(costs: Costs, options: Options) -> Costs:
    """The costs with what the user says that a loss outside the model takes."""
    if options.loss_size is None:
        return costs
    return replace(costs, sizes=replace(costs.sizes, outside=options.loss_size))


def _cost_model(step: CapturedStep, options: Options) -> Costs:
    joint = step.joint
    if options.cost == "estimate":
        trust_known_layouts(joint)
        costs = estimate(joint, _estimated_device(joint, options))
    else:
        rough = Device.named(device_of(joint).type)
        order = partial(order_for_measuring, joint, rough, options.budget)
        costs = measure(joint, step.inputs, order=order, ranks=step.ranks)
    return _with_loss(costs, options)


def _frontier(step: CapturedStep, costs: Costs, options: Options) -> tuple[Frontier, int]:
    """What memory buys, and the budget in bytes, up to which that was searched op by op: by the first rank, for all."""
    joint, alone = step.joint, len(step.ranks.ranks) == 1

    def search() -> tuple[int, int, Ladder]:
        counted = beside_ops(joint, costs) if communicates(joint) else costs
        budget, searched, ladder = _searched(joint, counted, options)
        return budget, searched, ladder if alone else ladder.on(NO_GRAPH)

    budget, searched, ladder = step.ranks.from_first("planning", search)
    return (ladder if alone else ladder.on(joint)).frontier(searched), budget


def _searched(joint: Joint, costs: Costs, options: Options) -> tuple[int, int, Ladder]:
    """The budget, how far was searched for it, and what was found.

    What leaves for the host is chosen from programs that need more than the budget: all are searched for it.
    """
    settings: dict[str, Any] = {"solver": options.solver, "slots": options.slots, "effort": options.effort}
    if options.offloads_by_chain:
        settings |= {"solver": "auto", "effort": 0.0}
    of_costs = (options.cost, str(options.device), str(device_of(joint)), options.loss_size)
    known = FrontierCache(joint, costs, (settings, of_costs))
    hosted = bool(options.offload or options.offload_weights)
    ladder = known.get()
    if ladder is None:
        ladder = None if hosted else known.of_other_sizes()
        if ladder is None or ladder.given.minimum > _bytes(options, ladder):
            ladder = Ladder(given=_surveyed(joint, costs, settings, of_costs))
    budget = _bytes(options, ladder)
    searched = ladder.given.keep_all.peak if hosted else budget
    if settings["solver"] == "auto":
        ladder = ladder.to(searched, costs, effort=settings["effort"])
    known.put(ladder)
    return budget, searched, ladder


def _surveyed(joint: Joint, costs: Costs, settings: Mapping[str, Any], of_costs: object) -> Frontier:
    """The survey of a graph; what a quick one has found is taken from there."""
    effort = settings["effort"]
    quick = FrontierCache(joint, costs, ({**settings, "effort": 0.0}, of_costs)).get() if effort else None
    if quick is None or settings["solver"] != "auto":
        return survey(joint, costs, **settings)
    return replace(quick.given, candidates=lowered(quick.given.candidates, costs, effort=effort))


def _bytes(options: Options, ladder: Ladder) -> int:
    keep_all = ladder.given.keep_all
    return bytes_of(options.budget, keep_all.peak, device_of(keep_all.layout.joint))


def _calibrated(
    frontier: Frontier, costs: Costs, budget: int, step: CapturedStep, options: Options
) -> tuple[Frontier, Costs]:
    """Multiply all times by the measured over the predicted time of a program near the budget."""
    if not (options.offload or options.offload_weights):
        _within(budget, frontier, costs, options)  # raises before anything runs
    if options.cost == "estimate":
        return frontier, costs
    factor = calibration(frontier.nearest(budget).program(), costs, step.inputs, step.ranks)
    return frontier.scaled(factor), costs.scaled(factor)


def _planned(
    chosen: Candidate, frontier: Frontier, costs: Costs, budget: int, options: Options, **further: Any
) -> Plan:
    joint = chosen.layout.joint
    measured = options.cost == "measure"
    target = None if measured else _estimated_device(joint, options)
    return Plan(
        budget=budget,
        chosen=chosen,
        alternatives=frontier,
        costs=costs,
        device=str(target) if target else device_name(device_of(joint)),
        assumed=assumptions(joint, target) if target else "",
        timed=f"{options.cost}d",
        **further,
    )


def _plan_with_offloading(frontier: Frontier, costs: Costs, budget: int, options: Options) -> Plan:
    """The plan where values may wait on the host."""
    joint = frontier.keep_all.layout.joint
    tier = options.tier or default_tier(device_of(joint))
    link = _link(tier, joint, options)
    if options.offloads_by_chain:
        offloaded = with_schedules(frontier, costs, link, options.solver, options.slots, options.host_limit)
    else:
        offloaded = with_offloading(frontier, costs, link, options.host_limit)
    if communicates(joint):
        offloaded = with_overlap(offloaded, costs, budget)
    try:
        chosen = _within(budget, offloaded, costs, options)
    except BudgetTooSmall as error:
        raise _naming_the_limit(error, frontier, costs, link, options) from None
    return _planned(chosen, offloaded, costs, budget, options, tier=tier, link=link)


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
        raise _in_the_users_terms(error, everything, options) from None
    weights = WeightBudget(
        handles=Handles(name=trained.weights.name, numbers=trained.numbers),
        keep_all_peak=everything,
        minimum=best.minimum,
        hosted=frozenset(best.choice.hosted),
    )
    return _planned(best.candidate, frontier, costs, budget, options, tier=tier, link=link, weights=weights)


def named(trained: TrainedParameters, values: Iterable[int]) -> str:
    """The names of parameters in the model, for messages."""
    names = [trained.names[value] for value in values]
    return f"the parameter {names[0]}" if len(names) == 1 else f"the parameters {', '.join(names)}"


def _link(tier: HostTier, joint: Joint, options: Options) -> Link:
    """The speeds of the copies to the tier and back, measured where costs are."""
    if options.cost == "measure":
        return measure_link(tier, device_of(joint), typical_size(joint))
    speed = _estimated_device(joint, options).link
    return Link(to_host=speed, from_host=speed)


def _estimated_device(joint: Joint, options: Options) -> Device:
    return Device.named(options.device or device_of(joint).type)


def whole_of(joint: Joint, options: Options) -> int:
    """Bytes that keeping everything takes, by estimate: nothing is run, however large the sizes are."""
    costs = _with_loss(estimate(joint, _estimated_device(joint, options)), options)
    return keep_all_peak(joint, costs)


def _within(budget: int, frontier: Frontier, costs: Costs, options: Options) -> Candidate:
    """The fastest candidate that fits. Raises `BudgetTooSmall`, with the op that needs the least budget."""
    try:
        return frontier.within(budget)
    except BudgetTooSmall as error:
        reason = str(floor_of(frontier.candidates[-1].program(), costs))
        raise _in_the_users_terms(error, frontier.keep_all.peak, options, reason) from None


def _in_the_users_terms(
    error: BudgetTooSmall, whole: int, options: Options, reason: str = ""
) -> BudgetTooSmall:
    """The error in percent of keeping everything, where the budget is in percent."""
    share = options.budget.of_keep_all if isinstance(options.budget, Percent) else None
    return error.explained(share=share, whole=whole, reason=reason)


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
