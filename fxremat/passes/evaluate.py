"""The fake value of a node, computed anew after a pass has changed its inputs or inserted it."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def evaluate(node: fx.Node) -> Any:
    """Return the fake value of a node, computed from the present fake values of its inputs."""
    if node.target is operator.getitem:
        return cast(fx.Node, node.args[0]).meta["val"][node.args[1]]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    mode = next(leaf.fake_mode for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))  # type: ignore[attr-defined]
    with mode:
        return cast(Any, node.target)(*args, **kwargs)
