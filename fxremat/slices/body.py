"""A region (group of ops) as one op: a loop over slices of its inputs, whose generated code frees tensors early.

    for each slice:    cut the inputs (views), and run the region's ops on them:
        outputs that are cut    are written into their part of a buffer that was allocated before the loop
        outputs that are sums   the first slice's is the accumulator, to which the others' are added; by `addmm_` if
                                they are matrix products

Code is generated once for each slice size, separately for the first slice and for later ones.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx

from fxremat.device import kind_of
from fxremat.graphs.accounting import rounded
from fxremat.graphs.nodes import storage_bytes, tensors_of
from fxremat.graphs.overwriting import PLACE, overwritten
from fxremat.ops.overwriting import overwrite_where_alike
from fxremat.passes.in_place import note_overwriting_among
from fxremat.slices.emission import CONTIGUOUS, emitted
from fxremat.slices.labels import SUM, WHOLE, Part, place
from fxremat.slices.rules import name_of
from fxremat.step.step_graph import Kind
from fxremat.torch_private import boxed, storage_of

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """A group of ops that is to run in slices, as nodes of the graph that they are part of.

    Attributes:
        inputs: the nodes that it reads.
        steps: its ops and views, in order.
        outputs: the values that it computes and other ops read.
        labels: how its inputs and values are cut: see `slices.labels`.
        count: number of rows along the axis that is cut (tokens, images, ...).
        parts: the number of slices.
        wide: True: accumulate sums of half precision in float32.
    """

    inputs: tuple[fx.Node, ...]
    steps: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    labels: Mapping[fx.Node, Part | tuple[Part, ...]]
    count: int
    parts: int
    wide: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of a slice; the last slice may have fewer."""
        return -(-self.count // self.parts)

    def sums(self) -> list[fx.Node]:
        """Return the outputs that are sums over the slices."""
        return [node for node in self.outputs if self.labels[node] is SUM]


@dataclass(frozen=True)
class _Cut:
    """The cut of a tensor into rows: along `dims` dimensions from `dim` on, with `each` elements of them in a row."""

    dim: int
    dims: int
    each: int

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with the cut dimensions flattened into the last of them; the others have size 1.

        A view or a copy.
        """
        if self.dims == 1:
            return tensor
        flat = tensor.flatten(self.dim, self.dim + self.dims - 1)
        shape = (*flat.shape[: self.dim], *[1] * (self.dims - 1), *flat.shape[self.dim :])
        return flat.view(shape) if flat.is_contiguous() else flat.unflatten(self.dim, (*[1] * (self.dims - 1), -1))

    def slice(self, prepared: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        """Return `rows` rows, from row `first` on, of a tensor that `prepared` returned."""
        return prepared.narrow(self.dim + self.dims - 1, first * self.each, rows * self.each)


@dataclass(frozen=True)
class _Output:
    """An output of a region: its full size, how it is cut, and the dtype in which it is accumulated."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    part: Part
    cut: _Cut | None
    summed_in: torch.dtype

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Return the bytes of the output in a dtype, as the allocator rounds them."""
        return rounded(math.prod(self.size) * dtype.itemsize, self.device)


class Sliced:
    """A function that runs a group of ops (region) in slices on its inputs, and returns its outputs as a tuple.

    Its text depends on the code of a slice, the number of rows and the number of slices, so that equal regions
    have equal texts, and different regions different ones.
    """

    kind = Kind.SLICED

    def __init__(self, region: Region) -> None:
        self.count, self.parts, self.rows = region.count, region.parts, region.rows
        self._body = _Body(region)
        self._cuts = [self._cut(region, node) for node in region.inputs]
        self._outputs = [self._output(region, node) for node in region.outputs]
        self._runs: dict[tuple[int, bool], Any] = {}
        code = self._body.emit(self.rows, first=False).code
        known = (code, self.count, self.parts, self._cuts, self._outputs)
        self.digest = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
        self.__name__ = "sliced"

    def __str__(self) -> str:
        return f"sliced {self.digest} in {self.parts}"

    __repr__ = __str__

    def __deepcopy__(self, _: Any) -> Sliced:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sliced) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Run all slices, one after the other, and return the outputs of the region."""
        prepared = [x if cut is None else cut.prepared(x) for x, cut in zip(inputs, self._cuts, strict=True)]
        made = [self._buffer(output) for output in self._outputs]
        buffers = [
            None if buffer is None or output.cut is None else output.cut.prepared(buffer)
            for buffer, output in zip(made, self._outputs, strict=True)
        ]
        for begin in range(0, self.count, self.rows):
            rows = min(self.rows, self.count - begin)
            given = [
                x if cut is None else cut.slice(x, begin, rows) for x, cut in zip(prepared, self._cuts, strict=True)
            ]
            for place_, output in enumerate(self._outputs):
                if output.cut is not None:
                    given.append(output.cut.slice(buffers[place_], begin, rows))  # type: ignore[arg-type]
                elif output.part is SUM and begin:
                    given.append(made[place_])
            results = iter(self._run(rows, first=not begin)(given))
            for place_, output in enumerate(self._outputs):
                if output.cut is None and not begin:
                    made[place_] = next(results)
        return tuple(self._finished(m, o) for m, o in zip(made, self._outputs, strict=True))

    def _finished(self, made: torch.Tensor | None, output: _Output) -> torch.Tensor:
        assert made is not None
        return made if made.dtype == output.dtype else made.to(output.dtype)

    def _run(self, rows: int, *, first: bool) -> Any:
        key = (rows, first)
        if key not in self._runs:
            self._runs[key] = boxed(self._body.emit(rows, first=first))
        return self._runs[key]

    @staticmethod
    def _buffer(output: _Output) -> torch.Tensor | None:
        if output.cut is None:
            return None
        return torch.empty_strided(output.size, output.stride, dtype=output.dtype, device=output.device)

    @staticmethod
    def _cut(region: Region, node: fx.Node) -> _Cut | None:
        part = region.labels.get(node, WHOLE)
        if not isinstance(part, int):
            return None
        at = place(node.meta["val"].shape, part, region.count)
        assert at is not None, f"{node.name} cannot be cut"
        return _Cut(at.dim, at.dims, at.each)

    @staticmethod
    def _output(region: Region, node: fx.Node) -> _Output:
        value: torch.Tensor = node.meta["val"]
        part = region.labels[node]
        assert not isinstance(part, tuple)
        size, stride = tuple(value.shape), tuple(value.stride())
        cut = Sliced._cut(region, node)
        if cut is not None and not _views_as_one(value, cut):
            stride = tuple(torch.empty(size, device="meta").stride())
        summed_in = summed_in_type(value, wide=region.wide) if part is SUM else value.dtype
        return _Output(size, stride, value.dtype, value.device, part, cut, summed_in)

    @cached_property
    def workspace(self) -> int:
        """The peak in bytes of running all slices, beyond the region's inputs and outputs."""
        wide = sum(o.bytes_in(o.summed_in) for o in self._outputs if o.dtype != o.summed_in)
        narrow = sum(o.bytes_in(o.dtype) for o in self._outputs if o.dtype != o.summed_in)
        sums = sum(o.bytes_in(o.summed_in) for o in self._outputs if o.part is SUM)
        first = self._body.peak(self.rows, first=True) - sums
        later = self._body.peak(self.rows, first=False) if self.parts > 1 else 0
        return max(0, max(first, later) + wide - narrow, wide)

    def nodes(self) -> list[fx.Node]:
        """Return the ops that a slice runs, as nodes with fake values in `meta["val"]`."""
        return [node for node in self._body.emit(self.rows, first=True).graph.nodes if node.op == "call_function"]


def summed_in_type(value: torch.Tensor, *, wide: bool) -> torch.dtype:
    """Return the dtype in which a sum over slices is accumulated; float64 for a single number, if available.

    `wide`: True: sums of half precision are accumulated in float32.
    """
    if value.dtype in (*HALF, torch.float32) and value.numel() == 1 and kind_of(value.device).doubles:
        return torch.float64
    return torch.float32 if wide and value.dtype in HALF else value.dtype


def _views_as_one(value: torch.Tensor, cut: _Cut) -> bool:
    """Tell whether a tensor fills its storage, and the dimensions of its cut axis can be viewed as one."""
    dense = storage_bytes(value) == value.numel() * value.element_size() and value.storage_offset() == 0
    inside = range(cut.dim, cut.dim + cut.dims - 1)
    return dense and all(value.stride(d) == value.stride(d + 1) * value.size(d + 1) for d in inside)


class _Body:
    """The code of one slice; it has copies of the region's nodes, since their graph may change."""

    def __init__(self, region: Region) -> None:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for number, node in enumerate(region.inputs):
            copies[node] = graph.placeholder(f"in_{number}")
            copies[node].meta = {"val": node.meta["val"]}
        for node in region.steps:
            copies[node] = graph.create_node(
                "call_function", node.target, *fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            )
            copies[node].meta = {"val": node.meta["val"]}
        self._graph = graph
        self._inputs = [copies[node] for node in region.inputs]
        self._steps = [copies[node] for node in region.steps]
        self._outputs = [copies[node] for node in region.outputs]
        self._labels = {copies[node]: region.labels[node] for node in copies if node in region.labels}
        self._count, self._wide = region.count, region.wide

    def emit(self, rows: int, *, first: bool) -> fx.GraphModule:
        """Generate the code for one slice: (*inputs, *slices of cut outputs, *accumulators) -> the remaining outputs.

        The `first` slice gets no accumulators; it returns the first summand of each sum.
        """
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        values = [node.meta["val"] for node in self._inputs]
        mode: Any = next(value.fake_mode for value in values if isinstance(value, torch.Tensor))  # type: ignore[attr-defined]
        with mode:
            for node in self._inputs:
                made[node] = self._placeholder(graph, node.name, self._cut_fake(node, rows))
            targets = [self._given(graph, node, number, rows, first) for number, node in enumerate(self._outputs)]
            for node in self._steps:
                target, args, kwargs = emitted(node, made.__getitem__, self._labels, self._count, rows)
                args = _contiguous(graph, node, args)
                made[node] = _call(graph, target, args, kwargs)
                if target is aten.reshape.default:
                    made[node] = _as_shown(graph, made[node])
            inner = {made[node] for node in self._steps} - {made[node] for node in self._outputs}
            results = [
                self._result(graph, made[node], self._labels[node], target)
                for node, target in zip(self._outputs, targets, strict=True)
            ]
        graph.output(tuple(result for result in results if result is not None))
        note_overwriting_among(graph, inner)
        _looking_at_layouts(graph)
        graph.eliminate_dead_code(is_impure_node=_writes)
        _last_uses_first(graph)
        graph.lint()
        return fx.GraphModule(torch.nn.Module(), graph, "Slice")

    def peak(self, rows: int, *, first: bool) -> int:
        """Return the peak in bytes of a slice of `rows` rows, without inputs and accumulators."""
        graph = self.emit(rows, first=first).graph
        return _peak(graph)

    def _cut_fake(self, node: fx.Node, rows: int) -> Any:
        value, part = node.meta["val"], self._labels.get(node, WHOLE)
        if not isinstance(part, int):
            return value
        at = place(value.shape, part, self._count)
        assert at is not None
        cut = _Cut(at.dim, at.dims, at.each)
        return cut.slice(cut.prepared(value), 0, rows)

    def _given(self, graph: fx.Graph, node: fx.Node, number: int, rows: int, first: bool) -> fx.Node | None:
        """Return the placeholder of the buffer that an output is written into or added to; None if there is none."""
        part, value = self._labels[node], node.meta["val"]
        if isinstance(part, int):
            return self._placeholder(graph, f"out_{number}", self._cut_fake(node, rows))
        if part is SUM and not first:
            return self._placeholder(graph, f"sum_{number}", value.to(summed_in_type(value, wide=self._wide)))
        return None

    def _placeholder(self, graph: fx.Graph, name: str, value: Any) -> fx.Node:
        node = graph.placeholder(name)
        node.meta = {"val": value}
        return node

    def _result(self, graph: fx.Graph, node: fx.Node, part: Any, target: fx.Node | None) -> fx.Node | None:
        """Write an output into its buffer, or add it to its accumulator, and return None; otherwise return the output.
        """
        value = node.meta["val"]
        if isinstance(part, int):
            assert target is not None
            _call(graph, aten.copy_.default, (target, node), {})
            return None
        if part is not SUM:
            return node if target is None else None
        if target is None:
            wide = summed_in_type(value, wide=self._wide)
            return node if wide == value.dtype else _call(graph, aten._to_copy.default, (node,), {"dtype": wide})
        same = summed_in_type(value, wide=self._wide) == value.dtype
        if node.target is aten.mm.default and not node.users and same:
            _call(graph, aten.addmm_.default, (target, *node.args), {})
            graph.erase_node(node)
        else:
            _call(graph, aten.add_.Tensor, (target, node), {})
        return None


def _call(graph: fx.Graph, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """Append a call to a graph, with its fake value, and return its node."""
    node = graph.call_function(target, tuple(args), dict(kwargs))
    shown, options = fx.node.map_arg((tuple(args), dict(kwargs)), lambda parent: parent.meta["val"])
    node.meta["val"] = target(*shown, **options)
    return node


def _contiguous(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an op's arguments for a slice, with contiguous copies of those whose strides its kernel would ignore."""
    names = CONTIGUOUS.get(name_of(node))
    if names is None:
        return args
    assert isinstance(node.target, torch._ops.OpOverload)
    given = list(args)
    for position, (shown, known) in enumerate(zip(args, node.target._schema.arguments, strict=False)):
        if known.name in names and isinstance(shown, fx.Node) and not shown.meta["val"].is_contiguous():
            given[position] = _call(graph, aten.clone.default, (shown,), {"memory_format": torch.contiguous_format})
    return tuple(given)


def _as_shown(graph: fx.Graph, view: fx.Node) -> fx.Node:
    """If a reshape copies its fake input, insert a real copy, whose result may be overwritten; return the new node.

    A reshape that is a view of its fake input is returned unchanged.
    """
    source = view.args[0]
    assert isinstance(source, fx.Node)
    if storage_of(view.meta["val"]) == storage_of(source.meta["val"]):
        return view
    copy = _call(graph, aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
    again = _call(graph, aten.reshape.default, (copy, view.args[1]), {})
    graph.erase_node(view)
    return again


def _looking_at_layouts(graph: fx.Graph) -> None:
    """Make ops that overwrite an operand check at run time that its layout is that of their result."""
    for node in graph.nodes:
        if (operand := overwritten(node)) is not None and operand.op != "placeholder":
            node.args = (node.target, node.meta[PLACE], *node.args)
            node.target = overwrite_where_alike


def _writes(node: fx.Node) -> bool:
    """Tell whether a node of a slice's code writes to an argument, or is an input or output."""
    effects = (aten.copy_.default, aten.add_.Tensor, aten.addmm_.default, overwrite_where_alike)
    return node.op in ("placeholder", "output") or node.target in effects


def _last_uses_first(graph: fx.Graph) -> None:
    """Move each write of an output directly after the op that computes it, so that it is freed early."""
    for node in list(graph.nodes):
        if node.target in (aten.copy_.default, aten.add_.Tensor) and node.args[0].op == "placeholder":
            source = node.args[1]
            if isinstance(source, fx.Node) and source.op == "call_function":
                source.append(node)
        elif node.target is aten.addmm_.default:
            last = max((a for a in node.args[1:] if isinstance(a, fx.Node)), key=list(graph.nodes).index)
            if last.op == "call_function":
                last.append(node)


def _taken_over(node: fx.Node) -> int:
    """Return the bytes of the operand that an op overwrites with its result; 0 if it overwrites none."""
    if node.target is not overwrite_where_alike:
        return 0
    _, place, *operands = node.args
    operand: Any = operands[cast(int, place)]
    value: torch.Tensor = operand.meta["val"]
    return rounded(storage_bytes(value), value.device)


def _peak(graph: fx.Graph) -> int:
    """Return the peak in bytes of the storages that a graph's nodes allocate, each freed after its last use."""
    nodes = list(graph.nodes)
    given = {storage_of(t) for n in nodes if n.op == "placeholder" for t in tensors_of(n) if t is not None}
    last: dict[Any, int] = {}
    size: dict[Any, int] = {}
    for number, node in enumerate(nodes):
        for shown in (node, *node.all_input_nodes):
            for tensor in tensors_of(shown):
                if tensor is not None and (key := storage_of(tensor)) not in given:
                    last[key] = number
                    size.setdefault(key, rounded(storage_bytes(tensor), tensor.device))
    freed = [0] * len(nodes)
    for key, number in last.items():
        freed[number] += size[key]
    alive = most = 0
    seen: set[Any] = set()
    for number, node in enumerate(nodes):
        made = {storage_of(tensor) for tensor in tensors_of(node) if tensor is not None} - given - seen
        seen |= made
        alive += sum(size[key] for key in made)
        most = max(most, alive - _taken_over(node))
        alive -= freed[number]
    return most


def outputs_of_region(node: fx.Node) -> Sequence[fx.Node]:
    """Return the getitem nodes of a sliced region, which select its outputs."""
    return [user for user in node.users if user.target is operator.getitem]
