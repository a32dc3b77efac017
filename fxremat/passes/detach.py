"""Drop what a joint graph has of autograd: `detach`, which has nothing left to cut off, and a mark of saved tensors.

AOTAutograd marks what an `autograd.Function` stashes as `ctx.x = x`, and lets it live until the loss is gone. Without
the mark it is saved like everything else, and let go of while the backward runs, as plans count it.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.torch_private import STASHED


def drop_detach(graph: fx.Graph) -> None:
    """Let what reads a `detach` read its argument, and unmark what is stashed. O(nodes)."""
    for node in graph.nodes:
        node.meta.pop(STASHED, None)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
