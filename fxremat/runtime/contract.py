"""Graphs, never run, from which AOTAutograd reads the inputs and outputs of the functions that really run."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


class Contract:
    """A graph with the inputs and outputs of another function, for AOTAutograd to read; it is never run."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}

    def take(self, name: str, meta: dict[str, Any], node: fx.Node | None = None) -> None:
        """Add an input.

        Args:
            node: the node of the joint graph that the input stands for; None if there is none.
        """
        made = self.graph.placeholder(name)
        made.meta = dict(meta)
        if node is not None:
            self.nodes[node] = made

    def new(self, value: Any, meta: dict[str, Any] | None = None) -> fx.Node:
        """Add an op that computes nothing, with `value` as its fake result."""
        made = self.graph.call_function(aten.empty.memory_format, ([0],))
        made.meta = {**(meta or {}), "val": value}
        return made

    def made(self, node: object) -> Any:
        """Return this graph's node for a node of the joint graph; a constant is returned as it is."""
        if not isinstance(node, fx.Node):
            return node
        return self.nodes[node] if node in self.nodes else self.new(node.meta.get("val"), node.meta)
