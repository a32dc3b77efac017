"""A rewrite of a joint graph so that groups of its ops (regions) run in slices, before anything is planned.

    made again    forward op (cut inputs)            -> losses, sums, small results
                  backward op (the same, gradients)  -> gradients, assembled from slices, and sums; it runs the slice's
                                                        forward again
    inside        one forward op                     -> results and gradients, as if the loss's gradient were 1; the
                                                        backward multiplies them by the real gradient of the loss

"inside" runs no op twice. It is possible if the only incoming gradient is that of the loss, which is one
number, and no gradient is float16, which loss scaling would cost bits. A region is searched for around the op
that needs most memory, then around the next, until none needs more than a target.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fxremat.graphs.captured import Captured, read_joint, with_updates_inside
from fxremat.graphs.names import frame_of, module_of
from fxremat.passes.in_place import forget_overwriting, note_overwriting
from fxremat.slices.body import HALF, Sliced
from fxremat.slices.explicit import make_explicit
from fxremat.slices.region import Blocked, Found, find
from fxremat.slices.values import Values
from fxremat.slices.write import Writer, show, show_again, sort_again
from fxremat.torch_private import copied

aten = torch.ops.aten

LEAST_ROWS = 32  # minimum number of rows of a slice, if tensors are cut into more than MANY rows
MANY = 256  # number of rows into which tensors are cut
MOST_REGIONS = 200
TRIED = 6  # the search ends after this many ops for which no region was found
TOLD = 0.5  # reasons are reported only for ops that need at least this fraction of the largest op's bytes
MOST_REASONS = 3  # number of reasons that are reported
MANY_OUTPUTS = 16  # outputs smaller than the bytes of the largest op by this factor are never replaced by NaN


@dataclass(frozen=True, kw_only=True)
class SlicedRegion:
    """The description of a region (group of ops) that runs in slices, for messages.

    Attributes:
        parts: number of slices.
        rows: number of rows of a slice.
        inside: True if gradients are computed in the forward.
        ops: names of the ops of the joint graph that run in slices.
        where: the module, or the line of code, whose value was too large.
        sums: number of results that are sums over the slices.
        summed: the modules, or names, of the ops whose sums have more than one number.
        summed_in: the dtypes in which sums of more than one number are accumulated.
        wide: True if sums of half precision are accumulated in float32.
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


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """Settings for choosing groups of ops (regions) that run in slices; equal graphs get equal regions.

    Attributes:
        target: bytes that an op may read and write, without parameters.
        most: largest number of slices of a region.
        inside: True: compute gradients in the forward if that is possible.
        wide: True: accumulate sums of half precision in float32.
        only_loss: True: instead of large outputs other than the loss, return NaN in their shapes.
    """

    target: int
    most: int = 1 << 30
    inside: bool = False
    wide: bool = False
    only_loss: bool = False

    def of(self, joint: Captured) -> SlicedJoint:
        """Return the graph with regions in slices, such that no op needs more than `target` bytes if possible."""
        return _Slicer(joint, self).run()


@dataclass(frozen=True, kw_only=True, eq=False)
class SlicedJoint:
    """A joint graph after some of its regions (groups of ops) were replaced by ops that run them in slices."""

    joint: Captured
    slicing: Slicing
    regions: tuple[SlicedRegion, ...]
    blocked: tuple[str, ...]  # the reasons why ops that need much memory do not run in slices
    floor: int  # bytes of the inputs and outputs of the largest op that does not run in slices: the peak is no lower


def largest_need(joint: Captured) -> int:
    """Return the bytes that the largest op reads and writes, without parameters and inputs."""
    values = Values(joint)
    return max((values.need(joint.nodes[op.index]) for op in joint.ops), default=0)


def bytes_beside_loss(joint: Captured) -> int:
    """Return the bytes of large tensors that the forward returns besides its loss, and that could be left out."""
    values, need = Values(joint), largest_need(joint)
    nodes = [node for node in _beside_loss(joint) if _is_left_out(values, node, need)]
    return sum(map(values.bytes, {values.base(node) for node in nodes}))


def _beside_loss(joint: Captured) -> list[fx.Node]:
    """Return the outputs of the forward that get no gradient: all but the loss."""
    trained = {str(getattr(node.meta.get("desc"), "output", None)) for node in joint.tangent_nodes}
    outputs = zip(joint.forward_outputs, joint.output_descs, strict=True)
    return [node for node, desc in outputs if isinstance(node, fx.Node) and str(desc) not in trained]


