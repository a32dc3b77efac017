"""Profiles the memory of a training step, and finds the changes that would save most.

    profile = fxremat.profile(model, example_inputs)
    print(profile)                  peak, what it consists of, a tree by module, three changes that would save most
    profile.to_html()               the page of a plan, with those changes
    profile.to_json()               its figures, to be compared with those of a later version of the model

A profile is the keep-all plan, and other plans of the same captured step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxremat.errors import FxrematError
from fxremat.graphs.accounting import device_of, set_aside
from fxremat.host.files import FileTier
from fxremat.plans import Plan
from fxremat.search.candidate import Candidate
from fxremat.search.floor import floor_of
from fxremat.settings import Setting, Slices
from fxremat.show.headline import estimated, measured, slower, unbroken
from fxremat.show.modules import Share
from fxremat.show.notebook import framed
from fxremat.show.page import page_of
from fxremat.show.page_data import page_data
from fxremat.show.profile_figures import ProfileComparison, ProfileFigures
from fxremat.show.text import ROWS, labelled, most_in, table
from fxremat.show.tree import rows_of
from fxremat.slices.rewrite import bytes_beside_loss
from fxremat.units import format_bytes, format_seconds

BEST = 3  # maximum number of changes that are shown
WORTH = 0.01  # savings below this fraction of the peak are not shown
NOTHING = "No change that fxremat knows of would save one percent in at most twice the time."
SLOWEST = 2.0  # changes that make the step take more than this multiple of its time are not shown
BELOW = 0.9  # the budget tried with slices, as a fraction of the smallest budget without slices
HEADS = ("saved", "gradients", "forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change that lets the step run in less memory, compared with the step without any change."""

    what: str  # description of the change, such as "run the head in slices"
    how: str  # the call of fxremat.compile that makes the change
    peak: int  # peak bytes with the change
    time: float  # seconds of one forward and backward with the change
    whole: int  # peak bytes without the change
    fastest: float  # seconds of one forward and backward without the change

    @property
    def saved(self) -> int:
        """Bytes by which the change lowers the peak."""
        return self.whole - self.peak

    def __str__(self) -> str:
        slower = self.time / self.fastest if self.fastest else 1.0
        cost = f"for {100 * (slower - 1):.0f} % more time" if slower > 1.005 else "in the same time"
        share = f"{100 * self.saved / self.whole:.0f} %"
        return f"{self.what}: saves {format_bytes(self.saved)} ({share}) {cost}: {self.how}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Profile:
    """The memory profile of a training step, printable as text."""

    plan: Plan  # the plan of the step without any recomputation
    changes: tuple[Saving, ...]  # the changes that would save most, the best first (`best_of`)

    def __repr__(self) -> str:
        return f"<fxremat profile: {self.plan.headline}>"

    def _repr_html_(self) -> str:
        return framed(self.to_html(), str(self))

    @property
    def peak(self) -> int:
        """Peak bytes of one forward and backward, above what was allocated before."""
        return self.plan.predicted_peak

    @property
    def time(self) -> float:
        """Seconds of one forward and backward."""
        return self.plan.predicted_time

    @cached_property
    def figures(self) -> ProfileFigures:
        """The peak, and the bytes at the peak by module and by purpose, without the plan."""
        return ProfileFigures.of(self.plan)

    def to_json(self) -> str:
        """Return the profile's figures as JSON text, which `from_json` reads."""
        return self.figures.to_json()

    @staticmethod
    def from_json(source: str | Mapping[str, Any]) -> ProfileFigures:
        """Return the figures of the profile that `to_json` wrote; the plan is not among them.

        Raises `FxrematError` if it is not a profile.
        """
        return ProfileFigures.from_json(source)

    def compare(self, after: Profile | ProfileFigures) -> ProfileComparison:
        """Compare with a later profile: which modules have more bytes at the peak, and which have fewer.

            print(fxremat.Profile.from_json(text).compare(profile))      an earlier one, from a file
            before.compare(after).exceeds("1%")                          tells whether the peak grew by more
        """
        return self.figures.compare(after)

    def to_html(self) -> str:
        """Return an HTML page that shows the step's memory, tensor by tensor."""
        data = page_data(self.plan) | {
            "title": f"{self.plan.graph.model}: a profile by fxremat",
            "headline": self._headline,
            "about": f"A profile by fxremat of the step as it is{measured(self.plan)}",
            "facts": [list(fact) for fact in self._facts()],
            "budget": None,
            "advice": [str(change) for change in self.changes],
        }
        return page_of(data, str(self))

    @property
    def _headline(self) -> str:
        """A sentence with the peak, and the peak after the change that saves most."""
        takes = f"{self.plan.graph.model} trains in {format_bytes(self.peak)}"
        best = next(iter(self.changes), None)
        would = f"; it could in {format_bytes(best.peak)}, {slower(best.time, best.fastest)}" if best else ""
        return unbroken(takes + would + estimated(self.plan))

    @property
    def _title(self) -> str:
        return f"fxremat profile of {self.plan.graph.model} on {self.plan.device} ({self.plan.timed} times)"

    def _facts(self) -> Iterator[tuple[str, str]]:
        plan, total = self.plan, self.plan.modules.total
        yield "peak", f"{format_bytes(self.peak)}, where {floor_of(plan.program, plan.running.costs)}"
        times = f"{format_seconds(total.forward)} forward, {format_seconds(total.backward)} backward"
        yield "time", f"{format_seconds(self.time)}: {times}"
        yield "saved", f"{format_bytes(total.saved)} for the backward, or returned: {most_in(plan.modules, 'saved')}"
        yield "gradients", f"{format_bytes(total.gradients)} are returned"
        if plan.sizes:
            yield "sizes", plan.sizes
        if plan.assumed:
            yield "kernels", plan.assumed

    def __str__(self) -> str:
        rows = rows_of(self.plan.modules, ROWS, self.plan.graph.model, _where_it_goes)
        lines = [self._title, *labelled(self._facts()), "", *table(rows, HEADS, _where_it_goes), ""]
        if not self.changes:
            return "\n".join([*lines, NOTHING])
        advice = [(f"{number}.", str(change)) for number, change in enumerate(self.changes, start=1)]
        return "\n".join([*lines, "What would save most", *labelled(advice)])


