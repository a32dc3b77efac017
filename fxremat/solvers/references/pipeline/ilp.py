"""Finds the best periodic schedule of a short pipeline by a mixed integer program, solved by HiGHS.

It is the best over all allocations, or for a given one.

    tasks         t = F_1 .. F_n, B_n .. B_1 with their starts in the period; copy t takes the output of t to t + 1
    z[l, m]       pieces l and m share a device; transitive, at most P groups
    w[t, s]       t and s share a device and t is first in the period: no two overlap, within a period of each other
    link[t, s]    copies t and s run between the same two devices; ordered likewise
    shift         periods that begin between t and its copy, the copy and t + 1: 0, 1 or 2 each
    h[l]          sum of the shifts from F_l to B_l: micro-batches of l in flight when the period begins

    memory at t   copies * weights + sum of kept * (h + 1 if F was before t, - 1 if B was) + values that wait
                  between neighbours on the device + buffers of borders that leave it                            <=  M

    least T, then, with T * (1 + 1e-4), the least sum of shifts: the first solution may keep many more than it needs

The times that HiGHS returns are rounded; the caller gets the shortest period that their orders allow (`tasks.tight`).
A. Shilova's thesis (2021), chapter 6; pieces instead of tasks in z, and half of w, halve the program. Where the thesis
counts the values that a task reads and writes in addition to the buffers, `whole` does too. Practical up to about seven
pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from fxremat.solvers.pipeline.model import PlannedStage
from fxremat.solvers.pipeline.modulo import Pattern
from fxremat.solvers.pipeline.stage_costs import Job
from fxremat.solvers.pipeline.tasks import tasks_of, tight
from fxremat.solvers.sizes import Floats

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

SECONDS = 60.0  # time limit in seconds of each of the two solves
_FAILED = 4  # status of HiGHS for numerical trouble; scaling times differently helps
_SCALES = (300.0, 600.0, 137.0)  # total seconds of a micro-batch after scaling; tried in this order
_SLACK = 1e-4  # relative amount by which the second solve may exceed the least period

Terms = dict[int, float]  # column (variable) -> factor; column -1 stands for the constant 1


def least_pattern(
    job: Job, stages: Sequence[PlannedStage], *, free: bool, whole: bool = False, seconds: float = SECONDS
) -> Pattern | None:
    """Return the periodic schedule with the shortest period; None if none fits, or none is found in time.

    Args:
        stages: runs of layers, none of which is split.
        free: True: stages may move to any device; False: each is on its given device.
        whole: count the tensors that a task reads and writes in addition to buffers, as chapter 6 of the thesis does.
        seconds: time limit of each of the two solves.
    """
    for scale in _SCALES:
        program = _Program(job, stages, free, whole, scale)
        first = program.solve({program.period: 1.0}, seconds)
        if first.status == _FAILED:
            continue
        if first.x is None:
            return None
        shortest = float(first.x[program.period])
        program.high[program.period] = shortest * (1 + _SLACK)
        second = program.solve(dict.fromkeys(program.shifts, 1.0), seconds)
        return program.pattern(first if second.x is None else second)
    return None


class _Program:
    def __init__(
        self, job: Job, stages: Sequence[PlannedStage], free: bool, whole: bool, scale: float
    ) -> None:
        self.job, self.stages, self.free, self.whole = job, stages, free, whole
        self.count = len(stages)
        self.total = 2 * self.count
        ends = [stage.last for stage in stages]
        layers = job.layers.layers
        self.forth = [layers[end].output_bytes for end in ends[:-1]]
        self.back = [layers[end].grad_bytes for end in ends[:-1]]
        self.unit = scale / max(job.seconds, sum(stage.way.seconds for stage in stages), 1e-300)
        forward = [stage.way.forward_time * self.unit for stage in stages]
        backward = [stage.way.backward_time * self.unit for stage in stages]
        self.seconds = [*forward, *reversed(backward)]
        copies = [*map(job.forth, ends[:-1]), 0.0, *reversed([job.back(end) for end in ends[:-1]])]
        self.copying = [length * self.unit for length in copies]
        self.big = 2 * (sum(self.seconds) + sum(self.copying)) + 1
        self.low: list[float] = []
        self.high: list[float] = []
        self.whole_numbers: list[int] = []
        self.rows: list[tuple[float, Terms]] = []  # (number, terms): sum of terms >= number
        self.period = self._column(0.0, self.big)
        self.starts = [self._column(-length, self.big) for length in self.seconds]
        self.copy_starts = [self._column(-length, self.big) for length in self.copying]
        self.shifts: list[int] = []
        self._together()
        self.first = self._orders(self.starts, self.seconds, self._shared())
        self._links()
        self._window()
        self._chain()
        self._memory()

    def _column(self, low: float, high: float, *, integer: bool = False) -> int:
        self.low.append(low)
        self.high.append(high)
        self.whole_numbers.append(int(integer))
        return len(self.low) - 1

    def _binary(self) -> int:
        return self._column(0.0, 1.0, integer=True)

    def _at_least(self, number: float, *terms: tuple[float, int | Terms]) -> None:
        """Add the constraint sum of factor * term >= number."""
        row: Terms = {}
        for factor, term in terms:
            for column, each in term.items() if isinstance(term, dict) else [(term, 1.0)]:
                if column < 0:
                    number -= factor * each
                else:
                    row[column] = row.get(column, 0.0) + factor * each
        self.rows.append((number, row))

    def _piece(self, task: int) -> int:
        return task if task < self.count else self.total - 1 - task

    def _together(self) -> None:
        """Add constraints that make sharing a device transitive, with at most as many groups as there are devices."""
        self.z: dict[tuple[int, int], Terms] = {}
        for a, b in combinations(range(self.count), 2):
            same = self.stages[a].device == self.stages[b].device
            self.z[a, b] = {self._binary(): 1.0} if self.free else {-1: float(same)}
            self.z[b, a] = self.z[a, b]
        for a in range(self.count):
            self.z[a, a] = {-1: 1.0}
        if not self.free:
            return
        for a, b, c in combinations(range(self.count), 3):
            for x, y, w in ((a, b, c), (b, a, c), (c, a, b)):
                self._at_least(-1.0, (1.0, self.z[y, w]), (-1.0, self.z[x, y]), (-1.0, self.z[x, w]))
        heads = [self._column(0.0, 1.0) for _ in range(self.count)]
        for a, head in enumerate(heads):
            self._at_least(1.0, (1.0, head), *((1.0, self.z[b, a]) for b in range(a)))
        self._at_least(-float(self.job.machines.devices), *((-1.0, head) for head in heads))

    def _shared(self) -> dict[tuple[int, int], Terms]:
        pairs = combinations(range(self.total), 2)
        return {(t, s): self.z[self._piece(t), self._piece(s)] for t, s in pairs}

    def _orders(
        self, starts: Sequence[int], seconds: Sequence[float], shared: dict[tuple[int, int], Terms]
    ) -> dict[tuple[int, int], Terms]:
        """Add a variable for each pair that may share a device or link, and constraints that order their starts.

        Return the variables: 1 if the first of the pair starts first.
        """
        first: dict[tuple[int, int], Terms] = {}
        for (t, s), z in shared.items():
            w = self._binary()
            first[t, s] = {w: 1.0}
            first[s, t] = {**z, w: -1.0}
            self._at_least(0.0, (1.0, z), (-1.0, w))
            self._at_least(seconds[t] - self.big, (1.0, starts[s]), (-1.0, starts[t]), (-self.big, w))
            self._at_least(
                seconds[s] - self.big, (1.0, starts[t]), (-1.0, starts[s]), (-self.big, z), (self.big, w)
            )
            for a, b in ((t, s), (s, t)):
                self._at_least(
                    seconds[a] - self.big,
                    (1.0, self.period),
                    (-1.0, starts[a]),
                    (1.0, starts[b]),
                    (-self.big, z),
                )
        return first

    def _links(self) -> None:
        """Add constraints that order copies between the same two devices."""
        shared: dict[tuple[int, int], Terms] = {}
        moving = [t for t in range(self.total - 1) if self.copying[t] > 0]
        for t, s in combinations(moving, 2):
            a, b, c, d = (self._piece(task) for task in (t, t + 1, s, s + 1))
            link = self._binary()
            shared[t, s] = {link: 1.0}
            for x, y in (((a, c), (b, d)), ((a, d), (b, c))):
                self._at_least(-1.0, (1.0, link), (-1.0, self.z[x]), (-1.0, self.z[y]), (1.0, self.z[a, b]))
            for inside in (self.z[a, b], self.z[c, d]):
                self._at_least(-1.0, (-1.0, link), (-1.0, inside))
            self._at_least(0.0, (1.0, self.z[a, c]), (1.0, self.z[b, c]), (-1.0, link))
            self._at_least(0.0, (1.0, self.z[a, d]), (1.0, self.z[b, d]), (-1.0, link))
        self._orders(self.copy_starts, self.copying, shared)

    def _window(self) -> None:
        self.low[self.starts[0]] = self.high[self.starts[0]] = 0.0
        for starts, lengths in ((self.starts, self.seconds), (self.copy_starts, self.copying)):
            for start, length in zip(starts, lengths, strict=True):
                self._at_least(length, (1.0, self.period), (-1.0, start))

    def _chain(self) -> None:
        """Add a shift by a period where a later task or copy starts earlier in the period."""
        self.steps: list[tuple[list[int], list[int]]] = []
        for t in range(self.total - 1):
            z = self.z[self._piece(t), self._piece(t + 1)]
            length = self.copying[t]
            to_copy = self._between(self.starts[t], (self.seconds[t], {}), self.copy_starts[t])
            to_next = self._between(self.copy_starts[t], (length, z), self.starts[t + 1])
            self.steps.append((to_copy, to_next))
            self.shifts += [*to_copy, *to_next]

    def _between(self, before: int, lasting: tuple[float, Terms], after: int) -> list[int]:
        """Add after + shifts * T >= before + seconds; the seconds are 0 if z (both on one device)."""
        seconds, z = lasting
        found = []
        for periods, big in ((0.0, self.big), (1.0, 2 * self.big)):
            shift = self._binary()
            self._at_least(
                seconds, (1.0, after), (periods, self.period), (-1.0, before), (seconds, z), (big, shift)
            )
            found.append(shift)
        return found

    def _memory(self) -> None:
        count, total = self.count, self.total
        alive = [
            dict.fromkeys((c for step in self.steps[p : total - 1 - p] for half in step for c in half), 1.0)
            for p in range(count)
        ]
        sigma: dict[tuple[int, int], Terms] = {}
        for p in range(count):
            for m in range(count):
                if m == p:
                    sigma[p, m] = alive[m]
                    continue
                column = self._column(0.0, inf)
                much = 8.0 * count
                self._at_least(-much, (1.0, column), *((-1.0, c) for c in alive[m]), (-much, self.z[p, m]))
                sigma[p, m] = {column: 1.0}
        borders = [self._leaving(p) for p in range(count)]
        for t in range(total):
            self._fits(t, sigma, borders)

    def _leaving(self, piece: int) -> list[tuple[float, Terms]]:
        """Return (bytes, condition) of the buffers of each border between the device of a stage and another device."""
        found = []
        for m in range(self.count - 1):
            b = self._column(0.0, 1.0)
            self._at_least(0.0, (1.0, b), (-1.0, self.z[piece, m]), (1.0, self.z[piece, m + 1]))
            self._at_least(0.0, (1.0, b), (-1.0, self.z[piece, m + 1]), (1.0, self.z[piece, m]))
            found.append((self.forth[m] + self.back[m], {b: 1.0}))
        return found

    def _output(self, task: int) -> float:
        """Return the bytes that a task passes to the next one."""
        if task < 0:
            return self.job.layers.input_bytes
        if task < self.count - 1:
            return self.forth[task]
        if task == self.count - 1:
            return self.job.layers.layers[-1].output_bytes
        if task == self.total - 1:
            return self.job.layers.input_grad_bytes
        return self.back[self._piece(task) - 1]

    def _beside(self, t: int) -> float:
        """Return the bytes needed by the micro-batch that task t computes."""
        way = self.stages[self._piece(t)].way
        forward = t < self.count
        own = way.kept_bytes if forward else 0.0
        if self.whole:
            return own + self._output(t) + (0.0 if forward else self._output(t - 1))
        return own + way.bytes(1) - way.kept_bytes

    def _fits(
        self, t: int, sigma: dict[tuple[int, int], Terms], borders: list[list[tuple[float, Terms]]]
    ) -> None:
        piece = self._piece(t)
        terms: list[tuple[float, Terms]] = list(borders[piece])
        for m, stage in enumerate(self.stages):
            terms.append((self.job.weights(stage.first, stage.last), self.z[piece, m]))
            terms.append((stage.way.kept_bytes, sigma[piece, m]))
            f, b = m, self.total - 1 - m
            if f != t:
                terms.append((stage.way.kept_bytes, self.first[f, t]))
            if b != t:
                terms.append((-stage.way.kept_bytes, self.first[b, t]))
        terms += self._waiting(t)
        room = self.job.machines.memory * (1 + 1e-9) - self._beside(t)
        self._at_least(-room, *((-size, term) for size, term in terms if size))

    def _waiting(self, t: int) -> Iterable[tuple[float, Terms]]:
        """Yield (bytes, condition) of the tensors that are kept for a later task on the device of task t while t runs.
        """
        for s in range(self.total - 1):
            if t in (s, s + 1) or s == self.count - 1:
                continue
            waits = self._column(0.0, 1.0)
            around = ((s, t), (t, s + 1), (s + 1, s))
            self._at_least(-1.0, (1.0, waits), *((-1.0, self.first[pair]) for pair in around))
            yield self._output(s), {waits: 1.0}

    def solve(self, objective: Terms, seconds: float) -> OptimizeResult:
        from scipy.optimize import Bounds, LinearConstraint, milp  # imported here since it takes a second
        from scipy.sparse import coo_array

        columns = len(self.low)
        cost = np.zeros(columns)
        for column, factor in objective.items():
            cost[column] = factor
        entries = [
            (row, c, factor) for row, (_, terms) in enumerate(self.rows) for c, factor in terms.items()
        ]
        rows, cols, factors = zip(*entries, strict=True)
        matrix = coo_array((factors, (rows, cols)), shape=(len(self.rows), columns)).tocsr()
        return milp(
            cost,
            integrality=np.array(self.whole_numbers),
            constraints=LinearConstraint(matrix, np.array([number for number, _ in self.rows]), np.inf),
            bounds=Bounds(np.array(self.low), np.array(self.high)),
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )

    def pattern(self, found: OptimizeResult) -> Pattern:
        """Return the starts of micro-batch 0 in a solution, with the shortest period that their order allows."""
        x: Floats = found.x
        stages = self._allocated(x)
        tasks = tasks_of(self.job, stages)
        period = float(x[self.period])
        starts = [0.0]
        late = 0.0
        for t in range(self.total - 1):
            to_copy, to_next = self.steps[t]
            late += period * sum(round(x[shift]) for shift in to_copy)
            if t != self.count - 1:
                starts.append(float(x[self.copy_starts[t]]) + late)
            late += period * sum(round(x[shift]) for shift in to_next)
            starts.append(float(x[self.starts[t + 1]]) + late)
        exact, tick = tight(tasks, np.array(starts) / self.unit, period / self.unit)
        return Pattern(stages, exact, tick, 0)

    def _allocated(self, x: Floats) -> list[PlannedStage]:
        """Return the stages with the devices that the solution assigns to them."""
        devices: list[int] = []
        for b, stage in enumerate(self.stages):
            if not self.free:
                devices.append(stage.device)
                continue
            mates = [devices[a] for a in range(b) if sum(f * x[c] for c, f in self.z[a, b].items()) > 0.5]
            devices.append(mates[0] if mates else max(devices, default=-1) + 1)
        return [
            PlannedStage(first=s.first, last=s.last, device=d, way=s.way)
            for s, d in zip(self.stages, devices, strict=True)
        ]
