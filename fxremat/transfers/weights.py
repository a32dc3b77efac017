"""Weights that live on the host, and updates of weights inside the step, as steps of a program.

    update     right after the last step that reads the parameter or writes its gradient
    resident   a parameter that stays on the device, with its optimizer state: bytes in every step
    hosted     a parameter on the host: it is copied in before its first reader (and again in the backward, if it is
               released in between), updated, and copied back
    state      the optimizer state of a hosted parameter: it is copied separately, before the update and after it

What is kept on the host is chosen greedily, by the bytes above the limit that it removes for each byte that is
copied, as in Algorithm 1 of Beaumont et al., Weight Offloading Strategies for Training Large DNN Models (2022).
Activations compete by the same measure. The simulated clock decides when each copy runs (`transfers.clock`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from fxremat.errors import FxrematError
from fxremat.step.costs import Costs, Link, ParameterUpdate
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Program, Role, Step, Transfer
from fxremat.transfers.activations import RoundTrip, copies_of
from fxremat.transfers.clock import Ints
from fxremat.transfers.copies import CopyIn, CopyOut, TimedCopies, durations, need_of, time_copies


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A choice of what the host stores: parameters with their optimizer state, and activations until the backward."""

    hosted: frozenset[int]  # parameters that are stored on the host
    # of these, the parameters that are also freed on the device between forward and backward (copied in twice a step)
    twice: frozenset[int] = frozenset()
    trips: tuple[RoundTrip, ...] = ()  # activations that are copied to the host until the backward




def update_inside(program: Program, units: Iterable[ParameterUpdate]) -> Program:
    """Return the program with an optimizer update for each parameter in `units`, all of them on the device. O(steps).
    """
    if any(isinstance(step, Transfer) for step in program.steps):
        raise FxrematError("updates come before transfers: this program has transfers already")
    graph = program.layout.graph
    last: dict[int, int] = {}
    for position, step in enumerate(program.steps):
        last |= dict.fromkeys((*step.reads, *step.writes), position)
    after: dict[int, list[Transfer]] = {}
    for unit in units:
        weight = program.first[unit.value]
        gradient = program.first[graph.updates_of[unit.value]]
        position = max(last.get(weight, 0), last[gradient], program.split)
        after.setdefault(position, []).append(
            Transfer(
                program.steps[position].block,
                Role.UPDATE,
                -1,
                (weight, gradient),
                (),
                workspace=unit.workspace,
                seconds=unit.seconds,
            )
        )
    steps: list[Step | Transfer] = []
    for position, step in enumerate(program.steps):
        steps.append(step)
        steps += after.get(position, ())
    return replace(program, steps=tuple(steps), resident=sum(unit.held for unit in units))


def step_bytes(units: Iterable[ParameterUpdate], away: Set[int]) -> int:
    """Return the peak in bytes of `optimizer.step()`, which updates one parameter after the other; 0 without updates.

    Args:
        away: parameters that live on the host. Each comes for its update, with its gradient and its state.
    """
    later = [(unit, unit.later) for unit in units if unit.later is not None]
    resident = sum(unit.held for unit, _ in later if unit.value not in away)
    coming = (more + (unit.held if unit.value in away else 0) for unit, more in later)
    return resident + max(coming, default=0)


@dataclass(frozen=True)
class _Visits:
    """The indices of the first and last step that read a parameter, in the forward (None if none does) and backward."""

    forward: tuple[int, int] | None
    backward: tuple[int, int]


def _visits(program: Program, units: Iterable[ParameterUpdate]) -> dict[int, _Visits]:
    """Return, by value, the steps that read each parameter. O(values that the program reads)."""
    places: dict[int, list[int]] = {program.first[unit.value]: [] for unit in units}
    for place, step in enumerate(program.steps):
        for version in step.reads:
            if version in places:
                places[version].append(place)
    return {program.version_of[version]: _split(found, program.split) for version, found in places.items()}


def _split(places: Sequence[int], split: int) -> _Visits:
    before, after = [p for p in places if p < split], [p for p in places if p >= split]
    return _Visits((before[0], before[-1]) if before else None, (after[0], after[-1]))


