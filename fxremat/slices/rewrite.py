"""A joint graph in which regions run in slices: `Joint -> Joint`, before anything is planned.

    made again    forward op (cut inputs)            -> losses, sums, small results
                  backward op (the same, gradients)  -> gradients, cut and put together, and sums; it makes the slice's
                                                        forward again
    inside        one forward op                      -> all of these, for a gradient of the loss of 1; the backward
                                                        multiplies by the real one

The second does no op twice, and is possible where the only gradient that comes in is that of the loss, which is one
number; half-precision floats of loss scaling would lose bits, so that float16 gradients are never made so.

Regions are looked for around the op that needs most, then the next, until none needs more than a target.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from fxremat.passes.in_place import depending_on, overwrite_gradients, restore
from fxremat.slices.body import HALF, Region, Sliced, summed_in_type
from fxremat.slices.explicit import make_explicit
from fxremat.slices.labels import SUM
from fxremat.slices.region import Blocked, Found, find
from fxremat.slices.values import Values
from fxremat.step.joint import (
    Joint,
    frame_of,
    module_of,
    read_joint,
    storage_bytes,
    tensors_of,
    with_updates_inside,
)
from fxremat.step.overwriting import overwritten
from fxremat.torch_private import storage_of

aten = torch.ops.aten

LEAST_ROWS = 32  # of a slice, where a row is one of more than MANY
MANY = 256
MOST_REGIONS = 200
TRIED = 6  # ops without a region, after which no more are looked for
TOLD = 0.5  # of what the largest op needs: why an op that needs less is whole is not told
MOST_REASONS = 3
MANY_OUTPUTS = 16  # an output of so much less than the largest op needs is returned in any case


@dataclass(frozen=True, kw_only=True)
class SlicedRegion:
    """What runs in slices, for people.

    Attributes:
        parts: number of slices.
        rows: rows of a slice.
        inside: gradients are made in the forward.
        ops: names of the ops of the joint graph that run in slices.
        where: the module, or the line, whose value was too large.
        sums: results that are sums over the slices.
        summed: the modules, or names, of the ops whose sums have more than one number.
        summed_in: the types in which those are added up.
        wide: those of half precision are added up in float32.
    """

    parts: int
    rows: int
    inside: bool
    ops: tuple[str, ...]
    where: str
    sums: int
    summed: tuple[str, ...]
    summed_in: tuple[str, ...]
    wide: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class SlicedJoint:
    """A joint graph some of whose regions run in slices."""

    joint: Joint
    regions: tuple[SlicedRegion, ...]
    blocked: tuple[str, ...]  # why ops that need much are whole
    floor: int  # bytes that the largest op which is whole needs


def sliced(
    joint: Joint,
    target: int,
    *,
    most: int = 1 << 30,
    inside: bool = False,
    wide: bool = False,
    only_loss: bool = False,
) -> SlicedJoint:
    """Cut regions until no op needs more than `target` bytes, as far as that goes. The given graph is not changed.

    Args:
        target: bytes that an op may read and write, parameters apart.
        most: slices of a region at most.
        inside: make gradients in the forward where that is possible.
        wide: add up sums of half precision in float32.
        only_loss: return no large tensors beside the loss, but NaN in their shapes.
    """
    return _Slicing(joint, target, most, inside=inside, wide=wide, only_loss=only_loss).run()


def largest_need(joint: Joint) -> int:
    """Bytes that the op with the most needs, parameters and inputs apart."""
    values = Values(joint)
    return max((values.need(op.node) for op in joint.ops), default=0)


def bytes_beside_loss(joint: Joint) -> int:
    """Bytes of large tensors that the forward returns beside its loss, which need not be returned."""
    values, need = Values(joint), largest_need(joint)
    nodes = [node for node in _beside_loss(joint) if _is_left_out(values, node, need)]
    return sum(map(values.bytes, {values.base(node) for node in nodes}))


def _beside_loss(joint: Joint) -> list[fx.Node]:
    """The outputs of the forward that are given no gradient."""
    trained = {str(getattr(node.meta.get("desc"), "output", None)) for node in joint.tangents}
    outputs = zip(joint.forward_outputs, joint.output_descs, strict=True)
    return [node for node, desc in outputs if isinstance(node, fx.Node) and str(desc) not in trained]


class _Slicing:
    def __init__(
        self, joint: Joint, target: int, most: int, *, inside: bool, wide: bool, only_loss: bool
    ) -> None:
        self.given, self.target, self.most = joint, target, most
        self.inside, self.wide, self.only_loss = inside, wide, only_loss
        self.graph = _copy(joint.module.graph)  # that is rewritten
        self.outputs = len(joint.forward_outputs)
        self.regions: list[SlicedRegion] = []
        self.blocked: dict[str, str] = {}  # op -> reason, "" where it is not worth telling
        self.need = 0  # of the op with the most, before anything is cut

    def run(self) -> SlicedJoint:
        for node in self.graph.nodes:
            if overwritten(node) is not None:
                restore(node)
        make_explicit(self.graph)
        values = self._values()
        self.need = max(map(values.need, values.ops), default=0)
        if self.only_loss and self._leave_out(values):
            values = self._values()
        while len(self.regions) < MOST_REGIONS and len(self.blocked) < TRIED:
            op = self._largest(values)
            if op is None:
                break
            try:
                self._cut(values, op)
            except Blocked as reason:
                told = values.need(op) >= TOLD * self.need
                self.blocked[op.name] = str(reason) if told else ""
            values = self._values()
        floor = max((values.need(op) for op in values.ops), default=0)
        overwrite_gradients(self.graph)
        self.graph.eliminate_dead_code()
        joint = read_joint(fx.GraphModule(self.given.module, self.graph), self.outputs)
        if self.given.updates_of:
            joint = with_updates_inside(joint, set(self.given.updates_of))
        blocked = tuple(filter(None, dict.fromkeys(self.blocked.values())))[:MOST_REASONS]
        return SlicedJoint(joint=joint, regions=tuple(self.regions), blocked=blocked, floor=floor)

    def _leave_out(self, values: Values) -> bool:
        """Let the forward return NaN in the place of large tensors beside its loss; whether there are any."""
        beside = [node for node in _beside_loss(values.joint) if _is_left_out(values, node, self.need)]
        end = next(iter(reversed(self.graph.nodes)))
        outputs = list(end.args[0])
        for place, node in enumerate(outputs[: self.outputs]):
            if node not in beside:
                continue
            shown: Any = node.meta["val"]
            with self.graph.inserting_before(end):
                options: dict[str, Any] = {"dtype": shown.dtype, "device": shown.device}
                number = self.graph.call_function(aten.full.default, ([], math.nan), options)
                outputs[place] = self.graph.call_function(aten.expand.default, (number, list(shown.shape)))
            for made in (number, outputs[place]):
                with shown.fake_mode:
                    _show(made)
        changed = outputs != list(end.args[0])
        end.args = (outputs,)
        self.graph.eliminate_dead_code()
        return changed

    def _values(self) -> Values:
        return Values(read_joint(cast(Any, _Unfinished(self.graph)), self.outputs))

    def _largest(self, values: Values) -> fx.Node | None:
        """The op that needs most among those that need more than the target, and may be in a region."""
        open_ = [op for op in values.ops if op.name not in self.blocked]
        op = max(open_, key=values.need, default=None)
        return op if op is not None and values.need(op) > self.target else None

    def _cut(self, values: Values, op: fx.Node, skipped: Set[tuple[int, int]] = frozenset()) -> None:
        """Put the best region around an op in the place of its ops. Raises `Blocked`.

        Args:
            skipped: axes along which that has failed.
        """
        finest: tuple[int, Found, int] | None = None
        for found in find(values, op):
            parts = self._parts(values, found)
            if parts < 2 or found.axis in skipped:
                continue
            need = self._need(values, found) // parts
            if finest is None or need < finest[0]:
                finest = need, found, parts
            if need <= self.target:
                break
        if finest is None:
            raise Blocked(f"{op.name} has too few rows to cut")
        _, found, parts = finest
        before = _copy(self.graph)
        try:
            self._replace(values, found, parts)
        except Blocked as reason:
            self.graph = before
            again = self._values()
            try:
                self._cut(again, next(node for node in again.ops if node.name == op.name), {*skipped, found.axis})
            except Blocked:
                raise reason from None

    def _need(self, values: Values, found: Found) -> int:
        return max(values.need(op) for op in found.ops)

    def _parts(self, values: Values, found: Found) -> int:
        """The fewest slices, a power of two, with which no op of the region needs more than the target."""
        least = LEAST_ROWS if found.count > MANY else 1
        most = min(self.most, found.count // least)
        need, parts = self._need(values, found), 2
        while parts * 2 <= most and need > parts * self.target:
            parts *= 2
        return min(parts, most)

    def _replace(self, values: Values, found: Found, parts: int) -> None:
        writer = _Writer(self.graph, values, found, parts, wide=self.wide)
        inside = self.inside and writer.only_loss() is not None
        nodes = [writer.inside()] if inside else writer.made_again()
        targets = [node.target for node in nodes if isinstance(node.target, Sliced)]
        rows = targets[0].rows
        _sort(self.graph)
        self.graph.eliminate_dead_code()
        _show_again(self.graph, set(nodes))
        self.graph.lint()
        self.regions.append(
            SlicedRegion(
                parts=-(-found.count // rows),
                rows=rows,
                inside=inside,
                ops=tuple(op.name for op in found.ops),
                where=_where(found),
                sums=len(writer.sums),
                summed=tuple(dict.fromkeys(writer.summed)),
                summed_in=tuple(sorted(writer.summed_in)),
                wide=self.wide and any(value.meta["val"].dtype in HALF for value in writer.sums),
            )
        )


def _is_left_out(values: Values, node: fx.Node, need: int) -> bool:
    """Whether an output is a large floating-point tensor that the forward makes, and overwrites nothing."""
    value = values.joint.value_of.get(node)
    shown = node.meta.get("val")
    return (
        value in values.joint.kept_outputs
        and isinstance(shown, torch.Tensor)
        and shown.dtype.is_floating_point
        and values.base(node).op == "call_function"
        and MANY_OUTPUTS * values.bytes(values.base(node)) >= need
    )


def _name_of_sum(values: Values, node: fx.Node) -> str:
    """The module whose gradient a sum is, or its name."""
    return module_of(values.producer(node)) or node.name


def _where(found: Found) -> str:
    """The first module that ops of a region belong to; else the line where its largest value is made, or its name."""
    names = (module_of(op) for op in found.ops)
    frame = frame_of(found.seed)
    line = f"{Path(frame[0]).name}:{frame[1]}" if frame else found.seed.name
    return next(filter(None, names), line)


def _copy(graph: fx.Graph) -> fx.Graph:
    """A graph with the same nodes, names and fake values."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    return made


