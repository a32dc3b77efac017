"""Transfers put into a program: what leaves the device, when its memory is let go, when it is taken again.

    trip       a forward value that some step reads last before the turn, and some step reads first after it
    offload    right after the step that makes it: as early as possible (thesis, Proposition 1)
    release    once its copy has ended, or where the memory is needed before: then the step there waits
    prefetch   as soon as, from there to its first reader, it fits beside everything else; first read, first back
    wait       before its first reader

All four are steps of the program, so memory follows from the order of the steps alone and does not depend on how fast
copies are; only time does. That is the accounting `whole` of the simulator (spec/offload.md, O.7), op by op: a value
that leaves is on the device until its copy ends, one that comes back from the moment its copy starts.

The copies of each direction run one after the other, beside the ops (O.3, O.4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from fxremat.cost.table import Costs
from fxremat.errors import InvalidSchedule
from fxremat.linearize.joint import Origin, storage_bytes
from fxremat.linearize.layout import Layout
from fxremat.passes.liveness import Memory, live_bytes
from fxremat.passes.program import Program, Replay, Role, Step, Transfer
from fxremat.schedule import Offload, Prefetch, Schedule, Value

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speeds of the copies, and what one costs the thread that starts it."""

    to_host: float  # bytes per second
    from_host: float
    drag: float = 0.05  # seconds that ops lose for each second of copying: both use the device's memory

    def seconds(self, size: int) -> float:
        """Of copying so many bytes out and back."""
        return size / self.to_host + size / self.from_host


