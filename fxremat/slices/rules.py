"""Rules for running ops in slices: for each family of ops, what it reads and writes in each slice.

    way = {inputs: part}, (part of each output)        cut alike, not cut, or a sum over the slices

    mm, rows       a cut, b whole        ->  cut           softmax, other dim   cut    ->  cut
    mm, inner      a, b cut              ->  sum           sum over the axis    cut    ->  sum
    pointwise      all cut, or broadcast ->  cut           convolution          batch  ->  batch, sums of weights

An op has several ways if its inputs can be cut along several axes. An op without a rule cannot run in slices,
and is named in the message if that keeps a region from being cut. The tests compare each rule with the uncut op
on real tensors, and with DTensor's strategies where these can express the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from fxremat.graphs.nodes import is_random, tensors_of
from fxremat.slices.labels import SUM, WHOLE, Part, Place, axes, place


@dataclass(frozen=True)
class Way:
    """One way to run an op in slices: how its inputs and its outputs are cut."""

    reads: Mapping[fx.Node, Part]
    writes: tuple[Part, ...]  # for each output of an op, the dimension along which it is cut into slices


Rule = Callable[[fx.Node, int], Iterator[Way]]
_RULES: dict[str, Rule] = {}

POINTWISE = {  # pointwise ops without torch's `pointwise` tag
    *("_to_copy", "clone", "contiguous", "detach", "alias", "native_dropout_backward", "masked_fill"),
    *("lift_fresh_copy", "full_like", "zeros_like", "ones_like", "empty_like"),
}
VIEWS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten"),
}
SEE_ALL = {  # op that needs the entire axis -> the reason
    "native_batch_norm": "reads statistics of the whole batch (BatchNorm)",
    "_native_batch_norm_legit": "reads statistics of the whole batch (BatchNorm)",
    "_native_batch_norm_legit_functional": "reads statistics of the whole batch (BatchNorm)",
    "batch_normalized": "reads statistics of the whole batch (BatchNorm)",
    "batch_statistics": "reads statistics of the whole batch (BatchNorm)",
    "native_batch_norm_backward": "reads statistics of the whole batch (BatchNorm)",
    "cudnn_batch_norm": "reads statistics of the whole batch (BatchNorm)",
    "cudnn_batch_norm_backward": "reads statistics of the whole batch (BatchNorm)",
}


def name_of(node: fx.Node) -> str:
    """Return the name of an op without its namespace and overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return str(getattr(target, "__name__", target))


def ways(node: fx.Node, count: int) -> list[Way]:
    """Return the ways to run an op in slices of tensors with `count` rows; [] for an op without a rule."""
    rule = _rule(node)
    if rule is None or is_random(node):
        return []
    return [way for way in rule(node, count) if way.reads or _makes(name_of(node))]


def why_not(node: fx.Node) -> str:
    """Explain, for a message, why an op cannot run in slices."""
    name = name_of(node)
    if name in SEE_ALL:
        return f"{node.name} {SEE_ALL[name]}"
    if is_random(node):
        return f"{node.name} ({name}) draws random numbers"
    if _rule(node) is None:
        return f"{node.name}: {name} has no rule for slices"
    return f"{node.name} ({name}) needs more than a slice of what it reads"


def _rule(node: fx.Node) -> Rule | None:
    name, target = name_of(node), node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    # an op with this name in another library may compute something else
    if target.namespace == "aten" and name in _RULES:
        return _RULES[name]
    pointwise = torch.Tag.pointwise in target.tags or (target.namespace == "aten" and name in POINTWISE)
    return _pointwise if pointwise and target.namespace in ("aten", "prims") else None


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an op by its name in the schema; None if there is none."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, each in enumerate(node.target._schema.arguments):
        if each.name == name:
            return node.args[position] if position < len(node.args) else each.default_value
    return None


def with_argument(node: fx.Node, name: str, value: Any) -> list[Any]:
    """Return all arguments of an op as a list in schema order, with one of them replaced."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    return [value if each.name == name else argument(node, each.name) for each in schema]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of the tensor that a node computes."""
    return tuple(cast(torch.Tensor, node.meta["val"]).shape)


