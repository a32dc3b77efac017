"""A candidate: one way to run the step, judged exactly, and where it comes from.

    FromSchedule    a schedule of blocks, as a solver of chains gave it
    FromJoin        one of the towers of a join, laid on the blocks
    Refined         one of these, improved on op by op
    Transferred     any of these, with copies to the host and back
    Communicating   any of these, with its collectives beside its ops
    InUnits         any of these, its ops taken together into units that are compiled

An origin knows its program, and the schedule that it began with.
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
    known: Order | None = None  # its order, where that was worked out

    def order(self, layout: Layout) -> Order:
        """Which op runs when. O(steps)."""
        return self.known or order_of(layout, self.schedule)

    def program(self, layout: Layout) -> Program:
        """Every step of the schedule. O(steps)."""
        return self.order(layout).program()

    def on(self, layout: Layout) -> FromSchedule:
        """The same origin on the layout of an equal graph."""
        return replace(self, known=self.known and replace(self.known, layout=layout))


@dataclass(frozen=True, eq=False)
class FromJoin(FromSchedule):
    """A schedule of a join of towers, which the layout's blocks run in the same order."""

    _: KW_ONLY
    timeline: JoinTimeline


@dataclass(frozen=True, eq=False)
class Refined:
    """An order of ops that the search found, beginning from the program of another origin."""

    began: FromSchedule
    found: Order

    def order(self, _: Layout) -> Order:
        """Which op runs when."""
        return self.found

    def program(self, _: Layout) -> Program:
        """Every step of the order. O(steps)."""
        return self.found.program()

    def on(self, layout: Layout) -> Refined:
        """The same origin on the layout of an equal graph."""
        return replace(self, began=self.began.on(layout), found=replace(self.found, layout=layout))


class _PutIntoAnother:
    """What is put into the program of another origin: its order is that of the other."""

    began: FromSchedule | Refined | Transferred
    result: ProgramWithTransfers | ProgramWithCommunication

    def order(self, layout: Layout) -> Order:
        """Which op runs when, as if what was put in took no time of its own."""
        return self.began.order(layout)

    def program(self, _: Layout) -> Program:
        """Every step of it, with what was put in."""
        return self.result.program

    def on(self, layout: Layout) -> FromSchedule | Refined:
        """The origin without that on the layout of an equal graph."""
        return self.began.on(layout)


@dataclass(frozen=True, eq=False)
class Transferred(_PutIntoAnother):
    """A program with copies to the host and back, put into that of another origin."""

    began: FromSchedule | Refined
    result: ProgramWithTransfers


@dataclass(frozen=True, eq=False)
class Communicating(_PutIntoAnother):
    """A program whose collectives run beside its ops, made of that of another origin."""

    began: FromSchedule | Refined | Transferred
    result: ProgramWithCommunication


@dataclass(frozen=True, eq=False)
class InUnits:
    """The program of another origin in units, each an op of a step graph of its own."""

    began: FromSchedule | Refined | Transferred | Communicating
    ops: Layout  # of the single ops
    fused: Program

    def order(self, _: Layout) -> Order:
        """Which op of the other origin runs when, units apart."""
        return self.began.order(self.ops)

    def program(self, _: Layout) -> Program:
        """Every unit of it."""
        return self.fused

    def on(self, layout: Layout) -> FromSchedule | Refined:
        """The origin without units on the layout of an equal graph."""
        return self.began.on(layout)