@dataclass(frozen=True, slots=True)
class Trip:
    """A version that can be away between two steps: `leaves` is its last reader before, `returns` its first after."""

    version: int
    size: int
    made: int  # position of the step that makes it
    leaves: int
    returns: int
    back: int  # position of the first step before which it may start to come back

    @property
    def away(self) -> slice:
        """The steps during which it need not be on the device."""
        return slice(self.leaves + 1, self.returns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Swapped:
    """A program with transfers, and what the clock says about it."""

    program: Program
    memory: Memory
    time: float  # seconds
    copying: tuple[float, float]  # seconds of copying to the host, and back
    waiting: float  # seconds that ops wait for copies
    waiting_back: float  # of them, for copies that come back
    bytes: int  # that leave, and come back
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


def trips(program: Program, costs: Costs, least: int = 1) -> list[Trip]:
    """Every trip over the turn that a program allows, of at least so many bytes, by where it starts. O(steps).

    Only whole storages travel: one that is larger than the tensor that shows it stays.
    """
    found = _Visits.of(program).trips(dict.fromkeys(range(len(program.version_of)), program.turn), costs)
    return [trip for trip in found if trip.size >= least and trip.leaves < program.turn]


def trips_of(layout: Layout, schedule: Schedule, costs: Costs) -> tuple[Program, list[Trip]]:
    """What a schedule executes, and the trips that its Off and Pre tokens ask for.

    What comes back a second time (a solver of chains may drop it and fetch it again) has stayed since the first.

    Raises:
        InvalidSchedule: a value that is not stored leaves, or one comes back that has not left.
    """
    replay = Replay(layout)
    hosted: dict[Value, Mapping[int, int]] = {}
    back: dict[int, int] = {}
    for op in schedule.ops:
        match op:
            case Offload(value):
                hosted[value] = replay.versions_of(value.kind, value.index - 1)
            case Prefetch(value):
                if value not in hosted:
                    raise InvalidSchedule(f"{op} is not on the host")
                replay.restore(value.kind, value.index - 1, hosted[value])
                for version in hosted[value].values():
                    back.setdefault(version, len(replay.steps))
            case _:
                replay.execute(op)
    program = replay.whole_program()
    return program, _Visits.of(program).trips(back, costs)


@dataclass(frozen=True)
class _Visits:
    """The positions of the steps that touch each version, in order."""

    program: Program
    at: dict[int, list[int]]

    @classmethod
    def of(cls, program: Program) -> _Visits:
        at: dict[int, list[int]] = {}
        for position, step in enumerate(program.steps):
            for version in (*step.reads, *step.writes):
                at.setdefault(version, []).append(position)
        return cls(program, at)

    def trips(self, back: Mapping[int, int], costs: Costs) -> list[Trip]:
        """The trips of those versions that can travel, each back from a position on, by where they start."""
        found = []
        for version, position in back.items():
            visits = self.at.get(version, [])
            place = bisect_left(visits, position)
            size = self._travels(version, costs)
            if size and 0 < place < len(visits):
                leaves, returns = visits[place - 1], visits[place]
                soonest = max(position, self.program.turn) if returns >= self.program.turn else position
                found.append(Trip(version, size, visits[0], leaves, returns, soonest))
        return sorted(found, key=lambda trip: trip.made)

    def _travels(self, version: int, costs: Costs) -> int:
        """The bytes of a version that may leave; 0 for what stays: what the caller holds, and odd storages."""
        joint = self.program.layout.joint
        value = joint.values[self.program.version_of[version]]
        size = costs.sizes.values[value.index]
        if value.origin is not Origin.FORWARD or value.index in joint.pinned | joint.updates:
            return 0
        shown = value.node.meta["val"]
        whole = (
            isinstance(shown, torch.Tensor) and shown.nbytes == storage_bytes(shown) == value.bytes <= size
        )
        return size if whole else 0


def need_of(program: Program, memory: Memory) -> Ints:
    """Bytes needed at each step; the first of the backward answers for the moment between the two graphs as well."""
    need = np.array(memory.during, dtype=np.int64)
    if program.turn < need.size:
        need[program.turn] = max(need[program.turn], memory.turn)
    return need


def cap(need: Ints, possible: Sequence[Trip], limit: int) -> list[Trip] | None:
    """Trips that make a program fit into `limit` bytes, or None; `need` becomes what is needed then.

    While something does not fit, the earliest value that need not be there at the worst step leaves (autocapper of the
    thesis, 4.3); then those that are not needed after all stay.
    """
    waiting, chosen = list(possible), []
    while need.max(initial=0) > limit:
        worst = int(need.argmax())
        idle = next((trip for trip in waiting if trip.leaves < worst < trip.returns), None)
        if idle is None:
            return None
        waiting.remove(idle)
        chosen.append(idle)
        need[idle.away] -= idle.size
    for trip in reversed(tuple(chosen)):
        if (need[trip.away] + trip.size).max(initial=0) <= limit:
            need[trip.away] += trip.size
            chosen.remove(trip)
    return sorted(chosen, key=lambda trip: trip.made)


def swap(program: Program, chosen: Sequence[Trip], costs: Costs, link: Link, limit: int) -> Swapped:
    """The program with these trips; it stays below `limit` wherever it can. O(steps + trips * steps between)."""
    need = need_of(program, live_bytes(program, costs.sizes))
    for trip in chosen:
        need[trip.away] -= trip.size
    return _Clock(program, chosen, costs, link, limit, need).run()


@dataclass(eq=False)
class _Clock:
    """Goes through the program once, with a clock and two queues, and writes down what happens."""

    program: Program
    chosen: Sequence[Trip]
    costs: Costs
    link: Link
    limit: int
    need: Ints
    now: float = 0.0
    waited: dict[Role, float] = field(default_factory=lambda: {Role.RELEASE: 0.0, Role.WAIT: 0.0})
    lingering_bytes: int = 0
    steps: list[Step | Transfer] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    copies: dict[tuple[Role, int], tuple[float, float]] = field(default_factory=dict)
    lanes: dict[Role, float] = field(default_factory=lambda: {Role.OFFLOAD: 0.0, Role.PREFETCH: 0.0})
    ends: dict[tuple[Role, Trip], float] = field(default_factory=dict)
    lingering: deque[Trip] = field(default_factory=deque)
    renamed: dict[int, int] = field(default_factory=dict)  # version that left -> version that came back

    def __post_init__(self) -> None:
        self.numbers = {trip: number for number, trip in enumerate(self.chosen)}
        self.version_of = list(self.program.version_of)
        self.coming = deque(sorted(self.chosen, key=lambda trip: trip.returns))
        self.made, self.leaves, self.returns = (
            _grouped(self.chosen, key)
            for key in (attrgetter("made"), attrgetter("leaves"), attrgetter("returns"))
        )

    def run(self) -> Swapped:
        turn = 0
        for position, step in enumerate(self.program.steps):
            self._make_room(position)
            if position == self.program.turn:
                turn = len(self.steps)
            self._bring_back(position)
            assert isinstance(step, Step)
            self._execute(step)
            for trip in self.made.get(position, ()):
                self._start(Role.OFFLOAD, trip, reads=(trip.version,))
            for trip in self.leaves.get(position, ()):
                self.lingering.append(trip)
                self.lingering_bytes += trip.size
        program = Program(
            layout=self.program.layout,
            steps=tuple(self.steps),
            turn=turn,
            version_of=tuple(self.version_of),
            first=self.program.first,
            repeated=self.program.repeated,
            preserved=self.program.preserved,
        )
        size = sum(trip.size for trip in self.chosen)
        return Swapped(
            program=program,
            memory=live_bytes(program, self.costs.sizes),
            time=self.now + self.link.drag * self.link.seconds(size),
            copying=(size / self.link.to_host, size / self.link.from_host),
            waiting=sum(self.waited.values()),
            waiting_back=self.waited[Role.WAIT],
            bytes=size,
            starts=tuple(self.starts),
            copies=self.copies,
        )

    def _make_room(self, position: int) -> None:
        """Release what has left by now, and wait for more where the step would not fit."""
        while self.lingering and (
            self.ends[Role.OFFLOAD, self.lingering[0]] <= self.now
            or self.need[position] + self.lingering_bytes > self.limit
        ):
            self._release()

    def _release(self) -> None:
        trip = self.lingering.popleft()
        self.lingering_bytes -= trip.size
        self._wait_until(self.ends[Role.OFFLOAD, trip], Role.RELEASE)
        self._write(Role.RELEASE, trip, reads=(trip.version,))

    def _bring_back(self, position: int) -> None:
        """Start the copies that fit and can start before this step ends; wait for what the step reads."""
        step = self.program.steps[position]
        seconds = 0.0 if step.op is None else self.costs.seconds[step.op]
        while self.coming:
            trip = self.coming[0]
            due = trip.returns == position
            soon = (
                trip.back <= position
                and self.lanes[Role.PREFETCH] <= self.now + seconds
                and self._fits_until_read(trip, position)
            )
            if not (due or soon):
                break
            self.coming.popleft()
            while trip in self.lingering:
                self._release()
            self.need[position : trip.returns] += trip.size
            self._make_room(position)
            self.version_of.append(self.program.version_of[trip.version])
            self.renamed[trip.version] = version = len(self.version_of) - 1
            self._start(Role.PREFETCH, trip, writes=(version,))
        for trip in self.returns.get(position, ()):
            self._wait_until(self.ends[Role.PREFETCH, trip], Role.WAIT)
            self._write(Role.WAIT, trip, reads=(self.renamed[trip.version],))

    def _fits_until_read(self, trip: Trip, position: int) -> bool:
        most = int(self.need[position : trip.returns].max(initial=0))
        return (
            trip.leaves < position
            and trip not in self.lingering
            and most + self.lingering_bytes + trip.size <= self.limit
        )

    def _start(
        self, role: Role, trip: Trip, *, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()
    ) -> None:
        speed = self.link.to_host if role is Role.OFFLOAD else self.link.from_host
        start = max(self.now, self.lanes[role])
        if role is Role.PREFETCH:
            start = max(start, self.ends[Role.OFFLOAD, trip])
        self.lanes[role] = self.ends[role, trip] = end = start + trip.size / speed
        self.copies[role, self.numbers[trip]] = (start, end)
        self._write(role, trip, reads=reads, writes=writes)

    def _write(
        self, role: Role, trip: Trip, *, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()
    ) -> None:
        maker = self.program.steps[trip.made]
        self.starts.append(self.now)
        self.steps.append(Transfer(maker.block, role, self.numbers[trip], reads, writes))

    def _wait_until(self, moment: float, role: Role) -> None:
        self.waited[role] += max(0.0, moment - self.now)
        self.now = max(self.now, moment)

    def _execute(self, step: Step) -> None:
        reads = tuple(self.renamed.get(version, version) for version in step.reads)
        self.starts.append(self.now)
        self.steps.append(Step(step.op, step.block, step.role, reads, step.writes))
        self.now += self.costs.seconds[step.op]


def _grouped(chosen: Iterable[Trip], key: Callable[[Trip], int]) -> dict[int, list[Trip]]:
    groups: dict[int, list[Trip]] = {}
    for trip in chosen:
        groups.setdefault(key(trip), []).append(trip)
    return groups
