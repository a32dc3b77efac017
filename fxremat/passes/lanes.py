"""The clock of a program with copies: ops one after the other, and a lane of copies in each direction beside them.

    departure   a version leaves: its copy starts after one step, and after another nothing on the device reads it
    release     once that copy has ended, or where the memory is needed before: then the step there waits
    arrival     a version comes: as soon as, from there to its first reader, it fits beside everything else; the first
                that is read is the first to come
    wait        before its first reader

All of them are steps of the program, so memory follows from the order of the steps alone and does not depend on how
fast copies are; only time does. That is the accounting `whole` of the simulator (spec/offload.md, O.7), op by op: what
leaves is on the device until its copy ends, what comes is there from the moment its copy starts.

The copies of each direction run one after the other, beside the ops (O.3, O.4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fxremat.cost.table import Costs
from fxremat.linearize.joint import Origin
from fxremat.passes.liveness import Memory, live_bytes
from fxremat.passes.program import Program, Role, Step, Transfer

Ints = NDArray[np.int64]
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speeds of the copies, and what one costs the thread that starts it."""

    to_host: float  # bytes per second
    from_host: float
    drag: float = 0.05  # seconds that ops lose for each second of copying: both use the device's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A version that leaves the device, or the optimizer state of the parameter that the version shows."""

    trip: int  # what comes back of it has the same number
    block: int
    version: int  # as the steps before read it
    size: int
    starts: int  # position of the step after which its copy starts; an update starts it itself
    leaves: int  # position of its last reader
    state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A version that comes from the host, as another one of the same value; or the state of a parameter."""

    trip: int
    block: int
    version: int  # that the steps from `first` on read, and which the new one stands for
    size: int
    begins: int  # position of the first step before which it may come
    first: int  # position of its first reader
    state: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Swapped:
    """A program with transfers, and what the clock says about it."""

    program: Program
    memory: Memory
    time: float  # seconds
    copying: tuple[float, float]  # seconds of copying to the host, and back
    waiting: float  # seconds that ops wait for copies
    waiting_back: float  # of them, for copies that come back
    bytes: int  # that leave
    starts: tuple[float, ...]  # seconds, of each step
    copies: Mapping[tuple[Role, int], tuple[float, float]]  # start and end of OFFLOAD and PREFETCH, by trip

    @property
    def hidden(self) -> tuple[float, float]:
        """The shares of the copies' seconds that no op waits for: to the host, and back."""
        waits = (self.waiting - self.waiting_back, self.waiting_back)
        out, back = (
            1.0 - min(1.0, wait / c) if c else 1.0 for wait, c in zip(waits, self.copying, strict=True)
        )
        return out, back


def need_of(program: Program, memory: Memory) -> Ints:
    """Bytes needed at each step; the first of the backward answers for the moment between the two graphs as well."""
    need = np.array(memory.during, dtype=np.int64)
    if program.turn < need.size:
        need[program.turn] = max(need[program.turn], memory.turn)
    return need


def clocked(
    program: Program,
    departures: Sequence[Departure],
    arrivals: Sequence[Arrival],
    need: Ints,
    costs: Costs,
    link: Link,
    limit: int,
) -> Swapped:
    """The program with these copies; it stays below `limit` wherever it can. O(steps + copies * steps between).

    Args:
        need: bytes at each step without what is away then; it is used up.
    """
    return _Clock(program, departures, arrivals, need, costs, link, limit).run()


class _Leaving(NamedTuple):
    """What nothing on the device reads any more, and whose copy may still be under way."""

    departure: Departure
    versions: tuple[int, ...]


