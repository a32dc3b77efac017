"""Facts about nodes of a captured graph: their tensors, whether they are numbers or draw random ones, and so on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

SYMBOLS: tuple[type, ...] = (torch.SymInt, torch.SymFloat, torch.SymBool)
NUMBERS: tuple[type, ...] = (*SYMBOLS, int, float)


def tensors_of(node: fx.Node) -> list[torch.Tensor | None]:
    """Return the outputs of a node as a list, with None for outputs that are not tensors."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [item if isinstance(item, torch.Tensor) else None for item in value]
    return []


def attribute(node: fx.Node) -> Any:
    """Return the object that a `get_attr` node refers to."""
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def subgraphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order op calls, such as the branches of a `cond`."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    named = [parent for parent in node.all_input_nodes if parent.op == "get_attr" and "val" not in parent.meta]
    found = map(attribute, named)
    return [each for each in found if isinstance(each, fx.GraphModule)]


def is_random(node: fx.Node) -> bool:
    """Tell whether an op draws random numbers (a dropout in eval mode does not), or a graph that it calls does."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return any(map(is_random, (each for graph in subgraphs_of(node) for each in graph.graph.nodes)))
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target is aten.native_dropout.default:
        return node.args[2] is not False
    return node.kwargs.get("dropout_p", _argument(node, "dropout_p")) != 0.0


def _argument(node: fx.Node, name: str) -> object:
    """Return the value of an op's positional argument, by its name in the schema; None if there is none."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[position] if position < len(node.args) else argument.default_value
    return None


def is_number(value: object) -> bool:
    """Tell whether a node's value is a number: a Python number, or a symbolic one that is known only at run time."""
    return isinstance(value, NUMBERS)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the storage of a (fake) tensor; for a sparse one, of its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return int(tensor.untyped_storage().nbytes())


def tangents_in(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders for the gradients that autograd passes to a joint graph (tangents)."""
    return [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")]
