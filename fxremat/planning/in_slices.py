"""Planning a step some of whose regions run in slices, to need less memory.

A region is a group of ops, such as the vocabulary head with its loss, that runs several times, each time on one
slice of the batch or sequence. There are several ways to choose regions and the number of slices. They are
tried until one recomputes hardly anything; none is tried if the step as captured fits without recomputation.
The ops of the first way are measured; for the others, ops that were not measured are estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import TypedDict

import torch

from fxremat.cost.calibrate import known_calibration
from fxremat.cost.estimate import estimate
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.graphs.captured import Captured
from fxremat.options import Options
from fxremat.planning.choosing import chosen
from fxremat.planning.compressed import in_fewer_bytes, may_compress
from fxremat.planning.facts import estimated_device, rate_of, with_loss
from fxremat.planning.limits import Limit
from fxremat.planning.step import Step
from fxremat.planning.surveys import Survey, estimated_least, kept_alone, surveyed
from fxremat.plans import Plan
from fxremat.search.candidate import Frontier, unbeaten
from fxremat.settings import MANY_SLICES, Slices
from fxremat.slices.rewrite import SlicedJoint, bytes_beside_loss, largest_need
from fxremat.slices.variants import least_of_all, variants
from fxremat.step.step_graph import Kind
from fxremat.units import format_bytes

NOTED = 1.02  # an error's note states the estimated least budget with slices times this margin
# no further ways to slice are tried after one that takes at most this times the seconds without recomputation
ENOUGH = 1.05
# a search may lower the least budget of the step as captured by this factor, so it is worth its time up to there
SEARCHED_BELOW = 1.25
WAYS = 2  # ways to slice a graph of several, beside the one with most slices
WORTH_A_NOTE = 0.9  # an error's note on slices is added only if slices lower the least budget to at most this fraction


@dataclass(frozen=True, kw_only=True, eq=False)
class Variants:
    """The step as captured and the ways to run it in slices, each with its costs and Pareto frontier."""

    surveys: tuple[Survey, ...]  # at least one, all for the same budget in bytes
    captured: Survey  # the step as captured; a budget in percent refers to its peak without recomputation
    blocked: tuple[str, ...] = ()  # reasons why ops that need much memory cannot run in slices
    more: bool = False  # True if there are further ways to slice or compress that were not tried


def variants_of(step: Step, options: Options, limit: Limit) -> Variants:
    """Find costs and frontiers of the step as captured, and of ways to slice it if slices are allowed and needed."""
    if (slicing := options.slicing) is None:
        captured = surveyed(step, options, limit)
        others = tuple(in_fewer_bytes(captured, options))
        more = not others and may_compress(captured, options)
        return Variants(surveys=(captured, *others), captured=captured, more=more)
    quick = options.quick()
    captured = kept_alone(step, options, limit)
    within, fits = _agreed(step, captured, options)
    if fits:
        captured = surveyed(step, quick, within)
        within, fits = _agreed(step, captured, options)
    if fits:
        captured = replace(captured, limit=within)
        return Variants(surveys=(captured,), captured=captured, more=True)
    found: list[Survey] = []
    # measured / estimated seconds in the first way; the later ways share most of its ops and are estimated
    rate: float | None = None
    more = False
    for sliced in variants(step.graph, within.bytes, **_settings(slicing)):
        _check_alike(step, sliced)
        found.append(surveyed(replace(step, graph=sliced.joint), quick, within, sliced, rate))
        if rate is None:
            rate = rate_of(sliced.joint, found[0].costs, options)
            captured = kept_alone(step, options, limit, rate)
            within, _ = _agreed(step, captured, options)
        more = found[-1].seconds_within(within.bytes) <= ENOUGH * found[-1].frontier.keep_all.time
        if more:
            break
    fastest_found = min((one.seconds_within(within.bytes) for one in found), default=inf)
    slow = not more or fastest_found > ENOUGH * captured.frontier.keep_all.time
    if slow and (not found or largest_need(step.graph) <= within.bytes):
        found.append(surveyed(step, quick, within))
        if within.bytes < found[-1].frontier.minimum <= within.bytes * SEARCHED_BELOW:
            found[-1] = surveyed(step, options, within)
    if any(one.sliced for one in found):
        blocked = tuple(dict.fromkeys(reason for one in found for reason in one.blocked))
    else:
        blocked = least_of_all(step.graph, **_settings(slicing)).blocked
    return Variants(
        surveys=tuple(replace(one, limit=within) for one in found), captured=captured, blocked=blocked, more=more
    )


def ways_to_slice(graph: Captured, peak: int, options: Options) -> Iterator[SlicedJoint]:
    """Yield a graph with its largest ops in slices, in a few ways; none if the options do not allow it, or none can be.

    Args:
        peak: the bytes that it needs if nothing is in slices or recomputed.
    """
    if (slicing := options.slicing) is None:
        return
    ways = islice(variants(graph, peak // 2, **_settings(slicing)), WAYS)
    seen: set[tuple[str, ...]] = set()
    for found in (*ways, least_of_all(graph, **_settings(slicing))):
        known = tuple(op.target for op in found.joint.ops)
        if found.regions and known not in seen:
            seen.add(known)
            yield found


class _Settings(TypedDict):
    """The user's settings for slices, as keyword arguments of `slices.variants`."""

    most: int
    reduce: str | None
    only_loss: bool


