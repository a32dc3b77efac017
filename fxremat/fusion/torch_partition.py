"""The forward and the backward that `torch.compile` would compile, as a program of two regions: `TorchPartition`.

torch decomposes the joint graph into the ops that Inductor lowers, and partitions it by a minimum cut of memory
traffic. What it recomputes are parts of captured ops, such as the normalized input of a LayerNorm whose mean is kept.
The order of captured ops that belongs to it recomputes each op of which a part runs again.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxremat.errors import FxrematError
from fxremat.fusion.min_cut import with_recomputations
from fxremat.fusion.units import Units, by_phase, ops_of
from fxremat.graphs.captured import Captured
from fxremat.graphs.nodes import storage_bytes, tensors_of
from fxremat.ops.decompositions import DECOMPOSITIONS
from fxremat.ops.seeded import ALWAYS_COMPILED
from fxremat.passes.lower_as_one import mark
from fxremat.step.program import Order
from fxremat.torch_inductor import decomposed_joint, partitioned
from fxremat.torch_private import storage_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TwoPhases:
    """A joint graph as torch partitions it."""

    order: Order  # of the captured ops
    units: Units  # ops that are not compiled, such as the one that draws seeds, then forward and backward
    emitted: fx.GraphModule  # with recomputations as nodes of their own; nodes are marked with their unit (`GROUP`)
    saved: int  # bytes of what the forward keeps for the backward


class TorchPartition:
    """The ways in which torch partitions a joint graph, by how much of what it would keep may be kept.

    Args:
        graph: the captured joint graph, which stays as it is.
        known: an order in which each op runs at least once; its blocks are taken.
        once: ops that must not be recomputed.
    """

    def __init__(self, graph: Captured, known: Order, once: Set[int] = frozenset()) -> None:
        self._graph, self._known, self._once = graph, known, once

    @cached_property
    def _decomposed(self) -> fx.GraphModule:
        # seeds are drawn outside of regions, and masks are drawn from them in the region that reads them
        own = {
            op: function
            for op, function in DECOMPOSITIONS.items()
            if op not in ALWAYS_COMPILED and torch.Tag.nondeterministic_seeded not in op.tags
        }
        return decomposed_joint(self._graph.module, own)

    @cached_property
    def _run_once(self) -> set[str]:
        """The names of nodes of the decomposed graph that must not be recomputed, random ones among them."""
        graph = self._graph
        once = {graph.nodes[op.index].name for op in graph.ops if op.random or op.index in self._once}
        found = {node.name: _origin(node) for node in self._decomposed.graph.nodes if _origin(node) in once}
        if missing := once - set(found.values()):
            raise FxrematError(f"{min(missing)} must not run twice, and no decomposed op says that it was made from it")
        return set(found)

    def phases(self, share: float = 1.0) -> TwoPhases | None:
        """Return forward and backward where torch may keep this share of what it would keep at most.

        O(nodes), and a minimum cut. None if an op that cannot be compiled depends on others, so that there are more
        than two regions, or if torch cannot partition the graph, which is logged.
        """
        if not _are_two_regions(by_phase(self._known.program())):
            return None
        try:
            return self._phases(share)
        except Exception as error:  # of a graph that torch does not know from its own capture
            log.warning("torch cannot partition the graph (%s: %s): its way is not tried", type(error).__name__, error)
            return None

    def _phases(self, share: float) -> TwoPhases | None:
        whole, count = self._decomposed, len(self._graph.forward_outputs)
        emitting = _Emitting(whole, *partitioned(whole, count, share, self._run_once), count)
        order = self._order(emitting.again)
        program = order.program()
        units = by_phase(program)
        if not _are_two_regions(units):
            return None
        apart = [self._graph.nodes[op].name for unit in units[:-2] for op in ops_of(program, unit)]
        emitted = emitting.emit(apart)
        return None if emitted is None else TwoPhases(order, units, emitted, emitting.saved)

    def _order(self, again: Iterable[fx.Node]) -> Order:
        """Return the order of captured ops that recomputes each op which one of these nodes is a part of."""
        graph = self._graph
        number = {node.name: op.index for node, op in zip(graph.nodes, graph.ops, strict=True)}
        origins = {number.get(_origin(node)) for node in again}
        kept = {
            value.index for value in graph.values if value.producer is not None and value.producer not in origins
        }
        return with_recomputations(graph, self._known, kept)


def _are_two_regions(units: Units) -> bool:
    """Tell whether the last two units are the only ones that are compiled."""
    return [unit.compiled for unit in units] == [*(False for _ in units[:-2]), True, True]


def _origin(node: fx.Node) -> str:
    """Return the name of the captured node that a node of the decomposed graph was made from; "" if it is not known."""
    sources = node.meta.get("from_node") or ()
    return sources[-1].name if sources else ""


class _Emitting:
    """Puts a forward and a backward graph into one, in which the backward reads values of the forward.

    As in `lower_as_one`, each group makes all views that it reads, so that only entire storages cross between them.
    """

    def __init__(self, whole: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
        self._whole, self._forward, self._backward, self._count = whole, forward.graph, backward.graph, count
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}  # a node of the forward or the backward -> the emitted one
        self._inputs: dict[str, fx.Node] = {}  # name of an input of the step, or of a constant -> the emitted node
        before = {node.name for node in self._forward.nodes}
        self.again = [  # what the backward computes again
            node
            for node in self._backward.nodes
            if node.op == "call_function" and node.name in before and _base(node) is node
        ]
        self.saved = 0

    def emit(self, apart: Sequence[str]) -> fx.GraphModule | None:
        """Return the graph, of the decomposed graph's inputs and outputs.

        Args:
            apart: names of captured ops that run before the forward's region; None is returned where one of them is
                not a single node.
        """
        for node in self._whole.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._inputs[node.name] = self._graph.node_copy(node)
        self._inputs_of(self._forward)
        for place, name in enumerate(apart):
            nodes = [node for node in self._forward.nodes if node.op == "call_function" and _origin(node) == name]
            if len(nodes) != 1 or any(read not in self._made for read in nodes[0].all_input_nodes):
                return None
            last = self._last
            self._copy(nodes)
            mark(self._graph, last, place, late=False)
        last = self._last
        self._copy(self._forward.nodes)
        mark(self._graph, last, len(apart), late=False)
        last = self._last
        self._read_saved()
        self._copy(self._backward.nodes)
        mark(self._graph, last, len(apart) + 1, late=True)
        views: dict[fx.Node, fx.Node] = {}
        outputs = [*_returned(self._forward)[: self._count], *_returned(self._backward)]
        returned: list[Any] = [self._viewed(one, views) if isinstance(one, fx.Node) else one for one in outputs]
        output = self._graph.output(tuple(returned))
        output.meta = dict(self._whole.graph.output_node().meta)
        return fx.GraphModule(self._whole, self._graph, class_name="Step")

    @property
    def _last(self) -> fx.Node | None:
        return next(iter(reversed(self._graph.nodes)), None)

    def _inputs_of(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr") and node.name in self._inputs:
                self._made[node] = self._inputs[node.name]

    def _copy(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node.op not in ("placeholder", "output") and node not in self._made:
                self._made[node] = self._graph.node_copy(node, self._made.__getitem__)

    def _read_saved(self) -> None:
        """Let the backward read what the forward keeps, and count the bytes."""
        self._inputs_of(self._backward)
        saved = {node.name: node for node in _returned(self._forward)[self._count :] if isinstance(node, fx.Node)}
        views: dict[fx.Node, fx.Node] = {}
        bases = set[fx.Node]()
        for node in self._backward.find_nodes(op="placeholder"):
            if node not in self._made:
                self._made[node] = self._viewed(saved[node.name], views)
                bases.add(_base(saved[node.name]))
        self.saved = sum(
            storage_bytes(tensor)
            for node in bases
            if node.op == "call_function"
            for tensor in tensors_of(node)
            if tensor is not None
        )

    def _viewed(self, node: fx.Node, views: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return the emitted node of a value; where it is a view, another view of the same base. Emits it if it is new.

        Args:
            views: those made so far, for the same reader.
        """
        base = _base_of_view(node)
        if base is None:
            return self._made[node]
        if node not in views:
            parent = self._viewed(base, views)
            views[node] = self._graph.node_copy(node, lambda one: parent if one is base else self._made[one])
        return views[node]


def _returned(graph: fx.Graph) -> list[object]:
    output = graph.output_node()
    values = output.args[0]
    assert isinstance(values, list | tuple)
    return list(values)


def _base(node: fx.Node) -> fx.Node:
    """Return what a node is a view of, directly or through other views; itself if it is none."""
    while (parent := _base_of_view(node)) is not None:
        node = parent
    return node


def _base_of_view(node: fx.Node) -> fx.Node | None:
    """Return the only node that a node reads, if it returns views of it; None if it computes something."""
    parents = node.all_input_nodes
    if node.op != "call_function" or len(parents) != 1:
        return None
    if node.target is operator.getitem:
        return parents[0] if _base_of_view(parents[0]) is not None else None
    storages = {storage_of(tensor) for tensor in tensors_of(parents[0]) if tensor is not None}
    own = [tensor for tensor in tensors_of(node) if tensor is not None]
    return parents[0] if own and all(storage_of(tensor) in storages for tensor in own) else None
