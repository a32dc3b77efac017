"""Merge the start of each collective and the wait for its result into one op, or split them again.

    started = all_gather_into_tensor(x, ...);  ...;  y = wait_tensor(started)    ->    y = Collective(...)(x, ...)

See `graphs.collectives`. Captured graphs have the collectives of tensor parallelism (DTensor's
redistributions), and functional collectives that the model calls. A collective that nothing waits for is not
changed.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxremat.graphs.collectives import Collective, collective, is_start
from fxremat.ops.collectives import ONE_AT_A_TIME, start_gather
from fxremat.passes.evaluate import show_views
from fxremat.torch_private import group_named

WAIT = torch.ops._c10d_functional.wait_tensor.default
KEPT = "recompute"  # the key in `meta` under which torch's checkpointing marks what is kept or recomputed


def wait_at_once(graph: fx.Graph) -> None:
    """Merge each collective and the wait for it into one op. O(nodes)."""
    for node in [node for node in graph.nodes if is_start(node)]:
        waits = [wait for shown in _shown(node) for wait in shown.users if _is_wait(wait)]
        if not waits:
            continue
        assert isinstance(node.target, torch._ops.OpOverload)
        node.target = collective(node.target)
        for wait in waits:
            started = wait.args[0]
            assert isinstance(started, fx.Node)
            wait.replace_all_uses_with(started)
            if KEPT in wait.meta:
                node.meta[KEPT] = wait.meta[KEPT]
            # a wait returns its operand at run time, but its fake value is a new tensor
            show_views(started, wait.meta["val"])
            graph.erase_node(wait)


def start_and_wait(graph: fx.Graph) -> None:
    """Replace collectives of an emitted graph by PyTorch's own ops: a start, and a wait for each result. O(nodes).

    An all-gather that starts early is waited for at once if its backend cannot run two collectives at a time.
    """
    for node in [*graph.nodes]:
        if isinstance(node.target, Collective):
            node.target = node.target.start
        elif node.target is start_gather:
            node.target, node.args = node.args[0], node.args[1:]
            group = group_named(node.args[-1])
            if group is None or group.name() not in ONE_AT_A_TIME:
                continue
        else:
            continue
        for shown in [node] if isinstance(node.meta["val"], torch.Tensor) else _shown(node)[1:]:
            with graph.inserting_after(shown):
                wait = graph.create_node("call_function", WAIT, (shown,), name=f"{shown.name}_complete")
            wait.meta = dict(shown.meta)
            shown.replace_all_uses_with(wait, lambda user, wait=wait: user is not wait)  # type: ignore[misc]


def _shown(node: fx.Node) -> list[fx.Node]:
    return [node, *(user for user in node.users if user.target is operator.getitem)]


def _is_wait(node: fx.Node) -> bool:
    return node.target is WAIT
