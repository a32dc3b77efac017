"""Calls of nn.LSTM, nn.GRU and nn.RNN in dynamo's graph, made one op each (`fxremat.ops.recurrent`)."""

from __future__ import annotations

from torch import fx

from fxremat.errors import CaptureError
from fxremat.graphs.names import place_of, source_of
from fxremat.ops.recurrent import KINDS, as_op
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
