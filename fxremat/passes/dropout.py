"""A rewrite of captured dropouts so that they give the same bits as eager PyTorch.

    eager on a CPU     x * (mask / (1 - p)), the quotient rounded to the dtype of x; its backward does the same
    as captured        x * mask * (1 / (1 - p)), the quotient exact

The two round differently: forward and backward in single precision for some p (0.15, not 0.1), the backward in
half precision for most p. On CUDA eager PyTorch runs the captured op itself.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from fxremat.torch_private import real_tensors

aten = torch.ops.aten


def drop_as_eager(graph: fx.Graph) -> None:
    """Rewrite every dropout of a joint graph that would round differently from eager PyTorch. O(nodes)."""
    drop_everything(graph)
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        if _on_cpu(node) and scale not in (0, 1):  # scales of 0 and 1, for p = 1 and p = 0, are exact
            node.args = (gradient, mask, rounded(1 / cast(float, scale), tensor_read(node).dtype))
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        _, p, training = node.args
        if _on_cpu(node) and tensor_read(node).dtype == torch.float32 and training and p != 1:
            keep = 1 - cast(float, p)
            if rounded(keep, torch.float32) != np.float32(1 / keep):
                _split(node, keep)


def drop_everything(graph: fx.Graph) -> None:
    """Rewrite the dropouts of a joint graph with p = 1 to a multiplication by zero. O(nodes)."""
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        if node.args[2] and node.args[1] == 1 and tensor_read(node).numel():
            _drop_all(node)


def rounded(keep: float, dtype: torch.dtype) -> float:
    """Return 1 / keep, rounded to `dtype` as in eager dropout.

    >>> rounded(0.85, torch.float32), rounded(0.85, torch.bfloat16)
    (1.1764705181121826, 1.1796875)
    """
    with real_tensors():
        return float(torch.ones((), dtype=dtype).div_(keep))


def tensor_read(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of the first argument of a node."""
    return cast(torch.Tensor, cast(fx.Node, node.args[0]).meta["val"])


def _on_cpu(node: fx.Node) -> bool:
    return tensor_read(node).device.type == "cpu"


def _split(node: fx.Node, keep: float) -> None:
    """Replace a dropout by an op that draws the same mask and one that multiplies in the order of eager PyTorch."""
    x = cast(fx.Node, node.args[0])
    with node.graph.inserting_before(node):
        mask = call_like(node, aten.bernoulli.p, call_like(node, aten.empty_like.default, x, dtype=torch.bool), keep)
        product = call_like(node, aten.native_dropout_backward.default, x, mask, rounded(keep, torch.float32))
    replace_dropout(node, product, mask)


def _drop_all(node: fx.Node) -> None:
    """Replace a dropout with p = 1: eager PyTorch multiplies by zero, forward and backward, and draws nothing."""
    x = cast(fx.Node, node.args[0])
    with node.graph.inserting_before(node):
        options = {"dtype": tensor_read(node).dtype, "device": tensor_read(node).device}
        zero = call_like(node, aten.zeros.default, [], **options)
        product = call_like(node, aten.mul.Tensor, x, zero)
    masks = [item for item in node.users if item.args[1] == 1]
    for backward in [user for mask in masks for user in mask.users]:
        if backward.target is aten.native_dropout_backward.default:
            backward.target, backward.args = aten.mul.Tensor, (backward.args[0], zero)
    replace_dropout(node, product, zero)


def call_like(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a node with the metadata of `like`, and a fake value of its own."""
    made = like.graph.call_function(target, args, kwargs)
    made.meta = dict(like.meta)
    values = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    with tensor_read(like).fake_mode:  # type: ignore[attr-defined]
        made.meta["val"] = target(*values[0], **values[1])
    return made


def replace_dropout(node: fx.Node, output: fx.Node, mask: fx.Node) -> None:
    """Replace a dropout's two results, its output and its mask, by two nodes."""
    for item in list(node.users):
        assert item.target is operator.getitem
        item.replace_all_uses_with(mask if item.args[1] else output)
        node.graph.erase_node(item)
    node.graph.erase_node(node)