Origin = FromSchedule | Refined | Transferred | Communicating | InUnits


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One way to run the step, judged exactly."""

    peak: int  # bytes above the start of the step
    time: float  # seconds
    layout: Layout
    origin: Origin

    def order(self) -> Order:
        """Which op runs when, transfers apart."""
        return self.origin.order(self.layout)

    def program(self) -> Program:
        """Every step of it."""
        return self.origin.program(self.layout)

    @property
    def schedule(self) -> Schedule:
        """The schedule of blocks that it began with; what runs may depart from it here and there."""
        return self._base.schedule

    @property
    def join(self) -> JoinTimeline | None:
        """The join of towers whose schedule it began with, simulated; None for others."""
        return self._base.timeline if isinstance(self._base, FromJoin) else None

    @property
    def refined(self) -> bool:
        """Whether the search improved on its schedule op by op."""
        return isinstance(self._untransferred, Refined)

    @property
    def transfers(self) -> ProgramWithTransfers | None:
        """Its copies to the host and back; None where it makes none."""
        origin = self.origin.began if isinstance(self.origin, Communicating) else self.origin
        return origin.result if isinstance(origin, Transferred) else None

    @property
    def communication(self) -> ProgramWithCommunication | None:
        """Its collectives beside its ops; None where it has none."""
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
        """The candidate that runs this order of ops instead, with the peak in bytes and the seconds of that."""
        return replace(self, peak=peak, time=time, origin=Refined(self._base, order))

    def transferring(self, result: ProgramWithTransfers) -> Candidate:
        """The candidate with these transfers in its program."""
        origin = Transferred(self._untransferred, result)
        return replace(self, peak=result.memory.peak, time=result.time, origin=origin)

    def communicating(self, result: ProgramWithCommunication, time: float) -> Candidate:
        """The candidate with its collectives beside its ops, and the seconds that it takes then."""
        assert not isinstance(self.origin, InUnits)
        origin = self.origin.began if isinstance(self.origin, Communicating) else self.origin
        return replace(self, peak=result.memory.peak, time=time, origin=Communicating(origin, result))

    def in_units(self, program: Program, peak: int, time: float) -> Candidate:
        """The candidate with its ops in units: the program of these, its peak in bytes and its seconds."""
        assert not isinstance(self.origin, InUnits)
        origin = InUnits(self.origin, self.layout, program)
        return replace(self, peak=peak, time=time, layout=program.layout, origin=origin)

    def on(self, layout: Layout) -> Candidate:
        """The same candidate on the layout of an equal graph."""
        return replace(self, layout=layout, origin=self.origin.on(layout))


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The Pareto frontier of candidate programs, by increasing time and decreasing peak."""

    keep_all: Candidate
    candidates: tuple[Candidate, ...]

    @property
    def minimum(self) -> int:
        """The least budget that works, in bytes."""
        return self.candidates[-1].peak

    def within(self, budget: int) -> Candidate:
        """The fastest candidate that fits. Raises `BudgetTooSmall`."""
        for candidate in self.candidates:
            if candidate.peak <= budget:
                return candidate
        raise BudgetTooSmall(minimum=self.minimum, budget=budget)

    def nearest(self, budget: int) -> Candidate:
        """The fastest candidate that fits, or else the one that needs least."""
        return next((c for c in self.candidates if c.peak <= budget), self.candidates[-1])

    def spread(self, count: int) -> list[Candidate]:
        """At most `count` candidates, fastest first, evenly over their peaks."""
        peaks = np.linspace(self.candidates[0].peak, self.candidates[-1].peak, count)
        places = range(len(self.candidates))
        nearest = {min(places, key=lambda k: abs(self.candidates[k].peak - peak)) for peak in peaks}
        return [self.candidates[place] for place in sorted(nearest)]

    def scaled(self, factor: float) -> Frontier:
        """The frontier with every time multiplied (calibration)."""
        return self.each(lambda candidate: replace(candidate, time=candidate.time * factor))

    def each(self, change: Callable[[Candidate], Candidate]) -> Frontier:
        """The frontier with every candidate changed, in a way that keeps their order."""
        return Frontier(keep_all=change(self.keep_all), candidates=tuple(map(change, self.candidates)))


def exchanged(graph: StepGraph) -> Callable[[Candidate], Candidate]:
    """What puts candidates on an equal graph: those that shared a layout share one again."""
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
