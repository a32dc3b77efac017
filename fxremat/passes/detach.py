"""Drop `detach`: a joint graph has no autograd left that it could cut off."""

from __future__ import annotations

import torch
from torch import fx


def drop_detach(graph: fx.Graph) -> None:
    """Let what reads a `detach` read its argument. O(nodes)."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
