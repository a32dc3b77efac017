"""A rewrite of ops that overwrite a value of their own graph to ops that make a new one.

    y = empty_like(x); z = bernoulli_(y, 0.9); w = div_(z, 0.9)    ->    z = bernoulli(y, 0.9); w = div(z, 0.9)

A trace that is not functionalized has such ops: `make_fx` traces a CPU's dropout like this. An input that is
overwritten is written to once, at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat.errors import CaptureError
from fxremat.graphs.nodes import tensors_of
from fxremat.ops import random as random  # registers an op
from fxremat.passes.evaluate import evaluate
from fxremat.torch_private import storage_of

aten = torch.ops.aten

DRAWN = torch.ops.fxremat.bernoulli_as.default


def without_mutation(graph: fx.Graph) -> None:
    """Let ops that overwrite a value, of which there is no view, make a new one. O(nodes).

    Raises `CaptureError` for other ops that overwrite an argument; it names the first.
    """
    nodes = [node for node in graph.nodes if _is_mutable(node.target) and not _is_write(node)]
    written: dict[fx.Node, fx.Node] = {}  # by what is written last: the input that it belongs into
    for node in nodes:
        target, base = _functional(node.target), node.args[0] if node.args else None
        if target is None or not isinstance(base, fx.Node) or base.op == "get_attr" or _is_shared(node, base):
            raise CaptureError(
                f"{node.name} ({node.target}) overwrites an argument, and a plan needs ops that do not: functionalize "
                "the graph (torch.func.functionalize)"
            )
        if target is DRAWN and base.target is aten.empty_like.default and not base.kwargs:
            node.args = (base.args[0], *node.args[1:])
        node.target = target
        before = {node, *_before(node)}
        base.replace_all_uses_with(node, lambda user, before=before: user not in before)  # type: ignore[misc]
        node.meta = {**node.meta, "val": evaluate(node)}
        if base.op == "placeholder" or base in written:
            written[node] = written.pop(base, base)
    with graph.inserting_before(graph.output_node()):
        for node, to in written.items():
            graph.call_function(aten.copy_.default, (to, node)).meta = {"val": to.meta["val"]}


def _is_write(node: fx.Node) -> bool:
    """Tell whether a node writes a value to an input, and is not read."""
    to = node.args[0] if node.args else None
    return node.target is aten.copy_.default and isinstance(to, fx.Node) and to.op == "placeholder" and not node.users


def _is_mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _functional(target: Any) -> Any:
    """Return the op that computes what an op with a trailing underscore writes; None if there is none."""
    if target is aten.bernoulli_.float:
        return DRAWN
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    if packet is None:
        return None
    wanted = [(each.name, str(each.type)) for each in target._schema.arguments]
    for overload in sorted(packet.overloads(), key=lambda overload: overload != target._overloadname):
        found = getattr(packet, overload)
        if not found._schema.is_mutable and [(e.name, str(e.type)) for e in found._schema.arguments] == wanted:
            return found
    return None


def _is_shared(node: fx.Node, base: fx.Node) -> bool:
    """Tell whether a node shows the storage of `base`, other than the one that overwrites it and what comes of that."""
    storages = {storage_of(tensor) for tensor in tensors_of(base) if tensor is not None}
    shown = {node, base}
    for other in node.graph.nodes:
        alike = any(tensor is not None and storage_of(tensor) in storages for tensor in tensors_of(other))
        if alike and other not in shown:
            if not (_is_mutable(other.target) and other.args and other.args[0] in shown):
                return True
            shown.add(other)
    return False


def _before(node: fx.Node) -> list[fx.Node]:
    """Return the nodes in front of a node."""
    found: list[fx.Node] = []
    for other in node.graph.nodes:
        if other is node:
            break
        found.append(other)
    return found