def _settings(slicing: Slices) -> _Settings:
    reduce = "fp32" if slicing.reduce_dtype is torch.float32 else "same" if slicing.reduce_dtype else None
    return _Settings(most=slicing.most, reduce=reduce, only_loss=slicing.drop_outputs)


def _drops(options: Options) -> bool:
    return options.slicing is not None and options.slicing.drop_outputs


def _agreed(step: Step, captured: Survey, options: Options) -> tuple[Limit, bool]:
    """Return the budget, and whether the step as captured fits without recomputation; the first rank decides for all.
    """

    def seen() -> tuple[int, bool]:
        mem = captured.limit.bytes
        return mem, not _drops(options) and captured.fits_without_more(mem)

    mem, fits = step.ranks.from_first("planning slices", seen)
    return replace(captured.limit, known=mem), fits


def _check_alike(step: Step, found: SlicedJoint) -> None:
    """Raise `FxrematError` if different ranks would run different regions in slices."""
    if len(step.ranks.ranks) == 1:
        return
    mine = [op.target for op in found.joint.ops if op.kind is Kind.SLICED]
    if any(other != mine for other in step.ranks.gathered(mine, "comparing slices")):
        raise FxrematError("the ranks would run different regions in slices: give every rank inputs of equal sizes")


def fastest(found: Variants, options: Options) -> Plan:
    """Plan with the fastest program that fits, among those of the step as captured and of all ways to slice it.

    Raises:
        BudgetTooSmall: none fits; `.minimum` is the least budget over all of them.
    """
    if len(found.surveys) == 1 and options.slicing is None:
        return replace(chosen(found.captured, options), more_ways=found.more)
    errors: list[BudgetTooSmall] = []
    for one in sorted(found.surveys, key=lambda one: one.seconds_within(one.limit.bytes)):
        if options.slicing and not (one.measured and one.fits_without_more(one.limit.bytes)):
            one = surveyed(one.step, options, one.limit, one.sliced)
        try:
            plan = chosen(one, options)
        except BudgetTooSmall as error:
            errors.append(error.explained())  # without a traceback, whose frames would refer to it
            continue
        plan = plan if one is found.captured else _of_all(plan, one, found, options)
        return replace(plan, more_ways=found.more and len(one.step.ranks.ranks) == 1)
    least = min(errors, key=lambda error: error.minimum)
    notes = [f"not in slices: {'; '.join(found.blocked)}"] if found.blocked else []
    if not _drops(options) and (beside := bytes_beside_loss(found.captured.step.graph)):
        notes.append(
            f'forward returns {format_bytes(beside)} beside its loss, which are there to the end: '
            "slices=Slices(drop_outputs=True) leaves them out"
        )
    raise found.captured.limit.explained(least).explained(note="; ".join(notes))


def _of_all(plan: Plan, one: Survey, found: Variants, options: Options) -> Plan:
    """Return the plan with the frontiers of all variants (the step as captured, and each way to slice it) merged.

    Args:
        plan: the plan made from the fastest variant.
        one: the variant that it was made from.
        found: all variants. Memory without recomputation is reported for the step as captured.
    """
    # calibration (timing the real step) scaled the times of the chosen variant by this factor; do so for all variants,
    # except the step as captured where it was timed itself
    factor = plan.keep_all_time / max(1e-12, one.frontier.keep_all.time)
    own = known_calibration(found.captured.step.graph) if options.measures else None
    scaled = [other.frontier.scaled(factor) for other in found.surveys]
    every = (*plan.alternatives.candidates, *(c for frontier in scaled for c in frontier.candidates))
    weights = plan.weights
    return replace(
        plan,
        alternatives=Frontier(
            keep_all=found.captured.frontier.scaled(own or factor).keep_all, candidates=tuple(unbeaten(every))
        ),
        slices=one.sliced.regions if one.sliced else (),
        slicing=one.sliced.slicing if one.sliced else None,
        compression=one.compression,
        not_sliced=found.surveys[-1].blocked,
        weights=weights and replace(weights, keep_all_peak=found.captured.keep_all),
    )


def what_slices_buy(one: Survey, error: BudgetTooSmall, options: Options) -> str:
    """Return advice for an error message: the estimated least budget with slices; "" if slices would not help."""
    graph = one.step.graph
    found = least_of_all(graph, most=MANY_SLICES, reduce=None)
    if not found.regions:
        return ""
    costs = with_loss(found.joint, estimate(found.joint, estimated_device(graph, options)), options)
    least = int(estimated_least(found.joint, costs, options) * NOTED)
    if least > WORTH_A_NOTE * error.minimum:
        return ""
    return (
        f"with slices=True, {least} bytes or fewer would do: gradients that are sums over the slices are then equal "
        "up to rounding"
    )


