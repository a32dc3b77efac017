"""A rewrite of ops that cannot run in slices to ops that can, with results that are equal up to rounding.

    nll_loss(x, y), mean     nll_loss(losses of rows as they are, 0, mean)             the same bits
    with class weights       sum(nll_loss(x, y), none) / weight of all targets         accumulated in float64
    mse_loss(x, y), mean     sum(mse_loss(x, y), none) / number of elements            other losses and backwards too
    mean(x)                  sum(x) / number of elements
    new_zeros(x, size)       zeros(size): it reads nothing of x
    dropout(x) on a CPU      x * mask / (1 - p); one op draws the entire mask          the numbers that dropout draws

The rewritten losses compute the weight of all targets before any slice runs.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxremat.passes.dropout import rounded
from fxremat.passes.insert import Before
from fxremat.slices.rules import LOSSES, argument, name_of, shape_of, with_argument

aten = torch.ops.aten
FILLED: dict[Any, tuple[int, ...]] = {
    aten.new_zeros.default: (0,),
    aten.new_ones.default: (1,),
    aten.new_full.default: (),  # adds no argument: the fill value is one of the op's own
}
IGNORED = -100
MEAN, ADDED = 1, 2  # aten's numbers for the reductions "mean" and "sum" of a loss


def make_explicit(graph: fx.Graph) -> None:
    """Rewrite losses, means and dropouts of a joint graph to ops that can run on slices. O(nodes)."""
    for node in list(graph.nodes):
        if node.target in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
            _loss_by_rows(node)
        elif name_of(node) in LOSSES:
            _loss_by_elements(node)
        elif name_of(node) in {f"{name}_backward" for name in LOSSES}:
            _loss_backward(node)
        elif node.target is aten.mean.default and node.meta["val"].dtype.is_floating_point:
            _mean(node)
        elif node.target is aten.native_dropout.default:
            _mask_by_itself(node)
        elif node.target in FILLED:
            _filled_alone(node)
    graph.eliminate_dead_code()


def _shown(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _loss_by_rows(node: fx.Node) -> None:
    x, target, weight, reduction, ignored = (
        argument(node, name) for name in ("self", "target", "weight", "reduction", "ignore_index")
    )
    if reduction not in (MEAN, ADDED) or len(shape_of(x)) < 2:
        return
    write = Before(node, _shown(x).fake_mode)  # type: ignore[attr-defined]
    rows = write(node.target, x, target, weight, 0, ignored)
    losses = write(operator.getitem, rows, 0)
    added = _added_as_whole if weight is None else _added_by_weight
    outputs = added(write, node.target, losses, target, weight, reduction, ignored)
    for item in list(node.users):
        item.replace_all_uses_with(outputs[item.args[1]])  # type: ignore[index]
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _added_as_whole(
    write: Before, op: Any, losses: fx.Node, target: fx.Node, _: None, reduction: int, ignored: int
) -> tuple[fx.Node, fx.Node]:
    """Sum up the losses of rows by the loss op itself, treating them as losses of one class.

    Return (loss, total weight).

    Sum and division are therefore those of the original op, bit for bit.
    """
    value = _shown(target)
    seen = write(aten.ne.Scalar, target, ignored)
    none = write(aten.full.default, [], IGNORED, dtype=value.dtype, device=value.device)
    zero = write(aten.full.default, [], 0, dtype=value.dtype, device=value.device)
    first = write(aten.where.self, seen, zero, none)
    only = write(aten.unsqueeze.default, write(aten.neg.default, losses), 1)
    result = write(op, only, first, None, reduction, IGNORED)
    shape = list(_shown(only).shape)
    zeros = write(aten.zeros.default, shape, dtype=_shown(losses).dtype, device=value.device)
    # the total weight depends only on the targets, so it is computed before any slice runs
    weight = write(op, zeros, first, None, reduction, IGNORED)
    return write(operator.getitem, result, 0), write(operator.getitem, weight, 1)


def _added_by_weight(
    write: Before, _: Any, losses: fx.Node, target: fx.Node, weight: fx.Node, reduction: int, ignored: int
) -> tuple[fx.Node, fx.Node]:
    """Return (sum or weighted mean of the losses of rows, total weight of the targets), computed in float64."""
    dtype = _shown(losses).dtype
    total = _weight_of(write, target, weight, ignored)
    result = write(aten.sum.default, losses, dtype=torch.float64)
    if reduction == MEAN:
        result = write(aten.div.Tensor, result, total)
    return write(aten._to_copy.default, result, dtype=dtype), write(aten._to_copy.default, total, dtype=dtype)


def _weight_of(write: Before, target: fx.Node, weight: fx.Node, ignored: int) -> fx.Node:
    """Return the sum of the targets' weights, in float64."""
    seen = write(aten.ne.Scalar, target, ignored)
    zero = write(aten.full.default, [], 0, dtype=torch.int64, device=_shown(target).device)
    known = write(aten.where.self, seen, target, zero)
    each = write(aten.mul.Tensor, write(aten.index.Tensor, weight, [known]), seen)
    return write(aten.sum.default, each, dtype=torch.float64)


