"""Activations that are copied to the host between two uses: which can be, which are, and the program that copies them.

    round trip    a copy of a forward value to the host and back, between its last reader in the forward and its first
                  reader in the backward
    offload       right after the step that computes the value: as early as possible (Proposition 1 of the thesis by A.
                  Shilova, 2021)

The simulated clock decides when the value's memory is released, and when it is copied back (`transfers.clock`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxremat.chains.schedule import Offload, Prefetch, Schedule, Value
from fxremat.errors import InvalidSchedule
from fxremat.step.costs import Costs, Link
from fxremat.step.layout import Layout
from fxremat.step.liveness import live_bytes
from fxremat.step.order import Replay
from fxremat.step.program import Program, Recorder, Role, Transfer
from fxremat.step.step_graph import Origin, bits_of, numbers_of
from fxremat.step.transferred import ProgramWithTransfers
from fxremat.transfers.clock import Ints
from fxremat.transfers.copies import CopyIn, CopyOut, durations, need_of, time_copies

# a value is kept on the device if it has fewer bytes than the peak without recomputation divided by this number
SMALL = 2000


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A tensor that can be on the host between two of its readers, the steps with indices `leaves` and `returns`."""

    version: int
    size: int  # bytes of the value
    made: int  # index of the step that computes the value
    leaves: int  # index of the last step that reads the value before it is freed on the device
    returns: int  # index of the first step that reads the value after its copy back
    back: int  # index of the first step before which the copy back may start

    @property
    def away(self) -> slice:
        """The indices of the steps during which the value need not be on the device."""
        return slice(self.leaves + 1, self.returns)


