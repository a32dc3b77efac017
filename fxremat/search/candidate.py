"""A candidate: one way to run the step, with its exact peak and its time, and its origin.

    FromSchedule    a schedule of blocks, as a solver of chains returned it
    FromJoin        one of the towers of a join, mapped to the blocks
    Refined         one of these, improved op by op
    Transferred     any of these, with copies to the host and back
    Communicating   any of these, with collectives that run concurrently with its ops
    InUnits         any of these, with its ops grouped into units that are compiled

An origin knows its program, and the schedule that it was derived from.
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
from fxremat.step.program import Order, Program, order_of
from fxremat.step.step_graph import StepGraph
from fxremat.step.transferred import ProgramWithTransfers


@dataclass(frozen=True, eq=False)
class FromSchedule:
    """A schedule of the layout's blocks."""

    schedule: Schedule
    known: Order | None = None  # the order of ops that the schedule means; None: it has not been computed

    def order(self, layout: Layout) -> Order:
        """Return the order in which ops run. O(steps)."""
        return self.known or order_of(layout, self.schedule)

    def program(self, layout: Layout) -> Program:
        """Return the program that the schedule executes. O(steps)."""
        return self.order(layout).program()

    def on(self, layout: Layout) -> FromSchedule:
        """Return this origin for an equal graph, that of `layout`."""
        return replace(self, known=self.known and replace(self.known, layout=layout))


@dataclass(frozen=True, eq=False)
class FromJoin(FromSchedule):
    """A schedule of a join of towers (parts of the model that share no value), as a schedule of the layout's blocks."""

    _: KW_ONLY
    timeline: JoinTimeline


@dataclass(frozen=True, eq=False)
class Refined:
    """An order of ops that the search found, starting from the program of another origin."""

    began: FromSchedule
    found: Order

    def order(self, _: Layout) -> Order:
        """Return the order in which ops run."""
        return self.found

    def program(self, _: Layout) -> Program:
        """Return the program that runs in this order. O(steps)."""
        return self.found.program()

    def on(self, layout: Layout) -> Refined:
        """Return this origin for an equal graph, that of `layout`."""
        return replace(self, began=self.began.on(layout), found=replace(self.found, layout=layout))


class _PutIntoAnother:
    """Base of origins that add transfers or communication to another origin, whose order of ops they keep."""

    began: FromSchedule | Refined | Transferred
    result: ProgramWithTransfers | ProgramWithCommunication

    def order(self, layout: Layout) -> Order:
        """Return the order in which ops run, without the transfers or communication that were added."""
        return self.began.order(layout)

    def program(self, _: Layout) -> Program:
        """Return the program with the transfers or communication that were added."""
        return self.result.program

    def on(self, layout: Layout) -> FromSchedule | Refined:
        """Return the origin without transfers or communication, for an equal graph, that of `layout`."""
        return self.began.on(layout)


@dataclass(frozen=True, eq=False)
class Transferred(_PutIntoAnother):
    """The program of another origin, with copies to the host and back added."""

    began: FromSchedule | Refined
    result: ProgramWithTransfers


@dataclass(frozen=True, eq=False)
class Communicating(_PutIntoAnother):
    """The program of another origin, with collectives that run concurrently with its ops."""

    began: FromSchedule | Refined | Transferred
    result: ProgramWithCommunication


@dataclass(frozen=True, eq=False)
class InUnits:
    """The program of another origin with ops grouped into units, each an op of a step graph of its own."""

    began: FromSchedule | Refined | Transferred | Communicating
    ops: Layout  # the layout of the ops before they were grouped
    fused: Program  # the program of units, copies to the host included
    result: ProgramWithTransfers | None = None  # the same program with its copies' times; None: it makes no copies

    def order(self, _: Layout) -> Order:
        """Return the order in which the ops of the other origin run, without units."""
        return self.began.order(self.ops)

    def program(self, _: Layout) -> Program:
        """Return the program of units."""
        return self.fused

    def on(self, layout: Layout) -> FromSchedule | Refined:
        """Return the origin without units, for an equal graph of ops, that of `layout`."""
        return self.began.on(layout)


Origin = FromSchedule | Refined | Transferred | Communicating | InUnits


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One way to run the step, with its exact peak and its time."""

    peak: int  # bytes above the start of the step
    time: float  # seconds
    layout: Layout
    origin: Origin

    def order(self) -> Order:
        """Return the order in which ops run, without transfers."""
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
        """The simulated join of towers that its schedule comes from; None if it comes from a chain."""
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
        """The program with collectives that run concurrently with ops, and their times; None if there are none."""
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
        """Return the candidate that runs this order of ops instead, whose peak in bytes and seconds are given."""
        return replace(self, peak=peak, time=time, origin=Refined(self._base, order))

    def transferring(self, result: ProgramWithTransfers) -> Candidate:
        """Return this candidate with the program of `result`: its own, with copies to the host and back added."""
        origin = Transferred(self._untransferred, result)
        return replace(self, peak=result.memory.peak, time=result.time, origin=origin)

    def communicating(self, result: ProgramWithCommunication, time: float) -> Candidate:
        """Return the candidate with collectives that run concurrently with its ops, taking `time` seconds in all."""
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
        """Return this candidate for an equal graph, that of `layout`; transfers and communication are left out."""
        return replace(self, layout=layout, origin=self.origin.on(layout))


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The Pareto frontier of candidate programs, by increasing time and decreasing peak."""

    keep_all: Candidate  # the candidate that recomputes nothing
    candidates: tuple[Candidate, ...]  # the fastest first

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
        """Return at most `count` candidates, fastest first, evenly spread over their peaks."""
        peaks = np.linspace(self.candidates[0].peak, self.candidates[-1].peak, count)
        places = range(len(self.candidates))
        nearest = {min(places, key=lambda k: abs(self.candidates[k].peak - peak)) for peak in peaks}
        return [self.candidates[place] for place in sorted(nearest)]

    def scaled(self, factor: float) -> Frontier:
        """Return the frontier with every time multiplied by `factor`, as calibration to a measured time does."""
        return self.each(lambda candidate: replace(candidate, time=candidate.time * factor))

    def each(self, change: Callable[[Candidate], Candidate]) -> Frontier:
        """Return the frontier with `change` applied to every candidate, which must keep their order."""
        return Frontier(keep_all=change(self.keep_all), candidates=tuple(map(change, self.candidates)))


def exchanged(graph: StepGraph) -> Callable[[Candidate], Candidate]:
    """Return a function that returns a candidate for `graph`, equal to its own; shared layouts stay shared."""
    layouts: dict[int, Layout] = {}

    def moved(candidate: Candidate) -> Candidate:
        old = candidate.layout
        return candidate.on(layouts.setdefault(id(old), replace(old, graph=graph)))

    return moved


def unbeaten(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates that no other beats in both peak and time, fastest first. O(n log n)."""
    least: int | None = None
    for candidate in sorted(candidates, key=lambda c: (c.time, c.peak)):
        if least is None or candidate.peak < least:
            least = candidate.peak
            yield candidate
