"""Simulated times of schedules with copies: when ops and copies run, on a device with a memory limit.

    op                starts when the op before and the copies that it needs have ended, and it fits
    copy to host      first in, first out; starts when the value is on the device
    copy from host    first in, first out; starts when the value is on the host and it fits into memory together with
                      all else, values that are still leaving included, from now to the op that needs it

So a copy from the host never takes memory that an op before its reader needs, and placing Pre(v) early does no
harm. It follows that a schedule deadlocks only if `ResolvedSchedule.base` exceeds the limit somewhere: with
every copy to the host ended and every copy from it as late as possible. It also follows that, with two
independent directions, more memory or bandwidth never costs time. On one shared bus the copy that entered its
queue first goes first, if it can start; there more memory may let a copy from the host go before others.

    whole   a value occupies the device until its copy to the host ends, and from the start of its copy back
    fluid   it does so in part: memory is released and allocated at the speed of the link; an op's input stays entire
            while the op runs; copies from the host pause where they would take memory that an op needs

The fluid model is the relaxation O.7'' / OR.5 of the thesis of A. Shilova (2021, ch. 3-4). The thesis pauses no
copy, but delays copies from the host as long as it can: a copy that is early, where it fits, changes no op's
start. By its Proposition 1, offloading as early as possible is best.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from fxremat.chains.resolved import LinkCopy, ResolvedSchedule
from fxremat.chains.schedule import Schedule
from fxremat.errors import InvalidSchedule

_BYTES = 1e-3  # bytes; smaller differences are rounding errors


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """The simulated times and memory of a schedule; lists have one entry for each of its operations."""

    time: float  # seconds until the last op and the last copy have ended
    idle: float  # seconds during which no op runs
    peak: int  # peak bytes
    memory: list[int]  # bytes during each operation
    starts: list[float]  # seconds at which each operation starts
    ends: list[float]  # seconds at which each operation ends
    hidden: float  # fraction of the seconds of copying during which an op ran


@dataclass(kw_only=True)
class LinkSpeeds:
    """The speeds of copies in both directions, in bytes per second."""

    to_host: float
    from_host: float
    shared: bool  # True: only one copy at a time, in either direction


@dataclass(eq=False)
class _Flow:
    """A copy that is running or paused."""

    copy: LinkCopy
    rate: float  # bytes per second
    since: float  # time in seconds at which the copy last started, resumed or paused
    moved: float = 0.0  # bytes that were copied until the time `since`
    target: float = 0.0  # number of copied bytes at which the copy ends or pauses
    until: float = inf  # time at which the copy reaches `target`; inf if it is paused

    def at(self, time: float) -> float:
        if self.until == inf:
            return self.moved
        return self.target if time >= self.until else self.moved + (time - self.since) * self.rate

    def head_for(self, target: float, time: float) -> None:
        """Continue the copy at `time` (seconds), until `target` bytes are copied in total."""
        if target == self.target and self.until < inf:
            return
        self.moved, self.since = self.at(time), time
        self.target = max(target, self.moved)
        self.until = time + (self.target - self.moved) / self.rate

    def pause(self, time: float) -> None:
        self.moved, self.since, self.until = self.at(time), time, inf


def run(script: ResolvedSchedule, schedule: Schedule, limit: int | None, link: LinkSpeeds, *, fluid: bool) -> TimedRun:
    """Compute when each op and copy of a resolved schedule runs, within `limit` bytes. Raises `InvalidSchedule`.

    It raises if neither an op nor a copy can proceed. `fluid`: memory is freed and allocated at the speed of
    copies.
    """
    return _Clock(script, schedule, limit, link, fluid).run()


class _Clock:
    def __init__(
        self, script: ResolvedSchedule, schedule: Schedule, limit: int | None, link: LinkSpeeds, fluid: bool
    ) -> None:
        self.script, self.schedule, self.link, self.fluid = script, schedule, link, fluid
        self.limit: float = inf if limit is None else limit
        # need[q]: bytes at moment q, including values whose copy to the host has not ended and values copied
        # back early
        self.need = np.array(script.base, dtype=np.int64)
        for copy in script.copies:
            if copy.outward:
                self.need[copy.stored.gone :] += copy.stored.size
        # waiting copies: first those from the host, then those to the host
        self.queues: tuple[deque[LinkCopy], deque[LinkCopy]] = deque(), deque()
        self.flows: list[_Flow | None] = [None, None]
        self.done: set[LinkCopy] = set()
        self.time, self.place, self.step = 0.0, 0, 0
        self.running = inf  # time at which the running op ends; inf if none runs
        self.peak = 0.0
        tokens = len(schedule.ops)
        self.memory, self.starts, self.ends = [0.0] * tokens, [0.0] * tokens, [0.0] * tokens
        # total seconds of ops, of copies, and of copies that run during ops
        self.busy = self.copying = self.beneath = 0.0

    def run(self) -> TimedRun:
        self._reach_slot()
        while True:
            while self._start_op() or self._start_copies():
                pass
            event = self._next_event()
            if event == inf:
                break
            self._advance(event)
        if self.step < len(self.script.steps) or any(self.queues) or any(self.flows):
            raise InvalidSchedule(self._stuck())
        return TimedRun(
            time=self.time,
            idle=max(0.0, self.time - self.busy),
            peak=_whole(self.peak),
            memory=[_whole(memory) for memory in self.memory],
            starts=self.starts,
            ends=self.ends,
            hidden=self.beneath / self.copying if self.copying else 1.0,
        )

    def _reach_slot(self) -> None:
        """Process the drops and copies between two ops, after an op has ended or the step has begun."""
        self._see()
        now = self._used()
        for token in self.script.slots[self.step]:
            self.memory[token.token] = now
            now -= token.freed
            self.starts[token.token] = self.ends[token.token] = self.time
            if token.copy:
                self.queues[token.copy.outward].append(token.copy)
        self.place = 3 * self.step + 1
        self._see()

    def _used(self) -> float:
        """Return the bytes on the device at the current time."""
        return float(self.need[self.place]) + self._partial(self.place)

    def _partial(self, place: int) -> float:
        """Return the bytes that unfinished copies add to `need` at the moment `place`; 0 unless `fluid`."""
        if not self.fluid:
            return 0.0
        coming, leaving = self.flows
        change = 0.0
        if leaving and leaving.copy.stored.gone <= place:
            change -= leaving.at(self.time)
        if coming and place < coming.copy.due:
            change += coming.at(self.time)
        return change

    def _see(self) -> None:
        used = self._used()
        self.peak = max(self.peak, used)
        if self.running < inf:
            token = self.script.steps[self.step].token
            self.memory[token] = max(self.memory[token], used)

    def _start_op(self) -> bool:
        if self.running < inf or self.step == len(self.script.steps):
            return False
        step = self.script.steps[self.step]
        if self._excess() > 0 or not all(copy in self.done for copy in step.needs):
            return False
        self.starts[step.token] = self.time
        self.running = self.time + step.seconds
        self.busy += step.seconds
        self.place += 1
        self._see()
        return True

    def _excess(self) -> float:
        """Return the bytes that are missing for the next op to start, or for the time right after it; 0.0 if it fits.
        """
        places = (self.place + 1, self.place + 2)
        most = max(float(self.need[place]) + self._partial(place) for place in places) - self.limit
        return most if most > (_BYTES if self.fluid else 0) else 0.0

    def _start_copies(self) -> bool:
        """Start, or resume, the copies of both queues that can run; return whether any did.

        On a shared bus only one runs: the one that entered its queue first, if it can.
        """
        heads = [
            flow.copy.token if flow else queue[0].token if queue else inf
            for flow, queue in zip(self.flows, self.queues, strict=True)
        ]
        started = False
        for way in sorted((0, 1), key=heads.__getitem__):
            other = self.flows[1 - way]
            if self.link.shared and other and other.until < inf:
                continue
            started = self._start_copy(way) or started
        return started

    def _start_copy(self, way: int) -> bool:
        flow, queue = self.flows[way], self.queues[way]
        if flow is None:
            if not queue or not (queue[0].after is None or queue[0].after in self.done):
                return False
            copy = queue[0]
            target = self._room(copy, 0.0)
            if target <= 0 < copy.stored.size or (not self.fluid and target < copy.stored.size):
                return False
            queue.popleft()
            flow = self.flows[way] = _Flow(
                copy, self.link.to_host if copy.outward else self.link.from_host, self.time
            )
            self.starts[copy.token] = self.time
            if not copy.outward and not self.fluid:
                self.need[self.place : copy.due] += copy.stored.size
                self._see()
            flow.head_for(target, self.time)
            return True
        if flow.until < inf:
            return False
        target = self._room(flow.copy, flow.moved)
        if target <= flow.moved + _BYTES and target < flow.copy.stored.size:
            return False
        flow.head_for(target, self.time)
        return True

    def _room(self, copy: LinkCopy, moved: float) -> float:
        """Return how many bytes of a copy may have been copied, given the memory that ops need."""
        size = copy.stored.size
        if copy.outward:
            return size
        room = self.limit - float(self.need[self.place : copy.due].max())
        return max(moved, min(size, room))

    def _next_event(self) -> float:
        event = self.running
        for flow in self.flows:
            if flow:
                event = min(event, flow.until)
        if self.fluid and self.running == inf and self.step < len(self.script.steps):
            event = min(event, self._fits_at())
        return float(event)

    def _fits_at(self) -> float:
        """Return the time at which the next op fits, as a copy to the host frees memory; inf if it never does."""
        leaving, event = self.flows[1], 0.0
        for place in (self.place + 1, self.place + 2):
            excess = float(self.need[place]) + self._partial(place) - self.limit
            if excess > _BYTES:
                if leaving is None or leaving.copy.stored.gone > place:
                    return inf
                event = max(event, self.time + excess / leaving.rate, np.nextafter(self.time, inf))
        return event or inf

    def _advance(self, time: float) -> None:
        span = time - self.time
        active = sum(flow is not None and flow.until < inf for flow in self.flows)
        self.copying += span * active
        self.beneath += span * active if self.running < inf else 0.0
        self.time = time
        self._see()
        self._settle(1)
        if self.running <= time:
            self.ends[self.script.steps[self.step].token] = time
            self.running = inf
            self.step += 1
            self.place += 1
            self._reach_slot()
        coming = self.flows[0]
        if self.fluid and coming and coming.until < inf:
            coming.head_for(self._room(coming.copy, coming.at(time)), time)
        self._settle(0)

    def _settle(self, way: int) -> None:
        """If the copy of a direction (0: from the host, 1: to the host) has reached its target, complete or pause it.
        """
        flow = self.flows[way]
        if flow is None or flow.until > self.time:
            return
        copy = flow.copy
        if flow.target < copy.stored.size:
            flow.pause(self.time)
            return
        self.flows[way] = None
        self.ends[copy.token] = self.time
        self.done.add(copy)
        if copy.outward:
            self.need[copy.stored.gone :] -= copy.stored.size
        elif self.fluid:
            self.need[self.place : copy.due] += copy.stored.size
        self._see()

    def _stuck(self) -> str:
        """Describe the deadlock: the op that cannot start, and what it lacks."""
        copy = self.flows[0].copy if self.flows[0] else self.queues[0][0] if self.queues[0] else None
        if copy is None:
            step = self.script.steps[self.step]
            where, lacks = f"op {step.token + 1}, {self.schedule.ops[step.token]}", self._excess()
        else:
            where = f"op {copy.token + 1}, {self.schedule.ops[copy.token]}"
            lacks = float(self.need[self.place : copy.due].max()) + copy.stored.size - self.limit
        return f"{where}: deadlock: nothing can proceed; it lacks {lacks:.0f} bytes of {self.limit:.0f}"


def _whole(size: float) -> int:
    return ceil(size - _BYTES)
