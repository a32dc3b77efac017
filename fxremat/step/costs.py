"""Costs of the ops of a step: seconds, workspaces, and the sizes that liveness needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fxremat.step.liveness import Sizes
from fxremat.step.program import Program
from fxremat.step.step_graph import StepGraph


@dataclass(frozen=True)
class OpCost:
    """The cost of one execution of one op."""

    seconds: float
    workspace: int  # bytes beyond inputs and outputs, while it runs
    outputs: tuple[int, ...] = ()  # bytes of the storage of each output, by position; (): as in the step graph


@dataclass(frozen=True)
class Costs:
    """The costs of a step graph's ops: seconds, bytes of values and workspaces, and which ops must not overwrite."""

    seconds: tuple[float, ...]
    sizes: Sizes
    fresh: frozenset[int] = frozenset()  # ops that must allocate their result: real layouts forbid overwriting
    staying: frozenset[int] = frozenset()  # values that are not to be copied to the host

    def time(self, program: Program) -> float:
        """Return the seconds of all executions of a program, as if copies took no time."""
        return self.time_of(step.op for step in program.executions)

    def time_of(self, ops: Iterable[int]) -> float:
        """Return the seconds of executing these ops, by number, one after the other."""
        return sum([self.seconds[op] for op in ops])

    def scaled(self, factor: float) -> Costs:
        """Return these costs with every time multiplied by `factor` (calibration)."""
        return replace(self, seconds=tuple(seconds * factor for seconds in self.seconds))


def apart(graph: StepGraph, costs: Costs) -> tuple[Costs, float]:
    """Return costs in which collectives take no time, and the seconds of all of them, which may overlap with ops."""
    seconds = tuple(0.0 if op.communicates else s for op, s in zip(graph.ops, costs.seconds, strict=True))
    return replace(costs, seconds=seconds), sum(costs.seconds) - sum(seconds)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speeds of the copies to and from the host, and how much copying slows ops down."""

    to_host: float  # bytes per second
    from_host: float
    slowdown: float = 0.05  # seconds that ops lose for each second of copying: both use the device's memory
    in_powers: bool = False  # the host allocates powers of two bytes

    def on_host(self, size: int, tensors: int = 1) -> int:
        """Return the bytes of host memory that tensors of `size` bytes together occupy.

        >>> Link(to_host=1e9, from_host=1e9, in_powers=True).on_host(65 * 2**20) // 2**20
        128
        """
        each = -(-size // tensors)
        return tensors * (1 << (each - 1).bit_length()) if self.in_powers and each else size


@dataclass(frozen=True, kw_only=True)
class ParameterUpdate:
    """A parameter whose gradient the backward uses up, and what that costs: for its update, or for adding it up.

    The update runs in the backward. Or the backward adds the gradient to those of earlier backwards, and the update
    runs in `optimizer.step()`: `later`, which takes bytes in addition to all that waits.
    """

    value: int  # the number of the parameter's value in the step graph
    bytes: int  # bytes of the parameter
    state_bytes: int  # bytes that the backward reads and writes: of the optimizer state, or of the gradient so far
    workspace: int  # bytes that the backward allocates for it meanwhile
    seconds: float  # seconds of this in the backward
    stays: bool = False  # the parameter stays on the device: forward returns a view of it
    later: int | None = None  # bytes that the update in `optimizer.step()` allocates; None: it runs in the backward
    waiting: int = 0  # bytes of optimizer state that live where the parameter does, and that the backward leaves there

    @property
    def held(self) -> int:
        """The bytes of the parameter and of all that lives where it does."""
        return self.bytes + self.state_bytes + self.waiting
