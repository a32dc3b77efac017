"""Writes under a mask in dynamo's graph, `target[mask] = value`, with a backward of known sizes.

They are rewritten (`fxremat.ops.masked_writes`) where the value needs a gradient, as a learned vector does that takes
the place of masked tokens.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxremat.ops.masked_writes import write


def masked_writes_as_ops(graph: fx.Graph) -> None:
    """Let writes of values that need a gradient under masks be captured. O(nodes)."""
    found = [
        *graph.find_nodes(op="call_function", target=operator.setitem),
        *graph.find_nodes(op="call_method", target="index_put_"),
    ]
    for node in found:
        if node.kwargs or len(node.args) != 3:
            continue
        target, index, value = node.args
        mask = index[0] if isinstance(index, tuple | list) and len(index) == 1 else index
        if _is(mask, masks=True) and _is(target) and _is(value) and value.meta["example_value"].requires_grad:
            node.op, node.target, node.args = "call_function", write, (target, mask, value)


def _is(node: Any, *, masks: bool = False) -> bool:
    """Tell whether a node's value is a tensor of floating-point numbers, or of bools."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and (value.dtype == torch.bool if masks else value.is_floating_point())
