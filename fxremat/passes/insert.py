"""Insertion of calls into a graph of fake values."""

from __future__ import annotations

from typing import Any

from torch import fx


class Before:
    """Inserts calls, with their fake values, before a node.

    Args:
        node: the node that calls are inserted before.
        mode: the mode of the graph's fake tensors.
        like: the node whose metadata they get, such as the module; None: `node`.
        tags: further metadata.
    """

    def __init__(self, node: fx.Node, mode: Any, like: fx.Node | None = None, **tags: str) -> None:
        self.node, self.mode, self.meta = node, mode, {**(like or node).meta, **tags}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call, and return it."""
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.call_function(target, args, kwargs)
        shown, options = fx.node.map_arg((args, kwargs), lambda parent: parent.meta["val"])
        with self.mode:
            made.meta = self.meta | {"val": target(*shown, **options)}
        return made
