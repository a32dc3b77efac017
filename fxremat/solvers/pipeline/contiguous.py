"""Finds the best contiguous allocation: which layers form a stage, and what each stage recomputes.

    delay[p, j]   least seconds from the end of the forward of layer j to the start of its backward,
                  where layers j+1.. are p stages that fit                                     delay[0, last] = 0

    stage i..j    x = delay[p, j] (+) seconds of a configuration;  g = ceil(x / T)  micro-batches are in flight
                  of the configurations that fit with g, the fastest:  delay[p+1, i-1] <= x (+) copies of border i-1

A smaller delay never makes anything worse, so that one number for each (p, j) is enough, and T can be bisected over:
each try costs O(devices * layers^2 * configurations). For every allocation that is found, its own shortest period is
computed (`fixed`), so the bisection ends on an exact one. With every (k + 1)-th slot left empty, fewer micro-batches
are in flight (`groups.alive`) and the period is T (k + 1) / k; every k is tried (A. Shilova's thesis, 2021, Theorem
16).

The grouping rule (+) is that of 1F1B* (`groups`); the recursion is ours. Choosing the allocation is NP-hard only where
stages of one device need not be neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from fxremat.errors import BudgetTooSmall
from fxremat.jit import jit
from fxremat.solvers.pipeline.fixed import shortest_tick
from fxremat.solvers.pipeline.groups import alive, joined, periods
from fxremat.solvers.pipeline.model import PlannedStage, Way
from fxremat.solvers.pipeline.stage_costs import Job
from fxremat.solvers.sizes import Floats, Ints

TOLERANCE = 1e-7  # relative; every allocation that is faster by more than this is found


class StageTable(NamedTuple):
    """The ways to train each possible stage as arrays [first layer, last layer, way], fastest way first.

    A way is what the stage recomputes, with the resulting seconds and bytes.
    """

    ways: Ints  # [first, last]: number of ways
    seconds: Floats  # forward plus backward seconds
    kept: Floats  # bytes saved by a micro-batch between its forward and its backward
    most: Floats  # bytes of the micro-batch that is being computed
    fixed: Floats  # [first, last]: bytes that do not depend on the number of micro-batches in flight
    copying: Floats  # [border]: seconds to copy the output and its gradient of a micro-batch


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Contiguous stages, one on each device, with the shortest time between micro-batches for which memory suffices."""

    stages: tuple[PlannedStage, ...]
    tick: float  # seconds between two slots; each slot is for one micro-batch, or stays empty
    skip: int  # k: every (k + 1)-th slot stays empty; 0: none does

    @property
    def period(self) -> float:
        """Average seconds between two micro-batches once the pipeline is full."""
        return self.tick * (1 + 1 / self.skip) if self.skip else self.tick


def table_of(job: Job) -> StageTable:
    """Return the table of all stages that fit on a device with one micro-batch at a time."""
    found = list(_fitting(job))
    width = max((len(ways) for _, _, ways in found), default=1)
    shape = (job.count, job.count, width)
    table = StageTable(
        ways=np.zeros(shape[:2], dtype=np.int64),
        seconds=np.zeros(shape),
        kept=np.zeros(shape),
        most=np.zeros(shape),
        fixed=np.zeros(shape[:2]),
        copying=np.array([job.copying(border) for border in range(job.count - 1)] + [0.0]),
    )
    for first, last, ways in found:
        table.ways[first, last] = len(ways)
        table.fixed[first, last] = job.fixed(first, last)
        for place, way in enumerate(ways):
            table.seconds[first, last, place] = way.seconds
            table.kept[first, last, place] = way.kept_bytes
            table.most[first, last, place] = way.bytes(1)
    return table


def _fitting(job: Job) -> Iterator[tuple[int, int, tuple[Way, ...]]]:
    for first in range(job.count):
        for last in range(first, job.count):
            if job.fits(job.weights(first, last)) and (ways := job.ways(first, last)):
                yield first, last, ways


class Choices(NamedTuple):
    """The table of the dynamic program, [number of stages, first layer of the first of them]."""

    delay: Floats  # least seconds between the end of the previous layer's forward and the start of its backward
    last: Ints  # last layer of the first of these stages
    way: Ints  # index of the first stage's way, that is what it recomputes