class _Slicer:
    def __init__(self, joint: Captured, slicing: Slicing) -> None:
        self.given, self.slicing = joint, slicing
        self.graph = copied(joint.module.graph)  # the graph being rewritten; a copy of the original
        self.outputs = len(joint.forward_outputs)
        self.regions: list[SlicedRegion] = []
        self.blocked: dict[str, str] = {}  # op -> reason why it cannot run in slices; "" if it is not worth reporting
        self.need = 0  # bytes that the largest op reads and writes in the original graph

    def run(self) -> SlicedJoint:
        forget_overwriting(self.graph)
        make_explicit(self.graph)
        values = self._values()
        self.need = max(map(values.need, values.ops), default=0)
        if self.slicing.only_loss and self._leave_out(values):
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
        note_overwriting(self.graph)
        self.graph.eliminate_dead_code()
        joint = read_joint(fx.GraphModule(self.given.module, self.graph), self.outputs)
        if self.given.updates_of:
            joint = with_updates_inside(joint, set(self.given.updates_of))
        blocked = tuple(filter(None, dict.fromkeys(self.blocked.values())))[:MOST_REASONS]
        return SlicedJoint(joint=joint, slicing=self.slicing, regions=tuple(self.regions), blocked=blocked, floor=floor)

    def _leave_out(self, values: Values) -> bool:
        """Make the forward return NaN instead of large tensors besides its loss; return whether there are any."""
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
                    show(made)
        changed = outputs != list(end.args[0])
        end.args = (outputs,)
        self.graph.eliminate_dead_code()
        return changed

    def _values(self) -> Values:
        return Values(read_joint(cast(Any, _Unfinished(self.graph)), self.outputs))

    def _largest(self, values: Values) -> fx.Node | None:
        """Return the largest op by bytes read and written that is not blocked; None if all are within the target."""
        open_ = [op for op in values.ops if op.name not in self.blocked]
        op = max(open_, key=values.need, default=None)
        return op if op is not None and values.need(op) > self.slicing.target else None

    def _cut(self, values: Values, op: fx.Node, skipped: Set[tuple[int, int]] = frozenset()) -> None:
        """Replace the ops of the best region around an op by ops that run it in slices. Raises `Blocked`.

        Args:
            skipped: axes along which the replacement has failed.
        """
        finest: tuple[int, Found, int] | None = None
        for found in find(values, op):
            parts = self._parts(values, found)
            if parts < 2 or found.axis in skipped:
                continue
            need = self._need(values, found) // parts
            if finest is None or need < finest[0]:
                finest = need, found, parts
            if need <= self.slicing.target:
                break
        if finest is None:
            raise Blocked(f"{op.name} has too few rows to cut")
        _, found, parts = finest
        before = copied(self.graph)
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
        """Return the smallest power of two as number of slices with which no op of the region exceeds the target."""
        least = LEAST_ROWS if found.count > MANY else 1
        most = min(self.slicing.most, found.count // least)
        need, parts = self._need(values, found), 2
        while parts * 2 <= most and need > parts * self.slicing.target:
            parts *= 2
        return min(parts, most)

    def _replace(self, values: Values, found: Found, parts: int) -> None:
        writer = Writer(self.graph, values, found, parts, wide=self.slicing.wide)
        inside = self.slicing.inside and writer.only_loss is not None
        nodes = [writer.inside()] if inside else writer.made_again()
        targets = [node.target for node in nodes if isinstance(node.target, Sliced)]
        rows = targets[0].rows
        sort_again(self.graph)
        self.graph.eliminate_dead_code()
        show_again(self.graph, set(nodes))
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
                wide=self.slicing.wide and any(value.meta["val"].dtype in HALF for value in writer.sums),
            )
        )


def _is_left_out(values: Values, node: fx.Node, need: int) -> bool:
    """Tell whether an output is a large floating-point tensor that the forward computes, and overwrites no input."""
    value = values.joint.value_of.get(node)
    shown = node.meta.get("val")
    return (
        value in values.joint.kept_outputs
        and isinstance(shown, torch.Tensor)
        and shown.dtype.is_floating_point
        and values.base(node).op == "call_function"
        and MANY_OUTPUTS * values.bytes(values.base(node)) >= need
    )


def _where(found: Found) -> str:
    """Return the first module of a region's ops, or the source line or name of its largest value."""
    names = (module_of(op) for op in found.ops)
    frame = frame_of(found.seed)
    line = frame.place if frame else found.seed.name
    return next(filter(None, names), line)


@dataclass(frozen=True)
class _Unfinished:
    """A graph that is analysed while it is rewritten, for which no code is generated."""

    graph: fx.Graph
