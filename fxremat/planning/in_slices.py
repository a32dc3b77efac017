"""The plan of a step regions of which may run in slices: ways to slice it are searched until one fits well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypedDict

from fxremat.capture.accounting import device_of
from fxremat.cost.devices import Device
from fxremat.cost.estimate import estimate
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.options import MANY_SLICES, Options
from fxremat.planning.captured import CapturedStep
from fxremat.planning.finished import finished
from fxremat.planning.searched import Searched, in_the_users_terms, rate_of, search, unsearched, with_loss
from fxremat.plans import Plan
from fxremat.search.candidate import Frontier, unbeaten
from fxremat.search.survey import survey
from fxremat.slices.rewrite import SlicedJoint, bytes_beside_loss, largest_need
from fxremat.slices.variants import least_of_all, variants
from fxremat.step.step_graph import Kind
from fxremat.units import format_bytes

NOTED = 1.02  # times the least budget by estimate, which a note tells
ENOUGH = 1.05  # times what keeping everything takes: more slices could gain no more than that
WORTH_A_NOTE = 0.9  # of the least budget of whole ops


def best_in_slices(step: CapturedStep, options: Options) -> Plan:
    """The fastest plan that fits, of the step as it is and of it with regions in slices.

    Raises `BudgetTooSmall` with the least budget of them all.
    """
    quick = replace(options, effort=0.0)
    whole = unsearched(step, options)
    mem, fits = _agreed(step, whole, options)
    if fits:
        whole = search(step, quick)
        mem, fits = _agreed(step, whole, options)
    if fits:
        return _with_least(finished(whole, replace(quick, mem=mem)), step, options)
    known: list[Searched] = []
    rate: float | None = None  # of what is estimated; the first is measured, as most of its ops are those of all others
    more = False  # ways to slice are left that were not tried
    for found in variants(step.joint, mem, **_settings(options)):
        _check_alike(step, found)
        known.append(search(replace(step, joint=found.joint), replace(quick, mem=mem), found, rate))
        if rate is None:
            rate = rate_of(known[0], options)
            whole = unsearched(step, options, rate=rate)
            mem, _ = _agreed(step, whole, options)
        more = known[-1].seconds_within(mem) <= ENOUGH * known[-1].frontier.keep_all.time
        if more:
            break
    if not more and (not known or largest_need(step.joint) <= mem):
        known.append(search(step, replace(quick, mem=mem)))
    if not any(searched.sliced for searched in known):
        blocked = least_of_all(step.joint, **_settings(options)).blocked
    else:
        blocked = tuple(dict.fromkeys(reason for searched in known for reason in searched.blocked))
    plan = _fastest(known, whole, mem, options, blocked)
    return _with_least(plan, step, options) if more else plan


class _Settings(TypedDict):
    """What the user says of slices."""

    most: int
    reduce: str | None
    only_loss: bool


def _settings(options: Options) -> _Settings:
    return _Settings(most=options.most_slices, reduce=options.reduce, only_loss=options.outputs == "loss")


def _agreed(step: CapturedStep, whole: Searched, options: Options) -> tuple[int, bool]:
    """The budget in bytes, and whether the whole step fits without recomputation, as the first rank sees it."""

    def seen() -> tuple[int, bool]:
        mem = whole.bytes_for(options)
        return mem, options.outputs == "all" and whole.fits_without_more(mem)

    return step.ranks.from_first("planning slices", seen)


def _check_alike(step: CapturedStep, found: SlicedJoint) -> None:
    """Raise `FxrematError` where ranks would run other regions in slices than each other."""
    if len(step.ranks.ranks) == 1:
        return
    mine = [op.target for op in found.joint.ops if op.kind is Kind.SLICED]
    if any(other != mine for other in step.ranks.gathered(mine, "comparing slices")):
        raise FxrematError("the ranks would run different regions in slices: give every rank inputs of equal sizes")


def _with_least(plan: Plan, step: CapturedStep, options: Options) -> Plan:
    """The plan, which finds the least budget of ways to slice that were not tried for it when it is asked.

    Several ranks would have to ask together, so that theirs knows what was tried.
    """
    if len(step.ranks.ranks) > 1:
        return plan
    return replace(plan, more_slices=partial(_least_in_slices, replace(step, inputs=()), options))


def _least_in_slices(step: CapturedStep, options: Options) -> int:
    """The least budget with as many slices as there may be."""
    found = least_of_all(step.joint, **_settings(options))
    least = replace(options, mem=1, effort=0.0)
    try:
        return finished(search(replace(step, joint=found.joint), least, found), least).minimum
    except BudgetTooSmall as error:
        return error.minimum


def _fastest(
    known: Sequence[Searched], whole: Searched, mem: int, options: Options, blocked: Sequence[str]
) -> Plan:
    """The plan of the fastest searched step within `mem` bytes, which tells of all of them.

    Args:
        whole: the step as it is, which percentages refer to.
        blocked: why ops that need much are whole.
    """
    errors: list[BudgetTooSmall] = []
    for searched in sorted(known, key=lambda searched: searched.seconds_within(mem)):
        if not (searched.measured and searched.fits_without_more(mem)):
            searched = search(searched.step, replace(options, mem=mem), searched.sliced)
        try:
            plan = finished(searched, replace(options, mem=mem))
        except BudgetTooSmall as error:
            errors.append(error)
            continue
        return _telling_of_all(plan, searched, known, whole)
    least = min(errors, key=lambda error: error.minimum)
    notes = [f"not in slices: {'; '.join(blocked)}"] if blocked else []
    if options.outputs == "all" and (beside := bytes_beside_loss(whole.step.joint)):
        notes.append(
            f'forward returns {format_bytes(beside)} beside its loss, which are there to the end: outputs="loss" '
            "leaves them out"
        )
    raise in_the_users_terms(least, whole.everything(), options).explained(note="; ".join(notes))


def _telling_of_all(plan: Plan, searched: Searched, known: Sequence[Searched], whole: Searched) -> Plan:
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


def what_slices_buy(searched: Searched, error: BudgetTooSmall, options: Options) -> str:
    """A note on the least budget with regions in slices, by estimate; "" where they do not help."""
    joint = searched.step.joint
    found = least_of_all(joint, most=MANY_SLICES, reduce=None)
    if not found.regions:
        return ""
    device = Device.named(device_of(joint).type) if options.device is None else Device.named(options.device)
    costs = with_loss(found.joint, estimate(found.joint, device), options)
    least = int(survey(found.joint, costs, effort=0.0).minimum * NOTED)
    if least > WORTH_A_NOTE * error.minimum:
        return ""
    return (
        f"with slices=True, {least} bytes or fewer would do: gradients that are sums over the slices are then equal "
        "up to rounding"
    )
