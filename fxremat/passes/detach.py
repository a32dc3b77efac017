"""Removal of what autograd leaves in a joint graph: `detach`, which has no effect there, and marks of stashed tensors.

AOTAutograd marks tensors that an `autograd.Function` stores as `ctx.x = x`, and keeps them as long as the loss.
Without the mark they are saved like other values and freed during the backward, which is how plans count them.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.torch_private import STASHED


def drop_detach(graph: fx.Graph) -> None:
    """Replace every `detach` by its argument, and remove AOTAutograd's marks of stashed tensors from `meta`. O(nodes).
    """
    for node in graph.nodes:
        node.meta.pop(STASHED, None)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
