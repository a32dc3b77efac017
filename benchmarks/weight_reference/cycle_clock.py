"""The times of ops and copies once the gaps are chosen: the cycle is run over and over on a clock.

    op             starts when the one before has ended, its unit is there, and it fits beside what is reserved
    copy back      in order of need; starts when the unit has left and the host has it, the link is free, and from now
                   to the op that needs it every op fits beside it, evictions taken as instantaneous; at most `ahead`
                   ops before that op
    copy out       in order of production, as soon as the link is free
    copy ahead     where the link would be idle until the next copy out: of a unit that leaves later than it is written
    memory         is reserved from the start of a copy back to the end of the copy out

The time of a step is the difference of two starts of the first op, once the cycle repeats itself. Algorithm 2 of Weight
Offloading Strategies (see `cycle`), which leaves open how memory is tested, as a simulation of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from benchmarks.weight_reference.cycle import Cycle, Gap
from fxremat.errors import InvalidSchedule

CYCLES = 8
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Event:
    """An op, copy or drop that took from `start` to `end`, in seconds."""

    kind: str  # "op", "back", "out" (and the memory is let go), "ahead" (it is not), "drop" (at once, without a copy)
    place: int  # of the op, over all cycles; for copies, of the one after which the unit leaves, or that needs it
    unit: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class TimedCycle:
    """A run of several cycles."""

    time: float  # seconds of a cycle in the end
    events: tuple[Event, ...]


def run(cycle: Cycle, chosen: Sequence[Gap], *, ahead: int | None = None, cycles: int = CYCLES) -> TimedCycle:
    """Run a choice of gaps. O(cycles * ops * ops between a copy and its use).

    Args:
        ahead: how many ops before its use a unit may come back at most. None: as early as it fits.

    Raises:
        InvalidSchedule: an op can never start: the gaps do not make room for it.
    """
    return _Run(cycle, chosen, ahead, cycles).run()


@dataclass(eq=False)
class _Run:
    cycle: Cycle
    chosen: Sequence[Gap]
    ahead: int | None
    cycles: int
    now: float = 0.0
    place: int = 0  # of the next op to start, or of the one that runs
    running: float = inf  # when it ends
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        cycle = self.cycle
        self.count = len(cycle.ops)
        self.total = self.count * self.cycles
        self.leaves = {gap.start: gap.unit for gap in self.chosen}
        self.first_out = self._first_out()
        needs = {cycle.end(gap) for gap in self.chosen}
        self.needed = deque(place for place in range(self.total) if place % self.count in needs)
        away = {gap.unit for gap in self.chosen if cycle.end(gap) <= gap.start}  # over the end of the cycle
        self.there = [unit not in away for unit in range(len(cycle.units))]
        self.reserved = sum(size for size, there in zip(cycle.units, self.there, strict=True) if there)
        self.hosted = [unit in away for unit in range(len(cycle.units))]  # the host has it as it is
        self.leaving: set[int] = set()  # units whose copy out is under way or waits
        self.coming: set[int] = set()
        self.out: deque[tuple[int, int]] = deque()  # (unit, place) to be copied out and let go
        self.early: deque[tuple[int, int]] = deque()  # the same, to be copied where there is time
        self.back_until = self.out_until = inf
        self.back_copy = self.out_copy = (0, 0)
        self.out_early = False

    def _first_out(self) -> dict[int, int]:
        """For each unit with gaps, the start of the first one after the op that writes it."""
        first: dict[int, int] = {}
        for gap in self.chosen:
            writer = self.cycle.writer[gap.unit]
            if (
                gap.unit not in first
                or (gap.start - writer) % self.count < (first[gap.unit] - writer) % self.count
            ):
                first[gap.unit] = gap.start
        return first

    def run(self) -> TimedCycle:
        while True:
            while self._start_op() or self._start_back() or self._start_out():
                pass
            event = min(self.running, self.back_until, self.out_until)
            if event == inf:
                break
            self.now = event
            self._end_out()
            self._end_back()
            self._end_op()
        if self.place < self.total:
            op = self.cycle.ops[self.place % self.count]
            raise InvalidSchedule(f"{op.name} never starts: too little leaves the device before it")
        starts = [e.start for e in self.events if e.kind == "op" and e.place % self.count == 0]
        return TimedCycle(time=starts[-1] - starts[-2], events=tuple(self.events))

    def _start_op(self) -> bool:
        if self.running < inf or self.place == self.total:
            return False
        op = self.cycle.ops[self.place % self.count]
        if not self.there[op.unit] or op.unit in self.coming or op.unit in self.leaving:
            return False
        if self.reserved + op.beside > self.cycle.memory + _ROUNDING:
            return False
        if op.writes and self.out_until < inf and self.out_copy[0] == op.unit:
            return False  # it is being read
        self.running = self.now + op.seconds
        self.events.append(Event("op", self.place, op.unit, self.now, self.running))
        return True

    def _end_op(self) -> None:
        if self.running > self.now:
            return
        self.running = inf
        position = self.place % self.count
        op = self.cycle.ops[position]
        if op.writes:
            self.hosted[op.unit] = False
            if op.unit in self.first_out and self.first_out[op.unit] != position:
                self.early.append((op.unit, self.place))
        if position in self.leaves:
            self._leave(op.unit)
        self.place += 1

    def _leave(self, unit: int) -> None:
        """The op that just ended was the last before a gap."""
        self.early = deque(waiting for waiting in self.early if waiting[0] != unit)
        if self.hosted[unit]:
            self.there[unit] = False
            self.reserved -= self.cycle.units[unit]
            self.events.append(Event("drop", self.place, unit, self.now, self.now))
            return
        self.leaving.add(unit)
        if not (self.out_until < inf and self.out_copy[0] == unit):
            self.out.append((unit, self.place))

    def _start_out(self) -> bool:
        if self.out_until < inf:
            return False
        if self.out:
            self.out_copy, self.out_early = self.out.popleft(), False
        elif self.early and self._time_for(self.early[0][0]):
            self.out_copy, self.out_early = self.early.popleft(), True
        else:
            return False
        self.out_until = self.now + self.cycle.units[self.out_copy[0]] / self.cycle.to_host
        kind = "ahead" if self.out_early else "out"
        self.events.append(Event(kind, self.out_copy[1], self.out_copy[0], self.now, self.out_until))
        return True

    def _time_for(self, unit: int) -> bool:
        """Tell whether a copy ahead would be over before the next op ends whose unit has to leave by a copy."""
        moment = self.running if self.running < inf else self.now
        place = self.place if self.running < inf else self.place - 1
        end = self.now + self.cycle.units[unit] / self.cycle.to_host
        while place < self.total:
            position = place % self.count
            if place >= self.place and self.first_out.get(self.leaves.get(position, -1)) == position:
                other = self.leaves[position]
                if other == unit or self.cycle.writer[other] == position:
                    return moment >= end - _ROUNDING or other == unit
            if moment >= end:
                return True
            place += 1
            moment += self.cycle.ops[place % self.count].seconds
        return True

    def _end_out(self) -> None:
        if self.out_until > self.now:
            return
        unit = self.out_copy[0]
        self.out_until = inf
        self.hosted[unit] = True
        if unit in self.leaving:
            self.leaving.discard(unit)
            self.there[unit] = False
            self.reserved -= self.cycle.units[unit]
            if self.out_early:  # it was to stay, and was needed away before the copy was over
                self.events.append(Event("drop", self.out_copy[1], unit, self.now, self.now))

    def _start_back(self) -> bool:
        if self.back_until < inf or not self.needed:
            return False
        place = self.needed[0]
        unit = self.cycle.ops[place % self.count].unit
        if self.there[unit] or not self.hosted[unit]:
            return False
        if self.ahead is not None and place - self.place > self.ahead:
            return False
        if not self._fits(place, unit):
            return False
        self.needed.popleft()
        self.there[unit] = True
        self.coming.add(unit)
        self.reserved += self.cycle.units[unit]
        self.back_copy = (unit, place)
        self.back_until = self.now + self.cycle.units[unit] / self.cycle.from_host
        self.events.append(Event("back", place, unit, self.now, self.back_until))
        return True

    def _fits(self, place: int, unit: int) -> bool:
        """Tell whether a unit fits beside what is reserved now, and beside every op until the one that needs it."""
        cycle, size = self.cycle, self.cycle.units[unit]
        limit = cycle.memory + _ROUNDING
        beside = cycle.ops[self.place % self.count].beside if self.running < inf else 0.0
        if self.reserved + beside + size > limit:
            return False
        staying = self.reserved - sum(cycle.units[other] for other in self.leaving) + size
        for later in range(self.place, place + 1):
            op = cycle.ops[later % self.count]
            if staying + op.beside > limit:
                return False
            if later % self.count in self.leaves:
                staying -= cycle.units[op.unit]
        return True

    def _end_back(self) -> None:
        if self.back_until > self.now:
            return
        self.back_until = inf
        self.coming.discard(self.back_copy[0])
