"""All executions that a program of a step graph may contain: each op's first one, and recomputations.

They are numbered. A tape (`replay.Tape`) is a sequence of these numbers, with the values that each execution
reads and writes; `ops` below is the number of ops.

    op                 the first execution of an op
    ops + op           a recomputation of a forward op in the forward graph
    2 ops + op         a recomputation of a forward op in the backward graph
    3 ops + 0, ..., 3  the end of the forward graph, the loss, the arrival of gradients, and the end of the step

Values have the numbers of the step graph. Further numbers stand for the loss outside the model, a generator
state for each random op, and a copy of each input that the forward overwrites. The backward reads the copy; no
op makes it, so that it counts as alive from the start to its last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxremat.search.replay import Bits, Ints, Tape, blank_pages, replay
from fxremat.step.costs import Costs
from fxremat.step.layout import Layout
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Order
from fxremat.step.step_graph import Origin, StepGraph


def keep_all_peak(graph: StepGraph, costs: Costs) -> int:
    """Return the exact peak in bytes of the captured step, which runs every op once. O(reads + writes).

    It is counted without compiled kernels, whose loading takes longer where nothing else needs them.
    """
    count, alone = len(graph.ops), Layout(graph=graph, blocks=(), held=frozenset())
    captured = Order(alone, tuple(range(count)), (0,) * count, graph.forward_count)
    return live_bytes(captured.program(), costs.sizes).peak


class _Execution(NamedTuple):
    reads: Sequence[int]  # indices of the values that the execution reads
    writes: Sequence[int]
    extra: int = 0  # bytes allocated only during the execution, besides what it reads and writes
    seconds: float = 0.0


class Executions:
    """All executions of ops that a program of one step graph may contain, in no particular order.

    `tape` puts some of them in an order, so that their memory can be simulated.
    """

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        self._graph, self._costs, self._count = graph, costs, len(graph.ops)
        self._primals = {v.index for v in graph.values if v.origin is Origin.PRIMAL}
        self._read_late = {value for op in graph.backward_ops for value in op.reads}
        self._root = len(graph.values)
        random = [op.index for op in graph.ops if op.random]
        self._seed_of = {op: self._root + 1 + place for place, op in enumerate(random)}
        mutated = sorted(graph.mutated_primals)
        self._copy_of = {value: self._root + 1 + len(random) + place for place, value in enumerate(mutated)}
        sizes = [0 if v.index in self._primals else costs.sizes.values[v.index] for v in graph.values]
        sizes += [costs.sizes.root, *[costs.sizes.seed] * len(random)]
        self._sizes = np.array([*sizes, *(costs.sizes.values[value] for value in mutated)], dtype=np.int64)
        every = range(self._count)
        all_ = [
            *map(self._first, every),
            *(self._again(op, late=False) for op in every),
            *(self._again(op, late=True) for op in every),
            self._split(),
            self._loss(),
            self._tangents_arrive(),
            self._end(),
        ]
        self._reads = _Lists([execution.reads for execution in all_])
        self._writes = _Lists([execution.writes for execution in all_])
        self._extra = np.array([execution.extra for execution in all_], dtype=np.int64)
        self._seconds = np.array([execution.seconds for execution in all_], dtype=np.float64)

    def judge(self, order: Order) -> tuple[int, float]:
        """Return the exact peak in bytes and the time in seconds of an order of ops. O(reads + writes), some 0.1 ms."""
        return self.judge_ops(order.ops, order.split)

    def judge_ops(self, numbers: Sequence[int], split: int) -> tuple[int, float]:
        """Return the peak in bytes and the seconds of running ops in the order of `numbers`.

        `numbers[split]` is the first op of the backward graph; an op that occurs a second time is a
        recomputation.
        """
        ops, again = np.array(numbers, np.int64), np.ones(len(numbers), bool)
        again[np.unique(ops, return_index=True)[1]] = False
        entries = self.entries(ops, again, split)
        tape = self.tape(entries, np.zeros(entries.size, np.uint8))
        peak, _ = replay(tape, np.ones(entries.size, np.uint8), blank_pages(tape), 0)
        return int(peak), self._costs.time_of(numbers)

    def entries(self, ops: Ints, again: NDArray[np.bool_], split: int) -> Ints:
        """Return the index of each execution of a program, and of what `borders` inserts, in this object.

        Args:
            ops: the ops in the order in which they run.
            again: for each of them, whether it is a recomputation.
            split: the index in `ops` of the first execution in the backward graph.
        """
        inserted = borders(split, ops.size)
        late = np.arange(ops.size) >= split
        every = 3 * self._count + np.arange(len(inserted))
        return np.insert(ops + self._count * again * (1 + late), inserted, every)

    def tape(self, entries: Ints, optional: Bits) -> Tape:
        """Return these executions in order as arrays, for simulation; `optional` marks those that may be omitted.

        O(reads + writes).
        """
        read_from, reads = self._reads.of(entries)
        write_from, writes = self._writes.of(entries)
        return Tape(
            optional=optional,
            read_from=read_from,
            reads=reads,
            write_from=write_from,
            writes=writes,
            sizes=self._sizes,
            extra=self._extra[entries],
            seconds=self._seconds[entries],
            seeds=self._root + 1,
        )

    def _first(self, index: int) -> _Execution:
        op = self._graph.ops[index]
        seed = [self._seed_of[index]] if op.random and not op.backward else []
        return _Execution(
            self._stored(op.reads, late=op.backward),
            [*op.writes, *seed],
            self._costs.sizes.workspace[index],
            self._costs.seconds[index],
        )

    def _again(self, index: int, *, late: bool) -> _Execution:
        """Make an execution that recomputes an op, in the backward graph if `late`.

        Outputs that the caller holds since the first execution count only as temporary memory of the
        recomputation.
        """
        op = self._graph.ops[index]
        pinned = self._graph.pinned if late else self._graph.pinned | self._graph.dropped_outputs
        in_vain = sum(self._costs.sizes.values[value] for value in op.again_writes if value in pinned)
        seed = [self._seed_of[index]] if op.random else []
        return _Execution(
            [*self._stored(op.again_reads, late=late), *seed],
            [value for value in op.again_writes if value not in pinned],
            self._costs.sizes.workspace[index] + in_vain,
            self._costs.seconds[index],
        )

    def _split(self) -> _Execution:
        return _Execution([v for v in self._graph.updates if v not in self._primals], ())

    def _loss(self) -> _Execution:
        """Make the entry for a loss outside the model; outputs that the caller drops are there while it runs."""
        dropped = self._stored(sorted(self._graph.dropped_outputs), late=False)
        return _Execution(dropped, (), self._costs.sizes.of_loss)

    def _tangents_arrive(self) -> _Execution:
        return _Execution((), [*self._graph.tangent_values, self._root])

    def _end(self) -> _Execution:
        """Make the entry for the end of the step; it reads all values that are still alive then."""
        graph = self._graph
        held = [v for v in graph.tangent_values if v in graph.held_tangents or v not in self._read_late]
        return _Execution(sorted({*self._stored(graph.pinned, late=False), *held, self._root}), ())

    def _stored(self, values: Iterable[int], *, late: bool) -> list[int]:
        """Return the values whose memory belongs to the step; inputs and parameters exist before it.

        If `late`, the values are read in the backward graph, which reads copies of the inputs that the forward
        overwrites.
        """
        stored = [value for value in values if value not in self._primals]
        return [*stored, *(self._copy_of[value] for value in values if late and value in self._copy_of)]


def borders(split: int, count: int) -> list[int]:
    """Return where a program of `count` executions has the end of its forward, the loss, gradients, and its end."""
    return [split, split, split, count]


class _Lists:
    """Lists of numbers stored end to end in one array, from which any lists can be selected in any order."""

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        self._begins = np.zeros(len(lists) + 1, dtype=np.int64)
        self._begins[1:] = np.cumsum([len(items) for items in lists])
        self._items = np.array([item for items in lists for item in items], dtype=np.int64)

    def of(self, chosen: Ints) -> tuple[Ints, Ints]:
        """Return the selected lists end to end, after the offsets at which each of them begins."""
        first, lengths = self._begins[chosen], np.diff(self._begins)[chosen]
        begins = np.zeros(chosen.size + 1, dtype=np.int64)
        begins[1:] = np.cumsum(lengths)
        return begins, self._items[np.arange(begins[-1]) + np.repeat(first - begins[:-1], lengths)]