def least_size(keep_all_peak: int) -> int:
    """Return the smallest size in bytes for which copying a value to the host and back is considered."""
    return max(1, keep_all_peak // SMALL)


def trips(program: Program, costs: Costs, least: int = 1) -> list[RoundTrip]:
    """Return the possible round trips to the host between forward and backward, sorted by start. O(steps).

    Left out are values of fewer than `least` bytes, and values whose storage is larger than their tensor.
    """
    found = _Visits.of(program).trips(dict.fromkeys(range(len(program.version_of)), program.split), costs)
    return [trip for trip in found if trip.size >= least and trip.leaves < program.split]


def trips_of(layout: Layout, schedule: Schedule, costs: Costs) -> tuple[Program, list[RoundTrip]]:
    """Return the program of a schedule, and the round trips that its `Offload` and `Prefetch` operations describe.

    A value that is copied back a second time (a solver of chains may drop it and prefetch it again) stays on
    the device after the first time.

    Raises:
        InvalidSchedule: the schedule offloads a value that is not stored, or prefetches one that is not on the host.
    """
    replay, recorder = Replay(layout), Recorder(layout)
    hosted: dict[Value, Mapping[int, int]] = {}
    back: dict[int, int] = {}
    for op in schedule.ops:
        match op:
            case Offload(value):
                recorder.follow(replay.ops, replay.blocks)
                leaves = numbers_of(replay.only_in(value.kind, value.index - 1))
                hosted[value] = {each: recorder.current[each] for each in leaves}
            case Prefetch(value):
                if value not in hosted:
                    raise InvalidSchedule(f"{op} is not on the host")
                recorder.follow(replay.ops, replay.blocks)
                if replay.restore(value.kind, value.index - 1, bits_of(hosted[value])):
                    recorder.current |= hosted[value]
                for version in hosted[value].values():
                    back.setdefault(version, len(replay.ops))
            case _:
                replay.execute(op)
    order = replay.order()
    recorder.follow(order.ops, order.blocks)
    program = recorder.whole_program(order.split)
    return program, _Visits.of(program).trips(back, costs)


@dataclass(frozen=True)
class _Visits:
    """For each version of a value (the result of one execution), the indices of the steps that read or write it."""

    program: Program
    at: dict[int, list[int]]

    @classmethod
    def of(cls, program: Program) -> _Visits:
        at: dict[int, list[int]] = {}
        for position, step in enumerate(program.steps):
            for version in (*step.reads, *step.writes):
                at.setdefault(version, []).append(position)
        return cls(program, at)

    def trips(self, back: Mapping[int, int], costs: Costs) -> list[RoundTrip]:
        """Return the round trips of tensors that can be copied to the host, sorted by the step that computes each.

        Args:
            back: version -> index of the first step before which it may be copied back.
        """
        found = []
        for version, position in back.items():
            visits = self.at.get(version, [])
            place = bisect_left(visits, position)
            size = self._travels(version, costs)
            if size and 0 < place < len(visits):
                leaves, returns = visits[place - 1], visits[place]
                soonest = max(position, self.program.split) if returns >= self.program.split else position
                found.append(RoundTrip(version, size, visits[0], leaves, returns, soonest))
        return sorted(found, key=lambda trip: trip.made)

    def _travels(self, version: int, costs: Costs) -> int:
        """Return the bytes of a tensor (by its version number) if it can be copied to the host, else 0.

        It cannot if it was not computed by a forward op, if the caller holds it, if its tensor does not fill
        its storage, or if the user wants to keep it on the device.
        """
        graph = self.program.layout.graph
        value = graph.values[self.program.version_of[version]]
        size = costs.sizes.values[value.index]
        if value.origin is not Origin.FORWARD or value.index in graph.pinned | graph.freed_at_split | costs.staying:
            return 0
        return size if value.whole and value.bytes <= size else 0


def cap(need: Ints, possible: Sequence[RoundTrip], limit: int) -> list[RoundTrip] | None:
    """Return round trips to the host with which a program fits into `limit` bytes; None if no such set exists.

    While a step exceeds the limit, the earliest value that is not used at the worst step is chosen (the
    autocapper of A. Shilova's thesis, 2021, 4.3); in the end, round trips that turned out unnecessary are
    removed.

    Args:
        need: bytes at each step; values on the host are subtracted, in place.
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


def swap(program: Program, chosen: Sequence[RoundTrip], costs: Costs, link: Link, limit: int) -> ProgramWithTransfers:
    """Return the program with the copies of these round trips as steps; it stays within `limit` bytes if possible.

    O(steps + trips * steps between).
    """
    need = need_of(program, live_bytes(program, costs.sizes))
    copies_out, copies_in = copies_of(program, chosen, need)
    seconds = durations(program, costs)
    return time_copies(program, copies_out, copies_in, need, seconds, link, limit).performed(costs)


def most_on_host(program: Program, costs: Costs, link: Link) -> int:
    """Return the peak of bytes on the host; a value counts from the beginning of its copy out to its copy back's end.
    """
    there: dict[int, int] = {}
    now = most = 0
    for step in program.steps:
        if not isinstance(step, Transfer) or step.state_of is not None:
            continue
        if step.role is Role.OFFLOAD:
            there[step.trip] = link.on_host(costs.sizes.values[program.version_of[step.reads[0]]])
            now += there[step.trip]
            most = max(most, now)
        elif step.role is Role.WAIT:
            now -= there.pop(step.trip, 0)
    return most


def copies_of(
    program: Program, chosen: Sequence[RoundTrip], need: Ints, first: int = 0
) -> tuple[list[CopyOut], list[CopyIn]]:
    """Return the copies out and in of these round trips, numbered from `first` on.

    Args:
        need: bytes at each step; values on the host are subtracted, in place.
    """
    copies_out: list[CopyOut] = []
    copies_in: list[CopyIn] = []
    for number, trip in enumerate(chosen, first):
        need[trip.away] -= trip.size
        block = program.steps[trip.made].block
        copies_out.append(
            CopyOut(
                trip=number,
                block=block,
                version=trip.version,
                size=trip.size,
                starts=trip.made,
                leaves=trip.leaves,
            )
        )
        copies_in.append(
            CopyIn(
                trip=number,
                block=block,
                version=trip.version,
                size=trip.size,
                begins=max(trip.back, trip.leaves + 1),
                first=trip.returns,
            )
        )
    return copies_out, copies_in
