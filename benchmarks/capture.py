"""The joint graph of a model ahead of time: traced on fake tensors, nothing runs and nothing is planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from fxremat.graphs.captured import Captured, read_joint
from fxremat.passes.pipelines import normalize
from fxremat.torch_private import aot_backend, boxed, capture_settings, differentiate_as_eager


class _Captured(Exception):
    """Leaves torch.compile once the graph is known."""


def capture(model: nn.Module, *inputs: Any, **options: Any) -> Captured:
    """The forward and backward of one call as a joint. Raises what torch.compile raises where there is none."""
    module, forward_outputs = joint_graph(model, *inputs, **options)
    return read_joint(normalize(module), forward_outputs)


def joint_graph(model: nn.Module, *inputs: Any, **options: Any) -> tuple[fx.GraphModule, int]:
    """The joint graph of one call as AOTAutograd made it, and how many of its outputs belong to the forward."""
    found: list[tuple[fx.GraphModule, int]] = []

    def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        found.append((module, num_fwd_outputs))
        raise _Captured

    backend = aot_backend(fw_compiler=lambda graph, _: boxed(graph), partition_fn=partition)
    torch._dynamo.reset()
    try:
        with differentiate_as_eager(), capture_settings():
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*inputs, **options)
    except Exception as error:
        if not found:
            raise error from None
    return found[0]
