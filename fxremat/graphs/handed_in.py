"""Gradients that a loss outside of the model passes to the backward, whose memory layouts are not known in advance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxremat.graphs.nodes import tangents_in

aten = torch.ops.aten

PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Ops whose results are contiguous, in whatever layout their operands are."""


def handed_in(graph: fx.Graph) -> set[fx.Node]:
    """Return the placeholders of gradients of outputs, except for scalars, which have only one layout."""
    return {node for node in tangents_in(graph) if node.meta["val"].dim() > 0}


def layout_of(value: object) -> tuple[int, ...]:
    """Return the strides of a tensor, without those of dimensions of size 1; () for anything that is not a tensor."""
    return layout(value.shape, value.stride()) if isinstance(value, torch.Tensor) else ()


def is_one_number(value: object) -> bool:
    """Tell whether a tensor has memory for a single number, however many elements show it."""
    return type(value) is torch.Tensor and value.untyped_storage().nbytes() <= value.element_size()


def layout(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides without those of dimensions of size 1."""
    return tuple(stride for size, stride in zip(shape, strides, strict=True) if size > 1)


def laid_out_by_others(graph: fx.Graph) -> set[fx.Node]:
    """Return the gradients of outputs that are passed in, and all nodes whose memory layout may depend on theirs."""
    found = handed_in(graph)
    for node in graph.nodes:
        if node.target not in PRODUCTS and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
