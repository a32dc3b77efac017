"""A simulated clock, compiled by numba, of a program with copies to the host: when steps and copies run and wait.

    copy out    starts after the step at `starts`; after the step at `leaves` nothing on the device reads the value
    release     of the value's memory, once its copy out has ended; a step that needs the memory before waits for that
    copy in     starts, from the step at `begins` on, as soon as the value fits into memory at all steps up to its first
                reader, and the link is free before the step ends; the value that is read first is copied first
    wait        for the end of the copy in, before the first reader, at `first`

The copies of each direction run one after the other, concurrently with the ops (spec/offload.md, O.3 and O.4). A trip
is a value's way to the host and back; its two copies have its number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.jit import jit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

EXECUTE, OFFLOAD, RELEASE, PREFETCH, WAIT = range(5)
_NOW, _OUT, _BACK = range(3)  # entries of `Log.clock`: the time, and when the link is free in each direction
# Entries of `Log.counts`: events so far, begin and end of the queue, bytes in it, event at the split, peak.
_EVENTS, _HEAD, _TAIL, _BYTES, _TURN, _PEAK = range(6)


class CopiesOut(NamedTuple):
    """The copies to the host, as arrays with an entry for each."""

    trips: Ints  # number of the trip
    sizes: Ints  # bytes
    starts: Ints  # position of the step after which the copy starts
    leaves: Ints  # position of the last step that reads the value
    by_start: Ints  # indices of copies, sorted by `starts`
    by_leave: Ints  # indices of copies, sorted by `leaves`


class CopiesIn(NamedTuple):
    """The copies to the device, as arrays with an entry for each, in the order of their first readers."""

    trips: Ints  # number of the trip
    sizes: Ints  # bytes
    begins: Ints  # position of the first step before which the copy may start
    first: Ints  # position of the first reader


class Log(NamedTuple):
    """All that happens in a run of the clock, and the state of the run."""

    events: Ints  # [events, 2]: a kind such as `OFFLOAD`; the position of a step, or the index of a copy
    starts: Floats  # by event: its time in seconds
    out: Floats  # [copies_out, 2]: start and end of each copy
    back: Floats  # [copies_in, 2]: start and end of each copy
    ends: Floats  # by trip: when its copy out ends; 0 for values that were on the host from the start
    queue: Ints  # copies out whose values nothing reads any more, and whose memory is not released yet
    lingers: Ints  # by trip: whether its copy out is in the queue
    clock: Floats  # see `_NOW`
    waited: Floats  # seconds that steps wait for copies out, and for copies back
    counts: Ints  # see `_EVENTS`


def blank_log(steps: int, out: CopiesOut, back: CopiesIn) -> Log:
    """Return an empty log for a run of `steps` steps with these copies."""
    events = steps + 2 * out.trips.size + 2 * back.trips.size
    trips = 1 + max(out.trips.max(initial=-1), back.trips.max(initial=-1))
    return Log(
        events=np.zeros((events, 2), np.int64),
        starts=np.zeros(events),
        out=np.zeros((out.trips.size, 2)),
        back=np.zeros((back.trips.size, 2)),
        ends=np.zeros(trips),
        queue=np.zeros(out.trips.size, np.int64),
        lingers=np.zeros(trips, np.int64),
        clock=np.zeros(3),
        waited=np.zeros(2),
        counts=np.zeros(6, np.int64),
    )


def run(
    need: Ints,
    seconds: Floats,
    split: int,
    out: CopiesOut,
    back: CopiesIn,
    speeds: tuple[float, float],
    limit: int,
) -> Log:
    """Simulate the steps once, and return what happens. O(steps + copies_in * steps between start and first reader).

    Args:
        need: bytes at each step, without values that are on the host then; it is overwritten.
        seconds: of each step.
        split: position of the first step of the backward graph.
        speeds: bytes per second to the host, and back.
        limit: bytes; copies in start early, and memory is released late, only as far as steps stay within them.
    """
    log = blank_log(need.size, out, back)
    _run(need, seconds, split, out, back, speeds[0], speeds[1], limit, log)
    return log


def events_of(log: Log) -> int:
    """Return the number of events."""
    return int(log.counts[_EVENTS])


def split_of(log: Log) -> int:
    """Return the index of the first event of the backward graph."""
    return int(log.counts[_TURN])


def peak_of(log: Log) -> int:
    """Return the bytes at the worst step."""
    return int(log.counts[_PEAK])


def time_of(log: Log) -> float:
    """Return the seconds of the run."""
    return float(log.clock[_NOW])


@jit
def _run(
    need: Ints,
    seconds: Floats,
    split: int,
    out: CopiesOut,
    back: CopiesIn,
    to_host: float,
    from_host: float,
    limit: int,
    log: Log,
) -> None:
    coming = due = started = left = 0
    for position in range(need.size):
        _make_room(need[position], out, limit, log)
        if position == split:
            log.counts[_TURN] = log.counts[_EVENTS]
        while coming < back.trips.size:
            soon = _may_come(need, position, seconds[position], coming, back, limit, log)
            if not (soon or back.first[coming] == position):
                break
            while log.lingers[back.trips[coming]]:
                _release(out, log)
            need[position : back.first[coming]] += back.sizes[coming]
            _make_room(need[position], out, limit, log)
            after = log.ends[back.trips[coming]]
            _copy(_BACK, after, back.sizes[coming] / from_host, log.back[coming], log)
            _note(PREFETCH, coming, log)
            coming += 1
        while due < back.trips.size and back.first[due] == position:
            _wait(log.back[due, 1], 1, log)
            _note(WAIT, due, log)
            due += 1
        log.counts[_PEAK] = max(log.counts[_PEAK], need[position] + log.counts[_BYTES])
        _note(EXECUTE, position, log)
        log.clock[_NOW] += seconds[position]
        while started < out.trips.size and out.starts[out.by_start[started]] == position:
            number = out.by_start[started]
            _copy(_OUT, 0.0, out.sizes[number] / to_host, log.out[number], log)
            log.ends[out.trips[number]] = log.out[number, 1]
            _note(OFFLOAD, number, log)
            started += 1
        while left < out.trips.size and out.leaves[out.by_leave[left]] == position:
            number = out.by_leave[left]
            log.queue[log.counts[_TAIL]] = number
            log.counts[_TAIL] += 1
            log.counts[_BYTES] += out.sizes[number]
            log.lingers[out.trips[number]] = 1
            left += 1
    while log.counts[_HEAD] < log.counts[_TAIL]:
        _release(out, log)


@jit
def _make_room(need: int, out: CopiesOut, limit: int, log: Log) -> None:
    """Release memory whose copies out have ended; wait for more as long as a step of `need` bytes does not fit."""
    while log.counts[_HEAD] < log.counts[_TAIL]:
        ends = log.ends[out.trips[log.queue[log.counts[_HEAD]]]]
        if ends > log.clock[_NOW] and need + log.counts[_BYTES] <= limit:
            return
        _release(out, log)


@jit
def _release(out: CopiesOut, log: Log) -> None:
    number = log.queue[log.counts[_HEAD]]
    log.counts[_HEAD] += 1
    log.counts[_BYTES] -= out.sizes[number]
    log.lingers[out.trips[number]] = 0
    _wait(log.ends[out.trips[number]], 0, log)
    _note(RELEASE, number, log)


@jit
def _may_come(
    need: Ints, position: int, seconds: float, number: int, back: CopiesIn, limit: int, log: Log
) -> bool:
    if (
        back.begins[number] > position
        or log.lingers[back.trips[number]]
        or log.clock[_BACK] > log.clock[_NOW] + seconds
    ):
        return False
    most = 0
    for place in range(position, back.first[number]):
        most = max(most, need[place])
    return bool(most + log.counts[_BYTES] + back.sizes[number] <= limit)


@jit
def _copy(lane: int, after: float, seconds: float, span: Floats, log: Log) -> None:
    """Run a copy after those of its direction, no earlier than `after`; write start and end to `span`.

    Args:
        lane: the direction: `_OUT` or `_BACK`.
    """
    span[0] = max(log.clock[_NOW], log.clock[lane], after)
    span[1] = span[0] + seconds
    log.clock[lane] = span[1]


@jit
def _wait(moment: float, way: int, log: Log) -> None:
    log.waited[way] += max(0.0, moment - log.clock[_NOW])
    log.clock[_NOW] = max(log.clock[_NOW], moment)


@jit
def _note(kind: int, number: int, log: Log) -> None:
    at = log.counts[_EVENTS]
    log.events[at, 0] = kind
    log.events[at, 1] = number
    log.starts[at] = log.clock[_NOW]
    log.counts[_EVENTS] = at + 1
