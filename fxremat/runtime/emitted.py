"""A cache of the generated forward and backward graphs of the programs of one captured graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from fxremat.graphs.nodes import is_number
from fxremat.graphs.region import runnable
from fxremat.graphs.symbolic import Size
from fxremat.passes.lower import lower, sizes_of
from fxremat.runtime.unused import Backward
from fxremat.step.program import Program


@dataclass(frozen=True)
class Emitted:
    """The generated forward and backward graph of one plan, ready to run."""

    forward: Callable[[list[Any]], Any]
    backward: Backward
    forward_sizes: tuple[Size, ...]  # symbolic sizes that the forward takes after the primals
    backward_sizes: tuple[Size, ...]  # symbolic sizes that the backward takes first
    tensors: int  # number of tensors that the forward saves
    numbers: int  # number of Python numbers that the forward saves after the tensors, symbolic sizes not counted


@dataclass
class EmittedPrograms:
    """Cache of generated graphs, by program number; the `most` that ran last are kept.

    Args:
        outputs: the number of the forward's outputs.
        tangents: output -> the name of the placeholder of its gradient.
        fresh: ops that must not overwrite an operand at some size, and therefore do not at any.
        tier: the name of the host tier to which programs copy values; "": they copy none.
        sums: True if backwards take sums of gradients as their last input, to which they add (`ops.gradient_sums`).
    """

    outputs: int
    tangents: Mapping[int, str]
    most: int
    fresh: frozenset[int] = frozenset()
    tier: str = ""
    sums: bool = False
    _kept: OrderedDict[int, Emitted] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, number: int | None) -> bool:
        return number in self._kept

    def never_overwriting(self, fresh: Set[int]) -> None:
        """From now on, generate graphs in which these ops do not overwrite an operand."""
        if not fresh <= self.fresh:
            self.fresh |= fresh
            self._kept.clear()

    def of(self, number: int, program: Callable[[], Program], fresh: Set[int] | None = None) -> Emitted:
        """Return the graphs of program `number`, which `program` returns; they are generated unless they are cached.

        Args:
            fresh: ops that must not overwrite an operand, for a program of another graph; None: those of this one.
        """
        if number not in self._kept:
            self._kept[number] = self._emit(program(), self.fresh if fresh is None else fresh)
            if len(self._kept) > self.most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _emit(self, program: Program, fresh: Set[int]) -> Emitted:
        forward, backward = lower(program, self.tier, fresh=fresh, sums=self.sums)
        (returned,) = next(iter(reversed(forward.graph.nodes))).args
        saved = [node.meta["val"] for node in returned[self.outputs :]]
        numbers = sum(map(is_number, saved))
        return Emitted(
            forward=runnable(forward),
            backward=Backward(backward, self.tangents),
            forward_sizes=sizes_of(forward),
            backward_sizes=sizes_of(backward),
            tensors=len(saved) - numbers,
            numbers=numbers,
        )
