"""Ways to save a block, found as minimum cuts: which values to keep so that its backward can recompute the others.

If a second costs `rate` bytes, the cheapest save set of a block minimises

    bytes of the values kept + rate * seconds of the ops that run again

and is a minimum cut. An op is on the source side if it does not run again, and on the sink side if it does; a
value is cut (kept) between an op that does not run again and a reader that needs it:

    source -> op          rate * seconds(op)     the op runs again
    op     -> value       bytes(value)           the value is kept (0 for the block's output, which is kept anyway)
    value  -> op          infinite               an op that runs again needs its inputs
    value  -> sink        infinite               the backward reads the value

The block's inputs, parameters and held values are in memory in any case. Varying the rate gives all corners of
the convex frontier of (bytes, seconds); two neighbouring corners give the next rate to try (Eisner and
Severance's method).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fxremat.step.layout import BlockLayout, Layout
from fxremat.step.step_graph import StepGraph

AT_MOST = 12  # number of save options of a block, including option 0
GRAIN = 16  # flow capacities are integers, in units of 1 / 16 byte
LEAST_STEP = 0.02  # frontier points closer than this fraction of the block's bytes count as one
Solved = dict[object, list[tuple[int, ...]]]  # what decides a block's options -> for each, the places of its values


@dataclass(frozen=True)
class SaveSet:
    """One way to save a block: values that are kept, and the seconds of recomputing the others."""

    values: frozenset[int]  # the values of the block that are saved, its output included
    bytes: int  # total bytes of the saved values
    seconds: float  # seconds of the ops that have to run again before the backward


def add_options(layout: Layout, seconds: Sequence[float], sizes: Sequence[int], solved: Solved | None = None) -> Layout:
    """Return the layout with several ways to save each block as its options; equal blocks are solved only once.

    Args:
        seconds: seconds of each op, by number.
        sizes: bytes of each value, by number.
        solved: the blocks that were solved before, in other layouts, to which this adds its own.
    """
    solved = {} if solved is None else solved
    options: list[list[frozenset[int]]] = []
    for block in layout.blocks:
        key = _shape(layout, block, seconds, sizes)
        order = sorted(block.made)
        if key not in solved:
            sets = save_sets(layout, block, seconds, sizes)[1:]
            solved[key] = [tuple(order.index(value) for value in sorted(option.values)) for option in sets]
        options.append([frozenset(order[place] for place in option) for option in solved[key]])
    return layout.with_options(options)


def save_sets(
    layout: Layout, block: BlockLayout, seconds: Sequence[float], sizes: Sequence[int]
) -> list[SaveSet]:
    """Return ways to save a block, which trade bytes for seconds, by decreasing bytes.

    They are corners of the convex frontier, at most `AT_MOST`. The first keeps all that the backward reads.
    """
    cut = _Cut(layout, block, seconds, sizes)
    everything = cut.price(block.saved[0])
    corners = [everything, *cut.sweep(everything)]
    corners = sorted(
        {corner.values: corner for corner in corners}.values(), key=lambda c: (c.seconds, c.bytes)
    )
    frontier = [everything]
    for corner in corners:
        if corner.bytes < frontier[-1].bytes - LEAST_STEP * everything.bytes:
            frontier.append(corner)
    if len(frontier) > AT_MOST:
        keep = {round(i * (len(frontier) - 1) / (AT_MOST - 1)) for i in range(AT_MOST)}
        frontier = [corner for i, corner in enumerate(frontier) if i in keep]
    return frontier


def _shape(layout: Layout, block: BlockLayout, seconds: Sequence[float], sizes: Sequence[int]) -> object:
    """Return a key that is equal for blocks whose save options are equal up to renaming of ops and values."""
    graph = layout.graph
    local = {value: place for place, value in enumerate(sorted(block.made))}
    ops = tuple(
        (
            round(seconds[index] * 1e9),
            tuple(sorted(local.get(value, -1) for value in graph.ops[index].again_reads)),
            tuple((local[value], sizes[value]) for value in graph.ops[index].writes),
        )
        for index in block.forward
    )
    kinds = tuple((v in block.saved[0], v in block.boundary, v in layout.held) for v in sorted(block.made))
    return ops, kinds


class _Cut:
    """The minimum-cut problem of one block: which values to save, and which ops to recompute."""

    def __init__(
        self, layout: Layout, block: BlockLayout, seconds: Sequence[float], sizes: Sequence[int]
    ) -> None:
        self.graph: StepGraph = layout.graph
        self.block, self.seconds, self.sizes = block, seconds, sizes
        self.inside = block.made - layout.held
        self.output = block.boundary & block.made
        self.backward_reads = block.saved[0] & {
            value for index in block.backward for value in self.graph.ops[index].reads
        }

    def sweep(self, everything: SaveSet) -> Iterator[SaveSet]:
        """Yield all corners of the convex frontier of bytes and seconds except `everything`.

        The exchange rate at which two neighbours cost the same is tried between each two corners found.
        """
        total = sum(self.seconds[index] for index in self.block.forward)
        if not total or not everything.bytes:
            return
        least = self.solve(1e-3 / total)
        free = self.solve(1e6 * everything.bytes / total)
        yield free
        yield least
        stack = [(free, least)]
        while stack:
            high, low = stack.pop()
            if low.seconds <= high.seconds or high.bytes - low.bytes <= LEAST_STEP * everything.bytes:
                continue
            rate = (high.bytes - low.bytes) / (low.seconds - high.seconds)
            between = self.solve(rate)
            better = high.bytes + rate * high.seconds - (between.bytes + rate * between.seconds)
            if better > 1e-6 * everything.bytes and between.values not in (high.values, low.values):
                yield between
                stack += [(high, between), (between, low)]

    def solve(self, rate: float) -> SaveSet:
        """Return the values to save such that bytes plus `rate` times the seconds of recomputation are least."""
        if not self.backward_reads:
            return self.price(self.output)
        runs = [max(1, round(rate * self.seconds[index] * GRAIN)) for index in self.block.forward]
        good = self.network.source_side(runs)
        kept = {
            value
            for value in self.inside
            if value in self.network.place
            and self.network.place_of_op[self.graph.values[value].producer] in good
            and self.network.place[value] not in good
        }
        return self.price(frozenset(kept) | self.output)

    @cached_property
    def network(self) -> _Network:
        """The flow network of the block, without the capacities that depend on the rate."""
        return _Network(self)

    def price(self, kept: frozenset[int]) -> SaveSet:
        """Return the save set with these values, its bytes, and the seconds of the ops that it recomputes."""
        again: set[int] = set()
        stack = [value for value in self.backward_reads if value not in kept]
        while stack:
            producer = self.graph.values[stack.pop()].producer
            assert producer is not None
            if producer not in again:
                again.add(producer)
                stack += [
                    v for v in self.graph.ops[producer].again_reads if v in self.inside and v not in kept
                ]
        size = sum(self.sizes[value] for value in kept)
        return SaveSet(kept, size, sum(self.seconds[index] for index in sorted(again)))


SOURCE, SINK = 0, 1
LARGEST = 1 << 30  # SciPy's flow capacities have 32 bits


class _Network:
    """The flow network of a block as arrays; the edges from the source to the ops come first."""

    def __init__(self, cut: _Cut) -> None:
        ops = cut.block.forward
        self.place_of_op: dict[int | None, int] = {index: 2 + k for k, index in enumerate(ops)}
        written = [v for index in ops for v in cut.graph.ops[index].writes if v in cut.inside]
        read = [v for index in ops for v in cut.graph.ops[index].again_reads if v in cut.inside]
        values = dict.fromkeys([*written, *read, *sorted(cut.backward_reads)])
        self.place = {value: 2 + len(ops) + k for k, value in enumerate(values)}
        edges: list[tuple[int, int, int | None]] = []  # (from, to, capacity); a capacity of None is infinite
        for index in ops:
            op, here = cut.graph.ops[index], self.place_of_op[index]
            edges += [(self.place[value], here, None) for value in op.again_reads if value in cut.inside]
            for value in op.writes:
                if value in cut.inside:
                    size = 0 if value in cut.output else cut.sizes[value] * GRAIN
                    edges.append((here, self.place[value], size))
        edges += [(self.place[value], SINK, None) for value in cut.backward_reads]
        self.tails = np.array([SOURCE] * len(ops) + [tail for tail, _, _ in edges])
        self.heads = np.array([*(self.place_of_op[index] for index in ops), *(head for _, head, _ in edges)])
        self.fixed = [capacity for _, _, capacity in edges]
        self.size = 2 + len(ops) + len(values)

    def source_side(self, runs: Sequence[int]) -> set[int]:
        """Return the nodes that cannot reach the sink in the residual graph of a maximum flow: the largest source side.

        Args:
            runs: the capacities of the edges from the source to the ops.
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        total = sum(runs) + sum(size for size in self.fixed if size is not None)
        shift = max(0, (total + 1).bit_length() - LARGEST.bit_length() + 1)
        infinite = (total >> shift) + len(self.tails) + 1
        capacities = [max(1, run >> shift) for run in runs]
        capacities += [infinite if size is None else size >> shift for size in self.fixed]
        places = (self.tails, self.heads)
        graph = csr_array((np.array(capacities, np.int32), places), shape=(self.size, self.size))
        left: Any = graph - maximum_flow(graph, SOURCE, SINK).flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reached = breadth_first_order(left.T.tocsr(), SINK, return_predecessors=False)
        return set(range(self.size)).difference(reached.tolist())
