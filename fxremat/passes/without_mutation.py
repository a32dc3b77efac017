"""A rewrite of in-place ops on values that the graph itself computes to ops that return a new value.

    y = empty_like(x); z = bernoulli_(y, 0.9); w = div_(z, 0.9)    ->    z = bernoulli(y, 0.9); w = div(z, 0.9)

A trace that is not functionalized has such ops; `make_fx` traces a CPU's dropout like this. An input that is
overwritten is written to once, at the end.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxremat.errors import CaptureError
from fxremat.graphs.batch_norm import WHOLE
from fxremat.graphs.cudnn_batch_norm import CUDNN
from fxremat.graphs.nodes import tangents_in, tensors_of
from fxremat.ops import random as random  # imported for its effect: it registers an op
from fxremat.passes.evaluate import evaluate, show_views
from fxremat.torch_private import launches_in_place, storage_of

aten = torch.ops.aten

DRAWN = torch.ops.fxremat.bernoulli_as.default

STATISTICS: dict[Any, tuple[Any, int]] = {
    # in-place BatchNorm -> (the one that returns new running statistics, its number of results before them)
    aten.native_batch_norm.default: (WHOLE, 3),
    aten._native_batch_norm_legit.default: (WHOLE, 3),
    aten.cudnn_batch_norm.default: (CUDNN, 4),
    aten.miopen_batch_norm.default: (None, 0),
}


def without_mutation(graph: fx.Graph) -> None:
    """Replace in-place ops by ops that return a new value. O(nodes).

    Raises `CaptureError`, naming the first such op, if a view of an overwritten value is read later, or if
    there is no such op.
    """
    written: dict[fx.Node, fx.Node] = {}  # new value -> the input that it has to be written to at the end
    for node in [*graph.nodes]:
        if not _overwrites(node) or _is_write(node):
            continue
        before = {node, *_before(node)}
        bases = _bases(node)
        if not bases or any(_is_shared(base, node, before) for base in bases):
            raise CaptureError(
                f"{node.name} ({node.target}) overwrites an argument, and a plan needs ops that do not: functionalize "
                "the graph (torch.func.functionalize)"
            )
        results = _with_statistics(node) if node.target in STATISTICS else [_rewritten(node, bases[0])]
        made = before | {node, *results}
        for base, result in zip(bases, results, strict=True):
            if result is not node and base is node.args[0]:
                node.replace_all_uses_with(result, lambda user, made=made: user not in made)
            base.replace_all_uses_with(result, lambda user, made=made: user not in made)  # type: ignore[misc]
            show_views(result, base.meta["val"])
            if base.op == "placeholder" or base in written:
                written[result] = written.pop(base, base)
    with graph.inserting_before(graph.output_node()):
        for node, to in written.items():
            graph.call_function(aten.copy_.default, (to, node)).meta = {"val": to.meta["val"]}


def _rewritten(node: fx.Node, base: fx.Node) -> fx.Node:
    """Replace an in-place op by its functional form; return the node whose value is that of the overwritten tensor."""
    overwritten, node.target = node.target, _functional(node.target)
    if node.target is DRAWN and base.target is aten.empty_like.default and not base.kwargs:
        node.args = (base.args[0], *node.args[1:])
    node.meta = {**node.meta, "val": evaluate(node)}
    if _changes_shape(overwritten) or _described(node) == _described(base):
        return node
    # dtype and strides of the new value may differ from those of the overwritten tensor, so it is copied
    with node.graph.inserting_after(node):
        result = node.graph.call_function(aten.copy.default, (base, node))
    result.meta = dict(node.meta)
    result.meta["val"] = evaluate(result)
    return result


def _with_statistics(node: fx.Node) -> list[fx.Node]:
    """Replace a BatchNorm in training by one that returns new running statistics; return the nodes of these."""
    target, place = STATISTICS[node.target]
    assert target is not None
    node.target, node.args = target, (*node.args[:5], *(() if target is CUDNN else (True,)), *node.args[6:])
    node.meta = {**node.meta, "val": evaluate(node)}
    results: list[fx.Node] = []
    with node.graph.inserting_after(node):
        for item in (place + 1, place):
            result = node.graph.call_function(operator.getitem, (node, item))
            result.meta = {**node.meta, "val": evaluate(result)}
            results.insert(0, result)
    for user in node.users:
        user.meta = {**user.meta, "val": evaluate(user)}
    return results


def _overwrites(node: fx.Node) -> bool:
    """Tell whether an op overwrites an argument; BatchNorms in training do, although their schemas do not say so."""
    if node.target in STATISTICS:
        return node.args[3] is not None and node.args[5] is not False
    if launches_in_place(node):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _bases(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an op overwrites; [] if the op has no functional form."""
    if node.target in STATISTICS:
        found = list(node.args[3:5]) if STATISTICS[node.target][0] is not None else []
    else:
        found = list(node.args[:1]) if not launches_in_place(node) and _functional(node.target) is not None else []
    nodes = [base for base in found if isinstance(base, fx.Node) and base.op != "get_attr"]
    return nodes if len(nodes) == len(found) else []


