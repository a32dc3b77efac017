"""Every execution that a program may contain, in one fixed order; a choice says which of them happen.

    program      f1 f2 f3 | b3 b2 r1 b1                      r: a recomputation that the program has
    skeleton     f1 f2 f3 | (r2) b3 (r1) b2 (r1) b1          (r): one that may happen or not

First executions and backward ops always happen. A value is read from its latest execution and is alive from there to
its last reader, so every choice is a valid program: leaving a recomputation out only keeps what it would have made
alive since the execution before. What the caller holds is read from its first execution, which nothing frees.

The skeleton of a program has the program's own recomputations, and before each backward op those of the ops nearest
behind what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fxremat.search.replay import Bits, Ints, Tape, blank_pages, replay
from fxremat.step.costs import Costs
from fxremat.step.joint import Joint, Origin
from fxremat.step.layout import Layout
from fxremat.step.program import Order, Program, Role

NEAREST = 16  # recomputations that are offered before a backward op, at most


@dataclass(frozen=True, slots=True)
class _Execution:
    """One entry of a skeleton; op is None for the two moments between ops: the split, and the end."""

    op: int | None
    optional: bool
    reads: Sequence[int]
    writes: Sequence[int]
    extra: int = 0  # bytes while it runs, beyond what it reads and writes
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Skeleton:
    """The executions and the choice among them that a program is."""

    layout: Layout
    tape: Tape
    choice: Bits  # of the program
    ops: Ints  # op numbers, -1 for the split and the end
    blocks: Ints

    def judge(self, choice: Bits) -> tuple[int, float]:
        """Peak in bytes and time in seconds. O(executions), some tens of microseconds."""
        return replay(self.tape, choice, blank_pages(self.tape))

    def order(self, choice: Bits) -> Order:
        """What runs under a choice, recomputations that nothing reads left out."""
        pages = blank_pages(self.tape)
        replay(self.tape, choice, pages)
        runs = (pages.runs == 1) & (self.ops >= 0)
        split = int(np.flatnonzero(self.ops < 0)[0])
        return Order(
            layout=self.layout,
            ops=tuple(self.ops[runs].tolist()),
            blocks=tuple(self.blocks[runs].tolist()),
            split=int(runs[:split].sum()),
        )


class Skeletons:
    """Makes the skeletons of a joint graph's programs; what does not depend on the program is made once."""

    def __init__(self, joint: Joint, costs: Costs, *, nearest: int = NEAREST) -> None:
        self.parts = _Parts(joint, costs, nearest)

    def around(self, program: Program) -> Skeleton:
        """The skeleton around a program. O(steps * nearest)."""
        parts = self.parts
        executions = list(_executions(program, parts))
        read_from, reads = _joined([e.reads for e, _, _ in executions])
        write_from, writes = _joined([e.writes for e, _, _ in executions])
        tape = Tape(
            optional=np.array([e.optional for e, _, _ in executions], dtype=np.uint8),
            read_from=read_from,
            reads=reads,
            write_from=write_from,
            writes=writes,
            sizes=parts.sizes,
            extra=np.array([e.extra for e, _, _ in executions], dtype=np.int64),
            seconds=np.array([e.seconds for e, _, _ in executions], dtype=np.float64),
            seeds=len(parts.joint.values) + 1,
            start=parts.preserved,
        )
        return Skeleton(
            layout=program.layout,
            tape=tape,
            choice=np.array([chosen for _, _, chosen in executions], dtype=np.uint8),
            ops=np.array([-1 if e.op is None else e.op for e, _, _ in executions], dtype=np.int64),
            blocks=np.array([block for _, block, _ in executions], dtype=np.int64),
        )


def _executions(program: Program, parts: _Parts) -> Iterator[tuple[_Execution, int, bool]]:
    """Every execution, its block, and whether it is one of the program's."""
    ran, just_ran = set[int](), set[int]()
    for position, step in enumerate(program.executions):
        if position == program.split:
            yield from ((moment, -1, True) for moment in parts.split())
        if step.role is Role.BACKWARD:
            for near in parts.near(step.op):
                if near not in just_ran:
                    yield parts.again(near), step.block, False
            just_ran.clear()
            yield parts.first(step.op), step.block, True
        elif step.op in ran:
            just_ran.add(step.op)
            yield parts.again(step.op), step.block, True
        else:
            ran.add(step.op)
            yield parts.first(step.op), step.block, True
    yield parts.end(), -1, True