class _Clock:
    """Goes through the program once, with a clock and two queues, and writes down what happens."""

    def __init__(
        self,
        program: Program,
        departures: Sequence[Departure],
        arrivals: Sequence[Arrival],
        need: Ints,
        costs: Costs,
        link: Link,
        limit: int,
    ) -> None:
        self.program, self.departures, self.arrivals = program, departures, arrivals
        self.need, self.costs, self.link, self.limit = need, costs, link, limit
        self.started = _grouped(departures, attrgetter("starts"))
        self.left = _grouped(departures, attrgetter("leaves"))
        self.due = _grouped(arrivals, attrgetter("first"))
        self.coming = deque(sorted(arrivals, key=attrgetter("first")))
        self.lingering: deque[_Leaving] = deque()
        self.lingering_bytes = 0
        self.renamed: dict[int, int] = {}  # a version of the program -> the one that came in its place
        self.version_of = list(program.version_of)
        self.steps: list[Step | Transfer] = []
        self.starts: list[float] = []
        self.now = 0.0
        self.waited = {Role.RELEASE: 0.0, Role.WAIT: 0.0}
        self.free = {Role.OFFLOAD: 0.0, Role.PREFETCH: 0.0}  # when each lane is
        self.copies: dict[tuple[Role, int], tuple[float, float]] = {}

    def run(self) -> Swapped:
        turn = 0
        for position, step in enumerate(self.program.steps):
            self._make_room(position)
            if position == self.program.turn:
                turn = len(self.steps)
            self._bring(position)
            self._execute(step)
            self._send(position)
        while self.lingering:
            self._release()
        values = self.program.layout.joint.values
        came = range(len(self.program.version_of), len(self.version_of))
        program = replace(
            self.program,
            steps=tuple(self.steps),
            turn=turn,
            version_of=tuple(self.version_of),
            fetched=frozenset(v for v in came if values[self.version_of[v]].origin is Origin.PRIMAL),
        )
        out, back = (sum(copy.size for copy in copies) for copies in (self.departures, self.arrivals))
        copying = out / self.link.to_host, back / self.link.from_host
        return Swapped(
            program=program,
            memory=live_bytes(program, self.costs.sizes),
            time=self.now + self.link.drag * sum(copying),
            copying=copying,
            waiting=sum(self.waited.values()),
            waiting_back=self.waited[Role.WAIT],
            bytes=out,
            starts=tuple(self.starts),
            copies=self.copies,
        )

    def _make_room(self, position: int) -> None:
        """Release what has left by now, and wait for more where the step would not fit."""
        while self.lingering and (
            self._end(Role.OFFLOAD, self.lingering[0].departure.trip) <= self.now
            or self.need[position] + self.lingering_bytes > self.limit
        ):
            self._release()

    def _release(self) -> None:
        departure, versions = self.lingering.popleft()
        self.lingering_bytes -= departure.size
        self._wait_until(self._end(Role.OFFLOAD, departure.trip), Role.RELEASE)
        self._write(Role.RELEASE, departure, reads=versions)

    def _bring(self, position: int) -> None:
        """Start the copies that fit and can start before this step ends; wait for what the step reads."""
        step = self.program.steps[position]
        ends = self.now + (self.costs.seconds[step.op] if isinstance(step, Step) else 0.0)
        while self.coming:
            arrival = self.coming[0]
            soon = (
                arrival.begins <= position
                and self.free[Role.PREFETCH] <= ends
                and self._fits_until_read(arrival, position)
            )
            if not (soon or arrival.first == position):
                break
            self.coming.popleft()
            while self._lingers(arrival):
                self._release()
            self.need[position : arrival.first] += arrival.size
            self._make_room(position)
            if not arrival.state:
                self.version_of.append(self.program.version_of[arrival.version])
                self.renamed[arrival.version] = len(self.version_of) - 1
            self._copy(Role.PREFETCH, arrival)
            self._write(Role.PREFETCH, arrival, writes=self._new(arrival))
        for arrival in self.due.get(position, ()):
            self._wait_until(self._end(Role.PREFETCH, arrival.trip), Role.WAIT)
            self._write(Role.WAIT, arrival, reads=self._new(arrival))

    def _new(self, what: Departure | Arrival) -> tuple[int, ...]:
        """The version that stands for one of the program now; state has none."""
        return () if what.state else (self.renamed.get(what.version, what.version),)

    def _fits_until_read(self, arrival: Arrival, position: int) -> bool:
        most = int(self.need[position : arrival.first].max(initial=0))
        return not self._lingers(arrival) and most + self.lingering_bytes + arrival.size <= self.limit

    def _lingers(self, arrival: Arrival) -> bool:
        return any(departure.trip == arrival.trip for departure, _ in self.lingering)

    def _execute(self, step: Step | Transfer) -> None:
        self.starts.append(self.now)
        reads = tuple(self.renamed.get(version, version) for version in step.reads)
        self.steps.append(replace(step, reads=reads))
        self.now += self.costs.seconds[step.op] if isinstance(step, Step) else step.seconds

    def _send(self, position: int) -> None:
        """Start the copies of what leaves from this step on, and note what nothing reads after it."""
        for departure in self.started.get(position, ()):
            self._copy(Role.OFFLOAD, departure)
            if isinstance(self.program.steps[position], Step):
                self._write(Role.OFFLOAD, departure, reads=(departure.version,))
        for departure in self.left.get(position, ()):
            self.lingering.append(_Leaving(departure, self._new(departure)))
            self.lingering_bytes += departure.size

    def _copy(self, role: Role, what: Departure | Arrival) -> None:
        """Put a copy into its lane; one that comes back starts after it has left."""
        speed = self.link.to_host if role is Role.OFFLOAD else self.link.from_host
        start = max(self.now, self.free[role])
        if role is Role.PREFETCH:
            start = max(start, self._end(Role.OFFLOAD, what.trip))
        self.free[role] = end = start + what.size / speed
        self.copies[role, what.trip] = (start, end)

    def _end(self, role: Role, trip: int) -> float:
        """When a copy ends; 0 for what has been on the host from the start."""
        return self.copies.get((role, trip), (0.0, 0.0))[1]

    def _write(
        self,
        role: Role,
        what: Departure | Arrival,
        *,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
    ) -> None:
        self.starts.append(self.now)
        transfer = Transfer(what.block, role, what.trip, reads, writes)
        if what.state:
            sign = {Role.PREFETCH: 1, Role.RELEASE: -1}.get(role, 0)
            value = self.program.version_of[what.version]
            transfer = replace(transfer, state_of=value, takes=sign * what.size)
        self.steps.append(transfer)

    def _wait_until(self, moment: float, role: Role) -> None:
        self.waited[role] += max(0.0, moment - self.now)
        self.now = max(self.now, moment)


def _grouped(items: Iterable[_Item], key: Callable[[_Item], int]) -> dict[int, list[_Item]]:
    groups: dict[int, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
