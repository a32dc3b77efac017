"""Describes a plan in one sentence, for the top of its page.

    GPT trains in 33.5 MiB instead of 74.8, 16 % slower
    GPT trains in 64.0 MiB instead of 160.0, at the same speed, with 96.0 MiB offloaded (estimated for A100)
    GPT trains in 160.0 MiB and keeps everything
"""

from __future__ import annotations

import re

from fxremat.planned_step import PlannedStep
from fxremat.search.candidate import Candidate
from fxremat.units import format_bytes


def headline(plan: PlannedStep, candidate: Candidate) -> str:
    """Describe memory and time of a candidate plan, relative to the step without recomputation."""
    return unbroken(f"{plan.graph.model} trains in {_figures(plan, candidate)}{estimated(plan)}")


def unbroken(sentence: str) -> str:
    """Put non-breaking spaces between numbers and units, so that lines do not break there."""
    return re.sub(r"(?<=\d) (?=%|[KMGT]iB)|(?<=%) ", "\u00a0", sentence)


def _figures(plan: PlannedStep, candidate: Candidate) -> str:
    memory, speed = instead(candidate.peak, plan.keep_all_peak), slower(candidate.time, plan.keep_all_time)
    # the candidate's time includes updates of weights, but the time it would be compared with does not
    if plan.weights:
        return f"{memory}, weights and optimizer state included"
    if memory == format_bytes(candidate.peak) and speed == SAME:
        return f"{memory} and keeps everything"
    offloaded = candidate.transfers.bytes if candidate.transfers else 0
    return f"{memory}, {speed}" + (f", with {format_bytes(offloaded)} offloaded" if offloaded else "")


def estimated(plan: PlannedStep) -> str:
    """Return " (estimated for DEVICE)" for a plan whose times were estimated, else ""."""
    return f" (estimated for {plan.device})" if plan.timed == "estimated" else ""


def measured(plan: PlannedStep) -> str:
    """Return ", measured on DEVICE" for a plan whose times were measured, else ""."""
    return "" if plan.timed == "estimated" else f", {plan.timed} on {plan.device}"


def instead(size: int, whole: int) -> str:
    """Return "size instead of whole" as text; the text is short if units or sizes are equal.

    >>> instead(75_000_000, 168_000_000), instead(75_000_000, 3_000_000_000), instead(75_000_000, 75_000_001)
    ('71.5 MiB instead of 160.2', '71.5 MiB instead of 2.8 GiB', '71.5 MiB')
    """
    less, more = format_bytes(size), format_bytes(whole)
    unit = less[less.index(" ") :]
    return less if less == more else f"{less} instead of {more.removesuffix(unit)}"


SAME = "at the same speed"


def slower(time: float, fastest: float) -> str:
    """Describe how much slower a time is than another one.

    >>> [slower(time, 1.0) for time in (1.004, 1.16, 2.34, 0.9)]
    ['at the same speed', '16 % slower', '2.3 times as slow', 'in 10 % less time']
    """
    ratio = time / fastest if fastest else 1.0
    if ratio >= 2:
        return f"{ratio:.1f} times as slow"
    match round(100 * (ratio - 1)):
        case 0:
            return SAME
        case percent if percent > 0:
            return f"{percent} % slower"
        case percent:
            return f"in {-percent} % less time"
