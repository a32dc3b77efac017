"""A rewrite of a joint graph that stores what the backward reads in fewer bytes: `Compression`.

    a bool tensor                       its bits                                      dropout masks, conditions
    indices                             as int8, int16, int32                         max_pool, topk, sort, max
    a number of which only the sign     that bit                                      ReLU, leaky ReLU
    is read
    a tensor of which only the shape    nothing                                       the input of a max_pool
    is read
    a tensor of numbers                 int8 or float8, with one scale for each row   what products, convolutions and
                                                                                      smooth functions read

All but the last lose nothing: gradients have the same bits. A tensor is compressed just after the forward made it, and
brought back before each op of the backward that reads it. Planning sees ops and values like any others.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx

from fxremat.graphs.captured import Captured, read_joint, with_updates_inside
from fxremat.graphs.nodes import storage_bytes
from fxremat.ops.compressed import lies_in, row_length
from fxremat.passes.in_place import forget_overwriting, note_overwriting
from fxremat.passes.insert import Before
from fxremat.step.step_graph import Origin
from fxremat.torch_private import copied, memory_order, real_tensors

aten, ours = torch.ops.aten, torch.ops.fxremat

LEAST_BYTES = 1 << 8  # smaller tensors stay as they are
SCALE_BYTES = 4  # of the scale of a row
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

# op of the backward -> index of an argument of which it reads shape and strides only
SHAPE_ONLY: Mapping[Any, int] = {
    aten.max_pool2d_with_indices_backward.default: 1,
    aten.max_pool3d_with_indices_backward.default: 1,
    aten.avg_pool2d_backward.default: 1,
    aten.avg_pool3d_backward.default: 1,
    aten._adaptive_avg_pool2d_backward.default: 1,
    aten._adaptive_avg_pool3d_backward.default: 1,
}
# op that returns indices as its result of the given number -> the largest such index, from the node
BOUNDED: Mapping[Any, tuple[int, Callable[[fx.Node], int]]] = {
    aten.max_pool2d_with_indices.default: (1, lambda node: math.prod(_shown(node.args[0]).shape[-2:])),
    aten.max_pool3d_with_indices.default: (1, lambda node: math.prod(_shown(node.args[0]).shape[-3:])),
    aten.adaptive_max_pool2d.default: (1, lambda node: math.prod(_shown(node.args[0]).shape[-2:])),
    aten.topk.default: (1, lambda node: _size(node, 2)),
    aten.sort.default: (1, lambda node: _size(node, 1)),
    aten.sort.stable: (1, lambda node: _size(node, "dim")),
    aten.max.dim: (1, lambda node: _size(node, 1)),
    aten.min.dim: (1, lambda node: _size(node, 1)),
    aten.cummax.default: (1, lambda node: _size(node, 1)),
    aten.cummin.default: (1, lambda node: _size(node, 1)),
    aten.argsort.stable: (0, lambda node: _size(node, "dim")),
}
# op of the backward -> arguments whose rounding changes its result in proportion: products of matrices, convolutions,
# norms, elementwise products and smooth functions; not attention and losses, whose exponentials enlarge it
SMOOTH: Mapping[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.mul.Tensor: (0, 1),
    aten.convolution_backward.default: (1,),
    aten.native_layer_norm_backward.default: (1,),
    aten.native_group_norm_backward.default: (1,),
    aten.native_batch_norm_backward.default: (1,),
    aten.gelu_backward.default: (1,),
    aten.silu_backward.default: (1,),
    aten.tanh_backward.default: (1,),
    aten.sigmoid_backward.default: (1,),
    aten._softmax_backward_data.default: (1,),
}


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Which values of a captured graph are compressed, by their numbers; equal graphs get equal rewrites.

    Attributes:
        packed: values that are stored without loss.
        rounded: values that are stored as int8 or float8, with one scale for each row.
        dtype: "int8" or "fp8", for `rounded`.
    """

    packed: tuple[int, ...] = ()
    rounded: tuple[int, ...] = ()
    dtype: str = "int8"

    def __str__(self) -> str:
        packed = f"{len(self.packed)} values without loss" if self.packed else ""
        rounded = f"{len(self.rounded)} as {self.dtype} with a scale for each row" if self.rounded else ""
        return ", ".join(filter(None, [packed, rounded]))

    def is_part_of(self, other: Compression) -> bool:
        """Tell whether another rewrite rounds the same values, and packs all that this one packs."""
        return self.rounded == other.rounded and set(self.packed) <= set(other.packed)

    def of(self, joint: Captured) -> Captured:
        """Return the graph with these values compressed. O(nodes)."""
        return _Rewriter(joint, self).run()