def outputs_of(node: fx.Node) -> list[torch.Tensor | None]:
    """Return the outputs of a node by index, with None for outputs that are not tensors or not computed."""
    return tensors_of(node)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node that are tensors."""
    return [parent for parent in node.all_input_nodes if isinstance(parent.meta.get("val"), torch.Tensor)]


def _rules(*names: str) -> Callable[[Rule], Rule]:
    def registered(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return registered


def _makes(name: str) -> bool:
    return name in FILLS


def _whole(node: fx.Node, **_: Any) -> dict[fx.Node, Part]:
    return dict.fromkeys(node.all_input_nodes, WHOLE)


def _way(node: fx.Node, cut: Iterable[tuple[Any, Part]], *writes: Part) -> Way | None:
    """Return the way in which only the inputs in `cut` are cut, as stated there.

    None if that cuts an input in two ways.
    """
    reads: dict[fx.Node, Part] = {}
    for parent, part in cut:
        if isinstance(parent, fx.Node) and reads.setdefault(parent, part) != part:
            return None
    return Way({**_whole(node), **reads}, writes)


def _only(*found: Way | None) -> Iterator[Way]:
    yield from (way for way in found if way is not None)


def _at(shape: Sequence[int], dim: int, count: int) -> tuple[int, int] | None:
    """Return (elements before the dimension, elements per row) if a dimension is cut into `count` rows.

    None if impossible.
    """
    outer = math.prod(shape[:dim])
    found = place(shape, outer, count)
    if found is None or found.dim != dim or found.dims != 1:
        return None
    return outer, found.each


def _cut(
    node: fx.Node,
    pairs: Sequence[tuple[Any, int | None]],
    outputs: Sequence[tuple[Any, int] | Part],
    count: int,
) -> Way | None:
    """Return a way that cuts inputs and outputs along single dimensions, all with the same number of elements in a row.

    Args:
        pairs: inputs, each with the dimension that is cut, or None if the input is not cut.
        outputs: for each output, (tensor, dimension that is cut), or its label if it is not cut.
    """
    each: set[int] = set()
    cut: list[tuple[Any, Part]] = []
    for parent, dim in pairs:
        if dim is None:
            cut.append((parent, WHOLE))
            continue
        found = _at(shape_of(parent), dim, count)
        if found is None:
            return None
        cut.append((parent, found[0]))
        each.add(found[1])
    writes: list[Part] = []
    for output in outputs:
        if not isinstance(output, tuple):
            writes.append(output)
            continue
        tensor, dim = output
        if tensor is None:
            writes.append(WHOLE)
            continue
        found = _at(tensor.shape, dim, count)
        if found is None:
            return None
        writes.append(found[0])
        each.add(found[1])
    return _way(node, cut, *writes) if len(each) == 1 else None


def _aligned(shape: Sequence[int], whole: Sequence[int], at: Place, count: int) -> Part | None:
    """Return how an operand is cut that is broadcast to the shape `whole`, which is cut along `at`.

    None if it cannot be.
    """
    offset = len(whole) - len(shape)
    dims = [shape[d - offset] if d >= offset else 1 for d in range(at.dim, at.end)]
    if dims == list(whole[at.dim : at.end]):
        outer = math.prod(shape[: at.dim - offset])
        mine = place(shape, outer, count)
        if mine == Place(at.dim - offset, at.dims, at.each):
            return outer
        return None
    return WHOLE if all(size == 1 for size in dims) else None


def _pointwise(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice ops in which an element of the result depends on one element of each operand."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return
    whole = shape_of(node)
    for outer, at in axes(whole, count):
        cut = [(parent, _aligned(shape_of(parent), whole, at, count)) for parent in tensor_inputs(node)]
        if all(part is not None for _, part in cut):
            yield from _only(_way(node, cast(Any, cut), outer))


@_rules(*VIEWS)
def _reshape(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice views that keep the order of elements."""
    (x,) = tensor_inputs(node)
    if not isinstance(node.meta.get("val"), torch.Tensor) or node.target is torch.ops.aten.view.dtype:
        return
    for outer, _ in axes(shape_of(x), count):
        if place(shape_of(node), outer, count) is not None:
            yield Way({x: outer}, (outer,))