def profile_of(plan: Plan) -> Profile:
    """Profile a step, given its plan without recomputation.

    The step is planned twice more: with offloading, and with slices.
    """
    found = [change for change in (_recomputing(plan), _offloading(plan), _slicing(plan)) if change]
    return Profile(plan=plan, changes=tuple(best_of(found)))


def best_of(changes: Iterable[Saving]) -> list[Saving]:
    """Return the changes to show: those that save most first, without those that save little or cost too much time."""
    worth = (change for change in changes if change.saved >= WORTH * change.whole)
    bearable = (change for change in worth if change.time <= SLOWEST * change.fastest)
    return sorted(bearable, key=lambda change: (-change.saved, change.time))[:BEST]


def _where_it_goes(share: Share) -> tuple[float, ...]:
    return share.saved, share.gradients, share.forward, share.backward


def _recomputing(plan: Plan) -> Saving | None:
    """Return the saving by recomputation, at the knee of the Pareto frontier of peak and time.

    None if the peak there is not below the plan's.
    """
    knee = knee_of(plan.alternatives.candidates)
    return _change(plan, knee, "recompute what is cheap to make again", knee.peak)


def _offloading(plan: Plan) -> Saving | None:
    """Return the saving by offloading to the host, in at most the time that recomputation takes at its knee.

    None if no such plan has a lower peak.
    """
    knee = knee_of(plan.alternatives.candidates)
    other = _another(plan, knee.peak, offload=True)
    if other is None or other.tier is None:
        return None
    within = [c for c in other.alternatives.candidates if c.time <= knee.time and c.transfers]
    if not within:
        return None
    best = min(within, key=lambda candidate: candidate.peak)
    where = "in files" if isinstance(other.tier, FileTier) and plan.timed == "measured" else "on the host"
    return _change(plan, best, f"let values wait {where}", best.peak, offload=True)


def _slicing(plan: Plan) -> Saving | None:
    """Return the saving by running groups of ops in slices, with a budget too small for the unsliced ops.

    None if slices save nothing. In language models they mostly apply to the vocabulary head with its loss.
    """
    beside = bool(bytes_beside_loss(plan.captured))
    slices = Slices(drop_outputs=True) if beside else True
    other = _another(plan, int(BELOW * plan.known_minimum), slices=slices)
    if other is None or not other.slices:
        return None
    regions = " and ".join(dict.fromkeys(region.where for region in other.slices[:2]))
    without = ", and leave out the outputs beside the loss" if beside else ""
    return _change(plan, other.chosen, f"run {regions} in slices{without}", other.predicted_peak, slices=slices)


def _another(plan: Plan, mem: int, **options: Any) -> Plan | None:
    """Plan the same step within `mem` bytes and with other options; return None if planning fails."""
    assert plan.step is not None
    try:
        made: Plan = plan.step.plan(max(1, mem), **options)
    except FxrematError:
        return None
    return made


def _change(plan: Plan, candidate: Candidate, what: str, mem: int, **options: object) -> Saving | None:
    if candidate.peak >= plan.predicted_peak:
        return None
    outside = plan.costs.sizes.outside
    # the user gave the bytes of the loss, so the advice repeats them
    if outside != set_aside(plan.captured, device_of(plan.graph)):
        options["loss"] = outside
    given = "".join(
        f", {name}={'fxremat.' if isinstance(value, Setting) else ''}{value!r}" for name, value in options.items()
    )
    how = f'fxremat.compile(model, mem="{enough(mem)}"{given})'
    return Saving(
        what=what,
        how=how,
        peak=candidate.peak,
        time=candidate.time,
        whole=plan.predicted_peak,
        fastest=plan.predicted_time,
    )


def knee_of(candidates: tuple[Candidate, ...]) -> Candidate:
    """Return the knee of a frontier: the candidate furthest below the line between its two ends.

    The ends are the fastest candidate, which is never returned unless it is the only one, and the one with the
    lowest peak. Memory and time are scaled to 0 to 1 between them.
    """
    fast, small = candidates[0], candidates[-1]

    def below(candidate: Candidate) -> float:
        memory = (fast.peak - candidate.peak) / max(1, fast.peak - small.peak)
        time = (candidate.time - fast.time) / max(1e-12, small.time - fast.time)
        return memory - time

    return max(candidates[1:], key=below, default=small)


def enough(size: int) -> str:
    """Format a number of bytes, rounded up so that it suffices as a budget.

    >>> enough(66_900_000), enough(5_000_000_000), enough(1_000)
    ('63.9MiB', '4.66GiB', '1000B')
    """
    for unit, factor, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if size >= factor:
            return f"{math.ceil(size / factor * 10**digits) / 10**digits:.{digits}f}{unit}"
    return f"{size}B"
