"""A rewrite that lets the backward read the gradients of outputs in any memory layout.

AOTAutograd traces the backward for gradients in the layout of the outputs, and copies gradients in other
layouts. Such copies take memory that no plan counts, and may change bits, since eager PyTorch's backward reads
the gradient as it is. So does the rewritten graph: where autograd's `reshape`, which copies only if no view is
possible, was traced as a view, it becomes a reshape again.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.graphs.handed_in import handed_in
from fxremat.passes.in_place import depending_on

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)


def reshape_gradients(graph: fx.Graph) -> None:
    """Turn views of values that are computed from gradients of the outputs into reshapes. O(nodes).

    Gradients without dimensions, such as that of a loss, do not count.
    """
    for node in depending_on(graph, handed_in(graph)):
        if node.target in VIEWS:
            node.target = aten.reshape.default


def bear_any_layout(graph: fx.Graph) -> bool:
    """Tell whether the backward is correct for gradients in any layout, which only an `as_strided` of them prevents."""
    return not any(node.target is aten.as_strided.default for node in depending_on(graph, handed_in(graph)))
