"""Finds a periodic schedule for any allocation by modulo scheduling, from the end of the chain of tasks outwards.

A task is a forward (F) or backward (B) of a stage, or a copy between two stages; each has a start in the
period.

    F of the last stage starts at 0, and its B follows; then, stage by stage towards the first,
    copy of the output, and F      are placed as late as possible before the task that depends on them
    copy of the gradient, and B    are placed as early as possible after the task that they depend on
    in the time that their device or link has left, modulo the period

Each stage is then in flight as briefly as the stages after it allow; on devices with one stage each this is
1F1B*. If stages share a device the first start is not always the best: each task may also take a later start
next to other tasks of its resource, or at a distance that tasks still to be placed will need. Starts are tried
in the order of how often another than the first was taken (far ones count twice), up to a number of steps
(limited discrepancy search); at any time the placed tasks of a device must fit into its memory. Compilers
pipeline loops in the same way; A. Shilova's thesis (2021) solves a mixed integer program instead (`ilp`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np

from fxremat.jit import jit
from fxremat.solvers.pipeline.model import PipelinePlan, PlannedStage, slot_of
from fxremat.solvers.pipeline.stage_costs import Job
from fxremat.solvers.pipeline.tasks import PipelineTasks, bytes_of, least_period, tasks_of, tight
from fxremat.solvers.sizes import Floats, Ints

STEPS = 3000  # maximum number of task placements in one search
_DISCREPANCIES = 5  # maximum number of times that one search may take another start than the first
_TRIES = 12  # number of periods tried between the lower bound and the best found
_MIXTURES = 3  # number of random orders of tasks that are tried
_GAP = 1e-4  # relative difference below which periods count as equal


@jit
def _clear(tasks: PipelineTasks, starts: Floats, placed: Ints, task: int, start: float, tick: float) -> bool:
    """Tell whether a task with this start overlaps no placed task of the same device or link."""
    tiny = tick * 1e-9
    for other in range(starts.size):
        if placed[other] == 0 or tasks.resource[other] != tasks.resource[task]:
            continue
        after = (start - starts[other]) % tick  # time since the other task's start
        if after > tick - tiny:
            after = 0.0
        overlap = after < tasks.seconds[other] - tiny or after + tasks.seconds[task] > tick + tiny
        if overlap and tasks.seconds[other] > 0.0 and tasks.seconds[task] > 0.0:
            return False
    return True


@jit
def _rooms(tasks: PipelineTasks, placed: Ints, task: int, rooms: Floats) -> int:
    """Write to `rooms` the gaps that unplaced tasks of the same device or link will need; return their number.

    They are 0, the seconds of each such task, and sums of the seconds of forwards, and of backwards.
    """
    rooms[0] = 0.0
    count = 1
    total = placed.size
    forwards = backwards = 0.0
    for stage in range(tasks.device.size - 1, -1, -1):
        for side in range(2):
            other = 2 * stage if side == 0 else total - 1 - 2 * stage
            if placed[other] or other == task or tasks.resource[other] != tasks.resource[task]:
                continue
            seconds = tasks.seconds[other]
            if side == 0:
                forwards += seconds
            else:
                backwards += seconds
            for room in (seconds, forwards if side == 0 else backwards):
                if count < rooms.size and room > 0.0 and room != rooms[count - 1]:
                    rooms[count] = room
                    count += 1
    return count


class SearchState(NamedTuple):
    """The state of a search: the tasks placed so far, and the starts still to be tried for each."""

    starts: Floats  # seconds at which each task starts
    placed: Ints  # [task]: 1 if it is placed, else 0
    places: Floats  # [level]: possible starts of the task placed at this level of the search
    number: Ints  # [level]: number of possible starts; -1 if they are not computed yet
    taken: Ints  # [level]: index of the start that is being tried; -1 before the first
    rooms: Floats  # buffer that `_rooms` writes the required gaps between tasks to, in seconds


@jit
def _places(
    tasks: PipelineTasks, found: SearchState, level: int, task: int, limit: float, ahead: bool, tick: float, spare: int
) -> int:  # fmt: skip
    """Write possible starts of a task, within a period of `limit`, nearest first, to `places`; return their number.

    The task ends before the limit if `ahead`, else it starts after it. It touches the limit or another task, or
    leaves a gap that unplaced tasks will need: one of the first `spare` gaps of `_rooms`.
    """
    starts, seconds, places = found.starts, tasks.seconds[task], found.places[level]
    near = limit - seconds if ahead else limit
    count = 0
    tiny = tick * 1e-9
    for other in range(-1, starts.size):
        if other >= 0 and (found.placed[other] == 0 or tasks.resource[other] != tasks.resource[task]):
            continue
        for number in range(1 if other < 0 else 2 * spare):
            room = found.rooms[number // 2]
            if other < 0:
                start = near
            elif number % 2 == 0:
                start = starts[other] - room - seconds
            else:
                start = starts[other] + tasks.seconds[other] + room
            away = (near - start) % tick if ahead else (start - near) % tick
            if away > tick - tiny:
                away = 0.0
            if count == places.size and away >= abs(places[count - 1] - near):
                continue
            start = near - away if ahead else near + away
            if tasks.resource[task] < 0 or _clear(tasks, starts, found.placed, task, start, tick):
                count = _insert(places, count, start, away, near, tiny)
    return count


@jit
def _insert(places: Floats, count: int, start: float, away: float, near: float, tiny: float) -> int:
    """Insert a start into the first `count` entries, sorted by distance from `near`, unless present.

    Return the new count.
    """
    place = count
    for earlier in range(count):
        distance = abs(places[earlier] - near)
        if abs(distance - away) <= tiny:
            return count
        if distance > away and place == count:
            place = earlier
    if place == places.size:
        return count
    count = min(count + 1, places.size)
    for later in range(count - 1, place, -1):
        places[later] = places[later - 1]
    places[place] = start
    return count


@jit
def _look(tasks: PipelineTasks, found: SearchState, level: int, task: int, tick: float, later: bool) -> int:
    """Write the possible starts of the task of a search level to `found.places`, and return their number.

    `later`: include starts at a distance from other tasks, if unplaced tasks would fit in between.
    """
    if level == 0:
        found.places[0, 0] = 0.0
        return 1
    ahead = task < 2 * tasks.device.size - 1
    limit = found.starts[task + 1] if ahead else found.starts[task - 1] + tasks.seconds[task - 1]
    bound = tasks.resource[task] >= 0
    spare = _rooms(tasks, found.placed, task, found.rooms) if later and bound else 1
    count = _places(tasks, found, level, task, limit, ahead, tick, spare)
    return count if bound else min(1, count)


@jit
def _fits(tasks: PipelineTasks, starts: Floats, tick: float, skip: int, device: int, first: int) -> bool:
    """Tell whether stages `first` and later of a device fit into its memory.

    What its other stages surely need is counted, too.
    """
    return bytes_of(tasks, starts, tick, skip, device, first) <= tasks.memory * (1 + 1e-9)


@jit
def _cost(choice: int) -> int:
    """Return the discrepancies of a choice of start: 0 for the first, 1 for others, 2 for far ones."""
    return min(1, choice) + min(1, choice // 4)


@jit
def _search(
    tasks: PipelineTasks, order: Ints, found: SearchState, tick: float, skip: int, steps: int
) -> bool:
    """Find starts of all tasks for a periodic schedule that fits, in `found.starts`; return False if none is found."""
    count, total = tasks.device.size, order.size
    starts, placed, number, taken = found.starts, found.placed, found.number, found.taken
    for allowed in range(_DISCREPANCIES + 1):
        placed[:] = 0
        level, spent = 0, 0
        number[0] = -1
        while level >= 0:
            task = order[level]
            if number[level] < 0:  # possible starts are not computed yet
                number[level] = _look(tasks, found, level, task, tick, allowed > 0)
                taken[level] = -1
            if taken[level] >= 0:
                placed[task] = 0
                spent -= _cost(taken[level])
            taken[level] += 1
            choice = taken[level]
            steps -= 1
            if steps < 0:
                return False
            if choice >= number[level] or spent + _cost(choice) > allowed:
                number[level] = -1
                level -= 1
                continue
            starts[task] = found.places[level, choice]
            placed[task] = 1
            spent += _cost(choice)
            if (
                task % 2 == (task >= 2 * count - 1) and placed[total - 1 - task]
            ):  # the stage's other task, its forward or backward, is placed already
                stage = min(task, total - 1 - task) // 2
                if not _fits(tasks, starts, tick, skip, tasks.device[stage], stage):
                    continue
            if level + 1 < total:
                level += 1
                number[level] = -1
                continue
            fits = True
            for device in range(tasks.always.size):
                fits = fits and _fits(tasks, starts, tick, skip, device, 0)
            if fits:
                return True
    return False


def _order(count: int, backward_first: Sequence[bool]) -> Ints:
    """Return an order in which tasks are placed.

    `backward_first` tells for each stage whether its backward comes first.
    """
    total = 4 * count - 2
    order = [2 * count - 2, 2 * count - 1]
    for stage in range(count - 2, -1, -1):
        forward, backward = 2 * stage, total - 1 - 2 * stage
        halves = [[forward + 1, forward], [backward - 1, backward]]
        for half in reversed(halves) if backward_first[stage] else halves:
            order += half
    return np.array(order, dtype=np.int64)


@cache
def _orders(count: int) -> list[Ints]:
    """Return orders of placing tasks: forwards first, backwards first, and some mixtures.

    Orders matter since later tasks get the time that is left.
    """
    draw = random.Random(count)
    mixed = [[draw.random() < 0.5 for _ in range(count)] for _ in range(_MIXTURES)]
    return [_order(count, first) for first in ([False] * count, [True] * count, *mixed)]


class Pattern:
    """A periodic pipeline schedule: the starts of all tasks of micro-batch 0, and the tick, the time between two slots.

    Each slot is for one micro-batch. `skip` is k if every (k + 1)-th slot stays empty; 0: none does.
    """

    def __init__(self, stages: Sequence[PlannedStage], starts: Floats, tick: float, skip: int) -> None:
        self.stages = tuple(stages)
        self.starts = starts
        self.tick = tick
        self.skip = skip

    @property
    def period(self) -> float:
        """Average seconds between two micro-batches once the pipeline is full."""
        return self.tick * (1 + 1 / self.skip) if self.skip else self.tick

    def seconds(self, microbatches: int | None) -> float:
        """Return the seconds of a step with `microbatches` micro-batches; for None, the period."""
        if microbatches is None:
            return self.period
        one = float(self.starts[-1] - self.starts[0]) + self.stages[0].way.backward_time
        return slot_of(microbatches - 1, self.skip) * self.tick + one

    @classmethod
    def of(cls, plan: PipelinePlan) -> Pattern:
        """Return the periodic schedule of a pipeline plan."""
        starts = np.zeros(4 * len(plan.stages) - 2)
        starts[: 2 * len(plan.stages) : 2] = plan.forward_starts
        starts[1 : 2 * len(plan.stages) - 1 : 2] = plan.forth_starts
        starts[::-1][: 2 * len(plan.stages) : 2] = plan.backward_starts
        starts[::-1][1 : 2 * len(plan.stages) - 1 : 2] = plan.back_starts
        return cls(plan.stages, starts, plan.tick, plan.skip or 0)


def pattern_at(
    job: Job, stages: Sequence[PlannedStage], tick: float, *, skip: int = 0, steps: int = STEPS
) -> Pattern | None:
    """Return a periodic schedule with at most `tick` seconds between two slots for micro-batches.

    None if the search finds none that fits.
    """
    tasks = tasks_of(job, stages)
    if least_period(tasks) > tick * (1 + 1e-9):
        return None
    if (tasks.always > tasks.memory * (1 + 1e-9)).any():
        return None
    total = 4 * len(stages) - 2
    numbers = np.zeros((3, total), dtype=np.int64)
    found = SearchState(
        np.zeros(total), numbers[0], np.zeros((total, 16)), numbers[1], numbers[2], np.zeros(12)
    )
    for order in _orders(len(stages)):
        if _search(tasks, order, found, tick, skip, steps):
            starts, tick = tight(tasks, found.starts - found.starts[0], tick)
            return Pattern(stages, starts, tick, skip)
    return None


def best_pattern(
    job: Job, stages: Sequence[PlannedStage], *, below: float = inf, skip: int = 0, steps: int = STEPS
) -> Pattern | None:
    """Return the periodic schedule with the shortest tick, the seconds between two slots for micro-batches.

    None if the search finds none below `below`. Every (skip + 1)-th slot stays empty; 0: none does.
    """
    tasks = tasks_of(job, stages)
    low = least_period(tasks)
    total = float(tasks.seconds.sum())  # with this tick, only one micro-batch runs at a time
    high = min(below * (1 - _GAP), total)
    if low > high:
        return None
    found = pattern_at(job, stages, low, skip=skip, steps=steps)
    if found is not None:
        return found
    found = pattern_at(job, stages, high, skip=skip, steps=steps)
    if found is None:
        return None
    for _ in range(_TRIES):
        if found.tick <= low * (1 + _GAP):
            break
        middle = (low + found.tick) / 2
        better = pattern_at(job, stages, middle, skip=skip, steps=steps)
        if better is None:
            low = middle
        else:
            found = better
    return found
