"""A skeleton: all executions that a program may contain, in one fixed order; a choice says which of them happen.

    program      f1 f2 f3 | b3 b2 r1 b1                      r: a recomputation that the program has
    skeleton     f1 f2 f3 | (r2) b3 (r1) b2 (r1) b1          (r): a recomputation that may happen or not

First executions and backward ops always happen. A value is read from its latest execution and is alive from
there to its last reader. So every choice is a valid program: without a recomputation, its outputs only stay
alive since the execution before. Values that the caller holds are read from their first execution, and are
never freed.

The skeleton of a program has the program's own recomputations and, before each backward op, recomputations of
the forward ops that are closest upstream of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from fxremat.search.executions import Executions, borders
from fxremat.search.replay import Bits, Ints, Tape, blank_pages, replay
from fxremat.step.costs import Costs
from fxremat.step.layout import Layout
from fxremat.step.program import Order
from fxremat.step.step_graph import Origin, StepGraph

NEAREST = 16  # maximum number of recomputations that may be inserted before each backward op


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A program with recomputations inserted wherever they may help: all possible executions of ops, in order."""

    layout: Layout
    tape: Tape
    choice: Bits  # for each possible execution of an op, 1 if this candidate runs it
    ops: Ints  # the op of each execution; -1 for what `executions.borders` inserts
    blocks: Ints  # the block (run of ops between two cuts) of each execution; -1 where `ops` is -1

    def judge(self, choice: Bits) -> tuple[int, float]:
        """Return peak in bytes and time in seconds of a choice of executions. O(executions), some tens of microseconds.
        """
        return replay(self.tape, choice, blank_pages(self.tape), 0)

    def order(self, choice: Bits) -> Order:
        """Return the order of the chosen executions, without recomputations whose results are not read."""
        pages = blank_pages(self.tape)
        replay(self.tape, choice, pages, 0)
        runs = (pages.runs == 1) & (self.ops >= 0)
        split = int(np.flatnonzero(self.ops < 0)[0])
        return Order(
            layout=self.layout,
            ops=tuple(self.ops[runs].tolist()),
            blocks=tuple(self.blocks[runs].tolist()),
            split=int(runs[:split].sum()),
        )


class Skeletons:
    """Builds skeletons (programs with all recomputations that may help) for one step graph, from shared tables."""

    def __init__(self, graph: StepGraph, costs: Costs, *, nearest: int = NEAREST) -> None:
        self._executions = Executions(graph, costs)
        self._neighbours = _Neighbours(graph, nearest)
        self._backward = [op.backward for op in graph.ops]

    def around(self, order: Order) -> Skeleton:
        """Return a skeleton: the program that runs ops in this order, with all recomputations that may help.

        O(steps * nearest).
        """
        ops, blocks, again, chosen, split = self._listed(order)
        moments = borders(split, len(ops))
        entries = self._executions.entries(np.array(ops, np.int64), np.array(again, bool), split)
        return Skeleton(
            layout=order.layout,
            tape=self._executions.tape(entries, np.insert(np.array(again, np.uint8), moments, 0)),
            choice=np.insert(np.array(chosen, np.uint8), moments, 1),
            ops=np.insert(np.array(ops, np.int64), moments, -1),
            blocks=np.insert(np.array(blocks, np.int64), moments, -1),
        )

    def _listed(self, order: Order) -> tuple[list[int], list[int], list[bool], list[bool], int]:
        """List the possible executions: op, block, whether it is a recomputation, whether the given program has it.

        The last result is the index of the first execution in the backward graph.
        """
        ops, blocks, again, chosen = list[int](), list[int](), list[bool](), list[bool]()
        ran, just_ran, split = set[int](), set[int](), len(order.ops)
        for position, (op, block) in enumerate(zip(order.ops, order.blocks, strict=True)):
            if position == order.split:
                split = len(ops)
            near = list[int]()
            if self._backward[op]:
                near = [other for other in self._neighbours.near(op) if other not in just_ran]
                just_ran.clear()
            elif op in ran:
                just_ran.add(op)
            ops += [*near, op]
            blocks += [block] * (len(near) + 1)
            again += [*([True] * len(near)), op in ran]
            chosen += [*([False] * len(near)), True]
            ran.add(op)
        return ops, blocks, again, chosen, split


class _Neighbours:
    """Finds the recomputable forward ops that are closest upstream of an op's inputs: `near(op)`."""

    def __init__(self, graph: StepGraph, nearest: int) -> None:
        self.graph, self.nearest, self.pinned = graph, nearest, graph.pinned
        self.near = cache(self._near)

    def _near(self, index: int) -> list[int]:
        """List the recomputable forward ops closest upstream of an op's inputs, in forward order."""
        found: dict[int, None] = {}
        front = self._makers(self.graph.ops[index].reads)
        while front and len(found) < self.nearest:
            for maker in front[: self.nearest - len(found)]:
                found.setdefault(maker)
            behind = [m for maker in front for m in self._makers(self.graph.ops[maker].again_reads)]
            front = [maker for maker in dict.fromkeys(behind) if maker not in found]
        return sorted(found)

    def _makers(self, values: Iterable[int]) -> list[int]:
        """List the recomputable forward ops that make these values."""
        makers = [
            value.producer
            for value in (self.graph.values[index] for index in values)
            if value.origin is Origin.FORWARD and value.index not in self.pinned
        ]
        return [maker for maker in dict.fromkeys(makers) if maker is not None and self._repeatable(maker)]

    def _repeatable(self, index: int) -> bool:
        """Tell whether an op may be recomputed: not if it reads inputs that the step overwrites."""
        return self.graph.mutated_primals.isdisjoint(self.graph.ops[index].again_reads)
