"""A planned step as a list of moments: what runs in each, from when to when, and what is allocated on the device.

    moments    one for each execution of an op, copy or update, and one for a loss outside the model
    lives      allocations, each from one moment to another: see `step.kinds`

All pictures, lists and exports of a step's memory are made from these.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from fxremat.search.candidate import Candidate
from fxremat.step.costs import Costs
from fxremat.step.kinds import Life, MemoryKind, lives_of
from fxremat.step.program import Program, Step, Transfer

LOSS = "loss"  # role of the moment of the loss, between forward and backward


@dataclass(frozen=True, slots=True)
class Moment:
    """One execution of an op, a copy or update, or the loss outside the model."""

    start: float  # seconds from the start of the step; indices of moments if no op takes time
    end: float
    role: str
    op: int | None  # index of the op that is executed; None: no op is
    block: int  # index of the block (run of consecutive ops of the model) that the moment belongs to, from 0
    value: int | None = None  # index of the value that is copied, or whose optimizer state is; None: nothing is copied


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """All moments of a planned step, and its allocations."""

    program: Program
    moments: tuple[Moment, ...]
    lives: tuple[Life, ...]  # allocations; `first` and `last` are indices of moments
    split: int  # index of the first moment of the backward
    timed: bool  # True: times are seconds; False: no op takes time, and times are indices of moments

    @classmethod
    def of(cls, candidate: Candidate, costs: Costs) -> Moments:
        """Return the moments of a candidate plan, with predicted times. O(moments)."""
        program, sizes = candidate.program(), costs.sizes
        seconds = [step.seconds if step.op is None else costs.seconds[step.op] for step in program.steps]
        timed = any(seconds)
        starts = _starts(candidate, len(seconds)) if timed else None
        if starts is None:
            seconds = seconds if timed else [1.0] * len(seconds)
            starts = [0.0, *accumulate(seconds)][: len(seconds)]
        moments = [
            _moment(program, step, start, start + duration)
            for step, start, duration in zip(program.steps, starts, seconds, strict=True)
        ]
        lives = lives_of(program, sizes)
        if not sizes.outside:
            return cls(
                program=program, moments=tuple(moments), lives=tuple(lives), split=program.split, timed=timed
            )
        split = program.split
        until = moments[split].start if split < len(moments) else moments[-1].end if moments else 0.0
        ended = max((moment.end for moment in moments[:split]), default=until)
        moments.insert(split, Moment(min(ended, until), until, LOSS, None, _block_before(moments, split)))
        tangents, dropped = program.layout.graph.tangent_values, program.layout.graph.dropped_outputs
        given = sum(sizes.values[value] for value in tangents) + sizes.root
        later = [_moved(life, split, tangents, dropped) for life in lives]
        gone = sum(life.bytes for life in lives if life.value in dropped and life.last == split - 1)
        if (more := max(sizes.outside, given - gone) if dropped else sizes.outside - given) > 0:
            later.append(Life(MemoryKind.OUTSIDE, split, split, more))
        return cls(program=program, moments=tuple(moments), lives=tuple(later), split=split + 1, timed=timed)

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """Allocated bytes on the device at each moment."""
        change = [0] * (len(self.moments) + 1)
        for life in self.lives:
            change[life.first] += life.bytes
            change[min(life.last + 1, len(self.moments))] -= life.bytes
        return tuple(accumulate(change[:-1]))

    @property
    def end(self) -> float:
        """The time at which the last moment ends."""
        return max((moment.end for moment in self.moments), default=0.0)

    def lives_at(self, place: int) -> list[Life]:
        """Return the allocations that exist at the moment with index `place`."""
        return [life for life in self.lives if life.first <= place <= life.last]


def _starts(candidate: Candidate, count: int) -> Sequence[float] | None:
    """Return the simulated start time of each execution, in seconds.

    None if copies or collectives were not simulated together with the ops.
    """
    clock = candidate.communication or candidate.transfers
    return clock.starts if clock and len(clock.starts) == count else None


def _moment(program: Program, step: Step | Transfer, start: float, end: float) -> Moment:
    value = None
    if isinstance(step, Transfer):
        versions = (*step.reads, *step.writes)
        value = program.version_of[versions[0]] if versions else step.state_of
    return Moment(start, end, step.role.value, step.op, step.block, value)


def _block_before(moments: Sequence[Moment], place: int) -> int:
    return moments[place - 1].block if place else 0


def _moved(life: Life, split: int, tangents: Sequence[int], dropped: Set[int]) -> Life:
    """Return an allocation with its indices after the moment of the loss was inserted at `split`, before the backward.

    Gradients that the loss passes to the backward, the `tangents`, exist from that moment on; outputs that are
    `dropped` before the backward exist up to it, and if there are such, gradients exist after it.
    """
    handed_in = not dropped and (life.kind is MemoryKind.OUTSIDE or life.value in tangents)
    ends = life.last + (life.value in dropped and life.last == split - 1)
    begins = life.first if handed_in or life.first < split else life.first + 1
    return replace(life, first=begins, last=life.last if ends < split else life.last + 1)
