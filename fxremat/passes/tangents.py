"""Gradients that a loss outside the model hands in are taken as they lie in memory.

AOTAutograd traces the backward with gradients laid out as the outputs are, and copies what comes otherwise: memory
that no plan counts, and other bits than eager PyTorch's, whose backward runs on the gradient as it is. Here it does,
too: what autograd calls `reshape`, a view where that is possible, is traced as a view, and becomes a reshape again.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.graphs.handed_in import handed_in
from fxremat.passes.in_place import depending_on

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)


def reshape_gradients(graph: fx.Graph) -> None:
    """Let views of what is computed from gradients of outputs be reshapes; a loss's gradient is a number. O(nodes)."""
    for node in depending_on(graph, handed_in(graph)):
        if node.target in VIEWS:
            node.target = aten.reshape.default


def bear_any_layout(graph: fx.Graph) -> bool:
    """Whether the backward computes the same of gradients however they lie: it does unless it takes strides itself."""
    return not any(node.target is aten.as_strided.default for node in depending_on(graph, handed_in(graph)))
