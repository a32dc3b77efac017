"""Choosing the means by which a step fits its budget, where the user leaves that to the planner (`Options.exact`).

    recomputing               always tried
    offloading                activations may wait on the host
    slices                    groups of ops may run in slices of the batch or sequence
    offloading and slices

The first that fits is chosen, unless a later one is faster by at least `FASTER`. Once the chosen one is so near to the
time without recomputation that no other can be, the rest is not tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.options import Options
from fxremat.planned_step import Means
from fxremat.planning.step import Step
from fxremat.plans import Plan
from fxremat.transfers.network import communicates
from fxremat.units import format_bytes, shortened

log = logging.getLogger(__name__)

FASTER = 1.05  # a further means is used if it makes the step at least so many times as fast


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Some means together, as the options that differ from the user's."""

    name: str
    options: dict[str, Any]
    forbidden: str = ""  # the option that forbids it; "": it may be used


def plan_by_means(
    step: Step, options: Options, plan: Callable[[Step, Options], Plan]
) -> tuple[Plan, Options]:
    """Plan with the means that the user allows, and choose; `plan` is called with the options of each.

    Returns:
        the plan, which has what each means gives, and the options that it was made with.

    Raises:
        BudgetTooSmall: nothing fits; `.minimum` is the least budget over all means, and `.means` has each one's.
    """
    tried: list[Means] = []
    best: tuple[int, Plan, Options] | None = None
    errors: list[BudgetTooSmall] = []
    for way in _ways(step, options):
        if reason := way.forbidden or (_enough(step, best[1]) if best else ""):
            tried.append(Means(name=way.name, why_not=reason))
            continue
        try:
            allowed = replace(options, **way.options)
            made = plan(step, allowed)
        except BudgetTooSmall as error:
            errors.append(error.explained())  # without a traceback, whose frames would refer to it
            tried.append(Means(name=way.name, least=error.minimum))
            continue
        except FxrematError as refused:
            if not way.options:
                raise
            tried.append(Means(name=way.name, why_not=shortened(str(refused))))
            continue
        slowdown = made.predicted_time / max(1e-12, made.keep_all_time)
        if best is None or _is_faster(step, slowdown, best[1]):
            best = len(tried), made, allowed
        tried.append(Means(name=way.name, slowdown=slowdown, peak=made.predicted_peak))
    if best is None:
        least = min(errors, key=lambda error: error.minimum)
        raise least.explained(note=_told(least.note, tried, options)).of_means(tried)
    place, made, allowed = best
    tried[place] = replace(tried[place], chosen=True)
    others = any(not way.forbidden for number, way in enumerate(_ways(step, options)) if number != place)
    return replace(made, means=tuple(tried), more_ways=made.more_ways or others), allowed


def with_kernels_among_means(plan: Plan) -> Plan:
    """Return a plan with compiled kernels, or with the reason why it has none, in its list of means."""
    if plan.compiled is None:
        kernels = Means(name="compiled kernels", why_not=plan.not_compiled)
    else:
        slowdown = plan.predicted_time / max(1e-12, plan.keep_all_time)
        kernels = Means(name="compiled kernels", slowdown=slowdown, peak=plan.predicted_peak, chosen=True)
    return replace(plan, means=(*plan.means, kernels))


def of_least(step: Step, options: Options, tried: Sequence[Means]) -> tuple[Options, tuple[Means, ...]]:
    """Return the options of the means that needs least, after nothing fitted, and the means with that one as the last.

    At its least budget no other that changes less fits.
    """
    least = min((means for means in tried if means.least is not None), key=lambda means: means.least or 0)
    way = next(way for way in _ways(step, options) if way.name == least.name)
    backend = options.inductor or "eager"  # what is captured stays
    alone = replace(options, exact=None, backend=backend, **way.options)
    return alone, (*(means for means in tried if means is not least), least)


def with_means(plan: Plan, tried: Sequence[Means]) -> Plan:
    """Return a plan with the means that were tried before; the last of them is the plan's."""
    slowdown = plan.predicted_time / max(1e-12, plan.keep_all_time)
    chosen = Means(name=tried[-1].name, slowdown=slowdown, peak=plan.predicted_peak, chosen=True)
    made = replace(plan, means=(*tried[:-1], chosen))
    return with_kernels_among_means(made) if made.compiled or made.not_compiled else made


