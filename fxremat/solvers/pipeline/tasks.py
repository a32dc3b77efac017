"""Represents an allocation as a chain of tasks on devices and links; computes period and memory from their starts.

    F_0, forth_0, F_1, .., F_n, B_n, .., back_0, B_0      forwards, backwards and copies, each on a device or a link, or
                      on no resource (copies that take no time, and borders between stages of one device)
    tight     the shortest period that the order of tasks on each resource allows: every order requires
              x_v >= x_u + seconds - shift * T, so T is the largest (sum of seconds / sum of shifts) over cycles of such
              edges; found by raising T from cycle to cycle
    bytes     counted when each task of a device starts or ends; nothing changes on a device in between. As only the
              order of its own tasks matters, `tight` never changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxremat.jit import jit
from fxremat.solvers.pipeline.model import PipelinePlan, PlannedStage
from fxremat.solvers.pipeline.stage_costs import Job
from fxremat.solvers.sizes import Floats, Ints

NEAR = 1e-7  # fraction of a period; times that differ by less count as equal


class PipelineTasks(NamedTuple):
    """The 4 * n - 2 tasks of n stages: F of stage s is task 2 * s, its B is 4 * n - 3 - 2 * s, copies lie between.

    F is a forward and B a backward.
    """

    seconds: Floats
    resource: Ints  # [task]: index of its device or, after all devices, link; -1: none
    kept: Floats  # [stage]: bytes saved by a micro-batch between its forward and its backward
    extra: Floats  # [stage]: additional bytes of the micro-batch that is being computed
    device: Ints  # [stage]: its device
    waits: Floats  # [task]: bytes that stay on the device from its end to the start of the next task but one
    always: Floats  # [device]: bytes of weights and buffers
    memory: float  # bytes of each device


def tasks_of(job: Job, stages: Sequence[PlannedStage]) -> PipelineTasks:
    """Return the tasks of an allocation: forwards, backwards and copies, with their devices or links."""
    count = len(stages)
    total = 4 * count - 2
    seconds, waits, resource = np.zeros(total), np.zeros(total), np.full(total, -1, np.int64)
    always = np.zeros(job.machines.devices)
    links: dict[tuple[int, ...], int] = {}
    for number, stage in enumerate(stages):
        forward, backward = 2 * number, total - 1 - 2 * number
        seconds[forward], seconds[backward] = stage.way.forward_time, stage.way.backward_time
        resource[[forward, backward]] = stage.device
        always[stage.device] += job.weights(stage.first, stage.last)
        if number + 1 == count:
            continue
        after = stages[number + 1].device
        if after == stage.device:
            waits[forward] = job.layers.layers[stage.last].output_bytes
            waits[backward - 2] = job.layers.layers[stage.last].grad_bytes
            continue
        always[[stage.device, after]] += job.buffer(stage.last)
        pair = tuple(sorted((stage.device, after)))
        link = links.setdefault(pair, job.machines.devices + len(links))
        for task, length in ((forward + 1, job.forth(stage.last)), (backward - 1, job.back(stage.last))):
            seconds[task] = length
            resource[task] = link if length else -1
    return PipelineTasks(
        seconds=seconds,
        resource=resource,
        kept=np.array([stage.way.kept_bytes for stage in stages]),
        extra=np.array([stage.way.bytes(1) - stage.way.kept_bytes for stage in stages]),
        device=np.array([stage.device for stage in stages], dtype=np.int64),
        waits=waits,
        always=always,
        memory=job.machines.memory,
    )


def least_period(tasks: PipelineTasks) -> float:
    """Return the seconds for which the busiest device or link works on one micro-batch; no period is shorter."""
    loads = np.zeros(int(tasks.resource.max()) + 1)
    for resource, seconds in zip(tasks.resource, tasks.seconds, strict=True):
        if resource >= 0:
            loads[resource] += seconds
    return float(loads.max())


@jit
def _slots(low: int, high: int, phase: int, skip: int) -> int:
    """Count the time slots low + 1 .. high that are used if every (skip + 1)-th slot stays empty.

    `phase` is the index of slot 0 in a cycle of skip + 1 slots.
    """
    if skip == 0:
        return high - low
    return high - low - ((high + phase + 1) // (skip + 1) - (low + phase + 1) // (skip + 1))


@jit
def _begun(moment: float, start: float, tick: float) -> int:
    """Return the last slot whose task has begun at `moment`, if the task of slot 0 begins at `start`."""
    return int(np.floor((moment - start) / tick + 1e-7))


@jit
def bytes_of(tasks: PipelineTasks, starts: Floats, tick: float, skip: int, device: int, first: int) -> float:
    """Return the peak bytes of stages `first` and later on a device, given the starts of their tasks.

    The bytes that the stages before `first` surely occupy are added.
    """
    count = tasks.device.size
    total = 4 * count - 2
    most = 0.0
    sure = tasks.always[device]
    if first > 0 and skip == 0:
        delay = starts[total - 1 - 2 * first] + tasks.seconds[total - 1 - 2 * first] - starts[2 * first]
        for other in range(first):
            if tasks.device[other] == device:
                sure += tasks.kept[other] * np.floor(delay / tick - 1e-7)
    for at in range(first, count):
        if tasks.device[at] != device:
            continue
        for side in range(4):  # forward starts, forward ends, backward starts, backward ends
            task = 2 * at if side < 2 else total - 1 - 2 * at
            moment = starts[task] + (tasks.seconds[task] if side % 2 else 0.0)
            if side % 2 and tasks.waits[task] == 0.0:
                continue
            for phase in range(skip + 1):
                if skip and phase == skip:
                    continue
                size = sure + (0.0 if side % 2 else tasks.extra[at])
                for s in range(first, count):
                    if tasks.device[s] != device:
                        continue
                    f, b = 2 * s, total - 1 - 2 * s
                    ended = _begun(moment, starts[b] + tasks.seconds[b], tick)
                    size += tasks.kept[s] * _slots(ended, _begun(moment, starts[f], tick), phase, skip)
                    for left in (f, b):
                        if tasks.waits[left] > 0.0 and (left == f or s > first):
                            made = _begun(moment, starts[left] + tasks.seconds[left], tick)
                            read = _begun(moment, starts[left + 2], tick)
                            size += tasks.waits[left] * _slots(read, made, phase, skip)
                most = max(most, size)
    return float(max(most, sure))


@jit
def _raised(heads: Ints, tails: Ints, seconds: Floats, shifts: Ints, tick: float, starts: Floats) -> float:
    """Return the period that some cycle of constraints needs if it exceeds `tick`; else `tick`, and fill `starts`.

    Constraint e says that task heads[e] starts at least seconds[e] - shifts[e] * period after task tails[e].
    """
    nodes = starts.size
    starts[:] = 0.0
    by = np.full(nodes, -1, dtype=np.int64)
    last = -1
    for _ in range(nodes + 1):
        last = -1
        for edge in range(heads.size):
            after = starts[tails[edge]] + seconds[edge] - shifts[edge] * tick
            if after > starts[heads[edge]] + tick * 1e-11:
                starts[heads[edge]], by[heads[edge]], last = after, edge, heads[edge]
        if last < 0:
            return tick
    for _ in range(nodes):
        last = tails[by[last]]
    node, length, turns = last, 0.0, 0
    while True:
        edge = by[node]
        length += seconds[edge]
        turns += shifts[edge]
        node = tails[edge]
        if node == last:
            return length / turns if turns > 0 else np.inf


def tight(tasks: PipelineTasks, starts: Floats, tick: float) -> tuple[Floats, float]:
    """Return starts with the shortest period that keeps the order of tasks on each device and link, and that period.

    `starts` and `tick` themselves are returned if no shorter period is found.
    """
    edges = [(task, task + 1, tasks.seconds[task], 0) for task in range(starts.size - 1)]
    for resource in range(int(tasks.resource.max()) + 1):
        lane = [task for task in range(starts.size) if tasks.resource[task] == resource]
        slots = {task: int(np.floor(starts[task] / tick + NEAR)) for task in lane}
        lane.sort(
            key=lambda task: (round(float(starts[task] / tick - slots[task]) / NEAR), _order(tasks, task))
        )
        for place, task in enumerate(lane):
            after = lane[(place + 1) % len(lane)]
            turn = int(place + 1 == len(lane))
            # constraint: x_after - T * slot(after) + T * turn >= x_task - T * slot(task) + seconds
            if after != task:
                edges.append((task, after, tasks.seconds[task], turn + slots[task] - slots[after]))
    tails, heads, seconds, shifts = (np.array(column) for column in zip(*edges, strict=True))
    shortest = least_period(tasks)
    found = np.zeros(starts.size)
    while (raised := _raised(heads, tails, seconds, shifts, shortest, found)) > shortest:
        if not raised < tick * (1 + NEAR):
            return starts, tick
        shortest = raised
    return found - found[0], shortest


def _order(tasks: PipelineTasks, task: int) -> int:
    """Return the sort key of tasks with equal starts: tasks that take no time come first."""
    return int(tasks.seconds[task] > 0)


def planned(
    job: Job,
    stages: Sequence[PlannedStage],
    starts: Floats,
    tick: float,
    *,
    skip: int | None,
    bound: float,
    by: str,
) -> PipelinePlan:
    """Return the plan in which the tasks of micro-batch 0 have these starts, without checking that it fits.

    `tick`: seconds between slots for micro-batches; `bound` and `by` are fields of the plan.
    """
    tasks = tasks_of(job, stages)
    count, total = len(stages), starts.size
    flights = []
    for number in range(count):
        start, end = (
            starts[2 * number],
            starts[total - 1 - 2 * number] + tasks.seconds[total - 1 - 2 * number],
        )
        most = max(
            _slots(_begun(start, end, tick), 0, phase, skip or 0)
            for phase in range((skip or 0) + 1)
            if not skip or phase < skip
        )
        flights.append(max(1, most))
    return PipelinePlan(
        layers=job.layers,
        machines=job.machines,
        stages=tuple(stages),
        tick=tick,
        skip=skip,
        forward_starts=tuple(map(float, starts[0 : 2 * count : 2])),
        backward_starts=tuple(float(starts[total - 1 - 2 * number]) for number in range(count)),
        forth_starts=tuple(float(starts[2 * number + 1]) for number in range(count - 1)),
        back_starts=tuple(float(starts[total - 2 - 2 * number]) for number in range(count - 1)),
        in_flight=tuple(flights),
        memory=tuple(
            float(bytes_of(tasks, starts, tick, skip or 0, device, 0))
            for device in range(job.machines.devices)
        ),
        bound=bound,
        by=by,
    )
