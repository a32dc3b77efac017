"""A simulation, compiled by numba, of a program with copies to the host: when steps and copies run and wait.

    copy out    starts after the step at `starts`; after the step at `leaves` nothing on the device reads the value
    release     frees the value's memory once its copy out has ended; a step that needs it earlier waits for that
    copy in     starts, from the step at `begins` on, as soon as the value fits into memory at all steps up to its first
                reader, and the link becomes free before the step ends; values are copied in the order of first readers
    wait        for the end of the copy in, before the first reader, at `first`

The copies of each direction run one after the other, concurrently with the ops (spec/offload.md, O.3 and O.4).
A trip is a copy of a value to the host and its copy back; both have the trip's number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.jit import jit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

EXECUTE, OFFLOAD, RELEASE, PREFETCH, WAIT = range(5)
# indices in `Log.clock`: the current time, and the times at which the link is free in each direction
_NOW, _OUT, _BACK = range(3)
# indices in `Log.counts`: number of events, begin and end of the queue, bytes in it, first backward event, peak
_EVENTS, _HEAD, _TAIL, _BYTES, _TURN, _PEAK = range(6)


class CopiesOut(NamedTuple):
    """The copies to the host, as arrays with one entry for each."""

    trips: Ints  # number of the copy's round trip
    sizes: Ints  # bytes of each copy
    starts: Ints  # index of the step after which the copy starts
    leaves: Ints  # index of the last step that reads the value
    by_start: Ints  # indices of copies, sorted by `starts`
    by_leave: Ints  # indices of copies, sorted by `leaves`


class CopiesIn(NamedTuple):
    """The copies to the device, as arrays with one entry for each, in the order of their first readers."""

    trips: Ints  # number of the copy's round trip
    sizes: Ints  # bytes of each copy
    begins: Ints  # index of the first step before which the copy may start
    first: Ints  # index of the first step that reads the value


class Log(NamedTuple):
    """The state of a simulation while it runs, and its result."""

    events: Ints  # [events, 2]: a kind such as `OFFLOAD`, and the index of a step or copy
    starts: Floats  # seconds at which each event happens
    out: Floats  # [copies_out, 2]: start and end of each copy in seconds
    back: Floats  # [copies_in, 2]: start and end of each copy in seconds
    ends: Floats  # by round trip: end of its copy out in seconds; 0 for values that are on the host at first
    queue: Ints  # copies out whose values are no longer read, but whose device memory is not freed yet
    lingers: Ints  # by round trip: 1 if its copy out is in `queue`
    clock: Floats  # current times, see `_NOW`
    waited: Floats  # seconds for which steps wait for copies to the host, and for copies from it
    counts: Ints  # counters, see `_EVENTS`


def blank_log(steps: int, out: CopiesOut, back: CopiesIn) -> Log:
    """Return an empty log for a simulation of `steps` steps with these copies."""
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
    """Simulate the steps once; return what happened. O(steps + copies_in * steps between start and first reader).

    Args:
        need: bytes at each step, without values that are on the host then; it is overwritten.
        seconds: seconds of each step.
        split: index of the first step of the backward graph.
        speeds: bytes per second to the host, and back.
        limit: bytes; copies in start early, and memory is released late, only as far as steps stay within this limit.
    """
    log = blank_log(need.size, out, back)
    _run(need, seconds, split, out, back, speeds[0], speeds[1], limit, log)
    return log


def events_of(log: Log) -> int:
    """Return the number of events in a simulation."""
    return int(log.counts[_EVENTS])


def split_of(log: Log) -> int:
    """Return the index of the first event of the backward graph."""
    return int(log.counts[_TURN])


def peak_of(log: Log) -> int:
    """Return the largest bytes at any step."""
    return int(log.counts[_PEAK])


def time_of(log: Log) -> float:
    """Return the seconds of the simulated step."""
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
    """Free memory whose copies to the host have ended; while a step of `need` bytes does not fit, wait for more copies.
    """
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
    """Simulate a copy that starts after earlier copies in its direction, and not before the time `after`.

    Start and end are stored in `span`.

    Args:
        lane: the direction, `_OUT` or `_BACK`.
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
