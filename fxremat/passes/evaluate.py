"""Fake values of nodes, computed again after a pass has inserted them or changed their inputs."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxremat.graphs.nodes import tensors_of
from fxremat.torch_private import storage_of


def evaluate(node: fx.Node) -> Any:
    """Return the fake value of a node, computed from the current fake values of its inputs, in their fake mode."""
    if node.target is operator.getitem:
        return cast(fx.Node, node.args[0]).meta["val"][node.args[1]]
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    mode = next(leaf.fake_mode for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))  # type: ignore[attr-defined]
    with mode:
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags:
            args = (args[0].detach(), *args[1:])
        return cast(Any, node.target)(*args, **kwargs)


def show_views(node: fx.Node, old: torch.Tensor) -> None:
    """Recompute the fake values of views of a node, as views of the node's value instead of `old`."""
    for view in node.users:
        if any(tensor is not None and storage_of(tensor) == storage_of(old) for tensor in tensors_of(view)):
            view.meta = dict(view.meta) | {"val": evaluate(view)}
            show_views(view, old)
