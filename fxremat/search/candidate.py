"""A candidate: one way to run the step, with its exact peak, its time, and its origin, which is how it was found.

    FromSchedule    a schedule of blocks (consecutive ops between two cuts), as a solver of chains returned it
    FromJoin        a schedule of a join: chains of blocks ("towers") that meet only at the end, as in a siamese network
    Refined         one of these, improved op by op
    Transferred     any of these, with copies to the host and back
    Communicating   any of these, with collectives that run concurrently with its ops
    InUnits         any of these, with its ops grouped into units that are compiled

An origin can return its order of ops, its program, and the schedule that it was derived from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.errors import BudgetTooSmall
from fxremat.step.communicating import ProgramWithCommunication
from fxremat.step.layout import Layout
from fxremat.step.order import order_of
from fxremat.step.program import Order, Program
from fxremat.step.step_graph import StepGraph
from fxremat.step.transferred import ProgramWithTransfers


@dataclass(frozen=True, eq=False)
class FromSchedule:
    """The origin of a candidate: a solver returned a schedule of blocks (runs of consecutive ops)."""

    schedule: Schedule
    known: Order | None = None  # the order of executed ops that the schedule stands for; None until it is computed

    def order(self, layout: Layout) -> Order:
        """Return the order in which ops run, recomputations included. O(steps)."""
        return self.known or order_of(layout, self.schedule)

    def program(self, layout: Layout) -> Program:
        """Return the program that the schedule executes. O(steps)."""
        return self.order(layout).program()

    def on(self, layout: Layout) -> FromSchedule:
        """Return how the candidate was found, for the equal graph of `layout`."""
        return replace(self, known=self.known and replace(self.known, layout=layout))


@dataclass(frozen=True, eq=False)
class FromJoin(FromSchedule):
    """The origin of a candidate: a schedule of several chains that share no value until they meet."""

    _: KW_ONLY
    timeline: JoinTimeline


@dataclass(frozen=True, eq=False)
class Refined:
    """The origin of a candidate: an op-by-op search, started from a solver's schedule, found an order of ops."""

    began: FromSchedule
    found: Order

    def order(self, _: Layout) -> Order:
        """Return the order in which ops run, recomputations included."""
        return self.found

    def program(self, _: Layout) -> Program:
        """Return the program that runs in this order. O(steps)."""
        return self.found.program()

    def on(self, layout: Layout) -> Refined:
        """Return how the candidate was found, for the equal graph of `layout`."""
        return replace(self, began=self.began.on(layout), found=replace(self.found, layout=layout))


class _PutIntoAnother:
    """Base class: how a candidate was found by adding copies to the host or communication to another program.

    The order of ops is that of the other program.
    """

    began: FromSchedule | Refined | Transferred
    result: ProgramWithTransfers | ProgramWithCommunication

    def order(self, layout: Layout) -> Order:
        """Return the order in which ops run, without the added copies or communication."""
        return self.began.order(layout)

    def program(self, _: Layout) -> Program:
        """Return the program with the added copies or communication."""
        return self.result.program

    def on(self, layout: Layout) -> FromSchedule | Refined:
        """Return how the program without copies and communication was found, for the equal graph of `layout`."""
        return self.began.on(layout)


@dataclass(frozen=True, eq=False)
class Transferred(_PutIntoAnother):
    """The origin of a candidate: another program, with copies to the host and back added."""

    began: FromSchedule | Refined
    result: ProgramWithTransfers


@dataclass(frozen=True, eq=False)
class Communicating(_PutIntoAnother):
    """The origin of a candidate: another program, whose collectives run concurrently with its ops."""

    began: FromSchedule | Refined | Transferred
    result: ProgramWithCommunication


@dataclass(frozen=True, eq=False)
class InUnits:
    """The origin of a program of compiled regions: a program op by op, whose ops were grouped into units.

    A unit is a compiled region or a single op; the program's steps are units.
    """

    began: FromSchedule | Refined | Transferred | Communicating
    ops: Layout  # the layout of the ops before they were grouped
    fused: Program  # the program of units, copies to the host included
    result: ProgramWithTransfers | None = None  # the same program with its copies' times; None: it makes no copies

    def order(self, _: Layout) -> Order:
        """Return the order in which single ops run, before they were grouped into compiled regions."""
        return self.began.order(self.ops)

    def program(self, _: Layout) -> Program:
        """Return the program whose steps are compiled regions and single ops."""
        return self.fused

    def on(self, layout: Layout) -> FromSchedule | Refined:
        """Return how the ungrouped program was found, for the equal graph of `layout`."""
        return self.began.on(layout)


