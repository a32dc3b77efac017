"""Replace a region (group of ops) in its graph by ops that run it in slices.

Afterwards the graph is sorted topologically again, and views of the new results get new fake values
(`sort_again`, `show_again`).
"""

from __future__ import annotations

import heapq
import logging
import operator
from collections.abc import Iterable, Set
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxremat.graphs.names import module_of
from fxremat.graphs.nodes import storage_bytes, tensors_of
from fxremat.passes.in_place import depending_on
from fxremat.slices.body import Region, Sliced, summed_in_type
from fxremat.slices.labels import SUM
from fxremat.slices.region import Blocked, Found
from fxremat.slices.values import Values
from fxremat.torch_private import storage_of

aten = torch.ops.aten
log = logging.getLogger(__name__)


class Writer:
    """Inserts the ops that replace a region in its graph."""

    def __init__(
        self, graph: fx.Graph, values: Values, found: Found, parts: int, *, wide: bool
    ) -> None:
        self.graph, self.values, self.found, self.parts, self.wide = graph, values, found, parts, wide
        self.forward = [op for op in found.ops if op not in values.late]
        self.backward = [op for op in found.ops if op in values.late]
        self.sums: list[fx.Node] = []  # results of the region that are sums over the slices
        self.summed: list[str] = []  # the modules (or names) of those sums over slices that have more than one number
        self.summed_in: set[str] = set()  # the dtypes in which gradients are summed over slices

    def made_again(self) -> list[fx.Node]:
        """Insert the region's forward op, and its backward op, which recomputes each slice's forward.

        Return the new nodes.
        """
        again = self._again
        written = []
        for mine, others in ((self.forward, set[fx.Node]()), (self.backward, again)):
            if mine:
                outputs = [v for op in mine for v in self.values.made_by(op) if self._is_read(v, {*mine, *others})]
                written.append(self._region({*mine, *others}, outputs, mine[-1]))
        for _, outputs, items in written:
            self._take_over(outputs, items)
        return [node for node, _, _ in written]

    def inside(self) -> fx.Node:
        """Insert one forward op that also computes the gradients, for a loss gradient of 1; return the new node.

        The backward multiplies them by the real gradient of the loss.
        """
        tangent = self.only_loss
        assert tangent is not None
        run = set(self.found.ops)
        outputs = [v for op in self.found.ops for v in self.values.made_by(op) if self._is_read(v, run)]
        place = self.forward[-1] if self.forward else self.backward[0]
        scaled = depending_on(self.graph, {tangent})
        early = self._early(tangent, place)
        node, outputs, items = self._region(run, outputs, place, early)
        results = []
        for output, item in zip(outputs, items, strict=True):
            if output not in scaled:
                results.append(item)
                continue
            with self.graph.inserting_before(output):
                product = self.graph.call_function(aten.mul.Tensor, (item, tangent))
            product.meta = dict(output.meta) | {"val": _fresh(output.meta["val"])}
            results.append(product)
        self._take_over(outputs, results)
        return node

    @cached_property
    def _made(self) -> set[fx.Node]:
        """The values that the region's ops compute."""
        return {value for op in self.found.ops for value in self.values.made_by(op)}

    @cached_property
    def _read_late(self) -> set[fx.Node]:
        """Backward nodes outside of the region on which its ops depend, directly or indirectly."""
        values, late = self.values, self.values.late
        found: set[fx.Node] = set()
        stack = [a for op in self.found.ops for a in op.all_input_nodes if values.base(a) not in self._made]
        while stack:
            node = stack.pop()
            if node in late and node not in found:
                found.add(node)
                stack += node.all_input_nodes
        return found

    @cached_property
    def only_loss(self) -> fx.Node | None:
        """The gradient of the loss, if the region depends on no other incoming gradient; else None."""
        values, made = self.values, self._made
        if any(t is not None and t.dtype == torch.float16 for v in made if v in values.late for t in tensors_of(v)):
            return None
        if any(values.base(a) in made for node in self._read_late for a in node.all_input_nodes):
            return None  # no slicing is possible: an input of the region depends on a result of the region
        leaves = {node for node in self._read_late if node.op == "placeholder"}
        roots = {values.joint.shown[value] for value in values.joint.root_tangents}
        large = any(values.base(node) is node and self._is_large(node) for node in self._read_late)
        return next(iter(leaves)) if len(leaves) == 1 and leaves <= roots and not large else None

    def _is_large(self, node: fx.Node) -> bool:
        seed = self.found.seed
        return 8 * self.values.bytes(node) >= self.values.bytes(seed)

    def _early(self, tangent: fx.Node, place: fx.Node) -> dict[fx.Node, fx.Node]:
        """Copy the backward nodes that the region reads into the forward, with 1 as the gradient of the loss.

        Returns node -> copy.
        """
        copies: dict[fx.Node, fx.Node] = {}
        shown: torch.Tensor = tangent.meta["val"]
        tag = place.meta.get("partitioner_tag")
        for node in sorted(self._read_late, key=self.values.place.__getitem__):
            with self.graph.inserting_before(place):
                if node is tangent:
                    options: dict[str, Any] = {"dtype": shown.dtype, "device": shown.device}
                    copies[node] = self.graph.call_function(aten.full.default, (list(shown.shape), 1), options)
                else:
                    copies[node] = self.graph.node_copy(node, lambda a: copies.get(a, a))
            copies[node].meta = dict(node.meta) | {"val": node.meta["val"], "partitioner_tag": tag}
        copied = list(copies.values())
        with shown.fake_mode:  # type: ignore[attr-defined]
            for node in copied:
                show(node)
        return copies

    @cached_property
    def _again(self) -> set[fx.Node]:
        """The forward ops that the backward of each slice recomputes.

        These are the ops on which large values depend; or those on which all cut values depend, if saving the
        other cut values would take more memory than a slice needs.
        """
        values, large = self.values, set(self.found.large)
        needed = self._behind(large)
        read = {value for op in (*self.backward, *needed) for value in values.read_by(op)}
        saved = {value for value in read if values.producer(value) in self.forward}
        cut = {v for v in saved - large if isinstance(self.found.labels.get(v), int) and not self._is_wanted(v)}
        if sum(map(values.bytes, cut)) * self.parts <= max(map(values.need, self.found.ops)):
            return needed
        made = {v for op in self.forward for v in values.made_by(op)}
        return self._behind({v for v in made if isinstance(self.found.labels.get(v), int)})

    def _behind(self, made_again: Set[fx.Node]) -> set[fx.Node]:
        """Return the region's forward ops that compute the values in `made_again` and that the backward needs.

        Values that the forward returns are left out.
        """
        values, forward = self.values, set(self.forward)
        kept = {values.joint.shown[value] for value in values.joint.kept_outputs}
        needed: set[fx.Node] = set()
        stack = [v for op in self.backward for v in values.read_by(op)]
        while stack:
            value = stack.pop()
            op = values.producer(value)
            if op in forward and op not in needed and value in made_again and value not in kept:
                needed.add(op)
                stack += values.read_by(op)
        return needed

    def _is_wanted(self, value: fx.Node) -> bool:
        """Tell whether an op outside of the region reads a value."""
        return any(reader not in self.found.ops for reader in self.values.readers(value))

    def _is_read(self, value: fx.Node, run: Set[fx.Node]) -> bool:
        """Tell whether a value is read by an op outside of `run`, other than backward ops that recompute it."""
        values = self.values
        for reader in values.readers(value):
            if reader in run:
                continue
            if reader not in self.backward or values.producer(value) not in self._again:
                return True
        return False

    def _region(
        self,
        run: Set[fx.Node],
        outputs: list[fx.Node],
        place: fx.Node,
        early: dict[fx.Node, fx.Node] | None = None,
    ) -> tuple[fx.Node, list[fx.Node], list[fx.Node]]:
        """Insert an op before `place` that runs the ops `run` in slices.

        Return the inserted node, the outputs, and the nodes that replace them.

        Args:
            early: backward node -> copy of it in the forward, which is read instead.
        """
        if not outputs:
            raise Blocked(f"nothing reads what {place.name} makes")
        inputs, steps = self._body(run)
        labels = dict(self.found.labels)
        for node in steps:
            unknown = node not in labels and self.values.is_view(node)
            if unknown and isinstance(labels.get(self.values.base(node)), int):
                raise Blocked(f"{node.name} shows what is cut in a way that cannot be")
        region = Region(
            inputs=tuple(inputs),
            steps=tuple(steps),
            outputs=tuple(outputs),
            labels=labels,
            count=self.found.count,
            parts=self.parts,
            wide=self.wide,
        )
        try:
            target = Sliced(region)
        except Exception as error:  # the region stays uncut, whatever the reason why an op cannot run on a slice
            log.debug("%s cannot be cut: %s: %s", place.name, type(error).__name__, error)
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise Blocked(f"{place.name} cannot be cut: {said}") from None
        self._note([output for output in outputs if labels[output] is SUM])
        given = [(early or {}).get(node, node) for node in inputs]
        with self.graph.inserting_before(place):
            node = self.graph.call_function(target, tuple(given))
            items = [self.graph.call_function(operator.getitem, (node, k)) for k in range(len(outputs))]
        fresh = tuple(_fresh(output.meta["val"]) for output in outputs)
        node.meta = dict(place.meta) | {"val": fresh}
        for item, value, output in zip(items, fresh, outputs, strict=True):
            about = output if (output in self.values.late) == (place in self.values.late) else place
            item.meta = dict(about.meta) | {"val": value}
        return node, outputs, items

    def _note(self, sums: list[fx.Node]) -> None:
        """Record which results are sums over the slices, before their nodes are removed."""
        self.sums += sums
        tensors = [node for node in sums if node.meta["val"].numel() > 1]
        self.summed += [_name_of_sum(self.values, node) for node in tensors]
        types = (summed_in_type(node.meta["val"], wide=self.wide) for node in tensors)
        self.summed_in |= {str(dtype).removeprefix("torch.") for dtype in types}

    def _body(self, run: Set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the values that the ops in `run` read from outside, and these ops in order.

        The views between the ops are included.
        """
        values = self.values
        inputs: dict[fx.Node, None] = {}
        steps: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            if node in steps or node in inputs:
                return
            base = values.base(node)
            if node in run or (node.op == "call_function" and values.producer(base) in run):
                for parent in node.all_input_nodes:
                    visit(parent)
                steps[node] = None
            else:
                inputs[node] = None

        for op in sorted(run, key=values.place.__getitem__):
            visit(op)
            for value in values.made_by(op):
                visit(value)
        return list(inputs), list(steps)

    def _take_over(self, outputs: Iterable[fx.Node], items: Iterable[fx.Node]) -> None:
        for output, item in zip(outputs, items, strict=True):
            output.replace_all_uses_with(item, delete_user_cb=lambda user: True)


def _fresh(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor with the layout of another one, in a storage of its own."""
    whole = storage_bytes(value) == value.numel() * value.element_size() and value.storage_offset() == 0
    with value.fake_mode:  # type: ignore[attr-defined]
        if whole:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def show(node: fx.Node) -> None:
    """Set the fake value of a node from those of its inputs."""
    shown, options = fx.node.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
    node.meta["val"] = node.target(*shown, **options)  # type: ignore[operator]


def show_again(graph: fx.Graph, written: Set[fx.Node]) -> None:
    """Recompute the fake values of views of new results, so that they share the new storages.

    `written` are the nodes of the new ops. Raises `Blocked` if a view is impossible.
    """
    new = {*written, *(user for node in written for user in node.users)}
    products = {user for node in new for user in node.users if user.target is aten.mul.Tensor}
    new |= products
    for node in graph.nodes:
        if node in new or node.op != "call_function" or new.isdisjoint(node.all_input_nodes):
            continue
        before = node.meta["val"]
        shown = [t for p in node.all_input_nodes for t in tensors_of(p) if t is not None]
        mode = shown[0].fake_mode  # type: ignore[attr-defined]
        try:
            with mode:
                show(node)
        except RuntimeError as error:
            raise Blocked(f"{node.name} cannot be shown: {str(error).splitlines()[0]}") from None
        storages = {storage_of(t) for t in shown}
        if any(t is not None and storage_of(t) in storages for t in tensors_of(node)):
            new.add(node)
        else:
            node.meta["val"] = before


def sort_again(graph: fx.Graph) -> None:
    """Sort the nodes topologically, as close to their current order as possible. Raises `Blocked` for a cycle."""
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    waiting = {node: len(node.all_input_nodes) for node in nodes}
    ready = [place[node] for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, place[user])
    if len(order) < len(nodes):
        raise Blocked("the region reads what is computed from its own results")
    root: Any = graph._root
    for node in order:
        root.prepend(node)


def _name_of_sum(values: Values, node: fx.Node) -> str:
    """Return the module of the parameter whose gradient the sum is, or the sum's name."""
    return module_of(values.producer(node)) or node.name