def _loss_by_elements(node: fx.Node) -> None:
    reduction = argument(node, "reduction")
    x = argument(node, "self")
    if reduction not in (MEAN, ADDED) or _shown(x).dim() < 2 or not isinstance(node.target, torch._ops.OpOverload):
        return
    write = Before(node, _shown(x).fake_mode)  # type: ignore[attr-defined]
    losses = write(node.target, *with_argument(node, "reduction", 0))
    _add_up(node, write, losses, _shown(losses).numel() if reduction == MEAN else 1)


def _loss_backward(node: fx.Node) -> None:
    gradient, x = argument(node, "grad_output"), argument(node, "self")
    if argument(node, "reduction") != MEAN or _shown(gradient).numel() != 1 or _shown(x).dim() < 2:
        return
    write = Before(node, _shown(x).fake_mode)  # type: ignore[attr-defined]
    shared = write(aten.div.Tensor, gradient, _shown(node).numel())
    node.args = (shared, *with_argument(node, "reduction", ADDED)[1:])
    node.kwargs = {}


def _mean(node: fx.Node) -> None:
    (x,) = node.all_input_nodes
    if _shown(x).dim() < 2 or not _shown(x).dtype.is_floating_point:
        return
    write = Before(node, _shown(x).fake_mode)  # type: ignore[attr-defined]
    _add_up(node, write, x, _shown(x).numel())


def _add_up(node: fx.Node, write: Before, x: fx.Node, divisor: int) -> None:
    """Replace a node by the sum of all elements over a divisor."""
    result = write(aten.sum.default, x, dtype=torch.promote_types(_shown(x).dtype, torch.float32))
    if divisor != 1:
        result = write(aten.div.Tensor, result, divisor)
    if _shown(node).dtype != _shown(result).dtype:
        result = write(aten._to_copy.default, result, dtype=_shown(node).dtype)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _filled_alone(node: fx.Node) -> None:
    """Replace a fill that takes dtype and device from a tensor by one that reads no tensor."""
    value = _shown(node)
    write = Before(node, value.fake_mode)  # type: ignore[attr-defined]
    number = FILLED[node.target] or (argument(node, "fill_value"),)
    new = write(aten.full.default, list(value.shape), *number, dtype=value.dtype, device=value.device)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _mask_by_itself(node: fx.Node) -> None:
    x, p, training = node.args
    assert isinstance(x, fx.Node)
    value = _shown(x)
    if not training or value.device.type != "cpu" or not isinstance(p, float) or not 0 < p < 1:
        return
    with value.fake_mode:  # type: ignore[attr-defined]
        in_order = torch.empty_like(value).is_contiguous()
    if not in_order:  # native_dropout draws in memory order, bernoulli in the order of its result's dimensions
        return
    write = Before(node, value.fake_mode)  # type: ignore[attr-defined]
    empty = write(aten.empty.memory_format, list(value.shape), dtype=torch.bool, device=value.device)
    mask = write(aten.bernoulli.p, empty, 1 - p)
    product = write(aten.native_dropout_backward.default, x, mask, rounded(1 - p, value.dtype))
    for item in list(node.users):
        item.replace_all_uses_with(mask if item.args[1] else product)
        node.graph.erase_node(item)
    node.graph.erase_node(node)