Origin = FromSchedule | Refined | Transferred | Communicating | InUnits


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One way to run a training step: a program of ops and recomputations, with its exact peak and its time."""

    peak: int  # peak bytes above what is allocated when the step begins
    time: float  # predicted seconds of one forward and backward
    layout: Layout
    origin: Origin

    def order(self) -> Order:
        """Return the order in which ops run, recomputations included and transfers left out."""
        return self.origin.order(self.layout)

    def program(self) -> Program:
        """Return the program, transfers included."""
        return self.origin.program(self.layout)

    @property
    def schedule(self) -> Schedule:
        """The schedule of blocks that this candidate was derived from; its program may differ from the schedule."""
        return self._base.schedule

    @property
    def join(self) -> JoinTimeline | None:
        """The simulated schedule of several chains that meet, if the candidate was found as one; else None."""
        return self._base.timeline if isinstance(self._base, FromJoin) else None

    @property
    def refined(self) -> bool:
        """True if the op-by-op search improved on the schedule that this candidate was derived from."""
        return isinstance(self._untransferred, Refined)

    @property
    def transfers(self) -> ProgramWithTransfers | None:
        """The program with copies to the host and back, and their times; None if the candidate makes no copies."""
        origin = self.origin.began if isinstance(self.origin, Communicating) else self.origin
        return origin.result if isinstance(origin, Transferred | InUnits) else None

    @property
    def communication(self) -> ProgramWithCommunication | None:
        """The program with collectives that run concurrently with its ops, and their times; None if it has none."""
        return self.origin.result if isinstance(self.origin, Communicating) else None

    @property
    def _untransferred(self) -> FromSchedule | Refined:
        origin = self.origin
        while isinstance(origin, InUnits | Communicating | Transferred):
            origin = origin.began
        return origin

    @property
    def _base(self) -> FromSchedule:
        origin = self.origin
        while not isinstance(origin, FromSchedule):
            origin = origin.began
        return origin

    def refined_to(self, order: Order, peak: int, time: float) -> Candidate:
        """Return the candidate that runs ops in `order` instead, with the given peak in bytes and time in seconds."""
        return replace(self, peak=peak, time=time, origin=Refined(self._base, order))

    def transferring(self, result: ProgramWithTransfers) -> Candidate:
        """Return this candidate with `result`, its own program with copies to the host and back added."""
        origin = Transferred(self._untransferred, result)
        return replace(self, peak=result.memory.peak, time=result.time, origin=origin)

    def communicating(self, result: ProgramWithCommunication, time: float) -> Candidate:
        """Return the candidate with collectives that run concurrently with its ops, taking `time` seconds in total."""
        assert not isinstance(self.origin, InUnits)
        origin = self.origin.began if isinstance(self.origin, Communicating) else self.origin
        return replace(self, peak=result.memory.peak, time=time, origin=Communicating(origin, result))

    @property
    def without_transfers(self) -> Candidate:
        """The candidate without copies to the host; its peak and its seconds are still those with them."""
        return replace(self, origin=self._untransferred) if isinstance(self.origin, Transferred) else self

    def in_units(
        self, program: Program, peak: int, time: float, transfers: ProgramWithTransfers | None = None
    ) -> Candidate:
        """Return the candidate with its ops grouped into units: their program, its peak in bytes and its seconds.

        Args:
            transfers: `program` with the times of its copies to the host, if it makes any.
        """
        assert not isinstance(self.origin, InUnits)
        origin = InUnits(self.origin, self.layout, program, transfers)
        return replace(self, peak=peak, time=time, layout=program.layout, origin=origin)

    def on(self, layout: Layout) -> Candidate:
        """Return this candidate for the equal graph of `layout`, without copies and communication."""
        return replace(self, layout=layout, origin=self.origin.on(layout))


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The Pareto frontier of candidate programs, by increasing time and decreasing peak."""

    keep_all: Candidate  # the candidate that recomputes nothing
    candidates: tuple[Candidate, ...]  # the candidates, fastest first

    @property
    def minimum(self) -> int:
        """The least budget that works, in bytes."""
        return self.candidates[-1].peak

    def within(self, budget: int) -> Candidate:
        """Return the fastest candidate that fits into `budget` bytes. Raises `BudgetTooSmall` if there is none."""
        for candidate in self.candidates:
            if candidate.peak <= budget:
                return candidate
        raise BudgetTooSmall(minimum=self.minimum, budget=budget)

    def nearest(self, budget: int) -> Candidate:
        """Return the fastest candidate that fits into `budget` bytes, else the one with the least peak."""
        return next((c for c in self.candidates if c.peak <= budget), self.candidates[-1])

    def spread(self, count: int) -> list[Candidate]:
        """Return at most `count` candidates, fastest first, whose peaks are about evenly spaced."""
        peaks = np.linspace(self.candidates[0].peak, self.candidates[-1].peak, count)
        places = range(len(self.candidates))
        nearest = {min(places, key=lambda k: abs(self.candidates[k].peak - peak)) for peak in peaks}
        return [self.candidates[place] for place in sorted(nearest)]

    def scaled(self, factor: float) -> Frontier:
        """Return the frontier with every time multiplied by `factor`, which corrects predicted to measured times."""
        return self.each(lambda candidate: replace(candidate, time=candidate.time * factor))

    def each(self, change: Callable[[Candidate], Candidate]) -> Frontier:
        """Return the frontier with `change` applied to every candidate, which must keep their order."""
        return Frontier(keep_all=change(self.keep_all), candidates=tuple(map(change, self.candidates)))


def exchanged(graph: StepGraph) -> Callable[[Candidate], Candidate]:
    """Return a function that transfers a candidate to `graph`, which is equal to the candidate's own graph."""
    layouts: dict[int, Layout] = {}

    def moved(candidate: Candidate) -> Candidate:
        old = candidate.layout
        return candidate.on(layouts.setdefault(id(old), replace(old, graph=graph)))

    return moved


def unbeaten(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the Pareto-optimal candidates in peak and time, fastest first. O(n log n)."""
    least: int | None = None
    for candidate in sorted(candidates, key=lambda c: (c.time, c.peak)):
        if least is None or candidate.peak < least:
            least = candidate.peak
            yield candidate
