"""A rewrite that lets the backward read gradients from a loss outside the model in any memory layout.

AOTAutograd traces the backward with gradients laid out as the outputs are, and copies those that differ: this is memory
that no plan counts, and other bits than eager PyTorch's, whose backward runs on the gradient as it is. This rewrite
makes the graph do so, too: what autograd calls `reshape`, a view where that is possible, is traced as a view, and
becomes a reshape again.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.graphs.handed_in import handed_in
from fxremat.passes.in_place import depending_on

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)


def reshape_gradients(graph: fx.Graph) -> None:
    """Turn views of values computed from gradients of outputs into reshapes; a loss's gradient is a number.

    O(nodes).
    """
    for node in depending_on(graph, handed_in(graph)):
        if node.target in VIEWS:
            node.target = aten.reshape.default


def bear_any_layout(graph: fx.Graph) -> bool:
    """Tell whether the backward is correct for any layout of gradients: it is, unless it uses strides itself."""
    return not any(node.target is aten.as_strided.default for node in depending_on(graph, handed_in(graph)))