def packable(joint: Captured) -> dict[int, int]:
    """Return the values read by the backward that can be stored in fewer bytes without loss: value -> bytes saved.

    O(nodes).
    """
    reads = _Reads(joint)
    ways = ((value, reads.way(value)) for value in reads.large())
    return {value: joint.values[value].bytes - way.bytes for value, way in ways if way is not None}


def roundable(joint: Captured, dtype: str) -> dict[int, int]:
    """Return the values that may be rounded to int8 or float8 without enlarging errors: value -> bytes saved. O(nodes).
    """
    reads, saved = _Reads(joint), dict[int, int]()
    for value in reads.large():
        if reads.way(value) is None and reads.smooth(value):
            less = joint.values[value].bytes - _Rounded(reads.shown(value), DTYPES[dtype]).bytes
            saved |= {value: less} if less > 0 else {}
    return saved


class _Way:
    """A way to store a tensor: its bytes, the nodes that store it, and those that bring it back."""

    bytes: int = 0

    def stored(self, write: Before, shown: fx.Node) -> Any:
        """Write what stores the tensor, and return it."""
        raise NotImplementedError

    def back(self, write: Before, stored: Any) -> fx.Node:
        """Write what brings the tensor back before an op of the backward, and return it."""
        raise NotImplementedError

    def for_reader(self, op: fx.Node) -> _Way:
        """Return how the tensor is brought back for an op of the backward."""
        return self

    def read_by(self, op: fx.Node) -> None:
        """Change an op of the backward, which now reads the tensor that was brought back."""


