"""Notes on which backward ops may write their result over a gradient that no other op reads; no node is changed.

    add(g1, g2), if no other op reads g1    ->    add_(g1, g2)

Without that, a sum of gradients or the backward of a ReLU or of a dropout needs three buffers where two are
enough. Since such an op runs once and is the only reader of the gradient, this is safe in any order in which a
plan runs the backward.

The numbers are the same, because the same kernel reads each element before it writes it. For that the operand
must have the layout that a new result would have; otherwise the next reader might add in another order. Fake
tensors do not always have the real layouts, so measuring compares them (`cost.measure`), and finds ops that
must allocate a new result after all (`Costs.fresh`). The layout of gradients from a loss outside of the model
is not known either: values that may have such a layout are overwritten only by ops whose new result would have
the same layout, whatever it is.

In plans the result is a value of its own, and the op's workspace is negative by the bytes that it reuses
(`graphs.accounting.costs_from`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxremat.graphs.handed_in import laid_out_by_others
from fxremat.graphs.nodes import tangents_in
from fxremat.graphs.overwriting import BACKWARDS, METHODS, PLACE, SELF_FIRST
from fxremat.graphs.symbolic import same_size
from fxremat.torch_private import storage_of

aten = torch.ops.aten

COMMUTE = {aten.add.Tensor, aten.mul.Tensor}  # ops that may overwrite their second operand as well as their first


def note_overwriting(graph: fx.Graph) -> None:
    """Record in `meta` which backward ops may overwrite an operand that no other op reads. O(nodes).

    Only values computed from the gradients that autograd passes in are overwritten, and never these gradients
    themselves, since autograd may still hold them.
    """
    handed_in = set(tangents_in(graph))
    note_overwriting_among(graph, depending_on(graph, handed_in) - handed_in)


def note_overwriting_among(graph: fx.Graph, ours: Set[fx.Node]) -> None:
    """Record in `meta` which ops may overwrite an operand that is in `ours` and read by no other op. O(nodes).

    Earlier records are removed.
    """
    shown = Counter(storage_of(t) for node in graph.nodes if (t := _tensor(node)) is not None)
    unknown = laid_out_by_others(graph)
    forget_overwriting(graph)
    for node in graph.nodes:
        if node.target not in METHODS | BACKWARDS:
            continue
        first, *rest = node.args
        known = unknown.isdisjoint(node.all_input_nodes)
        if (known or node.target not in SELF_FIRST) and _may_take(node, first, ours, shown):
            node.meta[PLACE] = 0
        elif known and node.target in COMMUTE and not node.kwargs and _may_take(node, rest[0], ours, shown):
            node.meta[PLACE] = 1


def forget_overwriting(graph: fx.Graph) -> None:
    """Remove the records of which ops may overwrite an operand; needed before ops of the graph are replaced."""
    for node in graph.nodes:
        node.meta.pop(PLACE, None)


def depending_on(graph: fx.Graph, tangents: Set[fx.Node]) -> set[fx.Node]:
    """Return these nodes, and all nodes that are computed from them."""
    late = set(tangents)
    for node in graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _tensor(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _may_take(node: fx.Node, operand: object, ours: Set[fx.Node], shown: Counter[int]) -> bool:
    """Tell whether an op may overwrite an operand: it is the only reader, and result and operand have the same layout.
    """
    if not isinstance(operand, fx.Node) or operand not in ours:
        return False
    if sum(leaf is operand for leaf in tree_leaves((node.args, node.kwargs))) != 1:
        return False
    old, new = _tensor(operand), _tensor(node)
    if old is None or new is None:
        return False
    chain = [node, operand, *_views_below(operand)]
    return (
        all(set(shower.users) == {reader} for reader, shower in itertools.pairwise(chain))
        and chain[-1] in ours
        and shown[storage_of(old)] == len(chain) - 1
        and (old.dtype, old.device) == (new.dtype, new.device)
        and _equal((*old.shape, *old.stride()), (*new.shape, *new.stride()))
        and _equal([_whole(old)] * 2, [_whole(new), old.numel() * old.element_size()])
    )


def _whole(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage().nbytes()


def _equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(sizes) == len(others) and all(map(same_size, sizes, others))


def _views_below(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the node of which `node` is a view, then the node of which that is a view, down to the storage's first."""
    storage = storage_of(node.meta["val"])
    while parents := [
        p for p in node.all_input_nodes if (t := _tensor(p)) is not None and storage_of(t) == storage
    ]:
        node = parents[0]
        yield node
