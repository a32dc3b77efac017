"""Weights that come and go, and updates inside the step, put into a program.

    update     right after the last step that reads the parameter or writes its gradient
    resident   a parameter that stays, with its optimizer state: bytes in every step
    hosted     one that lives on the host: it comes before its first reader (and once more after the turn, where it is
               let go in between), is updated, and goes back
    state      of a hosted parameter: a unit of its own, which comes before the update and goes back after it

Which are hosted is chosen as gaps are in Algorithm 1 of the paper (see `solvers.weights.selection`): by the bytes of
excess removed for each byte that is copied. When each comes is decided by the clock (`passes.lanes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxremat.cost.table import Costs
from fxremat.errors import FxrematError
from fxremat.passes.lanes import Arrival, Departure, Ints, Link, Swapped, clocked, need_of
from fxremat.passes.liveness import live_bytes
from fxremat.passes.program import Program, Role, Step, Transfer


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A parameter that the step updates."""

    value: int  # of the joint graph
    bytes: int
    state_bytes: int  # of its optimizer state
    workspace: int  # bytes that the update takes besides
    seconds: float  # of the update


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which parameters live on the host, and which of those leave between their forward and their backward as well."""

    hosted: frozenset[int]
    twice: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Handles:
    """Where the graphs find parameters that the step updates."""

    name: str  # of the run time's weights
    numbers: Mapping[int, int]  # parameter's value -> its place among the optimizer's


def update_inside(program: Program, units: Iterable[Unit]) -> Program:
    """The program with the update of every unit, all of them resident. O(steps)."""
    if any(isinstance(step, Transfer) for step in program.steps):
        raise FxrematError("weights and activations cannot both be offloaded yet")
    joint = program.layout.joint
    last: dict[int, int] = {}
    for position, step in enumerate(program.steps):
        last |= dict.fromkeys((*step.reads, *step.writes), position)
    after: dict[int, list[Transfer]] = {}
    for unit in units:
        weight = program.first[unit.value]
        gradient = program.first[joint.value_of[joint.updates_of[unit.value]]]
        position = max(last.get(weight, 0), last[gradient], program.turn)
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
    resident = sum(unit.bytes + unit.state_bytes for unit in units)
    return replace(program, steps=tuple(steps), resident=resident)


@dataclass(frozen=True)
class _Visits:
    """Where a parameter is used: first and last position before the turn, and the same from it on."""

    forward: tuple[int, int] | None
    backward: tuple[int, int]


def _visits(program: Program, unit: Unit) -> _Visits:
    version = program.first[unit.value]
    places = [place for place, step in enumerate(program.steps) if version in step.reads]
    before, after = [p for p in places if p < program.turn], [p for p in places if p >= program.turn]
    return _Visits((before[0], before[-1]) if before else None, (after[0], after[-1]))


def choose(
    program: Program, units: Sequence[Unit], costs: Costs, limit: int, settled: frozenset[int] | None = None
) -> Choice | None:
    """Which units to host so that the program fits into `limit` bytes; None where it does not even with all.

    Args:
        settled: those on the host, where only what leaves between forward and backward is still to choose.
    """
    excess = need_of(program, live_bytes(program, costs.sizes)) - limit
    visits = {unit.value: _visits(program, unit) for unit in units}
    hosted: set[int] = set(settled or ())
    twice: set[int] = set()
    for unit in units:
        if unit.value in hosted:
            excess = excess - _removed(unit, visits[unit.value], excess.size, hosted=False)
    while excess.max(initial=0) > 0:
        best: tuple[float, Unit, Ints] | None = None
        for unit in units:
            if unit.value in twice or not (settled is None or unit.value in settled):
                continue
            removed = _removed(unit, visits[unit.value], excess.size, hosted=unit.value in hosted)
            moved = (unit.bytes if unit.value in hosted else 2 * (unit.bytes + unit.state_bytes)) or 1
            profit = float(np.minimum(np.maximum(excess, 0), removed).sum()) / moved
            if profit > 0 and (best is None or profit > best[0]):
                best = (profit, unit, removed)
        if best is None:
            return None
        _, unit, removed = best
        (twice if unit.value in hosted else hosted).add(unit.value)
        excess = excess - removed
    for unit in sorted(units, key=lambda unit: unit.bytes):  # those that need not go after all stay
        if unit.value in hosted and settled is None:
            span = visits[unit.value], excess.size
            back = _removed(unit, *span, hosted=False)
            if unit.value in twice:
                back = back + _removed(unit, *span, hosted=True)
            if (excess + back).max(initial=0) <= 0:
                excess = excess + back
                hosted.discard(unit.value)
                twice.discard(unit.value)
    return Choice(hosted=frozenset(hosted), twice=frozenset(twice))


def _removed(unit: Unit, visits: _Visits, count: int, *, hosted: bool) -> Ints:
    """Bytes that a unit no longer takes at each step once it is hosted, or once it leaves after its forward too."""
    removed = np.zeros(count, dtype=np.int64)
    if hosted:
        if visits.forward is not None:
            removed[visits.forward[1] + 1 : visits.backward[0]] = unit.bytes
        return removed
    first = (visits.forward or visits.backward)[0]
    removed[:first] = unit.bytes
    removed[visits.backward[1] + 1 :] = unit.bytes
    removed += unit.state_bytes
    removed[visits.backward[1]] -= unit.state_bytes
    return removed


def hosted(
    program: Program, units: Sequence[Unit], choice: Choice, costs: Costs, link: Link, limit: int
) -> Swapped:
    """The program of `update_inside` with these units on the host."""
    away = sorted((unit for unit in units if unit.value in choice.hosted), key=lambda unit: unit.value)
    base = replace(program, resident=program.resident - sum(unit.bytes + unit.state_bytes for unit in away))
    need = need_of(base, live_bytes(base, costs.sizes))
    trips = _Trips(program, need)
    for unit in away:
        trips.add_weight(unit, twice=unit.value in choice.twice)
        if unit.state_bytes:
            trips.add_state(unit)
    return clocked(base, trips.departures, trips.arrivals, need, costs, link, limit)


class _Trips:
    """What comes and goes, and what is needed while it is there."""

    def __init__(self, program: Program, need: Ints) -> None:
        self.program, self.need = program, need
        self.arrivals: list[Arrival] = []
        self.departures: list[Departure] = []

    def add_weight(self, unit: Unit, *, twice: bool) -> None:
        """It comes before its first reader, after the turn once more if it is to; each graph fetches its own."""
        visits = _visits(self.program, unit)
        spans = [span for span in (visits.forward, visits.backward) if span is not None]
        if not twice:
            spans = [(spans[0][0], spans[-1][1])]
        begins = 0
        for first, last in spans:
            self.need[first : last + 1] += unit.bytes
            earliest = max(begins, self.program.turn) if first >= self.program.turn else begins
            self._come(unit, unit.bytes, begins=earliest, first=first)
            begins = last + 1
        self._go(unit, unit.bytes, visits.backward[1])

    def add_state(self, unit: Unit) -> None:
        """It is there for the update alone."""
        update = _visits(self.program, unit).backward[1]
        self.need[update] += unit.state_bytes
        self._come(unit, unit.state_bytes, begins=self.program.turn, first=update, state=True)
        self._go(unit, unit.state_bytes, update, state=True)

    def _come(self, unit: Unit, size: int, *, begins: int, first: int, state: bool = False) -> None:
        self.arrivals.append(
            Arrival(
                trip=len(self.arrivals),
                block=self.program.steps[first].block,
                version=self.program.first[unit.value],
                size=size,
                begins=begins,
                first=first,
                state=state,
            )
        )

    def _go(self, unit: Unit, size: int, update: int, *, state: bool = False) -> None:
        latest = self.arrivals[-1]
        self.departures.append(
            Departure(
                trip=latest.trip,
                block=latest.block,
                version=latest.version,
                size=size,
                starts=update,
                leaves=update,
                state=state,
            )
        )