@dataclass(frozen=True, eq=False)
class _Move:
    """Something that can be moved to the host: a parameter with its optimizer state, or an activation."""

    what: ParameterUpdate | RoundTrip
    removed: Ints  # bytes that the parameter no longer occupies on the device, at each step from `start` on
    start: int  # index of the first step in `removed`
    moved: int  # bytes copied for the parameter in one training step, in both directions
    host: int  # bytes that the parameter occupies on the host
    # the further move that this one makes possible: to be on the host between forward and backward too
    then: _Move | None = None

    def profit(self, excess: Ints) -> float:
        """Return the bytes above the limit that the move removes, summed over all steps, per byte that it copies.

        Args:
            excess: bytes above the limit at each step.
        """
        stretch = excess[self.start : self.start + self.removed.size]
        return float(np.minimum(np.maximum(stretch, 0), self.removed).sum()) / (self.moved or 1)

    def make(self, excess: Ints) -> None:
        excess[self.start : self.start + self.removed.size] -= self.removed

    def undo(self, excess: Ints) -> None:
        excess[self.start : self.start + self.removed.size] += self.removed


def choose(
    program: Program,
    units: Sequence[ParameterUpdate],
    costs: Costs,
    link: Link,
    limit: int,
    *,
    possible: Sequence[RoundTrip] = (),
    settled: frozenset[int] | None = None,
    host_mem: int | None = None,
) -> tuple[Choice, bool]:
    """Choose which parameters and state are on the host so that the program fits into `limit` bytes.

    Return the choice, and whether the program fits.

    The most profitable move is made first. Profits are evaluated lazily, since other moves can only lower them.

    Args:
        units: the parameters that the step updates.
        possible: activations that can be copied to the host.
        settled: the parameters on the host, if they are chosen already; None: they are chosen here.
        host_mem: bytes that may be on the host at a time: parameters and their state always, activations between
            forward and backward.
    """
    excess = need_of(program, live_bytes(program, costs.sizes)) - limit
    room = float("inf") if host_mem is None else host_mem
    movable = [unit for unit in units if not unit.stays]
    visits = _visits(program, movable)
    moves = [_hosting(unit, visits[unit.value], link, excess.size) for unit in movable]
    made: list[_Move] = []
    waiting: list[tuple[float, int, _Move]] = []
    order = count()

    def make(move: _Move) -> None:
        nonlocal room
        move.make(excess)
        made.append(move)
        room -= move.host
        if move.then:
            heappush(waiting, (-move.then.profit(excess), next(order), move.then))

    if settled is None:
        waiting = [(-move.profit(excess), next(order), move) for move in moves]
    for trip in possible:
        sizes = np.full(trip.returns - trip.leaves - 1, trip.size, dtype=np.int64)
        move = _Move(trip, sizes, trip.leaves + 1, 2 * trip.size, link.on_host(trip.size))
        waiting.append((-move.profit(excess), next(order), move))
    heapify(waiting)
    for move in moves:
        if isinstance(move.what, ParameterUpdate) and move.what.value in (settled or ()):
            make(move)
    while waiting and excess.max(initial=0) > 0:
        _, place, move = heappop(waiting)
        profit = move.profit(excess)
        if waiting and profit < -waiting[0][0]:
            heappush(waiting, (-profit, place, move))
        elif profit > 0 and move.host <= room:
            make(move)
    fits = bool(excess.max(initial=0) <= 0)
    if fits:
        made = _still_needed(made, excess, settled or frozenset())
    return _choice(made), fits


def _hosting(unit: ParameterUpdate, visits: _Visits, link: Link, steps: int) -> _Move:
    again = _Move(unit, _removed(unit, visits, steps, hosted=True), 0, unit.bytes, 0)
    moved = unit.bytes * (2 if unit.later is None else 1) + 2 * unit.state_bytes  # it is not changed if updated later
    beside = unit.state_bytes + unit.waiting
    kinds = max(1, round(beside / unit.bytes)) if unit.bytes else 1  # tensors of the parameter's size
    host = link.on_host(unit.bytes) + link.on_host(beside, kinds)
    return _Move(unit, _removed(unit, visits, steps, hosted=False), 0, moved, host, again)


def _still_needed(made: Sequence[_Move], excess: Ints, settled: Set[int]) -> list[_Move]:
    """Return the moves that are necessary, dropping the smallest first; moves of one parameter are dropped together.

    Args:
        settled: parameters that stay on the host in any case.
    """
    groups: dict[ParameterUpdate | RoundTrip, list[_Move]] = {}
    for move in made:
        groups.setdefault(move.what, []).append(move)
    for what, moves in sorted(groups.items(), key=lambda group: group[1][0].host):
        if isinstance(what, ParameterUpdate) and what.value in settled:
            continue
        for move in moves:
            move.undo(excess)
        if excess.max(initial=0) <= 0:
            del groups[what]
        else:
            for move in moves:
                move.make(excess)
    return [move for moves in groups.values() for move in moves]