def plan_after_others(step: Step, options: Options, plan: Callable[[Step, Options], Plan]) -> Plan:
    """Plan with weights on the host, since none of the means that were tried fits; the plan names all of them.

    Raises:
        BudgetTooSmall: this does not fit either; the error tells what each means would need.
    """
    name = "weights on the host"
    try:
        made = plan(step, options)
    except BudgetTooSmall as error:
        tried = [*options.tried, Means(name=name, least=error.minimum)]
        raise error.explained(note=_told(error.note, tried, options)).of_means(tried) from None
    slowdown = made.predicted_time / max(1e-12, made.keep_all_time)
    chosen = Means(name=name, slowdown=slowdown, peak=made.predicted_peak, chosen=True)
    return replace(made, means=(*options.tried, chosen))


def with_means_of(other: Plan, plan: Plan) -> Plan:
    """Return a plan with the means of a plan for other sizes; sizes change only where a single means is allowed."""
    slowdown = plan.predicted_time / max(1e-12, plan.keep_all_time)
    return replace(
        plan,
        means=tuple(
            replace(means, slowdown=slowdown, peak=plan.predicted_peak) if means.chosen else means
            for means in other.means
        ),
    )


def seen_before(tried: tuple[Means, ...]) -> tuple[Means, ...]:
    """Return the means that did not fit at a call as later plans name them, which may be for inputs of other sizes."""
    return tuple(
        means
        if means.least is None
        else Means(name=means.name, why_not=f"{format_bytes(means.least)} at least for the inputs of an earlier call")
        for means in tried
    )


def _ways(step: Step, options: Options) -> Iterator[_Way]:
    """Yield what may be used together, that which changes least first."""
    forced = [name for name, given in (("offloading", options.host), ("slices", options.slicing)) if given]
    yield _Way(name=" and ".join(forced) or "recomputing", options={})
    exact = "gradients round otherwise, which exact=True forbids" if options.exact else ""
    offload = "" if options.may_offload else f"offload={options.offload!r} forbids it"
    slices = exact or ("" if options.may_slice else f"slices={options.slices!r} forbids it")
    if options.offload is None or not options.host:
        yield _Way(name=" and ".join(["offloading", *forced]), options={"offload": True}, forbidden=offload)
    if options.slices is None or not options.slicing:
        yield _Way(name=" and ".join([*forced, "slices"]), options={"slices": True}, forbidden=slices)
    if options.may_offload and options.may_slice:
        yield _Way(name="offloading and slices", options={"offload": True, "slices": True})
    if not options.compiles:
        yield _Way(name="compiled kernels", options={}, forbidden=exact or _why_not_compiled(step, options))


def _why_not_compiled(step: Step, options: Options) -> str:
    if communicates(step.graph):
        return "ops communicate with other ranks"
    if options.backend == "eager":
        return 'backend="eager" forbids it'
    if options.as_captured:
        return "the step was captured for PyTorch's kernels"
    if not options.measures:
        return "they are measured, and costs are estimated"
    other = 'count="reserved"' if options.counts_reserved else f"solver={options.solver!r}"
    return f"they do not go with {'weights on the host' if options.hosts_weights else other}"


def _enough(step: Step, best: Plan) -> str:
    """Return why nothing else can be faster by `FASTER`; "" if something might. The first rank decides for all."""

    def gain() -> float:
        return best.predicted_time / max(1e-12, best.keep_all_time)

    slowdown = step.ranks.from_first("choosing means", gain)
    return f"not tried, as it could save {max(0.0, 1 - 1 / slowdown):.1%}" if slowdown <= FASTER else ""


def _is_faster(step: Step, slowdown: float, best: Plan) -> bool:
    """Tell whether a step is faster by `FASTER` than the best one. The first rank decides for all."""

    def faster() -> bool:
        return slowdown * FASTER <= best.predicted_time / max(1e-12, best.keep_all_time)

    return step.ranks.from_first("choosing means", faster)


def _told(note: str, tried: list[Means], options: Options) -> str:
    """Return the note of an error, followed by what each means would need, and which option allows further ones."""
    needed = [str(means) for means in tried if not means.why_not]
    further = "exact=False allows slices, with which gradients round otherwise"
    return "; ".join(filter(None, [note, *needed, further if options.exact and options.slices is None else ""]))