def _is_write(node: fx.Node) -> bool:
    """Tell whether a node only copies a value into an input that is not read later.

    In a joint graph, readers of an input mean its value at the beginning, wherever they are.
    """
    to = node.args[0] if node.args else None
    if node.target is not aten.copy_.default or not isinstance(to, fx.Node) or to.op != "placeholder" or node.users:
        return False
    if tangents_in(node.graph):
        return True
    before = _before(node)
    return all(user in before or _only_writes(user, to) for user in to.users)


def _only_writes(user: fx.Node, to: fx.Node) -> bool:
    return user.target is aten.copy_.default and user.args[0] is to and user.args[1] is not to


def _functional(target: Any) -> Any:
    """Return the functional form of an op with a trailing underscore; None if there is none."""
    if target is aten.bernoulli_.float:
        return DRAWN
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_"):
        return None
    wanted = [(each.name, str(each.type)) for each in target._schema.arguments]
    for packet_name in (name[:-1], f"{name}functional"):
        packet = getattr(getattr(torch.ops, namespace), packet_name, None)
        overloads = () if packet is None else packet.overloads()
        for overload in sorted(overloads, key=lambda overload: overload != target._overloadname):
            found = getattr(packet, overload)
            alike = [(each.name, str(each.type)) for each in found._schema.arguments] == wanted
            if alike and not found._schema.is_mutable and (_shows(found) or not _changes_shape(target)):
                return found
    return None


def _changes_shape(target: Any) -> bool:
    """Tell whether an op changes the shape of a tensor in place, but not its data, as `t_` does."""
    return torch.Tag.inplace_view in target.tags


def _shows(target: Any) -> bool:
    return any(each.alias_info is not None for each in target._schema.returns)


def _described(node: fx.Node) -> Any:
    """Return the dtype and layout of a node's tensor."""
    value = node.meta["val"]
    sides = [(size, stride) for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    return value.dtype, value.dim(), sides


def _is_shared(base: fx.Node, node: fx.Node, before: set[fx.Node]) -> bool:
    """Tell whether an overwritten value shares memory with an input, or with a view from before that is read later.

    Views that are made after the op show the new value, so they are no problem.

    Args:
        node: the op that overwrites the value.
        before: that op and all earlier ones.
    """
    storages = {storage_of(tensor) for tensor in tensors_of(base) if tensor is not None}
    for other in before - {base, node}:
        if not any(tensor is not None and storage_of(tensor) in storages for tensor in tensors_of(other)):
            continue
        if other.op in ("placeholder", "get_attr") or any(user not in before for user in other.users):
            return True
    return False


def _before(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that come before a node in the graph."""
    found: list[fx.Node] = []
    for other in node.graph.nodes:
        if other is node:
            break
        found.append(other)
    return found
