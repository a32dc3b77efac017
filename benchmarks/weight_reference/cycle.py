"""The model of weight offloading: a cycle of ops, each of which needs one unit of weights on the device.

    B_L .. B_1, F_1 .. F_L       repeated; a rematerialized forward is one more op that uses its unit
    beside(o)                    bytes that op o needs besides the weights that are there:
                                 sum of a_k, k <= i, for F_i; that and the gradient, of the unit's size, for B_i
    gap (k, p)                   unit k is used by op p, and next by op q: it may be away from the ops in between

    memory     beside(o) + units on the device, or on their way, while o runs  <=  M

A unit is written by one op of the cycle (its backward, with the update in it). It leaves the device with a copy to the
host, or without one where the host has it as it is: one copy out serves all gaps of a cycle (the discount).

Beaumont, Eyraud-Dubois, Shilova, Zhao, Weight Offloading Strategies for Training Large DNN Models (2022), section 3.
Their equation (4) counts w_i twice where it is read literally; here it is counted once, as in their NP-hardness proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from fxremat.errors import InvalidChain

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CycleOp:
    """One op of the cycle, with the unit of weights that it needs."""

    name: str
    seconds: float
    unit: int  # the weights that it needs
    beside: float  # bytes that it needs besides weights
    writes: bool  # whether it changes the unit


@dataclass(frozen=True, order=True)
class Gap:
    """A unit is away from the end of the op at `start` to the beginning of the next op that uses it."""

    unit: int
    start: int


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """A training step that follows another, on a device with a link that copies both ways at once.

    Raises:
        InvalidChain: a unit that no op uses or not exactly one writes, a negative size, a speed that is not positive.
    """

    ops: tuple[CycleOp, ...]
    units: tuple[float, ...]  # bytes of each
    memory: float  # bytes
    to_host: float  # bytes per second
    from_host: float

    def __post_init__(self) -> None:
        if not (self.to_host > 0 and self.from_host > 0):
            raise InvalidChain(
                f"the link copies {self.to_host} and {self.from_host} bytes/s; both are above 0"
            )
        for op in self.ops:
            if op.seconds < 0 or op.beside < 0:
                raise InvalidChain(
                    f"{op.name} takes {op.seconds} s and {op.beside} bytes; neither is negative"
                )
        for unit, size in enumerate(self.units):
            writers = sum(op.writes for op in self.ops if op.unit == unit)
            if size < 0 or writers != 1:
                raise InvalidChain(
                    f"unit {unit + 1} has {size} bytes and {writers} ops that write it, not one"
                )

    @classmethod
    def of_layers(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        weights: Sequence[float],
        activations: Sequence[float],
        memory: float,
        bandwidth: float,
    ) -> Cycle:
        """The cycle of a chain of L layers: times of each, its weights, and the L + 1 activations that are kept.

        >>> cycle = Cycle.of_layers([1, 1], [2, 2], [4, 5], [0, 1, 1], 20, 1)
        >>> [(op.name, op.beside) for op in cycle.ops]
        [('B2', 7), ('B1', 5), ('F1', 1), ('F2', 2)]
        """
        kept = list(accumulate(activations))[1:]
        layers = range(len(weights))
        backwards = [
            CycleOp(name=f"B{i + 1}", seconds=backward[i], unit=i, beside=weights[i] + kept[i], writes=True)
            for i in reversed(layers)
        ]
        forwards = [
            CycleOp(name=f"F{i + 1}", seconds=forward[i], unit=i, beside=kept[i], writes=False)
            for i in layers
        ]
        return cls(
            ops=(*backwards, *forwards),
            units=tuple(weights),
            memory=memory,
            to_host=bandwidth,
            from_host=bandwidth,
        )

    @property
    def seconds(self) -> float:
        """Seconds of all ops: the step's time where every copy is hidden."""
        return sum(op.seconds for op in self.ops)

    @cached_property
    def least_memory(self) -> float:
        """Bytes that the op that needs most takes with its own unit."""
        return max(op.beside + self.units[op.unit] for op in self.ops)

    @cached_property
    def most_memory(self) -> float:
        """Bytes with which every unit can stay."""
        return max(op.beside for op in self.ops) + sum(self.units)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the ops that use each unit, in order."""
        return tuple(
            tuple(place for place, op in enumerate(self.ops) if op.unit == unit)
            for unit in range(len(self.units))
        )

    @cached_property
    def writer(self) -> tuple[int, ...]:
        """The position of the op that writes each unit."""
        return tuple(next(place for place in places if self.ops[place].writes) for places in self.uses)

    def gaps(self) -> Iterator[Gap]:
        """Every gap of at least one op."""
        for unit, places in enumerate(self.uses):
            for start in places:
                if self.length(Gap(unit, start)):
                    yield Gap(unit, start)

    def end(self, gap: Gap) -> int:
        """The position of the op that needs the unit again."""
        places = self.uses[gap.unit]
        return places[(places.index(gap.start) + 1) % len(places)]

    def length(self, gap: Gap) -> int:
        """Number of ops from which the unit may be away."""
        return (self.end(gap) - gap.start - 1) % len(self.ops)

    def covered(self, gap: Gap) -> list[int]:
        """The positions of the ops from which the unit may be away."""
        return [(gap.start + 1 + step) % len(self.ops) for step in range(self.length(gap))]


def one_by_one(cycle: Cycle) -> float:
    """Seconds where every unit comes before each op that uses it, and no copy is hidden (the baseline L2L)."""
    copies = sum(cycle.units[unit] * len(places) for unit, places in enumerate(cycle.uses))
    return cycle.seconds + copies / cycle.from_host
