"""Merge of the start of each collective of a captured graph and the wait for it into one op.

    started = all_gather_into_tensor(x, ...);  ...;  y = wait_tensor(started)    ->    y = Collective(...)(x, ...)

See `graphs.collectives`. A captured graph has the collectives of tensor parallelism (DTensor's redistributions), and
the functional collectives that the model calls. One that nothing waits for is left as it is.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxremat.graphs.collectives import collective, is_start


def wait_at_once(graph: fx.Graph) -> None:
    """Merge each collective and the wait for it into one op. O(nodes)."""
    for node in [node for node in graph.nodes if is_start(node)]:
        waits = [wait for shown in _shown(node) for wait in shown.users if _is_wait(wait)]
        if not waits:
            continue
        assert isinstance(node.target, torch._ops.OpOverload)
        node.target = collective(node.target)
        for wait in waits:
            wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
            graph.erase_node(wait)


def _shown(node: fx.Node) -> list[fx.Node]:
    return [node, *(user for user in node.users if user.target is operator.getitem)]


def _is_wait(node: fx.Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default