def _joined(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists end to end, and where each begins."""
    begins = np.zeros(len(lists) + 1, dtype=np.int64)
    begins[1:] = np.cumsum([len(items) for items in lists])
    return begins, np.array([item for items in lists for item in items], dtype=np.int64)


class _Parts:
    """The executions of a joint graph's ops, each made once.

    Values are numbered as in the joint graph; after them come the loss outside, and a seed for each random op.
    """

    def __init__(self, joint: Joint, costs: Costs, nearest: int) -> None:
        self.joint, self.costs, self.nearest = joint, costs, nearest
        self.pinned = joint.pinned
        self.primals = {v.index for v in joint.values if v.origin is Origin.PRIMAL}
        self.tangents = [v.index for v in joint.values if v.origin is Origin.TANGENT]
        self.read_late = {value for op in joint.backward_ops for value in op.reads}
        self.root = len(joint.values)
        random = [op.index for op in joint.ops if op.random]
        self.seed_of = {op: self.root + 1 + place for place, op in enumerate(random)}
        sizes = [0 if v.index in self.primals else costs.sizes.values[v.index] for v in joint.values]
        self.sizes = np.array([*sizes, costs.sizes.root, *[costs.sizes.seed] * len(random)], dtype=np.int64)
        # copies of inputs that the forward overwrites and the backward reads
        self.preserved = sum(costs.sizes.values[value] for value in self.read_late & joint.mutated_primals)
        self.first = cache(self._first)
        self.again = cache(self._again)
        self.near = cache(self._near)

    def _first(self, index: int) -> _Execution:
        op = self.joint.ops[index]
        seed = [self.seed_of[index]] if op.random and not op.backward else []
        return _Execution(
            op=index,
            optional=False,
            reads=self._stored(op.reads),
            writes=[*op.writes, *seed],
            extra=self.costs.sizes.workspace[index],
            seconds=self.costs.seconds[index],
        )

    def _again(self, index: int) -> _Execution:
        """A recomputation. What the caller holds is made a second time in vain, and dropped at once."""
        op = self.joint.ops[index]
        in_vain = sum(self.costs.sizes.values[value] for value in op.again_writes if value in self.pinned)
        seed = [self.seed_of[index]] if op.random else []
        return _Execution(
            op=index,
            optional=True,
            reads=[*self._stored(op.again_reads), *seed],
            writes=[value for value in op.again_writes if value not in self.pinned],
            extra=self.costs.sizes.workspace[index] + in_vain,
            seconds=self.costs.seconds[index],
        )

    def split(self) -> Iterator[_Execution]:
        """The end of the forward graph, then what the caller brings."""
        updates = [v for v in self.joint.updates if v not in self.primals]
        yield _Execution(op=None, optional=False, reads=updates, writes=())
        brought = sum(self.costs.sizes.values[tangent] for tangent in self.tangents) + self.costs.sizes.root
        beyond = max(0, self.costs.sizes.outside - brought)
        yield _Execution(op=None, optional=False, reads=(), writes=[*self.tangents, self.root], extra=beyond)

    def end(self) -> _Execution:
        """What is alive when the step is over."""
        held = [v for v in self.tangents if v in self.joint.root_tangents or v not in self.read_late]
        reads = {*self._stored(self.pinned), *held, self.root}
        return _Execution(op=None, optional=False, reads=sorted(reads), writes=())

    def _near(self, index: int) -> list[int]:
        """The ops nearest behind what an op reads that may run again, in the order of the forward."""
        found: dict[int, None] = {}
        front = self._makers(self.joint.ops[index].reads)
        while front and len(found) < self.nearest:
            for maker in front[: self.nearest - len(found)]:
                found.setdefault(maker)
            behind = [m for maker in front for m in self._makers(self.joint.ops[maker].again_reads)]
            front = [maker for maker in dict.fromkeys(behind) if maker not in found]
        return sorted(found)

    def _makers(self, values: Iterable[int]) -> list[int]:
        """The ops that make these values, as far as they may run again."""
        makers = [
            value.producer
            for value in (self.joint.values[index] for index in values)
            if value.origin is Origin.FORWARD and value.index not in self.pinned
        ]
        return [maker for maker in dict.fromkeys(makers) if maker is not None and self._repeatable(maker)]

    def _repeatable(self, index: int) -> bool:
        """False for what reads inputs that the step overwrites: they would have to be copied first."""
        return self.joint.mutated_primals.isdisjoint(self.joint.ops[index].again_reads)

    def _stored(self, values: Iterable[int]) -> list[int]:
        return [value for value in values if value not in self.primals]
