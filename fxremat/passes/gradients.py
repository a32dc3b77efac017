"""A rewrite that returns the gradients of parameters in the layout of their parameters, as autograd stores them.

Autograd copies a gradient that lies otherwise, such as that of a convolution of channels_last values, when it stores it
in `.grad`: after the backward, when all gradients exist, and where no plan counts the copy. In the rewritten graph the
copy is an op beside the one that computes the gradient, which is freed at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat.graphs.names import parameter_of
from fxremat.graphs.nodes import tangents_in
from fxremat.graphs.symbolic import memory_format_of
from fxremat.passes.evaluate import evaluate


def lay_out_gradients(graph: fx.Graph) -> None:
    """Copy gradients of parameters whose layout is not that of the parameter into its layout. O(nodes)."""
    (output,) = graph.find_nodes(op="output")
    tangents = tangents_in(graph)
    primals = [node for node in graph.find_nodes(op="placeholder") if node not in tangents]
    given = output.args[0]
    if not isinstance(given, list | tuple):
        return
    results: list[Any] = list(given)
    for place, primal in enumerate(primals, len(results) - len(primals)):
        gradient = results[place]
        if not parameter_of(primal) or not isinstance(gradient, fx.Node) or gradient.op == "placeholder":
            continue
        layout = _layout_to_copy_to(primal.meta.get("val"), gradient.meta.get("val"))
        if layout is None:
            continue
        with graph.inserting_after(gradient):
            copy = graph.call_function(torch.ops.aten.clone.default, (gradient,), {"memory_format": layout})
        copy.meta = dict(gradient.meta)
        copy.meta["val"] = evaluate(copy)
        results[place] = copy
    output.args = (results if isinstance(given, list) else tuple(results),)


def _layout_to_copy_to(parameter: object, gradient: object) -> torch.memory_format | None:
    """Return the layout of a parameter; None if its gradient is stored as it is, or the layout has no name."""
    if not (isinstance(parameter, torch.Tensor) and isinstance(gradient, torch.Tensor)):
        return None
    strided = parameter.layout is torch.strided and gradient.layout is torch.strided
    if not strided or parameter.shape != gradient.shape or _alike(gradient, parameter):
        return None
    return memory_format_of(parameter)


def _alike(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Tell whether autograd stores a gradient as it is: its strides are the parameter's where a size is not 1.

    `obeys_layout_contract` in `torch/csrc/autograd/utils/grad_layout_contract.h` (torch 2.11, 2.13).
    """
    strides = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in strides)
