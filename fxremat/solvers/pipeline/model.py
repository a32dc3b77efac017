"""The model of pipeline parallelism: a chain of layers, devices, and schedules that repeat.

    stage      consecutive layers on one device; a device may have several (a non-contiguous allocation)
    period     seconds between two micro-batches once the pipeline is full
    work       a forward or backward of one stage for one micro-batch
    pattern    a periodic schedule: each work of micro-batch 0 has a start; micro-batch m starts it `slot(m)` ticks
               later
    tick       seconds between two slots, each of which is for one micro-batch, or stays empty
    memory of a device    copies * weights + in flight * saved, of each of its stages, + buffers at borders  <=  M

A pattern that skips every (k + 1)-th slot is k-periodic: fewer micro-batches are in flight, and the period is
tick * (k + 1) / k (Theorem 16).

A. Shilova, Memory Saving Strategies for Deep Neural Network Training (thesis, 2021), chapters 5-7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from fxremat.errors import InvalidChain


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the chain, with its seconds and bytes for one micro-batch."""

    name: str = ""
    forward_time: float  # seconds
    backward_time: float  # seconds
    weight_bytes: float  # bytes of one copy of the weights
    saved_bytes: float  # bytes saved from its forward to its backward
    output_bytes: float  # bytes of the layer's output
    grad_bytes: float  # bytes of the gradient of the output

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A chain of layers."""

    input_bytes: float
    input_grad_bytes: float
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise InvalidChain("layers is empty; a pipeline has at least one layer")
        _check(self)

    def __len__(self) -> int:
        return len(self.layers)


MOST_DEVICES = 10_000


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Identical devices; each pair of them has its own link, which makes one copy at a time."""

    devices: int
    memory: float  # bytes of each device
    bandwidth: float | None  # bytes per second of a link; None: copies take no time
    copies: float  # number of copies of the weights' bytes on their device (two versions and a gradient: 3)

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise InvalidChain(f"devices is {self.devices}; a pipeline has from 1 to {MOST_DEVICES}")
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            raise InvalidChain(f"bandwidth is {self.bandwidth}; it is above 0 bytes per second, or None")
        _check(self)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train a stage: what it saves and recomputes, as the resulting seconds and bytes."""

    forward_time: float  # seconds
    backward_time: float  # seconds, including recomputation
    kept_bytes: float  # bytes saved by a micro-batch between its forward and its backward
    peak_bytes: float  # peak bytes of a micro-batch while the stage runs its forward or backward

    def __post_init__(self) -> None:
        _check(self)

    @property
    def seconds(self) -> float:
        """Forward plus backward seconds."""
        return self.forward_time + self.backward_time

    def bytes(self, in_flight: int) -> float:
        """Return the bytes of `in_flight` micro-batches, one of which is being computed."""
        return (in_flight - 1) * self.kept_bytes + max(self.kept_bytes, self.peak_bytes)


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """Layers first..last (indices from 0, both included) on one device, trained in one way."""

    first: int
    last: int
    device: int
    way: Way


class WorkKind(Enum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Work:
    """A forward or backward of a stage for one micro-batch."""

    stage: int
    kind: WorkKind
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """An allocation of stages to devices, and a periodic schedule of their forwards, backwards and copies.

    Starts are those of micro-batch 0, in seconds. At a border between two stages, the output is copied forth
    and its gradient back; between two stages of one device nothing is copied.
    """

    layers: Layers
    machines: Machines
    stages: tuple[PlannedStage, ...]  # in the order of the chain
    tick: float  # seconds between two slots; each slot is for one micro-batch, or stays empty
    skip: int | None  # k: every (k + 1)-th slot stays empty; None: none does
    forward_starts: tuple[float, ...]  # start of each stage's forward
    backward_starts: tuple[float, ...]  # start of each stage's backward
    forth_starts: tuple[float, ...]  # start of the copy of each stage's output to the next stage
    back_starts: tuple[float, ...]  # start of the copy of each stage's output gradient from the next stage
    # for each stage, the most micro-batches between the start of the forward and the end of the backward
    in_flight: tuple[int, ...]
    memory: tuple[float, ...]  # peak bytes of each device
    bound: float  # lower bound in seconds on the period of any plan
    by: str  # name of the planner that found the plan

    @property
    def period(self) -> float:
        """Average seconds between two micro-batches once the pipeline is full."""
        return self.tick if self.skip is None else self.tick * (self.skip + 1) / self.skip

    def slot(self, microbatch: int) -> int:
        """Return the slot of a micro-batch: by how many ticks (seconds between slots) it is later than micro-batch 0.
        """
        return slot_of(microbatch, self.skip)

    def orders(self, microbatches: int) -> tuple[tuple[Work, ...], ...]:
        """Return the forwards and backwards of each device for `microbatches` micro-batches, in order.

        If several start at the same time, since some take no time, they are in the order in which they depend
        on each other.
        """
        timed: list[list[tuple[int, int, int, Work]]] = [[] for _ in range(self.machines.devices)]
        depth = len(self.stages)
        for number, stage in enumerate(self.stages):
            for microbatch in range(microbatches):
                late = self.slot(microbatch) * self.tick
                for kind, starts, rank in (
                    (WorkKind.FORWARD, self.forward_starts, number),
                    (WorkKind.BACKWARD, self.backward_starts, 2 * depth - number),
                ):
                    work = Work(number, kind, microbatch)
                    moment = round((starts[number] + late) / self.tick * _STEPS)
                    timed[stage.device].append((moment, microbatch, rank, work))
        return tuple(tuple(work for *_, work in sorted(works, key=lambda w: w[:3])) for works in timed)


def slot_of(microbatch: int, skip: int | None) -> int:
    """Return the index of the time slot of a micro-batch if every (skip + 1)-th stays empty; None or 0: no slot does.

    >>> [slot_of(number, 2) for number in range(5)]
    [0, 1, 3, 4, 6]
    """
    return microbatch + microbatch // skip if skip else microbatch


_STEPS = 1e7  # fractions of a tick: starts that differ by less than 1 / _STEPS of a tick count as equal


def _check(data: Any) -> None:
    """Raise `InvalidChain` unless times, sizes and counts are finite and not negative."""
    for field in fields(data):
        value = getattr(data, field.name)
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise InvalidChain(f"{field.name} is {value}; it is a finite number, 0 or more")