class _Bits(_Way):
    """The bits of a bool tensor, or of a predicate of a tensor; what comes back are zeros and ones in its dtype."""

    def __init__(self, shown: torch.Tensor, predicate: _Predicate | None = None) -> None:
        self.shown, self.layout = shown, (list(shown.shape), memory_order(shown))
        self.dtype, self.predicate = shown.dtype, predicate
        self.bytes = -(-shown.numel() // 8)

    def stored(self, write: Before, shown: fx.Node) -> fx.Node:
        mask = self.predicate.of(write, shown) if self.predicate else shown
        return write(ours.pack_bits.default, mask, self.layout[1])

    def back(self, write: Before, stored: Any) -> fx.Node:
        return write(ours.unpack_bits.default, stored, *self.layout, self.dtype)

    def for_reader(self, op: fx.Node) -> _Way:
        return _Shape(self.shown) if self.predicate and op.target in SHAPE_ONLY else self

    def read_by(self, op: fx.Node) -> None:
        if self.predicate:
            self.predicate.read_by(op)


class _Narrow(_Way):
    """Indices as integers of fewer bytes."""

    def __init__(self, shown: torch.Tensor, bound: int) -> None:
        fitting = (d for d in (torch.int8, torch.int16, torch.int32) if bound - 1 <= torch.iinfo(d).max)
        self.dtype, self.narrow = shown.dtype, next(fitting, shown.dtype)
        self.bytes = shown.numel() * self.narrow.itemsize

    def stored(self, write: Before, shown: fx.Node) -> fx.Node:
        return write(aten._to_copy.default, shown, dtype=self.narrow)

    def back(self, write: Before, stored: Any) -> fx.Node:
        return write(aten._to_copy.default, stored, dtype=self.dtype)


class _Shape(_Way):
    """Nothing: the op of the backward reads shape and strides only, and gets one number instead, seen as a tensor."""

    def __init__(self, shown: torch.Tensor) -> None:
        self.shape, self.options = list(shown.shape), {"dtype": shown.dtype, "device": shown.device}

    def stored(self, write: Before, shown: fx.Node) -> None:
        return None

    def back(self, write: Before, stored: Any) -> fx.Node:
        return write(aten.expand.default, write(aten.full.default, [], 0, **self.options), self.shape)


class _Rounded(_Way):
    """Integers or floats of eight bits, with one scale for each row."""

    def __init__(self, shown: torch.Tensor, dtype: torch.dtype) -> None:
        self.layout, self.dtype = (list(shown.shape), memory_order(shown)), dtype
        rows = shown.numel() // max(1, row_length(*self.layout))
        self.shown_dtype = shown.dtype
        self.bytes = shown.numel() + rows * SCALE_BYTES

    def stored(self, write: Before, shown: fx.Node) -> tuple[fx.Node, fx.Node]:
        both = write(ours.round_rows.default, shown, self.layout[1], self.dtype)
        return write(operator.getitem, both, 0), write(operator.getitem, both, 1)

    def back(self, write: Before, stored: Any) -> fx.Node:
        return write(ours.scale_rows.default, *stored, *self.layout, self.shown_dtype)


@dataclass(frozen=True)
class _Predicate:
    """A predicate that an op of the backward asks of each element of a tensor; its answer for NaN is the op's.

    The op gets 1 for an element of which this is true, and 0 for another, and a limit that tells these apart. Not so
    hardtanh and ReLU6: on a CPU, what they do with NaN depends on where it lies in memory.
    """

    target: Any
    limit: float = 0.0

    @classmethod
    def of_reader(cls, op: fx.Node, place: int) -> _Predicate | None:
        """Return what an op asks of its argument at a place; None if it reads more than one bit."""
        if place != 1 or op.kwargs:
            return None
        if op.target is aten.threshold_backward.default:
            limit = cast(float, op.args[2])
            with real_tensors():  # kernels compare in float32, and `le` in the tensor's dtype
                exact = torch.tensor(limit, dtype=_shown(op.args[1]).dtype).item() == limit
            return cls(op.target, limit) if exact else None
        return cls(op.target) if op.target is aten.leaky_relu_backward.default else None

    def of(self, write: Before, x: fx.Node) -> fx.Node:
        """Write the predicate of a tensor."""
        if self.target is aten.leaky_relu_backward.default:
            return write(aten.gt.Scalar, x, 0)
        return write(aten.bitwise_not.default, write(aten.le.Scalar, x, self.limit))

    def read_by(self, op: fx.Node) -> None:
        """Set the limit of an op so that it tells 1 from 0."""
        if self.target is aten.threshold_backward.default:
            op.args = (*op.args[:2], 0.5)


class _Reads:
    """Which ops of the backward read which value of a captured graph, and at which argument."""

    def __init__(self, joint: Captured) -> None:
        self.joint = joint
        self.late = joint.nodes[joint.forward_count :]
        # value -> ops of the backward that read it, each with the node (the value's or a view's) that it reads
        self.readers: dict[int, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
        for op in self.late:
            for read in op.all_input_nodes:
                if (value := joint.value_of.get(read)) is not None:
                    self.readers[value].append((op, read))

    def large(self) -> Iterator[int]:
        """Yield the values that the forward makes, that only backward ops read later, and that have many bytes."""
        given = self.joint.output_values | self.joint.kept_outputs | self.joint.updates | self.joint.returned
        for value in sorted(self.readers):
            known = self.joint.values[value]
            if known.origin is Origin.FORWARD and known.whole and value not in given and self._is_plain(value):
                yield value

    def _is_plain(self, value: int) -> bool:
        shown = self.joint.shown[value].meta.get("val")
        return (
            isinstance(shown, torch.Tensor)
            and shown.layout is torch.strided
            and all(isinstance(size, int) for size in shown.shape)
            and storage_bytes(shown) >= LEAST_BYTES
            and (shown.is_contiguous() or lies_in(shown, tuple(memory_order(shown))))
        )

    def shown(self, value: int) -> torch.Tensor:
        """Return the fake tensor of a value."""
        return cast(torch.Tensor, self.joint.shown[value].meta["val"])

    def way(self, value: int) -> _Way | None:
        """Return how a value is stored without loss in fewer bytes; None if it cannot be."""
        shown, bound = self.shown(value), self._bound(value)
        if shown.dtype is torch.bool:
            return _Bits(shown)
        if bound is not None:
            narrow = _Narrow(shown, bound)
            return narrow if narrow.bytes < shown.nbytes else None
        asked = {self._asked(op, read, value) for op, read in self.readers[value]}
        if None in asked:
            return None
        predicates = asked - {_Shape}
        if not predicates:
            return _Shape(shown)
        return _Bits(shown, cast(_Predicate, predicates.pop())) if len(predicates) == 1 else None

    def _asked(self, op: fx.Node, read: fx.Node, value: int) -> object:
        """Return what an op reads of a value: a predicate of it, `_Shape`, or None for more."""
        if read is not self.joint.shown[value] or list(op.args).count(read) != 1 or len(op.all_input_nodes) < 2:
            return None
        place = list(op.args).index(read)
        if SHAPE_ONLY.get(op.target) == place and self.shown(value).is_contiguous() and self._plain_inputs:
            return _Shape
        return _Predicate.of_reader(op, place)

    @cached_property
    def _plain_inputs(self) -> bool:
        """True if all parameters and inputs are contiguous: then fake results do not hide another order of memory."""
        shown = [node.meta.get("val") for node in self.joint.primals]
        return all(each.is_contiguous() for each in shown if isinstance(each, torch.Tensor) and each.dim() > 2)

    def _bound(self, value: int) -> int | None:
        """Return the largest index that a value contains; None if it does not contain indices."""
        known = self.joint.values[value]
        node = self.joint.nodes[cast(int, known.producer)]
        position, bound = BOUNDED.get(node.target, (None, None))
        return bound(node) if bound is not None and position == (known.position or 0) else None

    @cached_property
    def _of_parameters(self) -> set[int]:
        """The values that are computed from parameters alone, such as their copies in another dtype."""
        found = set(self.joint.parameters)
        for op in self.joint.ops[: self.joint.forward_count]:
            found |= set(op.writes) if op.reads and found.issuperset(op.reads) else set()
        return found

    def smooth(self, value: int) -> bool:
        """Tell whether rounding a value changes what is computed from it only in proportion."""
        plain = self.shown(value).dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not plain or value in self._of_parameters:
            return False
        return all(
            all(argument is not read or place in SMOOTH.get(op.target, ()) for place, argument in enumerate(op.args))
            and op.target in SMOOTH
            for op, read in self.readers[value]
        )


class _Rewriter:
    def __init__(self, joint: Captured, compression: Compression) -> None:
        self.joint, self.compression, self.reads = joint, compression, _Reads(joint)
        self.graph = copied(joint.module.graph)
        self.copies = dict(zip(joint.module.graph.nodes, self.graph.nodes, strict=True))

    def _ways(self) -> dict[int, _Way]:
        found = {value: self.reads.way(value) for value in self.compression.packed}
        dtype = DTYPES[self.compression.dtype]
        rounded = {value: _Rounded(self.reads.shown(value), dtype) for value in self.compression.rounded}
        return {value: way for value, way in {**found, **rounded}.items() if way is not None}

    def run(self) -> Captured:
        forget_overwriting(self.graph)
        for value, way in self._ways().items():
            self._compress(value, way)
        note_overwriting(self.graph)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        found = read_joint(fx.GraphModule(self.joint.module, self.graph), len(self.joint.forward_outputs))
        return with_updates_inside(found, set(self.joint.updates_of)) if self.joint.updates_of else found

    def _compress(self, value: int, way: _Way) -> None:
        shown, readers = self.copies[self.joint.shown[value]], self.reads.readers[value]
        mode = shown.meta["val"].fake_mode
        stored = way.stored(Before(shown.next, mode, like=shown), shown)
        for op in dict.fromkeys(op for op, _ in readers):
            reader = self.copies[op]
            write = Before(reader, mode, partitioner_tag="is_backward")
            as_read = way.for_reader(op)
            back = as_read.back(write, stored)
            for read in (read for other, read in readers if other is op):
                seen = self._seen_as(write, read, self.joint.shown[value], back)
                reader.replace_input_with(self.copies[read], seen)
            as_read.read_by(reader)

    def _seen_as(self, write: Before, view: fx.Node, shown: fx.Node, back: fx.Node) -> fx.Node:
        """Write the same view of the tensor that was brought back as `view`, a node of the original, is of `shown`."""
        if view is shown:
            return back
        value = self.joint.value_of[view]
        (below,) = (parent for parent in view.all_input_nodes if self.joint.value_of.get(parent) == value)
        base = self._seen_as(write, below, shown, back)
        others = {parent: self.copies[parent] for parent in view.all_input_nodes} | {below: base}
        args, kwargs = fx.node.map_arg((view.args, view.kwargs), others.__getitem__)
        return write(view.target, *args, **kwargs)


def _shown(node: object) -> torch.Tensor:
    return cast(torch.Tensor, cast(fx.Node, node).meta["val"])


def _size(node: fx.Node, place: int | str) -> int:
    """Return the size of the dimension that an argument of an op gives, by its place or name; by default the last."""
    if isinstance(place, str):
        dimension = cast(int, node.kwargs.get(place, -1))
    else:
        dimension = cast(int, node.args[place]) if len(node.args) > place else -1
    shape = _shown(node.args[0]).shape
    return int(shape[dimension]) if shape else 1
