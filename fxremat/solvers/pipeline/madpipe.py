"""MadPipe: allocations in which one device, the special one, may have any number of stages.

    state         layers 1..j to place, p normal devices left, seconds and bytes so far on the special device, the one
                  that may have many stages
    delay         least seconds from the end of the forward of j to the start of its backward for this state

    stage i..j    x = delay (+) U(i, j);  g = ceil(x / T)
    normal        U <= T and Mem(i, j, g) <= M                        -> i - 1, p - 1, the same
    special       its seconds + U <= T and bytes + Mem(i, j, g - 1) <= M      -> i - 1, p, both increased
                  then  delay' = x (+) copies of border i - 1, which last at most T
    p = 0         all layers that are left form one stage of the special device

The special device may really hold as many micro-batches as g, so that g - 1 is a hope: `spare` = 0 counts with g. This
program asks whether a period T is feasible, and bisects for the least such T; the thesis asks for the best period with
the delays of a guess, and bisects over guesses, which ends at the same period. States with seconds and bytes in the
same cell of a grid are merged into the one with the least delay, which keeps its exact numbers.

Then every allocation gets a pattern of its own (`modulo`), since the delays above ignore that stages of the special
device run one after the other. If the pattern is slower than hoped, allocations for longer periods, with g instead
of g - 1, and with less memory on the special device are tried as well.

U(i, j) are the seconds of a stage, Mem(i, j, g) its bytes with g micro-batches in flight, (+) as in `groups`.

A. Shilova's thesis (2021), sections 7.1 and 7.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.jit import jit
from fxremat.solvers.pipeline.contiguous import StageTable, table_of
from fxremat.solvers.pipeline.groups import joined, periods
from fxremat.solvers.pipeline.model import PlannedStage
from fxremat.solvers.pipeline.modulo import Pattern, best_pattern
from fxremat.solvers.pipeline.stage_costs import Job
from fxremat.solvers.sizes import Floats

Shorts = NDArray[np.int16]

# numbers of cells of the grid in which states are merged: for seconds, and for bytes
SECONDS_CELLS, BYTES_CELLS = 101, 21
_TOLERANCE = 1e-2  # relative difference below which periods count as equal
_MOST_FILLS = 40  # maximum number of times that the table is filled for one job
# fractions of its memory that the device which may run several stages may fill, in the order in which they are tried
_SHARES = (1.0, 0.85, 0.7, 0.5)
# periods to try, as fractions of the way from the hoped-for period to the best known one
_LONGER = (0.0, 0.1, 0.25, 0.5)


class Cells(NamedTuple):
    """The best state for each [layers left, devices left, rounded seconds, rounded bytes], and the state before it."""

    delay: Floats
    load: Floats  # exact seconds of the special device, the only one that may run several stages
    size: Floats  # exact bytes of the special device (the one that may run several stages)
    # [..., 6]: preceding cell, what the stage recomputes, is it on the special device (which may run several stages)
    back: Shorts


class Limits(NamedTuple):
    """The limits for one filling of the table."""

    memory: float  # bytes of each device
    share: float  # fraction of its memory that the special device (of several stages) may fill
    spare: int  # number of micro-batches in flight that are optimistically not counted on the special device
    tick: float  # period in seconds


@jit
def _relax(
    cells: Cells, at: tuple[int, int, int, int], x: float, seconds: float, held: float,
    choice: tuple[int, int, int, int, int, int],
) -> None:  # fmt: skip
    """Record a transition to the state `at` if its delay `x` is less than those recorded before.

    The delay is the time between the end of a layer's forward and the start of its backward.
    """
    if x < cells.delay[at] or (x == cells.delay[at] and held < cells.size[at]):
        cells.delay[at], cells.load[at], cells.size[at] = x, seconds, held
        for place in range(6):
            cells.back[at][place] = choice[place]


@jit
def _fill(table: StageTable, cells: Cells, limits: Limits) -> tuple[int, int, int]:
    """Fill all states; return (devices left, two cells) of the first final state, or (-1, -1, -1) if there is none."""
    count, devices, columns, grains = cells.delay.shape
    start = (count - 1, devices - 1, 0, 0)
    cells.delay[:] = np.inf
    cells.delay[start], cells.load[start], cells.size[start] = 0.0, 0.0, 0.0
    for left in range(count - 1, 0, -1):
        reach = left  # first layer of the longest stage that ends with the last unplaced layer
        for i in range(left):
            quick = table.seconds[i, left - 1, 0] <= limits.tick * (1 + 1e-9)
            if reach == left and table.ways[i, left - 1] > 0 and quick:
                reach = i
        for p in range(devices - 1, -1, -1):
            for c in range(columns):
                for m in range(grains):
                    if cells.delay[left, p, c, m] < np.inf:
                        _leave(table, cells, limits, (left, p, c, m), reach)
    for p in range(devices):
        for c in range(columns):
            for m in range(grains):
                if cells.delay[0, p, c, m] < np.inf:
                    return p, c, m
    return -1, -1, -1


@jit
def _leave(
    table: StageTable, cells: Cells, limits: Limits, at: tuple[int, int, int, int], reach: int
) -> None:
    """Expand a state by each stage that ends with its last unplaced layer and begins with layer `reach` or later."""
    left, p, c, m = at
    j, tick = left - 1, limits.tick
    limit, room = tick * (1 + 1e-9), limits.memory * (1 + 1e-9)
    columns, grains = cells.delay.shape[2] - 1, cells.delay.shape[3] - 1
    for i in range(j if p > 0 else 0, reach - 1, -1):
        if i > 0 and table.copying[i - 1] > limit:
            continue
        used = False
        for o in range(table.ways[i, j]):
            seconds = table.seconds[i, j, o]
            if seconds > limit:
                break
            x = joined(cells.delay[at], seconds, tick)
            flight = max(1, periods(x, tick))
            after = joined(x, table.copying[i - 1], tick) if i > 0 else x
            kept, most = table.kept[i, j, o], table.most[i, j, o]
            if not used and p > 0 and table.fixed[i, j] + (flight - 1) * kept + most <= room:
                choice = (left, p, c, m, o, 0)
                _relax(cells, (i, p - 1, c, m), after, cells.load[at], cells.size[at], choice)
                used = True
            busy = cells.load[at] + seconds
            held = cells.size[at] + table.fixed[i, j] + (flight - limits.spare) * kept
            if limits.spare == 0:
                held += most - kept
            if busy <= limit and held <= room * limits.share:
                cell = min(columns, int(np.ceil(busy / tick * columns - 1e-9)))
                grain = min(grains, int(np.ceil(held / room * grains - 1e-9))) if room > 0 else 0
                _relax(cells, (i, p, cell, grain), after, busy, held, (left, p, c, m, o, 1))


class MadPipe:
    """The dynamic program for one job, at any period."""

    def __init__(self, job: Job, *, cells: int = SECONDS_CELLS, grains: int = BYTES_CELLS) -> None:
        self.job = job
        self.fills = 0
        self.table = table_of(job)
        shape = (job.count + 1, job.machines.devices, cells + 1, grains + 1)
        back = np.zeros((*shape, 6), dtype=np.int16)
        self._cells = Cells(np.empty(shape), np.empty(shape), np.empty(shape), back)

    def stages(self, tick: float, *, spare: int = 1, share: float = 1.0) -> tuple[PlannedStage, ...] | None:
        """Return an allocation of stages that may be feasible with a period of `tick` seconds; None if there is none.

        `spare`: number of micro-batches in flight that are optimistically not counted on the special device,
        which may have many stages. `share`: fraction of the memory that it may fill.
        """
        self.fills += 1
        final = _fill(self.table, self._cells, Limits(self.job.machines.memory, share, spare, tick))
        if final[0] < 0:
            return None
        at = (0, *final)
        stages: list[PlannedStage] = []
        device = 1
        while at[0] < self.job.count:
            *before, way, special = (int(entry) for entry in self._cells.back[at])
            first, last = at[0], before[0] - 1
            stages.append(
                PlannedStage(
                    first=first,
                    last=last,
                    device=0 if special else device,
                    way=self.job.ways(first, last)[way],
                )
            )
            device += not special
            at = (before[0], before[1], before[2], before[3])
        return tuple(stages)

    def least_tick(
        self, low: float, high: float, *, spare: int = 1, share: float = 1.0, tolerance: float = _TOLERANCE
    ) -> float | None:
        """Return the least period between `low` and `high` for which there is an allocation.

        None if there is none at `high`.
        """
        if self.stages(high, spare=spare, share=share) is None:
            return None
        if self.stages(low, spare=spare, share=share) is not None:
            return low
        while high > low * (1 + tolerance):
            middle = (low + high) / 2
            if self.stages(middle, spare=spare, share=share) is None:
                low = middle
            else:
                high = middle
        return high

    def allocations(self, low: float, high: float) -> Iterator[tuple[PlannedStage, ...]]:
        """Yield allocations for periods between `low` and `high`, the most promising first."""
        for spare in (1, 0):
            least = low  # with less memory, or with all micro-batches counted, the period is never shorter
            for share in _SHARES:
                tick = self.least_tick(least, high, spare=spare, share=share)
                if tick is None or self.fills > _MOST_FILLS:
                    break
                least = tick
                for part in _LONGER:
                    stages = self.stages(tick + part * (high - tick), spare=spare, share=share)
                    if stages is not None:
                        yield stages


def merged(job: Job, stages: tuple[PlannedStage, ...]) -> tuple[PlannedStage, ...]:
    """Merge neighbouring stages on one device if both recompute nothing."""
    found: list[PlannedStage] = []
    for stage in stages:
        if found and found[-1].device == stage.device:
            first = found[-1].first
            keeps = job.keeping_all(first, stage.last)
            if found[-1].way == job.keeping_all(first, found[-1].last) and stage.way == job.keeping_all(
                stage.first, stage.last
            ):
                found[-1] = PlannedStage(first=first, last=stage.last, device=stage.device, way=keeps)
                continue
        found.append(stage)
    return tuple(found)


def best_madpipe(job: Job, *, low: float, below: float = inf) -> Pattern | None:
    """Return the periodic schedule with the shortest period that is found.

    None if no period is below `below` seconds; `low` is a lower bound on the period.
    """
    if job.machines.devices < 2:
        return None
    program = MadPipe(job)
    longest = float(program.table.seconds.max() * job.machines.devices + program.table.copying.sum())
    best: Pattern | None = None
    tried = set()
    for stages in program.allocations(low, min(below, longest)):
        for variant in dict.fromkeys((stages, merged(job, stages))):
            if variant in tried:
                continue
            tried.add(variant)
            pattern = best_pattern(job, variant, below=best.period if best else below)
            if pattern is not None:
                best = pattern
    return best


def as_published(job: Job, *, low: float) -> tuple[Pattern | None, float]:
    """Return the schedule of the allocation that MadPipe finds as published, and the period it assumes.

    (None, inf) or (None, period) if there is no allocation, or no schedule for it.
    """
    if job.machines.devices < 2:
        return None, inf
    program = MadPipe(job)
    longest = float(program.table.seconds.max() * job.machines.devices + program.table.copying.sum())
    hoped = program.least_tick(low, longest)
    stages = None if hoped is None else program.stages(hoped)
    if hoped is None or stages is None:
        return None, inf
    found = [best_pattern(job, variant) for variant in dict.fromkeys((stages, merged(job, stages)))]
    return min((p for p in found if p is not None), key=lambda p: p.period, default=None), hoped
