"""Calls of nn.LSTM, nn.GRU and nn.RNN, made one op each in dynamo's graph (`fxremat.ops.recurrent`).

Where a layer is called several times, autograd adds the gradients of its weights step by step, through all calls. So do
the ops: in the joint graph the backward of a call is given the sums that those of later calls have begun.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxremat.errors import CaptureError
from fxremat.graphs.names import place_of, source_of
from fxremat.ops.recurrent import KINDS, Layer, as_op
from fxremat.torch_private import parameter_name


def recurrent_as_ops(graph: fx.Graph) -> None:
    """Let recurrent layers be captured as ops. Raises `CaptureError` for packed sequences, whose sizes are data."""
    for kind, function in KINDS.items():
        for node in graph.find_nodes(op="call_function", target=function):
            x, states, weights, *numbers = node.args
            if not isinstance(numbers[0], bool):  # with batch sizes after the input, there is one tensor more
                raise CaptureError(
                    f"a recurrent layer{source_of(node)} reads packed sequences, whose sizes depend on data, and a "
                    "plan in bytes needs fixed sizes: pad them, or compile the submodules around it instead",
                    place_of(node),
                )
            given = [x, *(states if isinstance(states, tuple | list) else [states]), *weights]
            leaves = tuple(place for place, one in enumerate(given) if one.op == "placeholder" and parameter_name(one))
            node.target, node.args = as_op, (kind, leaves, *node.args)


def sum_recurrent_gradients(graph: fx.Graph) -> None:
    """Let the backwards of a recurrent layer that is called several times add gradients step by step. O(nodes)."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        total, gradient = node.args
        call, number = _backward_of(gradient)
        if call is None or node.kwargs or len(gradient.users) > 1 or places.get(total, len(places)) > places[call]:
            continue
        *others, text, sums, of = call.args
        layer = Layer.parse(text)
        position = layer.trained[number]
        if position <= layer.states or position in layer.leaves or position in of:
            continue
        call.args = (*others, text, [*sums, total], [*of, position])
        node.replace_all_uses_with(gradient)
        graph.erase_node(node)


def _backward_of(node: Any) -> tuple[Any, int]:
    """Return the backward of a recurrent layer that a node selects a gradient from, and its number; (None, 0): none."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return None, 0
    call, number = node.args
    found = isinstance(call, fx.Node) and call.target is torch.ops.fxremat.recurrent_backward.default
    return (call, int(number)) if found else (None, 0)  # type: ignore[arg-type]
