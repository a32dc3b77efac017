"""A rewrite that lets the backward read gradients from a loss outside the model in any memory layout.

AOTAutograd traces the backward for gradients laid out as the outputs are, and copies gradients that are not. Such
copies take memory that no plan counts, and may change bits: the backward of eager PyTorch runs on the gradient as it
is. So does the rewritten graph: autograd's `reshape`, which copies only if no view is possible, was traced as a view,
and becomes a reshape again.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.graphs.handed_in import handed_in
from fxremat.passes.in_place import depending_on

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)


def reshape_gradients(graph: fx.Graph) -> None:
    """Turn views of what is computed from gradients of the outputs into reshapes. O(nodes).

    Gradients without dimensions, such as that of a loss, do not count.
    """
    for node in depending_on(graph, handed_in(graph)):
        if node.target in VIEWS:
            node.target = aten.reshape.default


def bear_any_layout(graph: fx.Graph) -> bool:
    """Tell whether the backward is correct for gradients of any layout: it is, unless an `as_strided` reads them."""
    return not any(node.target is aten.as_strided.default for node in depending_on(graph, handed_in(graph)))
