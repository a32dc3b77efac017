"""Planning: `plan` turns a captured training step into the plan that runs it inside a memory budget.

    limit       the budget in bytes, or as a percentage of the peak of a step that recomputes nothing ("keep-all")
    variants    the step as captured, and rewritten so that its largest ops run on slices of the batch or sequence, or
                that what the backward reads is stored in fewer bytes; each with the costs of its ops and the Pareto
                frontier of ways to run it (time against peak memory)
    fastest     measured times are corrected, copies and communication are scheduled, and the fastest way that fits is
                chosen
    means       where the user leaves it to the planner: with or without offloading, and slices
    compiled    that way with groups of its ops compiled by Inductor, if the user asks for it and it is faster

Capturing a step and running a plan are in `fxremat.runtime`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fxremat import kernels
from fxremat.agreement import Agreement
from fxremat.errors import BudgetTooSmall, FxrematError, PlanMismatch
from fxremat.graphs.accounting import (
    copied_gradients,
    device_of,
    held_beside_copies,
    outer_gradients,
    outside_bytes,
    scale_of_loss,
    set_aside,
)
from fxremat.host.default import default_tier
from fxremat.ops.parameters import kind_of_optimizer
from fxremat.options import Options
from fxremat.passes.lower import Handles
from fxremat.planning.compiled import compiles_whole_graphs, with_compiled_kernels
from fxremat.planning.in_slices import Variants, fastest, variants_of, what_slices_buy
from fxremat.planning.limits import Limit, limit_of
from fxremat.planning.means import (
    of_least,
    plan_after_others,
    plan_by_means,
    with_kernels_among_means,
    with_means,
)
from fxremat.planning.step import Step
from fxremat.plans import Plan
from fxremat.profiles import enough
from fxremat.progress import bars, planning
from fxremat.search.floor import LOSS_RUNS
from fxremat.transfers.network import communicates
from fxremat.units import Least, Percent, format_bytes

log = logging.getLogger(__name__)
HOPE = 3  # whole graphs are compiled if the least budget op by op is at most this many times the user's


def plan(step: Step, options: Options, *, advise: bool = True) -> Plan:
    """Plan a captured training step within the user's budget, and log the start and the result.

    Args:
        advise: an error tells what slices would buy, which may take longer than the search for a plan.

    Raises:
        BudgetTooSmall: nothing fits; the error states the least budget that works, in percent too if the user gave
            percent.
    """
    if options.compiles and communicates(step.graph):
        if options.backend is not None:
            raise FxrematError(_communicating(step))
        options = replace(options, backend="eager")
    if options.plan is not None and options.loss_seen is None and (saved := _saved(step, options)) is not None:
        return saved
    if options.plan is not None and options.chooses:  # the step was captured to run a saved plan
        options = replace(options, plan=None, strict=None, as_captured=True)
    if isinstance(options.budget, Least):
        return _least(step, options)
    kernels.ready()  # waits for the numba compilers in other processes, which would disturb the measurements below
    limit = limit_of(step, options)
    shown = options.search.progress and step.ranks.rank == step.ranks.ranks[0]
    with bars(shown=shown), planning(what(step, limit)) as planned:
        op_by_op = partial(_op_by_op, limit=limit, advise=advise)
        try:
            if options.chooses:
                made, used = plan_by_means(step, options, op_by_op)
            elif options.tried:
                made, used = plan_after_others(step, options, op_by_op), options
            else:
                made, used = _whole_at_least(step, options, op_by_op), options
        except BudgetTooSmall as error:
            note = "; ".join(filter(None, [error.note, _of_unmeasured_loss(step, options, error)]))
            raise error.explained(note=note) from None
        if used.compiles and not made.compiled:
            made = with_compiled_kernels(made, step, used)
            made = with_kernels_among_means(made) if options.chooses else made
        _check_equal(made, step.ranks)
        planned(made.headline)
    return made


def _op_by_op(step: Step, options: Options, limit: Limit, *, advise: bool = True) -> Plan:
    """Plan within a limit, with each op in PyTorch's kernel. Raises `BudgetTooSmall` if nothing fits."""
    variants = variants_of(step, options, limit)
    try:
        return fastest(variants, options)
    except BudgetTooSmall as error:
        raise limit.explained(_with_advice(error, variants, options) if advise else error) from None


