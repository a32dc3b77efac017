"""Communication that overlaps with computation: when each collective starts, and when it is waited for.

    gather       starts once the network is idle and its result fits into memory at all steps up to its first reader
    reduction    starts once its operand exists; waited for when it has ended, or earlier if its memory is needed

The collectives run one after the other, in the order in which they start, concurrently with the ops, as on a
stream of NCCL's. The operands and results of a collective are held from its start to its wait, so that memory
follows from the order of the steps, and is the same on all ranks.

A collective whose result the very next ops need (tensor parallelism) is waited for at once. Gathers and
reductions stay within the forward or the backward, whichever they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from fxremat.search.candidate import Candidate, Frontier, unbeaten
from fxremat.step.communicating import Communication, ProgramWithCommunication
from fxremat.step.costs import Costs, apart
from fxremat.step.liveness import Sizes, live_bytes
from fxremat.step.program import Program, Role, Step, Transfer
from fxremat.step.step_graph import Op, Origin, StepGraph

TRIES = 4  # maximum number of simulations with lower memory limits, until the result fits into the budget
TRIED = 24  # number of programs, fastest first, for which overlap is simulated with the whole budget
LEAST_SHARE = 0.1  # searches count at least this fraction of a collective's seconds, even if ops could hide all of it


def communicates(graph: StepGraph) -> bool:
    """Tell whether the step has collectives."""
    return any(op.communicates for op in graph.ops)


def beside_ops(graph: StepGraph, costs: Costs) -> Costs:
    """Return costs for a search in which collectives take only the seconds that ops cannot hide.

    A repeated gather occupies the network; the step takes longer only if the network is the bottleneck.
    """
    without, network = apart(graph, costs)
    gathers = sum(costs.seconds[op.index] for op in graph.ops if op.communicates and not op.backward)
    computing = sum(without.seconds)
    share = min(1.0, max(LEAST_SHARE, (network + gathers) / computing if computing else 1.0))
    seconds = [s * share if graph.ops[k].communicates else s for k, s in enumerate(costs.seconds)]
    return replace(costs, seconds=tuple(seconds))


def with_overlap(frontier: Frontier, costs: Costs, budget: int) -> Frontier:
    """Return the frontier with communication overlapping with ops, within each candidate's own peak and the budget.

    Args:
        costs: the measured costs; the times of the candidates may come from the reduced costs of `beside_ops`.
    """
    keep_all = _timed(frontier.keep_all, costs)
    found = [_overlapping(candidate, costs, candidate.peak) for candidate in frontier.candidates]
    fitting = [candidate for candidate in frontier.candidates if candidate.peak <= budget]
    found += [_overlapping(candidate, costs, budget) for candidate in fitting[:TRIED]]
    whole = _overlapping(keep_all, costs, keep_all.peak)
    return Frontier(keep_all=whole, candidates=tuple(unbeaten([*found, whole])))


def _timed(candidate: Candidate, costs: Costs) -> Candidate:
    return candidate if candidate.transfers else replace(candidate, time=costs.time_of(candidate.order().ops))


def _overlapping(candidate: Candidate, costs: Costs, limit: int) -> Candidate:
    """Return the candidate with communication that overlaps with its ops, within `limit` bytes."""
    program = candidate.program()
    spread = overlapped(program, costs, limit)
    extra = candidate.transfers.time - costs.time(program) if candidate.transfers else 0.0
    return candidate.communicating(spread, spread.time + extra)


def overlapped(program: Program, costs: Costs, limit: int) -> ProgramWithCommunication:
    """Return the program with collectives started earlier or waited for later, if that is faster.

    It stays within `limit` bytes, if the program without overlap does.
    """
    at_once = _result(program, _Spread(program, costs, 0, units=()).run(), costs)
    if at_once.memory.peak > limit:
        return at_once
    units = tuple(_units(program, costs.sizes))
    room = limit
    for _ in range(TRIES):
        found = _Spread(program, costs, room, units=units).run()
        result = _result(program, found, costs)
        if result.memory.peak <= limit:
            return result if result.time < at_once.time else at_once
        room -= result.memory.peak - limit
    return at_once




@dataclass(frozen=True, kw_only=True)
class _Unit:
    """A collective that can overlap with ops, together with the steps that run right before and after it.

    Steps are given by their indices in the program.
    """

    at: int  # index of the step that runs the collective
    gather: bool  # True: a gather; False: a reduction
    head: tuple[int, ...]  # steps that prepare parameters for an all-gather (casts, padding), and run right before it
    tail: tuple[int, ...]  # steps (casts) that finish the result of a reduction, and run after the wait for it
    first: int  # the first step that reads the result of a gather
    size: int  # bytes of the result of a gather, or of the operand of a reduction


def _units(program: Program, sizes: Sizes) -> Iterator[_Unit]:
    writer = {version: k for k, step in enumerate(program.steps) for version in step.writes}
    readers: dict[int, list[int]] = {}
    for k, step in enumerate(program.steps):
        for version in step.reads:
            readers.setdefault(version, []).append(k)
    taken: set[int] = set()
    for k, step in enumerate(program.steps):
        if step.op is None or not _op(program, step).communicates:
            continue
        head = _head(program, k, writer, readers)
        tail = None if head is not None else _tail(program, k, readers)
        if head is not None:
            end = program.split if k < program.split else len(program.steps)
            first = min((r for v in step.writes for r in readers.get(v, ()) if r < end), default=end)
            made = [v for place in (*head, k) for v in program.steps[place].writes]
            size = _bytes(program, sizes, made)
            yield _Unit(at=k, gather=True, head=tuple(head), tail=(), first=first, size=size)
        elif tail is not None and taken.isdisjoint(tail):
            taken.update(tail)
            size = _bytes(program, sizes, _held(program, step))
            yield _Unit(at=k, gather=False, head=(), tail=tuple(tail), first=0, size=size)


def _op(program: Program, step: Step | Transfer) -> Op:
    assert step.op is not None
    return program.layout.graph.ops[step.op]


def _origin(program: Program, version: int) -> Origin:
    return program.layout.graph.values[program.version_of[version]].origin


def _bytes(program: Program, sizes: Sizes, versions: Sequence[int]) -> int:
    return sum(sizes.values[program.version_of[version]] for version in versions)


def _head(program: Program, at: int, writer: dict[int, int], readers: dict[int, list[int]]) -> list[int] | None:
    """Return the steps that compute what an all-gather sends, if they read only parameters.

    None if anything else is sent, or if other steps read their results.

    Args:
        writer: version (result of one execution) -> index of the step that computes it.
        readers: version -> indices of the steps that read it.
    """
    found: set[int] = set()
    stack = list(program.steps[at].reads)
    while stack:
        version = stack.pop()
        if _origin(program, version) is Origin.PRIMAL:
            continue
        place = writer.get(version)
        if place is None or place in found:
            if place is None:
                return None
            continue
        step = program.steps[place]
        inside = (place < program.split) == (at < program.split)
        if step.op is None or not inside or _op(program, step).communicates:
            return None
        found.add(place)
        stack += step.reads
    for place in found:
        if any(r != at and r not in found for v in program.steps[place].writes for r in readers.get(v, ())):
            return None
    return sorted(found)


def _tail(program: Program, at: int, readers: dict[int, list[int]]) -> list[int] | None:
    """Return the steps that turn a reduction's result into the returned gradient; None if other steps read it.

    Args:
        readers: version (result of one execution) -> indices of the steps that read it.
    """
    found: list[int] = []
    mine = set(program.steps[at].writes)
    stack = list(mine)
    while stack:
        for place in readers.get(stack.pop(), ()):
            step = program.steps[place]
            foreign = [v for v in step.reads if v not in mine and _origin(program, v) is not Origin.PRIMAL]
            if foreign or step.op is None or _op(program, step).communicates:
                return None
            if place not in found:
                found.append(place)
                mine.update(step.writes)
                stack += step.writes
    returned = program.layout.graph.pinned
    ends = [v for v in mine if not readers.get(v)]
    return sorted(found) if all(program.version_of[v] in returned for v in ends) else None




@dataclass
class _Run:
    """The result of a simulation: steps and waits in order, and times in seconds."""

    # (True if this is the wait for a collective, index of the step that runs or of the collective waited for)
    events: list[tuple[bool, int]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    split: int = 0  # index of the first event of the backward
    now: float = 0.0  # current time in seconds
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)  # collective -> seconds of its start and end
    waited: dict[int, float] = field(default_factory=dict)  # collective -> seconds for which ops wait for it


class _Spread:
    """Simulates a program whose collectives overlap with ops, within `limit` bytes if possible."""

    def __init__(self, program: Program, costs: Costs, limit: int, *, units: Sequence[_Unit]) -> None:
        self.program, self.limit = program, limit
        self.seconds = [0.0 if s.op is None else costs.seconds[s.op] for s in program.steps]
        self.units = {unit.at: unit for unit in units}
        self.with_others: Set[int] = {k for unit in units for k in (*unit.head, *unit.tail)}
        memory = live_bytes(program, costs.sizes)
        self.need = np.array(memory.during, dtype=np.int64)
        if program.split < self.need.size:
            self.need[program.split] = max(self.need[program.split], memory.at_split)
        self.free = 0.0  # seconds at which the network becomes free
        self.lingering = 0  # bytes of the operands of the reductions in `pending`
        self.pending: list[_Unit] = []  # reductions that have started and are not waited for yet
        self.found = _Run()

    def run(self) -> _Run:
        """Simulate the steps once."""
        count, split = len(self.program.steps), self.program.split
        for begin, end in ((0, split), (split, count)):
            if begin == split:
                self.found.split = len(self.found.events)
            gathers = sorted((u for u in self.units.values() if u.gather and begin <= u.at < end), key=lambda u: u.at)
            self._part(begin, end, gathers)
        return self.found

    def _part(self, begin: int, end: int, gathers: list[_Unit]) -> None:
        started: list[_Unit] = []
        for position in range(begin, end):
            while self.pending and (self._ended(self.pending[0]) or self._full(position)):
                self._finish(self.pending.pop(0))
            while gathers and self._may_start(gathers[0], position):
                started.append(self._start_gather(gathers.pop(0), position))
            for unit in [unit for unit in started if unit.first == position]:
                started.remove(unit)
                self._wait(unit)
            self._step(position)
        for unit in started:
            self._wait(unit)
        while self.pending:
            self._finish(self.pending.pop(0))

    def _step(self, position: int) -> None:
        unit = self.units.get(position)
        if unit is None:
            if position not in self.with_others:
                self._execute(position)
        elif not unit.gather:
            self._note(False, position)
            self._occupy(position)
            self.pending.append(unit)
            self.lingering += unit.size

    def _execute(self, position: int) -> None:
        step = self.program.steps[position]
        self._note(False, position)
        if step.op is not None and _op(self.program, step).communicates:
            self._occupy(position)
            self.found.waited[position] = self.found.spans[position][1] - self.found.now
            self.found.now = self.found.spans[position][1]
        else:
            self.found.now += self.seconds[position]

    def _occupy(self, position: int) -> None:
        begin = max(self.found.now, self.free)
        self.free = begin + self.seconds[position]
        self.found.spans[position] = begin, self.free

    def _note(self, wait: bool, position: int) -> None:
        self.found.events.append((wait, position))
        self.found.starts.append(self.found.now)

    def _ended(self, unit: _Unit) -> bool:
        return self.found.spans[unit.at][1] <= self.found.now

    def _full(self, position: int) -> bool:
        return bool(self.need[position] + self.lingering > self.limit)

    def _may_start(self, unit: _Unit, position: int) -> bool:
        if unit.at == position or (unit.head and unit.head[0] == position):
            return True
        if self.free > self.found.now + self.seconds[position]:
            return False
        until = unit.head[0] if unit.head else unit.at
        most = int(self.need[position:until].max(initial=0))
        return most + self.lingering + unit.size <= self.limit

    def _start_gather(self, unit: _Unit, position: int) -> _Unit:
        self.need[position : unit.at] += unit.size
        for place in unit.head:
            self._execute(place)
        self._note(False, unit.at)
        self._occupy(unit.at)
        return unit

    def _wait(self, unit: _Unit) -> None:
        end = self.found.spans[unit.at][1]
        self.found.waited[unit.at] = max(0.0, end - self.found.now)
        self.found.now = max(self.found.now, end)
        self._note(True, unit.at)

    def _finish(self, unit: _Unit) -> None:
        self._wait(unit)
        self.lingering -= unit.size
        for place in unit.tail:
            self._execute(place)


def _result(program: Program, found: _Run, costs: Costs) -> ProgramWithCommunication:
    """Return the program with steps and waits in the simulated order. O(steps)."""
    steps: list[Step | Transfer] = []
    for wait, position in found.events:
        step = program.steps[position]
        steps.append(_completed(program, step, position) if wait else step)
    spread = replace(program, steps=tuple(steps), split=found.split)
    collectives = tuple(
        Communication(
            name=_op(program, program.steps[position]).name,
            op=program.steps[position].op or 0,
            begins=begin,
            ends=end,
            waited=found.waited.get(position, 0.0),
        )
        for position, (begin, end) in sorted(found.spans.items(), key=lambda item: item[1])
    )
    return ProgramWithCommunication(
        program=spread,
        memory=live_bytes(spread, costs.sizes),
        time=found.now,
        starts=tuple(found.starts),
        collectives=collectives,
    )


def _completed(program: Program, step: Step | Transfer, trip: int) -> Transfer:
    """Return the step that waits for a collective; it reads operands and results, which keeps them alive until then."""
    assert step.op is not None
    return Transfer(step.block, Role.COMPLETE, trip, (*step.writes, *_held(program, step)), ())


def _held(program: Program, step: Step | Transfer) -> tuple[int, ...]:
    """Return the operands that a collective reads until its end; () for an all-reduce, which works in place."""
    op = _op(program, step)
    if op.overwrites is not None or op.target.startswith("collective all_reduce"):
        return ()
    return tuple(version for version in step.reads if _origin(program, version) is not Origin.PRIMAL)
