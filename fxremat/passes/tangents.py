"""A rewrite that lets the backward read the gradients of outputs in any memory layout.

AOTAutograd traces the backward for gradients in the layout of the outputs, and copies gradients in other
layouts. Such copies take memory that no plan counts, and may change bits, since eager PyTorch's backward reads
the gradient as it is. So does the rewritten graph: where autograd's `reshape`, which copies only if no view is
possible, was traced as a view, it becomes a reshape again.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.graphs.handed_in import handed_in, laid_out_by_others
from fxremat.graphs.symbolic import memory_format_of
from fxremat.passes.in_place import depending_on

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)
AS_TRACED = {
    aten.as_strided.default,
    aten.native_group_norm_backward.default,
    aten._weight_norm_interface_backward.default,
    aten._cdist_backward.default,
    aten.view_as_complex.default,
    aten.view_as_real.default,
    aten.cudnn_batch_norm_backward.default,
    aten.miopen_batch_norm_backward.default,
}
"""Ops that take a gradient to lie as it was traced: PyTorch's formulas call `contiguous` before, of which nothing is
traced if the gradient lies so then (derivatives.yaml of torch 2.11, 2.13, 2.14, 2.15)."""


def reshape_gradients(graph: fx.Graph) -> None:
    """Turn views of values that are computed from gradients of the outputs into reshapes. O(nodes).

    Gradients without dimensions, such as that of a loss, do not count.
    """
    for node in depending_on(graph, handed_in(graph)):
        if node.target in VIEWS:
            node.target = aten.reshape.default


def copy_gradients_of_other_layouts(graph: fx.Graph) -> None:
    """Let ops that need the layout that was traced copy gradients with another one, as eager PyTorch does. O(nodes)."""
    for node, gradients in _read_as_traced(graph).items():
        for gradient in gradients if node.target is not aten.as_strided.default else ():
            if (layout := memory_format_of(gradient.meta["val"])) is not None:
                with graph.inserting_before(node):
                    copy = graph.call_function(aten.contiguous.default, (gradient,), {"memory_format": layout})
                copy.meta = dict(gradient.meta)
                node.replace_input_with(gradient, copy)


def bear_any_layout(graph: fx.Graph) -> bool:
    """Tell whether the backward is correct for gradients in any layout. O(nodes).

    It is not if an op that needs the layout that was traced reads one which nothing copies into it.
    """
    return all(read.target is aten.contiguous.default for each in _read_as_traced(graph).values() for read in each)


def _read_as_traced(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return the ops that need a gradient in the layout that was traced, and which they read, in layouts not known."""
    unknown = laid_out_by_others(graph)
    ops = [node for node in graph.nodes if node.target in AS_TRACED]
    return {node: [read for read in node.all_input_nodes if read in unknown] for node in ops}
