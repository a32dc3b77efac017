"""Dropout in a captured graph, put back to the bits of eager PyTorch.

    eager on a CPU     x * (mask / (1 - p)), the quotient rounded to x's type; so is its backward
    as captured        x * mask * (1 / (1 - p)), the quotient exact

The two differ where rounding shows: forward and backward in single precision for some p (0.15, not 0.1), backward in
half precision for most. On CUDA eager PyTorch runs the captured op itself.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from fxremat._torch import real_tensors

aten = torch.ops.aten


def drop_as_eager(graph: fx.Graph) -> None:
    """Rewrite every dropout of a joint graph that would round otherwise than eager PyTorch. O(nodes)."""
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        if _on_cpu(node) and scale != 1:  # p = 0 or p = 1
            node.args = (gradient, mask, rounded(1 / cast(float, scale), _tensor(node).dtype))
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        _, p, training = node.args
        if _on_cpu(node) and _tensor(node).dtype == torch.float32 and training and p not in (0, 1):
            keep = 1 - cast(float, p)
            if rounded(keep, torch.float32) != np.float32(1 / keep):
                _split(node, keep)


def rounded(keep: float, dtype: torch.dtype) -> float:
    """1 / keep as eager dropout rounds it.

    >>> rounded(0.85, torch.float32), rounded(0.85, torch.bfloat16)
    (1.1764705181121826, 1.1796875)
    """
    with real_tensors():
        return float(torch.ones((), dtype=dtype).div_(keep))


def _tensor(node: fx.Node) -> torch.Tensor:
    return cast(torch.Tensor, cast(fx.Node, node.args[0]).meta["val"])


def _on_cpu(node: fx.Node) -> bool:
    return _tensor(node).device.type == "cpu"


def _split(node: fx.Node, keep: float) -> None:
    """Draw the mask by itself (the same numbers), and multiply by what eager PyTorch multiplies by."""
    x, graph = cast(fx.Node, node.args[0]), node.graph

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = dict(node.meta)
        values = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        made.meta["val"] = target(*values[0], **values[1])
        return made

    with graph.inserting_before(node), _tensor(node).fake_mode:  # type: ignore[attr-defined]
        mask = call(aten.bernoulli.p, call(aten.empty_like.default, x, dtype=torch.bool), keep)
        product = call(aten.native_dropout_backward.default, x, mask, rounded(keep, torch.float32))
    for item in list(node.users):
        assert item.target is operator.getitem
        item.replace_all_uses_with(mask if item.args[1] else product)
        graph.erase_node(item)
    graph.erase_node(node)
