"""Programs of one captured graph as fx graphs that run; the latest of them are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from fxremat.graphs.nodes import is_number
from fxremat.graphs.symbolic import Size
from fxremat.passes.lower import lower, sizes_of
from fxremat.step.program import Order
from fxremat.torch_private import boxed


@dataclass(frozen=True)
class Emitted:
    """The two graphs of a program, as they run."""

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    forward_sizes: tuple[Size, ...]  # passed to the forward after the primals
    backward_sizes: tuple[Size, ...]  # passed to the backward before all else
    tensors: int  # how many tensors the forward saves
    numbers: int  # how many numbers it saves after them; sizes are not counted


@dataclass
class EmittedPrograms:
    """The emitted programs of a graph, by number; at most `most` are kept, those that ran last.

    Args:
        outputs: the number of the forward's outputs.
        fresh: ops that overwrite no operand at any size, since at one size they must not.
    """

    outputs: int
    most: int
    fresh: frozenset[int] = frozenset()
    _kept: OrderedDict[int, Emitted] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, number: int | None) -> bool:
        return number in self._kept

    def never_overwriting(self, fresh: Set[int]) -> None:
        """Let these ops overwrite no operand from now on."""
        if not fresh <= self.fresh:
            self.fresh |= fresh
            self._kept.clear()

    def of(self, number: int, order: Order) -> Emitted:
        """Return the program `number`, which runs in this order; it is made at its first use, and if it was displaced.
        """
        if number not in self._kept:
            self._kept[number] = self._emit(order)
            if len(self._kept) > self.most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _emit(self, order: Order) -> Emitted:
        forward, backward = lower(order.program(), fresh=self.fresh)
        (returned,) = next(iter(reversed(forward.graph.nodes))).args
        saved = [node.meta["val"] for node in returned[self.outputs :]]
        numbers = sum(map(is_number, saved))
        return Emitted(
            forward=boxed(forward),
            backward=boxed(backward),
            forward_sizes=sizes_of(forward),
            backward_sizes=sizes_of(backward),
            tensors=len(saved) - numbers,
            numbers=numbers,
        )
