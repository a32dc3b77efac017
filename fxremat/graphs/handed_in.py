"""Gradients that a loss outside of the model passes to the backward, whose memory layouts are not known in advance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxremat.graphs.nodes import tangents_in

aten = torch.ops.aten

PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Ops whose results are contiguous, in whatever layout their operands are."""
OWN_LAYOUT = {
    aten.convolution_backward.default,
    aten.native_layer_norm_backward.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.embedding_dense_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""Ops whose results lie as sizes and operands of the forward say, in whatever layout a gradient comes."""
OWN_LAYOUT_ON_CPU = {aten.native_batch_norm_backward.default}


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
        if not found.isdisjoint(_deciding(node)):
            found.add(node)
    return found


def _deciding(node: fx.Node) -> list[fx.Node]:
    """Return the operands by whose layouts the results of an op may lie; a gradient comes first."""
    if node.target in PRODUCTS:
        return []
    own = node.target in OWN_LAYOUT or (
        node.target in OWN_LAYOUT_ON_CPU and all(read.meta["val"].device.type == "cpu" for read in node.all_input_nodes)
    )
    return [read for read in node.all_input_nodes if not own or read is not node.args[0]]
