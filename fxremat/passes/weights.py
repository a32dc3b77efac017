"""Weights that come and go, and updates inside the step, put into a program.

    update     right after the last step that reads the parameter or writes its gradient
    resident   a parameter that stays, with its optimizer state: bytes in every step
    hosted     one that lives on the host: it comes before its first reader (and once more after the turn, where it is
               let go in between), is updated, and goes back; its state comes and goes within the update

Which are hosted is chosen as gaps are in Algorithm 1 of the paper (see `solvers.weights.selection`): by the bytes of
excess removed for each byte that is copied. When each comes is chosen as in `passes.swap`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxremat.cost.table import Costs
from fxremat.errors import FxrematError
from fxremat.passes.liveness import live_bytes
from fxremat.passes.program import Program, Role, Step, Transfer
from fxremat.passes.swap import Ints, Link, Swapped, need_of


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
                _block_of(program, position),
                Role.UPDATE,
                -1,
                (weight, gradient),
                (),
                workspace=unit.workspace,
            )
        )
    steps: list[Step | Transfer] = []
    for position, step in enumerate(program.steps):
        steps.append(step)
        steps += after.get(position, ())
    resident = sum(unit.bytes + unit.state_bytes for unit in units)
    return replace(program, steps=tuple(steps), resident=resident)


def _block_of(program: Program, position: int) -> int:
    return program.steps[position].block


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


def choose(program: Program, units: Sequence[Unit], costs: Costs, limit: int) -> Choice | None:
    """Which units to host so that the program fits into `limit` bytes; None where it does not even with all."""
    excess = need_of(program, live_bytes(program, costs.sizes)) - limit
    visits = {unit.value: _visits(program, unit) for unit in units}
    hosted: set[int] = set()
    twice: set[int] = set()
    while excess.max(initial=0) > 0:
        best: tuple[float, Unit, Ints] | None = None
        for unit in units:
            if unit.value in twice:
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
        if unit.value in hosted:
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
    by_value = {unit.value: unit for unit in units}
    away = [by_value[value] for value in sorted(choice.hosted)]
    resident = program.resident - sum(unit.bytes + unit.state_bytes for unit in away)
    steps: list[Step | Transfer] = []
    for step in program.steps:
        if isinstance(step, Transfer) and program.version_of[step.reads[0]] in choice.hosted:
            unit = by_value[program.version_of[step.reads[0]]]
            step = replace(step, workspace=step.workspace + unit.state_bytes)
        steps.append(step)
    base = replace(program, steps=tuple(steps), resident=resident)
    stays: list[Stay] = []
    for unit in away:
        visits = _visits(program, unit)
        spans = [span for span in (visits.forward, visits.backward) if span is not None]
        if unit.value not in choice.twice:
            spans = [(spans[0][0], spans[-1][1])]
        begins = 0
        for first, last in spans:
            begins = (
                max(begins, program.turn) if first >= program.turn else begins
            )  # each graph fetches its own
            stays.append(Stay(unit.value, unit.bytes, begins, first, last))
            begins = last + 1
    seconds = {unit.value: unit.seconds for unit in units}
    for unit in away:
        seconds[unit.value] += unit.state_bytes / link.from_host + unit.state_bytes / link.to_host
    return _Clock(base, stays, seconds, costs, link, limit).run()


@dataclass(frozen=True, slots=True)
class Stay:
    """A parameter is on the device from before `first` to after `last`; it may come from position `begins` on."""

    value: int
    size: int
    begins: int
    first: int
    last: int


@dataclass(eq=False)
class _Clock:
    """Goes through the program once, and writes down what comes and goes when."""

    program: Program
    stays: Sequence[Stay]
    seconds: Mapping[int, float]  # of the update of each parameter
    costs: Costs
    link: Link
    limit: int

    def __post_init__(self) -> None:
        self.need = need_of(self.program, live_bytes(self.program, self.costs.sizes))
        for stay in self.stays:
            self.need[stay.first : stay.last + 1] += stay.size
        self.coming = deque(sorted(self.stays, key=lambda stay: stay.first))
        self.due: dict[int, list[Stay]] = {}
        for stay in self.stays:
            self.due.setdefault(stay.first, []).append(stay)
        self.numbers = {stay: number for number, stay in enumerate(self.stays)}
        self.version_of = list(self.program.version_of)
        self.fetched: set[int] = set()
        self.current: dict[
            int, tuple[int, Stay]
        ] = {}  # first version of a parameter -> the one on the device
        self.steps: list[Step | Transfer] = []
        self.starts: list[float] = []
        self.copies: dict[tuple[Role, int], tuple[float, float]] = {}
        self.now = self.waiting = self.waiting_back = 0.0
        self.back_free = self.out_free = 0.0
        self.ends: dict[Stay, float] = {}
        self.lingering: deque[tuple[Stay, int, float]] = (
            deque()
        )  # what is being stored: its version, when it ends
        self.lingering_bytes = 0

    def run(self) -> Swapped:
        turn = 0
        for position, step in enumerate(self.program.steps):
            self._make_room(position)
            if position == self.program.turn:
                turn = len(self.steps)
            self._bring(position)
            self._execute(step)
        while self.lingering:
            self._release()
        program = replace(
            self.program,
            steps=tuple(self.steps),
            turn=turn,
            version_of=tuple(self.version_of),
            fetched=frozenset(self.fetched),
        )
        came = sum(stay.size for stay in self.stays)
        went = sum({stay.value: stay.size for stay in self.stays}.values())
        return Swapped(
            program=program,
            memory=live_bytes(program, self.costs.sizes),
            time=self.now + self.link.drag * (came / self.link.from_host + went / self.link.to_host),
            copying=(went / self.link.to_host, came / self.link.from_host),
            waiting=self.waiting,
            waiting_back=self.waiting_back,
            bytes=went,
            starts=tuple(self.starts),
            copies=self.copies,
        )

    def _make_room(self, position: int) -> None:
        while self.lingering and (
            self.lingering[0][2] <= self.now or self.need[position] + self.lingering_bytes > self.limit
        ):
            self._release()

    def _release(self) -> None:
        stay, version, end = self.lingering.popleft()
        self.lingering_bytes -= stay.size
        self._wait(end, back=False)
        self._write(Role.RELEASE, stay, reads=(version,))

    def _bring(self, position: int) -> None:
        step = self.program.steps[position]
        seconds = 0.0 if step.op is None else self.costs.seconds[step.op]
        while self.coming:
            stay = self.coming[0]
            due = stay.first == position
            soon = (
                stay.begins <= position
                and self.back_free <= self.now + seconds
                and int(self.need[position : stay.first].max(initial=0)) + self.lingering_bytes + stay.size
                <= self.limit
            )
            if not (due or soon):
                break
            self.coming.popleft()
            self.need[position : stay.first] += stay.size
            self._make_room(position)
            self.version_of.append(stay.value)
            version = len(self.version_of) - 1
            self.fetched.add(version)
            start = max(self.now, self.back_free)
            self.back_free = self.ends[stay] = start + stay.size / self.link.from_host
            self.copies[Role.PREFETCH, self.numbers[stay]] = (start, self.back_free)
            self._write(Role.PREFETCH, stay, writes=(version,))
            self.current[self.program.first[stay.value]] = (version, stay)
        for stay in self.due.get(position, ()):
            self._wait(self.ends[stay], back=True)
            self._write(Role.WAIT, stay, reads=(self.current[self.program.first[stay.value]][0],))

    def _execute(self, step: Step | Transfer) -> None:
        reads = tuple(
            self.current[version][0] if version in self.current else version for version in step.reads
        )
        self.starts.append(self.now)
        self.steps.append(replace(step, reads=reads))
        if isinstance(step, Step):
            self.now += self.costs.seconds[step.op]
            return
        value = self.program.version_of[step.reads[0]]
        self.now += self.seconds[value]
        if step.reads[0] in self.current:
            version, stay = self.current[step.reads[0]]
            start = max(self.now, self.out_free)
            self.out_free = start + stay.size / self.link.to_host
            self.copies[Role.OFFLOAD, self.numbers[stay]] = (start, self.out_free)
            self.lingering.append((stay, version, self.out_free))
            self.lingering_bytes += stay.size

    def _write(
        self, role: Role, stay: Stay, *, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()
    ) -> None:
        self.starts.append(self.now)
        block = self.program.steps[stay.first].block
        self.steps.append(Transfer(block, role, self.numbers[stay], reads, writes))

    def _wait(self, moment: float, *, back: bool) -> None:
        waited = max(0.0, moment - self.now)
        self.waiting += waited
        self.waiting_back += waited if back else 0.0
        self.now += waited
