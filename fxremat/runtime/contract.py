"""Graphs, never run, from which AOTAutograd reads the inputs and outputs of the functions that really run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxremat.graphs.captured import Captured

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


def contract_of(
    joint: Captured, inputs: Iterable[fx.Node], *, tensors: int, sizes: Sequence[fx.Node] = (), numbers: int = 0
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return two graphs, never run, from which AOTAutograd reads the inputs and outputs of forward and backward.

    Args:
        joint: the captured step.
        inputs: those of the forward.
        tensors: number of tensors that the forward saves.
        sizes: symbolic sizes among the inputs, which it saves, too.
        numbers: number of further symbolic numbers that it saves after these.
    """
    like = next(node.meta["val"] for node in joint.primals if isinstance(node.meta.get("val"), torch.Tensor))
    with like.fake_mode:
        empty = torch.empty(0)
    number = sizes[0].meta["val"] if sizes else None
    forward, backward = Contract(), Contract()
    for node in inputs:
        forward.take(node.name, node.meta, node)
    outputs = [forward.made(node) for node in joint.forward_outputs]
    saved = [forward.new(empty) for _ in range(tensors)]
    counted = [forward.new(number) for _ in range(numbers)]
    forward.graph.output((*outputs, *saved, *(forward.nodes[node] for node in sizes), *counted))
    for node in sizes:
        backward.take(node.name, node.meta, node)
    for place in range(numbers):
        backward.take(f"number_{place}", {"val": number})
    for place in range(tensors):
        backward.take(f"slot_{place}", {"val": empty})
    for node in joint.tangent_nodes:
        backward.take(node.name, node.meta, node)
    backward.graph.output(tuple(backward.made(node) for node in joint.backward_outputs))
    return fx.GraphModule({}, forward.graph), fx.GraphModule({}, backward.graph)
