"""Symbolic joint graphs of models, as one capture for every size gives them."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx.experimental._config as shape_config
from torch import fx, nn

from fxremat.graphs.symbolic import SymbolicGraph
from fxremat.passes.pipelines import normalize
from fxremat.torch_private import aot_backend, boxed, capture_settings, differentiate_as_eager


class _Captured(Exception):
    """Leaves torch.compile once the graph is known."""


def symbolic_graph(model: nn.Module, *inputs: Any, raw: bool = False) -> SymbolicGraph:
    """The joint graph of one call, captured for inputs of all sizes, where those that are equal stay so.

    Args:
        raw: leave it as AOTAutograd made it, without the passes that a captured graph goes through.
    """
    found: list[SymbolicGraph] = []

    def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append(SymbolicGraph(module if raw else normalize(module), num_fwd_outputs))
        raise _Captured

    backend = aot_backend(fw_compiler=lambda graph, _: boxed(graph), partition_fn=partition)
    torch._dynamo.reset()
    try:
        with differentiate_as_eager(), capture_settings(True), shape_config.patch(use_duck_shape=True):
            torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    except Exception as error:
        if not found:
            raise error.__cause__ or error from None
    return found[0]