@_rules("t", "transpose", "permute")
def _permute(node: fx.Node, count: int) -> Iterator[Way]:
    (x,) = tensor_inputs(node)
    shape, rank = shape_of(x), len(shape_of(x))
    order = list(range(rank))
    match name_of(node):
        case "t":
            order.reverse()
        case "transpose":
            one, other = argument(node, "dim0") % rank, argument(node, "dim1") % rank
            order[one], order[other] = order[other], order[one]
        case _:
            order = [dim % rank for dim in argument(node, "dims")]
    for outer, at in axes(shape, count):
        places = [order.index(dim) for dim in range(at.dim, at.end)]
        if places == list(range(places[0], places[0] + at.dims)):
            moved = math.prod(shape_of(node)[: places[0]])
            if place(shape_of(node), moved, count) == Place(places[0], at.dims, at.each):
                yield Way({x: outer}, (moved,))


@_rules("expand")
def _expand(node: fx.Node, count: int) -> Iterator[Way]:
    (x,) = tensor_inputs(node)
    whole = shape_of(node)
    for outer, at in axes(whole, count):
        part = _aligned(shape_of(x), whole, at, count)
        if part is not None:
            yield Way({x: part}, (outer,))


FILLS = ("full", "zeros", "ones", "empty")


@_rules(*FILLS)
def _fill(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice constant tensors.

    Fills that take dtype and device from a tensor are rewritten before (`explicit`).
    """
    for outer, _ in axes(shape_of(node), count):
        yield Way(_whole(node), (outer,))


@_rules("mm")
def _mm(node: fx.Node, count: int) -> Iterator[Way]:
    a, b = node.args[:2]
    out = node.meta["val"]
    yield from _only(
        _cut(node, [(a, 0), (b, None)], [(out, 0)], count),
        _cut(node, [(a, 1), (b, 0)], [SUM], count),
        _cut(node, [(a, None), (b, 1)], [(out, 1)], count),
    )


@_rules("addmm")
def _addmm(node: fx.Node, count: int) -> Iterator[Way]:
    bias, a, b = (cast(fx.Node, argument) for argument in node.args[:3])
    out, shape = node.meta["val"], shape_of(bias)
    for dim, operand, other in ((0, a, b), (1, b, a)):
        at = len(shape) - 2 + dim  # a bias that is broadcast has no such dimension, or size 1
        cut = (bias, at if at >= 0 and shape[at] != 1 else None)
        yield from _only(_cut(node, [cut, (operand, dim), (other, None)], [(out, dim)], count))


@_rules("bmm")
def _bmm(node: fx.Node, count: int) -> Iterator[Way]:
    a, b = node.args[:2]
    out = node.meta["val"]
    yield from _only(
        _cut(node, [(a, 0), (b, 0)], [(out, 0)], count),
        _cut(node, [(a, 1), (b, None)], [(out, 1)], count),
        _cut(node, [(a, None), (b, 2)], [(out, 2)], count),
        _cut(node, [(a, 2), (b, 1)], [SUM], count),
    )


@_rules("baddbmm")
def _baddbmm(node: fx.Node, count: int) -> Iterator[Way]:
    c, a, b = (cast(fx.Node, argument) for argument in node.args[:3])
    out, shape = node.meta["val"], shape_of(c)
    for dim, of_a, of_b in ((0, 0, 0), (1, 1, None), (2, None, 2)):
        at = len(shape) - 3 + dim
        cut = (c, at if at >= 0 and shape[at] != 1 else None)
        yield from _only(_cut(node, [cut, (a, of_a), (b, of_b)], [(out, dim)], count))


def _along(node: fx.Node, count: int, dims: Iterable[int], operands: Sequence[fx.Node]) -> Iterator[Way]:
    """Yield ways to slice ops that keep shapes and combine elements only along `dims`, which are not cut."""
    shape = shape_of(operands[0])
    mixed = {dim % len(shape) for dim in dims} if shape else set()
    for outer, at in axes(shape, count):
        if not any(map(at.holds, mixed)):
            cut: list[tuple[Any, Part]] = [(x, outer) for x in operands]
            yield from _only(_way(node, cut, *[outer for _ in outputs_of(node)]))


@_rules("_softmax", "_log_softmax", "cumsum", "sort", "cumprod", "logcumsumexp")
def _one_along(node: fx.Node, count: int) -> Iterator[Way]:
    dim = argument(node, "dim")
    yield from _along(node, count, [dim], tensor_inputs(node)[:1])


@_rules("_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(node: fx.Node, count: int) -> Iterator[Way]:
    yield from _along(node, count, [argument(node, "dim")], tensor_inputs(node)[:2])


@_rules("flip")
def _flip(node: fx.Node, count: int) -> Iterator[Way]:
    yield from _along(node, count, argument(node, "dims"), tensor_inputs(node)[:1])


def _lead(node: fx.Node, x: fx.Node, count: int) -> Iterator[tuple[int, Place]]:
    """Yield the axes within the dimensions that a layer norm does not normalize."""
    lead = len(shape_of(x)) - len(argument(node, "normalized_shape"))
    yield from ((outer, at) for outer, at in axes(shape_of(x), count) if at.end <= lead)


@_rules("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(node: fx.Node, count: int) -> Iterator[Way]:
    x = cast(fx.Node, node.args[0])
    for outer, _ in _lead(node, x, count):
        yield from _only(_way(node, [(x, outer)], *[outer for _ in outputs_of(node)]))


@_rules("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(node: fx.Node, count: int) -> Iterator[Way]:
    gradient, x = (cast(fx.Node, argument) for argument in node.args[:2])
    statistics = [argument(node, name) for name in ("mean", "rstd")]
    for outer, _ in _lead(node, x, count):
        cut: list[tuple[Any, Part]] = [(y, outer) for y in (gradient, x, *statistics)]
        sums = [SUM for _ in outputs_of(node)[1:]]
        yield from _only(_way(node, cut, outer, *sums))


@_rules("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice the losses of single rows; their sums and means are rewritten before (`explicit`)."""
    x, target = (cast(fx.Node, argument) for argument in node.args[:2])
    if argument(node, "reduction") == 0 and len(shape_of(x)) > 1:
        yield from _only(_cut(node, [(x, 0), (target, 0)], [(outputs_of(node)[0], 0), WHOLE], count))


@_rules("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(node: fx.Node, count: int) -> Iterator[Way]:
    gradient, x, target = (cast(fx.Node, argument) for argument in node.args[:3])
    if len(shape_of(x)) < 2:
        return
    cut = [(gradient, 0)] if argument(node, "reduction") == 0 else []
    yield from _only(_cut(node, [*cut, (x, 0), (target, 0)], [(node.meta["val"], 0)], count))


LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")


@_rules(*LOSSES)
def _loss(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice elementwise losses; their sums and means are rewritten before (`explicit`)."""
    if argument(node, "reduction") == 0:
        yield from _pointwise(node, count)


@_rules(*(f"{name}_backward" for name in LOSSES))
def _loss_backward(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice gradients of elementwise losses, or of their sum; those of means are rewritten before."""
    if argument(node, "reduction") != 1:
        yield from _pointwise(node, count)


def _reduced(node: fx.Node, shape: Sequence[int]) -> set[int]:
    """Return the dimensions over which an op reduces."""
    dims = argument(node, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    return {dim % len(shape) for dim in dims} if dims and shape else set(range(len(shape)))


@_rules("sum")
def _sum(node: fx.Node, count: int) -> Iterator[Way]:
    (x,) = tensor_inputs(node)
    shape = shape_of(x)
    dims = _reduced(node, shape)
    for outer, at in axes(shape, count):
        if all(dim in dims for dim in range(at.dim, at.end)):
            yield Way({x: outer}, (SUM,))
    yield from _reduction(node, count)


@_rules("amax", "amin", "logsumexp", "mean", "var", "std", "var_mean", "any", "all", "argmax", "argmin", "prod")
def _reduction(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice a reduction along a dimension that is not reduced."""
    x = tensor_inputs(node)[0]
    shape = shape_of(x)
    dims = _reduced(node, shape)
    for outer, at in axes(shape, count):
        if any(map(at.holds, dims)):
            continue
        left = math.prod(shape[dim] for dim in range(at.dim) if dim not in dims)
        if all(t is not None and _kept(t.shape, left, at, count) for t in outputs_of(node)):
            yield Way({**_whole(node), x: outer}, tuple(left for _ in outputs_of(node)))


@_rules("topk")
def _topk(node: fx.Node, count: int) -> Iterator[Way]:
    yield from _beside(node, count, [argument(node, "dim")], tensor_inputs(node))


@_rules("max", "min", "linalg_vector_norm")
def _extremum(node: fx.Node, count: int) -> Iterator[Way]:
    if argument(node, "dim") is not None:
        yield from _reduction(node, count)


def _kept(shape: Sequence[int], outer: int, at: Place, count: int) -> bool:
    """Tell whether a tensor of this shape can be cut into the same rows, possibly along another dimension."""
    found = place(shape, outer, count)
    return found is not None and (found.dims, found.each) == (at.dims, at.each)


@_rules("gather", "scatter", "scatter_add")
def _gather(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice `gather` and similar ops along a dimension that is not indexed."""
    operands, dim = tensor_inputs(node), argument(node, "dim")
    shape = shape_of(operands[0])
    mixed = dim % len(shape) if shape else 0
    for _, at in axes(shape, count):
        if at.holds(mixed):
            continue
        places = [(x, math.prod(shape_of(x)[: at.dim])) for x in (*operands, node)]
        if all(
            shape_of(x)[at.dim : at.end] == shape[at.dim : at.end] and place(shape_of(x), outer, count) == at
            for x, outer in places
        ):
            yield from _only(_way(node, cast(Any, places[:-1]), places[-1][1]))


@_rules("index_select")
def _index_select(node: fx.Node, count: int) -> Iterator[Way]:
    yield from _beside(node, count, [argument(node, "dim")], tensor_inputs(node)[:1])


@_rules("select", "slice", "slice_backward", "select_backward", "split", "split_with_sizes", "unbind", "cat", "stack")
def _take(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice ops that split or join tensors along other dimensions than the cut one."""
    dim = argument(node, "dim")
    yield from _beside(node, count, [0 if dim is None else dim], tensor_inputs(node))


@_rules("slice_scatter", "select_scatter")
def _put(node: fx.Node, count: int) -> Iterator[Way]:
    yield from _beside(node, count, [argument(node, "dim")], tensor_inputs(node)[:2])


@_rules("constant_pad_nd")
def _pad(node: fx.Node, count: int) -> Iterator[Way]:
    pads, rank = argument(node, "pad"), len(shape_of(node))
    padded = [rank - 1 - k // 2 for k in range(len(pads)) if pads[k]]
    yield from _beside(node, count, padded, tensor_inputs(node)[:1])


@_rules("index")
def _index(node: fx.Node, count: int) -> Iterator[Way]:
    """Yield ways to slice `index` if the indexed dimensions are adjacent, and come after the cut one."""
    x, indices = cast(fx.Node, node.args[0]), cast(Sequence[Any], node.args[1])
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    if not taken or taken != list(range(taken[0], taken[-1] + 1)):
        return
    if any(index.meta["val"].dtype == torch.bool for index in indices if index is not None):
        return
    for outer, at in axes(shape_of(x), count):
        if at.end <= taken[0]:
            yield from _only(_way(node, [(x, outer), *((index, WHOLE) for index in indices)], outer))


def _beside(node: fx.Node, count: int, dims: Iterable[int], operands: Sequence[fx.Node]) -> Iterator[Way]:
    """Yield ways to slice ops that change some dimensions, along other dimensions that all tensors have.

    If the sliced dimension precedes the changed ones, tensors are aligned at their first dimension, else at the last.
    """
    outputs = [t for t in outputs_of(node) if t is not None]
    shape = list(shape_of(operands[0]))
    tensors = [x.meta["val"] for x in operands] + outputs
    rank = max(tensor.dim() for tensor in tensors)
    mixed = {dim % rank for dim in dims}
    alike = all(tensor.dim() == rank for tensor in tensors)
    for _, at in axes(shape, count):
        before = all(dim >= at.end for dim in mixed) or (alike and not any(map(at.holds, mixed)))
        if not before and not all(dim < at.dim + rank - len(shape) for dim in mixed):
            continue
        found = [_same_group(t.shape, shape, at, count, from_end=not before) for t in tensors]
        if all(part is not None for part in found):
            cut = list(zip(operands, found, strict=False))
            yield from _only(_way(node, cast(Any, cut), *cast(Any, found[len(operands) :])))


def _same_group(shape: Sequence[int], other: Sequence[int], at: Place, count: int, *, from_end: bool) -> int | None:
    dim = at.dim + (len(shape) - len(other) if from_end else 0)
    if dim < 0 or list(shape[dim : dim + at.dims]) != list(other[at.dim : at.end]):
        return None
    outer = math.prod(shape[:dim])
    return outer if place(shape, outer, count) == Place(dim, at.dims, at.each) else None


@_rules("embedding")
def _embedding(node: fx.Node, count: int) -> Iterator[Way]:
    weight, indices = (cast(fx.Node, argument) for argument in node.args[:2])
    for outer, _ in axes(shape_of(indices), count):
        yield from _only(_way(node, [(weight, WHOLE), (indices, outer)], outer))


@_rules("embedding_dense_backward")
def _embedding_backward(node: fx.Node, count: int) -> Iterator[Way]:
    gradient, indices = (cast(fx.Node, argument) for argument in node.args[:2])
    if argument(node, "scale_grad_by_freq"):
        return
    for outer, _ in axes(shape_of(indices), count):
        yield from _only(_way(node, [(gradient, outer), (indices, outer)], SUM))


@_rules("convolution")
def _convolution(node: fx.Node, count: int) -> Iterator[Way]:
    x, weight = node.args[:2]
    yield from _only(_cut(node, [(x, 0), (weight, None)], [(node.meta["val"], 0)], count))


@_rules("convolution_backward")
def _convolution_backward(node: fx.Node, count: int) -> Iterator[Way]:
    of_input = outputs_of(node)[0]
    first: tuple[Any, int] | Part = WHOLE if of_input is None else (of_input, 0)
    gradient, x, weight = node.args[:3]
    yield from _only(_cut(node, [(gradient, 0), (x, 0), (weight, None)], [first, SUM, SUM], count))


@_rules("native_group_norm")
def _group_norm(node: fx.Node, count: int) -> Iterator[Way]:
    yield from _only(_cut(node, [(node.args[0], 0)], [(t, 0) for t in outputs_of(node)], count))


@_rules("native_group_norm_backward")
def _group_norm_backward(node: fx.Node, count: int) -> Iterator[Way]:
    of_input = outputs_of(node)[0]
    first: tuple[Any, int] | Part = WHOLE if of_input is None else (of_input, 0)
    yield from _only(_cut(node, [(x, 0) for x in node.args[:4]], [first, SUM, SUM], count))


BY_BATCH = (  # ops all of whose tensors have the batch as first dimension; a mask or bias may be broadcast over it
    *("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "avg_pool2d_backward", "avg_pool3d_backward"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d"),
    *("_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "max_pool3d_with_indices_backward"),
    *("reflection_pad2d", "reflection_pad2d_backward", "replication_pad2d", "replication_pad2d_backward"),
    *("upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward"),
    *("upsample_nearest1d", "upsample_nearest1d_backward", "upsample_bicubic2d", "upsample_bicubic2d_backward"),
    *("pixel_shuffle", "pixel_unshuffle", "_upsample_nearest_exact2d", "_upsample_nearest_exact2d_backward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
)
BROADCAST = ("attn_mask", "attn_bias", "philox_seed", "philox_offset", "rng_state", "unused", "cum_seq_q", "cum_seq_k")


@_rules(*BY_BATCH)
def _by_batch(node: fx.Node, count: int) -> Iterator[Way]:
    over = [argument(node, name) for name in BROADCAST]
    pairs = [(x, 0) for x in tensor_inputs(node) if x not in over]
    pairs += [(x, 0) for x in over[:2] if isinstance(x, fx.Node) and _has_batch(x, pairs[0][0])]
    outputs: list[tuple[Any, int] | Part] = []
    for tensor in outputs_of(node):
        outputs.append((tensor, 0) if tensor is not None and tensor.dim() > 1 else WHOLE)
    yield from _only(_cut(node, pairs, outputs, count))


def _has_batch(mask: fx.Node, main: fx.Node) -> bool:
    return len(shape_of(mask)) == len(shape_of(main)) and shape_of(mask)[0] == shape_of(main)[0]
