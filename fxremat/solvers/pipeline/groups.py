"""1F1B*: of all periodic schedules with a given period, the one with the fewest micro-batches in flight everywhere.

    elements      stages and the copies between them, in the order of the chain, each on a resource of its own
    groups        from the last element on: as many as last at most T together form group 1, the next ones group 2, ..
    forwards      one right after the other
    backwards     within a group one right after the other, as soon as its last forward has ended; group g works on the
                  micro-batch that came g - 1 periods earlier

    in flight     g for every element of group g;  g - floor(g / (k + 1)) if every (k + 1)-th slot stays empty

    x (+) y       the seconds from a forward's end to its backward's start, x, grown by an element of y seconds:
                  x + y where that stays within as many periods, else T * ceil(x / T) + y

A. Shilova's thesis (2021), section 5.2.1, Theorem 15: it minimises every count at once, if every element takes time
forth and back. An element that takes no time one way need not wait for its resource there, which `modulo` makes use of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from fxremat.jit import jit
from fxremat.solvers.pipeline.model import PipelinePlan, PlannedStage
from fxremat.solvers.pipeline.stage_costs import ROUNDING, Job


@dataclass(frozen=True)
class Element:
    """A stage, or the copies between two stages: it runs once forward and, later, once backward for each micro-batch.
    """

    forward: float  # seconds
    backward: float  # seconds

    @property
    def seconds(self) -> float:
        """Forward plus backward seconds."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class ElementPattern:
    """The group of each element (stage or copies), and the seconds at which it starts to run micro-batch 0."""

    groups: tuple[int, ...]
    forward_starts: tuple[float, ...]
    backward_starts: tuple[float, ...]


def elements_of(job: Job, stages: Sequence[PlannedStage]) -> list[Element]:
    """Return an element for each stage, and one for the copies between each two stages, which are on different devices.
    """
    found = []
    for stage in stages:
        found.append(Element(stage.way.forward_time, stage.way.backward_time))
        if stage is not stages[-1]:
            found.append(Element(job.forth(stage.last), job.back(stage.last)))
    return found


def groups_of(elements: Sequence[Element], tick: float) -> list[int]:
    """Return the index of each element's group, 1 at the end; no group lasts longer than `tick` seconds."""
    groups, group, seconds = [], 1, 0.0
    for element in reversed(elements):
        if seconds + element.seconds > tick * (1 + ROUNDING):
            group, seconds = group + 1, 0.0
        seconds += element.seconds
        groups.append(group)
    return groups[::-1]


def pattern_of(elements: Sequence[Element], tick: float) -> ElementPattern:
    """Return the periodic schedule of 1F1B* with a period of `tick` seconds."""
    groups = groups_of(elements, tick)
    forward, start = [], 0.0
    for element in elements:
        forward.append(start)
        start += element.forward
    backward = [0.0] * len(elements)
    moment = 0.0
    for place in reversed(range(len(elements))):
        if place + 1 == len(elements) or groups[place] != groups[place + 1]:
            moment = forward[place] + elements[place].forward
        backward[place] = moment + (groups[place] - 1) * tick
        moment += elements[place].backward
    return ElementPattern(
        groups=tuple(groups), forward_starts=tuple(forward), backward_starts=tuple(backward)
    )


@jit
def alive(group: int, skip: int) -> int:
    """Return the number of micro-batches that an element of this group has in flight.

    Every (skip + 1)-th slot for a micro-batch stays empty; 0: none does.
    """
    return group if skip == 0 else group - group // (skip + 1)


@jit
def periods(delay: float, tick: float) -> int:
    """Return ceil(delay / tick), tolerating rounding errors."""
    return ceil(delay / tick * (1 - 1e-9) - 1e-12)


@jit
def joined(delay: float, seconds: float, tick: float) -> float:
    """Return the time between a forward's end and its backward's start after one more element runs in between.

    It is delay + seconds if that takes no more whole periods, else `seconds` after the next whole period.
    """
    if periods(delay, tick) == periods(delay + seconds, tick):
        return delay + seconds
    return periods(delay, tick) * tick + seconds


def scheduled(
    job: Job, stages: Sequence[PlannedStage], tick: float, *, skip: int | None, bound: float, by: str
) -> PipelinePlan:
    """Return the plan that runs a contiguous allocation by 1F1B*, without checking that it fits.

    `tick`: seconds from the start of a micro-batch to that of the next. `bound`, `by`: fields of the plan.
    """
    pattern = pattern_of(elements_of(job, stages), tick)
    counts = [alive(group, skip or 0) for group in pattern.groups[::2]]
    memory = [0.0] * job.machines.devices
    for stage, count in zip(stages, counts, strict=True):
        memory[stage.device] += job.fixed(stage.first, stage.last) + stage.way.bytes(count)
    return PipelinePlan(
        layers=job.layers,
        machines=job.machines,
        stages=tuple(stages),
        tick=tick,
        skip=skip,
        forward_starts=pattern.forward_starts[::2],
        backward_starts=pattern.backward_starts[::2],
        forth_starts=pattern.forward_starts[1::2],
        back_starts=pattern.backward_starts[1::2],
        in_flight=tuple(counts),
        memory=tuple(memory),
        bound=bound,
        by=by,
    )
