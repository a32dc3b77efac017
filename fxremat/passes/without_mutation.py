"""A rewrite of in-place ops to ops that return a new value.

    y = empty_like(x); z = bernoulli_(y, 0.9)    ->    z = bernoulli(y, 0.9)
    _foreach_add_([p, q], [g, h])                ->    n = _foreach_add([p, q], [g, h]); p = n[0]; q = n[1]
    row = select(y, 0, 0); zero_(row); sin(y)    ->    z = as_strided_scatter(y, zero(row), ...); sin(z)

A trace that is not functionalized has such ops; `make_fx` traces a CPU's dropout like this. An input that is
overwritten is written to once, at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.errors import CaptureError
from fxremat.graphs.batch_norm import WHOLE
from fxremat.graphs.cudnn_batch_norm import CUDNN
from fxremat.graphs.nodes import storage_bytes, tangents_in, tensors_of
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
    """Replace in-place ops by ops that return a new value. O(nodes) for each.

    Raises `CaptureError`, naming the first such op that cannot be replaced, and the reason.
    """
    written: dict[fx.Node, fx.Node] = {}  # new value -> the input that it has to be written to at the end
    for node in [*graph.nodes]:
        if not _overwrites(node) or _is_write(node):
            continue
        before, bases, follower = [*_before(node), node], _bases(node), node.next
        shared = _shared(node, bases, before, written)
        results = _with_statistics(node) if node.target in STATISTICS else _rewritten(node, bases)
        made = {*before, *results}
        with graph.inserting_before(follower):
            for base, result in zip(bases, results, strict=True):
                changed = _replaced(node, base, result, shared.get(base), made)
                owner = shared[base].owner if base in shared else base
                if owner.op == "placeholder" or owner in written:
                    written[changed] = written.pop(owner, owner)
    with graph.inserting_before(graph.output_node()):
        for node, to in written.items():
            graph.call_function(aten.copy_.default, (to, node)).meta = {"val": to.meta["val"]}


@dataclass(frozen=True)
class Shared:
    """The memory that an op overwrites as a part, or that is also read later by other names."""

    owner: fx.Node  # the node that made the memory, whose tensor fills it
    views: tuple[fx.Node, ...]  # nodes in this memory that are read later, the owner and the op's argument included


def _replaced(node: fx.Node, base: fx.Node, result: fx.Node, shared: Shared | None, made: set[fx.Node]) -> fx.Node:
    """Let all that comes after an in-place op read its result; return the new value of the memory that it overwrites.

    Args:
        base: the argument that the op overwrites.
        result: the new value of this argument.
        shared: the memory, if it is more than the argument; new nodes are then inserted.
        made: nodes that keep reading the old value; new nodes are added.
    """
    changed, seen = result, {base: result}
    if shared is not None:
        if not _lie_alike(shared.owner, base):
            changed = _strided(aten.as_strided_scatter.default, (shared.owner, result), base)
        seen = {view: changed if _lie_alike(view, shared.owner) else _view(changed, view) for view in shared.views}
        made |= {changed, *seen.values()}
    if seen.get(base) is not node and base is node.args[0]:
        node.replace_all_uses_with(seen[base], lambda user: user not in made)
    for view, now in seen.items():
        view.replace_all_uses_with(now, lambda user: user not in made)
        show_views(now, view.meta["val"])
    return changed


def _view(changed: fx.Node, view: fx.Node) -> fx.Node:
    """Insert what a view of some memory becomes when the memory has a new value."""
    return _strided(aten.as_strided.default, (changed,), view)


def _strided(target: Any, arguments: tuple[fx.Node, ...], view: fx.Node) -> fx.Node:
    """Insert an op on a view, which is described by its sizes, strides and offset."""
    shown: torch.Tensor = view.meta["val"]
    place = [*shown.shape], [*shown.stride()], int(shown.storage_offset())
    made = view.graph.call_function(target, (*arguments, *place))
    made.meta = {key: value for key, value in view.meta.items() if key != "desc"}
    made.meta["val"] = evaluate(made)
    return made


def _lie_alike(one: fx.Node, other: fx.Node) -> bool:
    first, second = one.meta["val"], other.meta["val"]
    return bool(_described(one) == _described(other) and first.storage_offset() == second.storage_offset())


def _rewritten(node: fx.Node, bases: Sequence[fx.Node]) -> list[fx.Node]:
    """Replace an in-place op by its functional form; return the nodes of the new values of the overwritten tensors."""
    overwritten, node.target = node.target, _functional(node.target)
    (base,) = bases[:1]
    if node.target is DRAWN and base.target is aten.empty_like.default and not base.kwargs:
        node.args = (base.args[0], *node.args[1:])
    node.meta = {**node.meta, "val": evaluate(node)}
    if not isinstance(node.args[0], fx.Node):
        items = [_after(node, operator.getitem, (node, place)) for place in reversed(range(len(bases)))][::-1]
        return [_as_before(item, base) for item, base in zip(items, bases, strict=True)]
    return [node if _changes_shape(overwritten) else _as_before(node, base)]


def _as_before(node: fx.Node, base: fx.Node) -> fx.Node:
    """Return a node with a new value, in the dtype and strides of the overwritten tensor; copy it if they differ."""
    return node if _described(node) == _described(base) else _after(node, aten.copy.default, (base, node))


def _after(node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    """Insert a call after a node, with the node's metadata."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, arguments)
    made.meta = dict(node.meta)
    made.meta["val"] = evaluate(made)
    return made


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
    """Return the arguments that an op overwrites. Raises `CaptureError` if the op has no functional form."""
    if reason := _without_functional_form(node):
        raise CaptureError(_refusal(node, reason))
    found = node.args[3:5] if node.target in STATISTICS else node.args[:1]
    items: Any = found[0] if len(found) == 1 and isinstance(found[0], list | tuple) else found
    if any(not isinstance(item, fx.Node) or item.op == "get_attr" for item in items):
        raise CaptureError(_refusal(node, "what it overwrites is a constant of the graph, not an input"))
    if len(set(items)) != len(items):
        raise CaptureError(_refusal(node, "it overwrites one tensor more than once"))
    return [*items]