@dataclass(frozen=True)
class _Unfinished:
    """A graph that is read while it is rewritten; no code is generated for it."""

    graph: fx.Graph


class _Writer:
    """Writes the ops that stand for a region into its graph."""

    def __init__(
        self, graph: fx.Graph, values: Values, found: Found, parts: int, *, wide: bool
    ) -> None:
        self.graph, self.values, self.found, self.parts, self.wide = graph, values, found, parts, wide
        self.forward = [op for op in found.ops if op not in values.late]
        self.backward = [op for op in found.ops if op in values.late]
        self.sums: list[fx.Node] = []  # results that are sums over the slices
        self.summed: list[str] = []  # the names of those of more than one number
        self.summed_in: set[str] = set()  # and their types

    def made_again(self) -> list[fx.Node]:
        """A forward op and a backward op, which makes the slice's forward again; the new nodes."""
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
        """One forward op, whose gradients are multiplied in the backward; the new node."""
        tangent = self.only_loss()
        assert tangent is not None
        run = set(self.found.ops)
        outputs = [v for op in self.found.ops for v in self.values.made_by(op) if self._is_read(v, run)]
        place = self.forward[-1] if self.forward else self.backward[0]
        scaled = depending_on(self.graph, {tangent})
        early = self._early(run, tangent, place)
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

    def only_loss(self) -> fx.Node | None:
        """The gradient of the loss, where all that the region reads of the backward is computed from it alone."""
        values, run = self.values, set(self.found.ops)
        made = {value for op in run for value in values.made_by(op)}
        if any(t is not None and t.dtype == torch.float16 for v in made if v in values.late for t in tensors_of(v)):
            return None
        roots = {values.joint.values[value].node for value in values.joint.root_tangents}
        leaves: set[fx.Node] = set()
        stack = [a for op in run for a in op.all_input_nodes if a in values.late and values.base(a) not in made]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder":
                leaves.add(node)
            elif values.base(node) in made or values.producer(values.base(node)) in run:
                return None
            stack += [a for a in node.all_input_nodes if a in values.late]
            if any(values.base(a) in made for a in node.all_input_nodes):
                return None  # it depends on a result of the region
        large = any(values.base(node) is node and self._is_large(node) for node in seen)
        return next(iter(leaves)) if len(leaves) == 1 and leaves <= roots and not large else None

    def _is_large(self, node: fx.Node) -> bool:
        seed = self.found.seed
        return 8 * self.values.bytes(node) >= self.values.bytes(seed)

    def _early(self, run: Set[fx.Node], tangent: fx.Node, place: fx.Node) -> dict[fx.Node, fx.Node]:
        """What the region reads of the backward, copied into the forward, for a gradient of the loss of 1."""
        values = self.values
        made = {value for op in run for value in values.made_by(op)}
        wanted = [a for op in run for a in op.all_input_nodes if a in values.late and values.base(a) not in made]
        needed, stack = set[fx.Node](), list(wanted)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += [a for a in node.all_input_nodes if a in values.late]
        copies: dict[fx.Node, fx.Node] = {}
        shown: torch.Tensor = tangent.meta["val"]
        tag = place.meta.get("partitioner_tag")
        for node in sorted(needed, key=values.place.__getitem__):
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
                _show(node)
        return copies

    @cached_property
    def _again(self) -> set[fx.Node]:
        """The forward ops that the backward of a slice makes again.

        Those behind large values; behind all that is cut, where what else would be saved is more than a slice needs.
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
        """The forward ops that make these values, as far as the backward reads them, and they are not returned."""
        values, forward = self.values, set(self.forward)
        kept = {values.joint.values[value].node for value in values.joint.kept_outputs}
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
        """Whether something outside of the region reads a value."""
        return any(reader not in self.found.ops for reader in self.values.readers(value))

    def _is_read(self, value: fx.Node, run: Set[fx.Node]) -> bool:
        """Whether a value is read by something else than these ops, or by the backward as it is."""
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
        """Write an op that runs these ops in slices: the new node, and what shows its outputs."""
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
        except (RuntimeError, ValueError, AssertionError) as error:
            raise Blocked(f"{place.name} cannot be cut: {str(error).splitlines()[0]}") from None
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
        """Note which results are sums, while their nodes are there."""
        self.sums += sums
        tensors = [node for node in sums if node.meta["val"].numel() > 1]
        self.summed += [_name_of_sum(self.values, node) for node in tensors]
        types = (summed_in_type(node.meta["val"], wide=self.wide) for node in tensors)
        self.summed_in |= {str(dtype).removeprefix("torch.") for dtype in types}

    def _body(self, run: Set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """What a region reads, and its ops and views in order."""
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
    """A fake tensor with the layout of another, in a storage of its own."""
    whole = storage_bytes(value) == value.numel() * value.element_size() and value.storage_offset() == 0
    with value.fake_mode:  # type: ignore[attr-defined]
        if whole:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _show(node: fx.Node) -> None:
    """Give a node the fake value that follows from those of its inputs."""
    shown, options = fx.node.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
    node.meta["val"] = node.target(*shown, **options)  # type: ignore[operator]


def _show_again(graph: fx.Graph, written: Set[fx.Node]) -> None:
    """Let views of what was written show its storages. Raises `Blocked` where one cannot."""
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
                _show(node)
        except RuntimeError as error:
            raise Blocked(f"{node.name} cannot be shown: {str(error).splitlines()[0]}") from None
        storages = {storage_of(t) for t in shown}
        if any(t is not None and storage_of(t) in storages for t in tensors_of(node)):
            new.add(node)
        else:
            node.meta["val"] = before


def _sort(graph: fx.Graph) -> None:
    """Put the nodes in a topological order, as near as may be to the one they have. Raises `Blocked` for a circle."""
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