def _of_unmeasured_loss(step: Step, options: Options, error: BudgetTooSmall) -> str:
    """Tell how much of the least budget is set aside for a loss outside the model, where these sizes are not measured.

    "" if the budget would be too small without that as well.
    """
    device, seen = device_of(step.graph), options.loss_seen
    if not outer_gradients(step.graph):
        scale = scale_of_loss(step.graph)
        counted = max(seen.beside_at(scale)) if seen else 0
        if not seen or not counted or error.minimum - counted > error.budget:
            return ""
        how = "as measured" if scale in dict(seen.beside[0]) else "going by calls of other sizes"
        return (
            f"the least counts {format_bytes(counted)} for what runs between the model's forward and its backward, "
            f"{how}: fewer would do if that kept less"
        )
    if seen is not None:
        expected, most = seen.peak_at(outside_bytes(step.graph)) or 0, max((peak for _, peak in seen.peaks), default=0)
        if expected <= most or error.minimum - (expected - most) > error.budget:
            return ""
        way = f'if it does not grow with them, fxremat.compile(..., loss="{enough(most)}") says so'
        took = f"which took {format_bytes(most)} at other sizes"
        return f"the least counts {format_bytes(expected)} for the loss outside the model, {took}: {way}"
    for_loss = max(set_aside(step.graph, device), options.loss_outside.size or 0)
    copies = max(copied_gradients(step.graph, device).values(), default=0) + held_beside_copies(step.graph, device)
    if error.minimum - for_loss - copies > error.budget:
        return ""
    fewer = for_loss // 4  # of a cross entropy
    share = options.budget.of_keep_all / 100 if isinstance(options.budget, Percent) else 0.0
    may_fit = error.reason.startswith(LOSS_RUNS) and error.minimum - fewer <= error.budget - share * fewer
    way = ""
    if options.loss_outside.size is None and may_fit:
        way = f': fxremat.compile(..., loss="{enough(for_loss - fewer)}") counts what a cross entropy takes'
    return (
        f"the least counts {format_bytes(for_loss)} for the loss outside the model and {format_bytes(copies)} for "
        f"copies of its gradients, until a step has measured them{way}"
    )


def _whole_at_least(step: Step, options: Options, op_by_op: Callable[[Step, Options], Plan]) -> Plan:
    """Plan op by op; where nothing fits, with forward and backward compiled whole, which may take less memory.

    Raises:
        BudgetTooSmall: nothing fits either way.
    """
    try:
        return op_by_op(step, options)
    except BudgetTooSmall as error:
        hopeless = error.minimum > HOPE * error.budget or options.counts_reserved
        if hopeless or not compiles_whole_graphs(step.graph, options):
            raise
        within_least = replace(options, mem=error.minimum)
        least = _op_by_op(step, within_least, limit_of(step, within_least))
        made = with_compiled_kernels(replace(least, budget=error.budget), step, options)
        if made.compiled is None:
            raise
        return made


def _communicating(step: Step) -> str:
    ops = step.graph.ops
    some = f"{sum(op.communicates for op in ops)} of the {len(ops)} ops"
    return (
        f'backend="inductor" compiles steps of one device, and {some} of this one communicate with other ranks: '
        "leave backend out, or, where a rank can hold all parameters, put DistributedDataParallel around "
        "fxremat.compile(model, mem=...), which sends gradients after the backward"
    )


def _least(step: Step, options: Options) -> Plan:
    """Plan within the least budget that works, which the error for a budget of one byte states."""
    try:
        return plan(step, replace(options, mem=1), advise=False)
    except BudgetTooSmall as error:
        least, tried = error.minimum, error.means
    options = replace(options, mem=least)
    if not tried:
        return plan(step, options)
    alone, others = of_least(step, options, tried)
    return with_means(plan(step, alone), others)


