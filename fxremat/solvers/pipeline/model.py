"""The model of pipelined model parallelism: a chain of layers, devices, and patterns that repeat.

    stage      consecutive layers on one device; a device may have several (a non-contiguous allocation)
    period     seconds between two micro-batches once the pipeline is full
    pattern    micro-batch 0 does each of its works at a start; micro-batch m does it `slot(m)` ticks later

    memory of a device    copies * weights + in flight * kept, of each of its stages, + buffers at its borders  <=  M

A pattern that skips every (k + 1)-th slot is k-periodic: fewer micro-batches are in flight, and the period is
tick * (k + 1) / k (Theorem 16).

A. Shilova, Memory Saving Strategies for Deep Neural Network Training (thesis, 2021), chapters 5-7.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One link of the chain; times and sizes of one micro-batch."""

    name: str = ""
    forward_time: float  # seconds
    backward_time: float
    weight_bytes: float  # one copy
    saved_bytes: float  # from its forward to its backward
    output_bytes: float  # of a_l
    grad_bytes: float  # of the gradient of a_l


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A chain of layers."""

    input_bytes: float
    input_grad_bytes: float
    layers: tuple[Layer, ...]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Identical devices; each pair of neighbouring stages has a link of its own, which copies one way at a time."""

    devices: int
    memory: float  # bytes of each
    bandwidth: float | None  # bytes per second of a link; None: copies take no time
    copies: float  # of the weights that a device keeps (two versions and a gradient: 3)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train a stage: what it keeps, and what its times are then."""

    forward_time: float  # seconds
    backward_time: float  # with what it recomputes
    kept_bytes: float  # per micro-batch between its forward and its backward
    peak_bytes: float  # of the micro-batch that is worked on


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers first..last, from 0, both included, on one device."""

    first: int
    last: int
    device: int
    way: Way


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Work:
    """What a device does with one micro-batch."""

    stage: int
    kind: Kind
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Stages on devices and a pattern of their works.

    Starts are those of micro-batch 0, in seconds; a border's copies are those of the output of its stage forth, and of
    its gradient back. A border between two stages of one device copies nothing.
    """

    layers: Layers
    machines: Machines
    stages: tuple[Stage, ...]  # in the order of the chain
    tick: float  # seconds
    skip: int | None  # k: every (k + 1)-th slot stays empty; None: none does
    forward_starts: tuple[float, ...]  # of each stage
    backward_starts: tuple[float, ...]
    forth_starts: tuple[float, ...]  # of each border
    back_starts: tuple[float, ...]
    in_flight: tuple[int, ...]  # most micro-batches of each stage between the start of F and the end of B
    memory: tuple[float, ...]  # bytes of each device
    bound: float  # seconds; no plan has a shorter period
    by: str  # which planner found it

    @property
    def period(self) -> float:
        """Seconds per micro-batch once the pipeline is full."""
        return self.tick if self.skip is None else self.tick * (self.skip + 1) / self.skip

    def slot(self, microbatch: int) -> int:
        """How many ticks after micro-batch 0 this one works."""
        return microbatch if self.skip is None else microbatch + microbatch // self.skip

    def orders(self, microbatches: int) -> tuple[tuple[Work, ...], ...]:
        """What each device does with so many micro-batches, in order.

        Works that start together, or take no time, are ordered as the chain asks for.
        """
        timed: list[list[tuple[float, int, Work]]] = [[] for _ in range(self.machines.devices)]
        depth = len(self.stages)
        for number, stage in enumerate(self.stages):
            for microbatch in range(microbatches):
                late = self.slot(microbatch) * self.tick
                for kind, starts, rank in (
                    (Kind.FORWARD, self.forward_starts, number),
                    (Kind.BACKWARD, self.backward_starts, 2 * depth - number),
                ):
                    work = Work(number, kind, microbatch)
                    timed[stage.device].append((starts[number] + late, rank, work))
        return tuple(tuple(work for *_, work in sorted(works, key=lambda w: w[:2])) for works in timed)
