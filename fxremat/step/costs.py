"""Costs of the ops of a training step: seconds, workspaces, and bytes of the values."""

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
    workspace: int  # bytes allocated only while the op runs, besides inputs and outputs
    outputs: tuple[int, ...] = ()  # bytes of the storage of each output of the op; (): those in the step graph


@dataclass(frozen=True)
class Costs:
    """The costs of a step graph's ops: seconds, bytes of values and workspaces, and which ops need a new result."""

    seconds: tuple[float, ...]
    sizes: Sizes
    fresh: frozenset[int] = frozenset()  # indices of ops whose kernels must not overwrite an input
    staying: frozenset[int] = frozenset()  # indices of values that must not be copied to the host

    def time(self, program: Program) -> float:
        """Return the summed seconds of all ops of a program, recomputations included; copies count as 0."""
        return self.time_of(step.op for step in program.executions)

    def time_of(self, ops: Iterable[int]) -> float:
        """Return the sum of the seconds of these ops, given by index."""
        return sum([self.seconds[op] for op in ops])

    def scaled(self, factor: float) -> Costs:
        """Return these costs with every time multiplied by `factor`, which corrects predicted to measured times."""
        return replace(self, seconds=tuple(seconds * factor for seconds in self.seconds))


def apart(graph: StepGraph, costs: Costs) -> tuple[Costs, float]:
    """Return the costs without the time of collectives, and the sum of their seconds, which may overlap with ops."""
    seconds = tuple(0.0 if op.communicates else s for op, s in zip(graph.ops, costs.seconds, strict=True))
    return replace(costs, seconds=seconds), sum(costs.seconds) - sum(seconds)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speeds of the copies to and from the host, and how much copying slows ops down."""

    to_host: float  # bytes per second
    from_host: float
    # seconds by which ops are delayed per second of copying, since both use the device's memory bandwidth
    slowdown: float = 0.05
    in_powers: bool = False  # True if the host allocator rounds sizes up to powers of two

    def on_host(self, size: int, tensors: int = 1) -> int:
        """Return the bytes that `tensors` tensors with `size` bytes in total occupy on the host.

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
    def in_the_optimizers_step(self) -> ParameterUpdate:
        """The same update in `optimizer.step()`: the backward adds up gradients, and state waits.

        The gradient so far is as large as the parameter, and adding to it allocates nothing.
        """
        return replace(
            self, state_bytes=self.bytes, waiting=self.state_bytes, workspace=0, later=self.workspace, seconds=0.0
        )

    @property
    def held(self) -> int:
        """The bytes of the parameter and of all that lives where it does."""
        return self.bytes + self.state_bytes + self.waiting
