"""Costs of the ops of a step: seconds, workspaces, and the sizes that liveness needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxremat.step.liveness import Sizes
from fxremat.step.program import Program
from fxremat.step.step_graph import StepGraph


@dataclass(frozen=True)
class OpCost:
    """One execution of one op."""

    seconds: float
    workspace: int  # bytes beyond inputs and outputs, while it runs
    outputs: tuple[int, ...] = ()  # bytes of the storage of each output, by position; (): as the graph says


@dataclass(frozen=True)
class Costs:
    """Seconds of each op, the sizes that liveness needs, and which ops must not overwrite."""

    seconds: tuple[float, ...]
    sizes: Sizes
    fresh: frozenset[int] = frozenset()  # ops that make a new result, since real layouts do not allow to overwrite

    def time(self, program: Program) -> float:
        """Seconds of all executions of a program, as if copies took no time."""
        return self.time_of(step.op for step in program.executions)

    def time_of(self, ops: Iterable[int]) -> float:
        """Seconds of executions of these ops, by number, one after the other."""
        return sum([self.seconds[op] for op in ops])

    def scaled(self, factor: float) -> Costs:
        """The same with every time multiplied (calibration)."""
        return replace(self, seconds=tuple(seconds * factor for seconds in self.seconds))


def apart(graph: StepGraph, costs: Costs) -> tuple[Costs, float]:
    """The costs without the time of collectives, and the seconds of all of these, which may pass beside the ops."""
    seconds = tuple(0.0 if op.communicates else s for op, s in zip(graph.ops, costs.seconds, strict=True))
    return replace(costs, seconds=seconds), sum(costs.seconds) - sum(seconds)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speeds of the copies, and what one costs the thread that starts it."""

    to_host: float  # bytes per second
    from_host: float
    slowdown: float = 0.05  # seconds that ops lose for each second of copying: both use the device's memory
    in_powers: bool = False  # the host's memory is taken in powers of two bytes

    def on_host(self, size: int, tensors: int = 1) -> int:
        """Bytes of the host's memory that tensors of `size` bytes together take there.

        >>> Link(to_host=1e9, from_host=1e9, in_powers=True).on_host(65 * 2**20) // 2**20
        128
        """
        each = -(-size // tensors)
        return tensors * (1 << (each - 1).bit_length()) if self.in_powers and each else size


@dataclass(frozen=True, kw_only=True)
class ParameterUpdate:
    """A parameter that the step updates."""

    value: int  # of the joint graph
    bytes: int
    state_bytes: int  # of its optimizer state
    workspace: int  # bytes that the update takes besides
    seconds: float  # of the update
    stays: bool = False  # on the device: forward returns a view of it