@jit
def _place(table: StageTable, choices: Choices, memory: float, tick: float, skip: int) -> int:
    """Fill the dynamic program's table for one `tick`; return the number of stages, or 0 if no allocation fits.

    `tick`: seconds between two slots for micro-batches, of which every (skip + 1)-th stays empty.
    """
    delay, last, way = choices.delay, choices.last, choices.way
    count, devices = table.ways.shape[0], delay.shape[0] - 1
    limit = tick * (1 + 1e-9)
    room = memory * (1 + 1e-9)
    delay[:] = np.inf
    delay[0, count] = 0.0
    for p in range(devices):
        for j in range(count - 1, -1, -1):
            before = delay[p, j + 1]
            if before == np.inf:
                continue
            for i in range(j, -1, -1):
                if i > 0 and table.copying[i - 1] > limit:
                    continue
                for o in range(table.ways[i, j]):
                    if table.seconds[i, j, o] > limit:
                        break
                    after = joined(before, table.seconds[i, j, o], tick)
                    flight = alive(max(1, periods(after, tick)), skip)
                    if table.fixed[i, j] + (flight - 1) * table.kept[i, j, o] + table.most[i, j, o] <= room:
                        if i > 0:
                            after = joined(after, table.copying[i - 1], tick)
                        if after < delay[p + 1, i]:
                            delay[p + 1, i], last[p + 1, i], way[p + 1, i] = after, j, o
                        break
        if delay[p + 1, 0] < np.inf:
            return p + 1
    return 0


class Placer:
    """Finds contiguous stages, one on each device, for any time between micro-batches.

    Costs of stages are tabulated once.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.table = table_of(job)
        shape = (job.machines.devices + 1, job.count + 1)
        self._choices = Choices(np.empty(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def stages(self, tick: float, skip: int = 0) -> tuple[PlannedStage, ...] | None:
        """Return stages that fit with `tick` seconds between slots for micro-batches; None if none fit.

        Every (skip + 1)-th slot stays empty; skip = 0: none does.
        """
        job = self.job
        count = _place(self.table, self._choices, job.machines.memory, tick, skip)
        stages = []
        first = 0
        for left in range(count, 0, -1):
            last = int(self._choices.last[left, first])
            way = job.ways(first, last)[self._choices.way[left, first]]
            stages.append(PlannedStage(first=first, last=last, device=count - left, way=way))
            first = last + 1
        return tuple(stages) or None

    @property
    def longest(self) -> float:
        """Seconds beyond which a longer period changes nothing."""
        return float(self.table.seconds.max() * self.job.machines.devices + self.table.copying.sum()) + 1e-300

    def best(self, skip: int = 0, below: float = inf) -> Partition | None:
        """Return the stages with the shortest tick, the seconds between slots for micro-batches.

        None if no stages fit with a tick below `below`. Every (skip + 1)-th slot stays empty; 0: none does.
        """
        found = self._try(min(below * (1 - TOLERANCE), self.longest), skip)
        low = 0.0
        while found is not None:
            better = self._try(found.tick * (1 - TOLERANCE), skip)
            if better is None:
                break
            found = better
            middle = (low + found.tick) / 2
            while middle < found.tick * (1 - TOLERANCE) and (better := self._try(middle, skip)) is None:
                low, middle = middle, (middle + found.tick) / 2
            found = better or found
        return found

    def _try(self, tick: float, skip: int) -> Partition | None:
        stages = self.stages(tick, skip)
        if stages is None:
            return None
        return Partition(stages=stages, tick=min(tick, shortest_tick(self.job, stages, skip=skip)), skip=skip)


def best_partition(job: Job) -> Partition:
    """Return the contiguous allocation with the shortest period; takes seconds for 100 layers.

    Schedules that leave every k-th slot for a micro-batch empty are tried, too.

    Raises:
        BudgetTooSmall: no allocation fits; `.minimum` is the smallest number of bytes for which one does.
    """
    placer = Placer(job)
    found = placer.best()
    if found is None:
        raise BudgetTooSmall(minimum=least_memory(job), budget=int(job.machines.memory))
    for skip in range(1, 2 * job.machines.devices):
        better = placer.best(skip, below=found.period / (1 + 1 / skip))
        if better is not None:
            found = better
    return found


def least_memory(job: Job) -> int:
    """Return the least bytes per device for which a contiguous allocation fits, however long its period."""
    least = [inf] * job.count + [-inf]  # [i]: least bytes for layers i and later on the devices considered so far
    for _ in range(job.machines.devices):
        least = [
            min(
                max(min(way.bytes(1) for way in job.ways(i, j)) + job.fixed(i, j), least[j + 1])
                for j in range(i, job.count)
            )
            for i in range(job.count)
        ] + [-inf]
    return ceil(least[0])
