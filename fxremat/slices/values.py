"""A view of a joint graph for finding regions to slice: ops, the values that they compute, and views of these."""

from __future__ import annotations

import operator
from functools import cached_property

import torch
from torch import fx

from fxremat.graphs.captured import Captured
from fxremat.graphs.nodes import storage_bytes
from fxremat.slices.body import Sliced


class Values:
    """The values of a joint graph as nodes: a value is the node that allocates a storage, or the getitem selecting it.

    Attributes:
        late: the nodes of the backward, including the incoming gradients.
    """

    def __init__(self, joint: Captured) -> None:
        self.joint = joint
        self.nodes: list[fx.Node] = list(joint.module.graph.nodes)
        self.place = {node: number for number, node in enumerate(self.nodes)}
        self.op_of = dict(zip(joint.nodes, joint.ops, strict=True))
        self.late = self._late()

    def _late(self) -> set[fx.Node]:
        late = {*self.joint.tangent_nodes, *self.joint.nodes[self.joint.forward_count :]}
        for node in self.nodes:
            if node.op == "call_function" and node not in self.op_of and not late.isdisjoint(node.all_input_nodes):
                late.add(node)
        return late

    @cached_property
    def ops(self) -> list[fx.Node]:
        """The ops of the graph that do not run in slices yet."""
        return [node for node in self.joint.nodes if not isinstance(node.target, Sliced)]

    def base(self, node: fx.Node) -> fx.Node:
        """Return the value that a node is a view of; the node itself if it is not a view."""
        number = self.joint.value_of.get(node)
        return node if number is None else self.joint.shown[number]

    def is_view(self, node: fx.Node) -> bool:
        """Tell whether a node is a view: another node allocates its storage."""
        return node.op == "call_function" and node not in self.op_of and self.base(node) is not node

    def bytes(self, value: fx.Node) -> int:
        """Return the bytes of a value."""
        shown = value.meta.get("val")
        return storage_bytes(shown) if isinstance(shown, torch.Tensor) else 0

    def producer(self, value: fx.Node) -> fx.Node:
        """Return the op that computes a value."""
        if value.target is operator.getitem:
            assert isinstance(value.args[0], fx.Node)
            return value.args[0]
        return value

    def made_by(self, op: fx.Node) -> list[fx.Node]:
        """Return the values that an op computes and other nodes read."""
        if isinstance(op.meta.get("val"), torch.Tensor):
            return [op]
        return [user for user in op.users if user.target is operator.getitem]

    def read_by(self, op: fx.Node) -> list[fx.Node]:
        """Return the values that an op reads, directly or through views."""
        return list(dict.fromkeys(self.base(parent) for parent in op.all_input_nodes))

    def showing(self, value: fx.Node) -> list[fx.Node]:
        """Return the value's node and all views of it, in the order of the graph."""
        found, stack = [value], [value]
        while stack:
            for user in stack.pop().users:
                if self.is_view(user) and self.base(user) is value and user not in found:
                    found.append(user)
                    stack.append(user)
        return sorted(found, key=self.place.__getitem__)

    def readers(self, value: fx.Node) -> list[fx.Node]:
        """Return the ops that read a value, and the output node if the graph returns it."""
        shown = self.showing(value)
        every = (user for node in shown for user in node.users)
        return [user for user in dict.fromkeys(every) if user in self.op_of or user.op == "output"]

    def need(self, op: fx.Node) -> int:
        """Return the bytes that an op reads and writes, without parameters and inputs; every plan needs at least these.
        """
        values = {*self.read_by(op), *self.made_by(op)}
        return sum(self.bytes(value) for value in values if value.op == "call_function")