def _choice(made: Sequence[_Move]) -> Choice:
    units = Counter(move.what.value for move in made if isinstance(move.what, ParameterUpdate))
    trips = [move.what for move in made if isinstance(move.what, RoundTrip)]
    return Choice(
        hosted=frozenset(units),
        twice=frozenset(value for value, moves in units.items() if moves == 2),
        trips=tuple(sorted(trips, key=lambda trip: trip.made)),
    )


def _removed(unit: ParameterUpdate, visits: _Visits, count: int, *, hosted: bool) -> Ints:
    """Return the bytes saved at each of `count` steps by keeping a parameter on the host.

    Args:
        hosted: True: it is on the host already; return what is saved by copying it back between forward and backward
            too.
    """
    removed = np.zeros(count, dtype=np.int64)
    if hosted:
        if visits.forward is not None:
            removed[visits.forward[1] + 1 : visits.backward[0]] = unit.bytes
        return removed
    first = (visits.forward or visits.backward)[0]
    removed[:first] = unit.bytes
    removed[visits.backward[1] + 1 :] = unit.bytes
    removed += unit.state_bytes + unit.waiting
    removed[visits.backward[1]] -= unit.state_bytes
    return removed


def hosted(
    program: Program, units: Sequence[ParameterUpdate], choice: Choice, costs: Costs, link: Link, limit: int
) -> TimedCopies:
    """Return the program of `update_inside` with the copies to and from the host that the choice requires."""
    away = sorted((unit for unit in units if unit.value in choice.hosted), key=lambda unit: unit.value)
    base = replace(program, resident=program.resident - sum(unit.held for unit in away))
    need = need_of(base, live_bytes(base, costs.sizes))
    trips = _Trips(program, need, _visits(program, away))
    for unit in away:
        trips.add_weight(unit, twice=unit.value in choice.twice)
        if unit.state_bytes:
            trips.add_state(unit)
    copies = copies_of(program, choice.trips, need, first=len(trips.copies_in))
    copies_out, copies_in = trips.copies_out + copies[0], trips.copies_in + copies[1]
    return time_copies(base, copies_out, copies_in, need, durations(base, costs), link, limit)


class _Trips:
    """Collects the copies of parameters stored on the host; `need` includes parameters while they are on the device."""

    def __init__(self, program: Program, need: Ints, visits: Mapping[int, _Visits]) -> None:
        self.program, self.need, self.visits = program, need, visits
        self.copies_in: list[CopyIn] = []
        self.copies_out: list[CopyOut] = []

    def add_weight(self, unit: ParameterUpdate, *, twice: bool) -> None:
        """Copy a parameter to the device before its first reader, and again in the backward if it leaves in between."""
        visits = self.visits[unit.value]
        spans = [span for span in (visits.forward, visits.backward) if span is not None]
        if not twice:
            spans = [(spans[0][0], spans[-1][1])]
        begins = 0
        for first, last in spans:
            self.need[first : last + 1] += unit.bytes
            earliest = max(begins, self.program.split) if first >= self.program.split else begins
            self._come(unit, unit.bytes, begins=earliest, first=first)
            begins = last + 1
        self._go(unit, unit.bytes if unit.later is None else 0, visits.backward[1])  # 0: the host's copy is still valid

    def add_state(self, unit: ParameterUpdate) -> None:
        """Copy a parameter's optimizer state in before its update, and back after it."""
        update = self.visits[unit.value].backward[1]
        self.need[update] += unit.state_bytes
        self._come(unit, unit.state_bytes, begins=self.program.split, first=update, state=True)
        self._go(unit, unit.state_bytes, update, state=True)

    def _come(self, unit: ParameterUpdate, size: int, *, begins: int, first: int, state: bool = False) -> None:
        self.copies_in.append(
            CopyIn(
                trip=len(self.copies_in),
                block=self.program.steps[first].block,
                version=self.program.first[unit.value],
                size=size,
                begins=begins,
                first=first,
                state=state,
            )
        )

    def _go(self, unit: ParameterUpdate, size: int, update: int, *, state: bool = False) -> None:
        latest = self.copies_in[-1]
        self.copies_out.append(
            CopyOut(
                trip=latest.trip,
                block=latest.block,
                version=latest.version,
                size=size,
                starts=update,
                leaves=update,
                state=state,
            )
        )