def _without_functional_form(node: fx.Node) -> str:
    """Return the reason why an in-place op cannot be replaced by one that returns a new value; "" if it can."""
    if node.target in STATISTICS:
        return "" if STATISTICS[node.target][0] is not None else "no form of it returns new running statistics"
    if launches_in_place(node):
        return "a Triton kernel writes to it"
    arguments: Any = node.target._schema.arguments  # type: ignore[union-attr]
    overwritten = [place for place, each in enumerate(arguments) if _is_written(each)]
    if _functional(node.target) is None:
        return "PyTorch has no form of this op that returns a new value"
    return "" if overwritten == [0] else f"it overwrites {len(overwritten)} arguments at once"


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _refusal(node: fx.Node, reason: str) -> str:
    return (
        f"{node.name} ({node.target}) overwrites an argument, and a plan needs ops that do not; {reason}: compute a "
        "new value instead, or trace the graph again under torch.func.functionalize, as docs/pass.md shows"
    )


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


def _shared(
    node: fx.Node, bases: Sequence[fx.Node], before: Sequence[fx.Node], written: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, Shared]:
    """Return the memory of the arguments that an op overwrites, where more than the argument is read later.

    Views that are made after the op show the new value, so they are no problem.

    Args:
        before: the op, and all nodes before it.
        written: new values of inputs so far, which are read at the end.

    Raises:
        CaptureError: the new value cannot be seen through the other views; the error names one.
    """
    if _changes_shape(node.target):
        return {}
    storages = {storage_of(base.meta["val"]): base for base in bases}
    if len(storages) != len(bases):
        raise CaptureError(_refusal(node, "it overwrites two views of the same memory"))
    earlier = set(before)
    members: dict[fx.Node, list[fx.Node]] = {base: [] for base in bases}
    for other in before[:-1]:
        for base in {storages[at] for at in map(storage_of, _tensors(other)) if at in storages}:
            members[base].append(other)
    found = {}
    for base, others in members.items():
        views = tuple(each for each in others if each is base or any(user not in earlier for user in each.users))
        kept = [each for each in others if each.op in ("placeholder", "get_attr") or each in written]
        if views == (base,) and kept in ([], [base]):
            continue
        owner = others[0]
        for other in {owner: None, **dict.fromkeys((*views, *kept))}:
            if reason := _unseen(other, owner):
                raise CaptureError(_refusal(node, f"{other.name}, in the memory that it overwrites, {reason}"))
        found[base] = Shared(owner, views)
    return found


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_of(node) if tensor is not None)


def _unseen(view: fx.Node, owner: fx.Node) -> str:
    """Return the reason why a view cannot be made from a new value of the memory; "" if it can."""
    shown, whole = view.meta["val"], owner.meta["val"]
    if not isinstance(shown, torch.Tensor):
        return "has several results"
    if view.op == "get_attr" or (view.op == "placeholder" and view is not owner):
        return "is an input or a constant of its own"
    if view is owner and shown.nbytes != storage_bytes(shown):
        return "is itself a part of other memory"
    same = shown.dtype == whole.dtype and shown.is_conj() == whole.is_conj() and shown.is_neg() == whole.is_neg()
    return "" if same else f"is read later as {str(shown.dtype).removeprefix('torch.')}"


def _before(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that come before a node in the graph."""
    found: list[fx.Node] = []
    for other in node.graph.nodes:
        if other is node:
            break
        found.append(other)
    return found