def _saved(step: Step, options: Options) -> Plan | None:
    """Return the saved plan that the user passed as `plan=`, bound to this step; None if it is for another step.

    Raises:
        PlanMismatch: the plan is for another step, and the options do not allow a new plan instead.
    """
    made, reason = None, ""
    limit = None if options.strict else limit_of(step, options, replayed=False)  # by all ranks together
    with planning(what(step, Limit(words=str(options.mem)))) as planned:
        try:
            made = _with_weights(options.saved.on(step.graph), step)
            _check_room_for_loss(made, options)
            if limit is not None:
                _check_within(made, limit, options)
        except PlanMismatch as error:
            reason = str(error)
        reason = next(filter(None, step.ranks.gathered(reason, "reading plans")), "")
        planned(reason or (made.headline if made else ""))
    if reason or made is None:
        if options.strict:
            raise PlanMismatch(f"{reason}; with mem another is made in its place")
        log.warning("%s: another plan is made", reason)
        return None
    _check_equal(made, step.ranks)
    if step.trained:
        return replace(made, tier=step.trained.weights.tier)
    tier = (options.tier or default_tier(device_of(made.graph))) if made.chosen.transfers else None
    return replace(made, tier=tier)


def _check_room_for_loss(made: Plan, options: Options) -> None:
    """Raise `PlanMismatch` for a saved plan that has less room for the loss than the user says that it needs."""
    said, aside = options.loss_outside.size, made.costs.sizes.outside
    if said is not None and said > aside:
        raise PlanMismatch(
            f"{made.saved_as or 'the plan'} sets {format_bytes(aside)} aside for the loss outside the model, and "
            f"loss= says {format_bytes(said)}"
        )


def _check_within(made: Plan, limit: Limit, options: Options) -> None:
    """Raise `PlanMismatch` for a saved plan that takes more than the budget given beside it."""
    least = isinstance(options.budget, Least)
    allowed = made.known_minimum if least else limit.of(lambda: made.keep_all_peak).bytes
    if made.predicted_peak > allowed:
        taken, given = format_bytes(made.predicted_peak), format_bytes(allowed)
        raise PlanMismatch(f"{made.saved_as or 'the plan'} takes {taken}, and mem={options.mem!r} allows {given}")


def _with_weights(made: Plan, step: Step) -> Plan:
    """Return a saved plan; one that also updates weights is connected to the parameters of this process.

    Raises:
        PlanMismatch: the plan is for another kind of optimizer, or an earlier plan has moved other parameters to the
            host.
    """
    if step.trained is None or made.weights is None:
        return made
    here = kind_of_optimizer(step.trained.optimizer)
    if here != made.weights.optimizer:
        raise PlanMismatch(f"the plan updates weights by {made.weights.optimizer}, and here is {here}")
    if step.trained.weights.later != made.weights.later:
        when = "step" if made.weights.later else "backward"
        raise PlanMismatch(f'the plan is for Offload(weights=True, updates="{when}"), and here is another value')
    if step.trained.settled not in (None, made.weights.hosted):
        raise PlanMismatch("other parameters live on the host since an earlier plan")
    handles = Handles(name=step.trained.weights.name, numbers=step.trained.numbers)
    return replace(made, weights=replace(made.weights, handles=handles))


def _with_advice(error: BudgetTooSmall, variants: Variants, options: Options) -> BudgetTooSmall:
    """Add to the error the least budget that would work with `slices=True`; return it unchanged if that is not known.
    """
    several = len(variants.captured.step.ranks.ranks) > 1
    if options.chooses or options.slicing or options.counts_reserved or error.note or several:
        return error
    try:
        return error.explained(note=what_slices_buy(variants.captured, error, options))
    except Exception as trouble:
        log.info("what slices would buy is not known: %s: %s", type(trouble).__name__, trouble)
        return error


def _check_equal(made: Plan, ranks: Agreement) -> None:
    """Raise `FxrematError` if ranks have plans that run collectives in different orders, which would deadlock."""
    if len(ranks.ranks) == 1:
        return
    graph = made.graph
    order = [s.op for s in made.chosen.program().steps if s.op is not None and graph.ops[s.op].communicates]
    if any(other != order for other in ranks.gathered(order, "comparing plans")):
        raise FxrematError(
            "the ranks have made different plans: give every rank the same options, and the same optimizer"
        )


def what(step: Step, limit: Limit) -> str:
    """Describe the planned step and its budget in words, for the log."""
    called_with = f" for inputs of {step.called_with}" if step.called_with else ""
    return f"{len(step.graph.ops)} ops within {limit.words}{called_with}"
