"""Recompute what Inductor fuses: a minimum cut decides which forward values the backward reads from memory.

Inductor computes pointwise ops, reductions and normalizations inside of the kernels that read their results, so that
recomputing them costs memory traffic only, and saves it where the recomputed value is larger than what it is computed
from. The values to keep are a minimum cut of the forward's data flow: every path from what cannot be recomputed to what
the backward reads has one, and together they cost the least traffic. A kept value that the forward would not write
otherwise costs twice its bytes. The longer the way from a value to the backward, the more it costs (`FARTHER`), since
more is recomputed from it. Not recomputed is

    what a backward op reads that is not fused, such as a matrix product: it would be written once more
    what the forward writes for ops behind such an op, such as the sums of residual branches: it would be computed again
        for several kernels of the backward
    a dropout mask, whose random numbers Inductor writes to memory

That is the formulation of torch's `min_cut_rematerialization_partition` with rules to the same ends, on the ops before
Inductor decomposes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxremat.fusion.units import is_pointwise
from fxremat.graphs.captured import Captured
from fxremat.ops.seeded import ALWAYS_COMPILED
from fxremat.step.program import Order
from fxremat.step.step_graph import Op, Origin

FARTHER = 1.1  # the cost of a value is multiplied by this for each op between it and the backward
FARTHEST = 100  # number of ops up to which that counts
UNITS = 2**20  # a minimum cut is computed in integers: the dearest value costs this many


def least_traffic(graph: Captured, known: Order, once: Set[int] = frozenset()) -> Order:
    """Return an order of ops that recomputes fused ops where that costs the least memory traffic.

    Forward and backward run as in `known`. O(ops) beside the minimum cut.

    Args:
        known: an order in which each op runs at least once; its blocks are taken.
        once: ops that must not be recomputed.
    """
    fusible = {op.index for op in graph.ops if op.writes and is_pointwise(graph.nodes[op.index])}
    read_apart = {value for op in graph.backward_ops if op.index not in fusible for value in op.reads}
    read_apart |= _read_in_later_stages(graph, fusible)
    again = {
        op.index
        for op in graph.forward_ops
        if op.index in fusible - once and not op.random and graph.nodes[op.index].target not in ALWAYS_COMPILED
        if read_apart.isdisjoint(op.writes)
    }
    return with_recomputations(graph, known, _Cut(graph, fusible, again).kept())


def with_recomputations(graph: Captured, known: Order, kept: Set[int]) -> Order:
    """Return an order of ops that recomputes what the backward reads and is not in `kept`. O(ops).

    Forward and backward run as in `known`. Before a backward op that reads a value which is not kept, the ops that
    compute it run again.

    Args:
        known: an order in which each op runs at least once; its blocks are taken.
        kept: values of the forward.
    """
    blocks = dict(reversed([*zip(known.ops, known.blocks, strict=True)]))  # of the first execution of each op
    first = dict.fromkeys(known.ops)
    forward = [op for op in first if op < graph.forward_count]
    backward = list(_with_recomputations(graph, [op for op in first if op >= graph.forward_count], kept))
    return Order(
        layout=known.layout,
        ops=(*forward, *(op for op, _ in backward)),
        blocks=(*(blocks[op] for op in forward), *(blocks[reader] for _, reader in backward)),
        split=len(forward),
    )


def _read_in_later_stages(graph: Captured, fusible: Set[int]) -> set[int]:
    """Return the values that forward ops read which also depend on later ops that are not fused.

    The stage of a value is the largest number of ops that are not fused on a way to it.
    """
    stage: dict[int, int] = {}
    found = set[int]()
    for op in graph.forward_ops:
        now = max((stage.get(value, 0) for value in op.reads), default=0)
        found |= {value for value in op.reads if value in stage and stage[value] < now}
        stage |= dict.fromkeys(op.writes, now + (op.index not in fusible))
    return found


def _with_recomputations(graph: Captured, backward: list[int], kept: Set[int]) -> Iterator[tuple[int, int]]:
    """Yield the ops of the backward, each after the recomputations that it needs, with the op that they run for."""
    made = {value.index for value in graph.values if value.origin is not Origin.FORWARD} | kept

    for index in backward:
        needed, again = [*graph.ops[index].reads], set[int]()
        while needed:
            value = needed.pop()
            if value not in made:
                producer = graph.values[value].producer
                assert producer is not None
                again.add(producer)
                made.update(graph.ops[producer].again_writes)
                needed += graph.ops[producer].again_reads
        yield from ((op, index) for op in sorted(again))  # as captured: each behind what it reads
        yield index, index


@dataclass(frozen=True)
class _Cut:
    """The flow network of a forward: value v enters at node 2 v and leaves at 2 v + 1."""

    graph: Captured
    fusible: Set[int]  # ops that Inductor fuses
    again: Set[int]  # forward ops that may be recomputed

    @property
    def ends(self) -> tuple[int, int]:
        """The source and the sink of the network."""
        count = len(self.graph.values)
        return 2 * count, 2 * count + 1

    @cached_property
    def edges(self) -> Mapping[tuple[int, int], int]:
        """The capacities of the edges, by the nodes where they begin and end."""
        graph, (source, sink), forever = self.graph, self.ends, int(np.iinfo(np.int32).max)
        read_later = {value for op in graph.backward_ops for value in op.reads}
        costs = self._costs(read_later)
        unit = max(costs.values(), default=0.0) / UNITS or 1.0
        found: dict[tuple[int, int], int] = {}
        for value, cost in costs.items():
            found[2 * value, 2 * value + 1] = math.ceil(cost / unit)
            producer = graph.values[value].producer
            if producer is None or producer not in self.again:
                found[source, 2 * value] = forever
            else:
                op = graph.ops[producer]
                found |= {(2 * read + 1, 2 * value): forever for read in op.again_reads if read in costs}
            if value in read_later:
                found[2 * value + 1, sink] = forever
        return found

    def kept(self) -> set[int]:
        """Return the values of a minimum cut."""
        # these take a third of a second to import, and only compiled kernels need them
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        source, sink = self.ends
        if not self.edges:
            return set()
        begins, ends = zip(*self.edges, strict=True)
        capacities = np.array([*self.edges.values()], dtype=np.int32)
        network = csr_array((capacities, (begins, ends)), shape=(sink + 1, sink + 1))
        left = csr_array(network - maximum_flow(network, source, sink).flow)
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
        known = {begin // 2 for begin, end in self.edges if begin % 2 == 0 and end == begin + 1}
        return {value for value in known if 2 * value in reached and 2 * value + 1 not in reached}

    def _costs(self, read_later: Set[int]) -> dict[int, float]:
        """Return what keeping each value costs that a forward op computes or reads, in bytes of traffic."""
        graph, readers = self.graph, dict[int, list[Op]]()
        for op in graph.ops:
            for value in op.reads:
                readers.setdefault(value, []).append(op)
        away = self._distances(read_later)
        found = {}
        for each in graph.values:
            index = each.index
            if each.origin is Origin.FORWARD or (each.origin is Origin.PRIMAL and index in readers):
                inside = each.producer in self.again and index not in graph.output_values
                fused = inside and all(op.index in self.fusible for op in readers.get(index, ()))
                times = 2 if fused else 1
                found[index] = times * max(1, each.bytes) * FARTHER ** min(away.get(index, 0), FARTHEST)
        return found

    def _distances(self, read_later: Set[int]) -> Mapping[int, int]:
        """Return for each value that the backward depends on how many forward ops are between it and the backward."""
        away = dict.fromkeys(read_later, 0)
        for op in reversed(self.graph.forward_ops):
            behind = [away[value] for value in op.writes if value in away]
            for value in op.reads if behind else ():
                away[value] = min(away.get(value, FARTHEST), min(behind) + 1)
        return away
