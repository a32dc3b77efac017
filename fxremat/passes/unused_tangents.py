"""Removal of sums with the gradients of outputs that nobody differentiates, which are zeros, from a backward graph.

For such an output autograd has no gradient; AOTAutograd passes zeros, and the backward adds what it computes from these
to other gradients. Eager PyTorch adds nothing. A sum with zeros may have another memory layout, in which later sums
round otherwise; and it is NaN where a derivative is infinite, as that of a square root at 0. So such sums are left out.
Other ops that read both (a concatenation, the backward of an LSTM) get zeros. What depends on no other gradient than
these is zero, or NaN, since a backward is linear in the gradients that it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import fx

from fxremat.graphs.handed_in import handed_in
from fxremat.graphs.nodes import tangents_in
from fxremat.graphs.symbolic import same_size
from fxremat.ops.overwriting import overwrite_where_alike
from fxremat.passes.in_place import depending_on
from fxremat.passes.tangents import AS_TRACED, VIEWS
from fxremat.torch_private import copied

aten = torch.ops.aten


def without_tangents(module: fx.GraphModule, unused: Set[str]) -> fx.GraphModule | None:
    """Return a backward graph that adds nothing for gradients which are zeros. O(nodes).

    It takes the same inputs, and computes what depends on zeros as before, so that it takes the memory of the plan.
    Sums stay where the graph could not run with the layouts that gradients have without them. None: it is the same.

    Args:
        unused: the names of the placeholders of these gradients.
    """
    graph = copied(module.graph)
    tangents = tangents_in(graph)
    given = depending_on(graph, {node for node in tangents if node.name not in unused})
    zero = depending_on(graph, {node for node in tangents if node.name in unused}) - given
    # the zeros of a gradient with dimensions are contiguous, whatever layout was traced
    unlike_traced = zero & depending_on(graph, handed_in(graph))
    terms, changed = dict[fx.Node, fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        term = _only_term(node, zero)
        if term is not None:
            terms[node] = term
            differs = term in changed or _lies_otherwise(term, node)
            differs = differs or not unlike_traced.isdisjoint(node.all_input_nodes)
        else:
            differs = node.target is not aten.contiguous.default and not changed.isdisjoint(node.all_input_nodes)
        if differs:
            changed.add(node)
    if any(node.target in AS_TRACED for node in changed):
        terms, changed = {node: term for node, term in terms.items() if node not in changed}, set()
    storage = _storages(graph)
    given_zeros = _give_zeros(graph, given - terms.keys(), zero, storage)
    if not (terms or given_zeros):
        return None
    for node in changed:
        if node.target in VIEWS:
            node.target = aten.reshape.default
    gone = zero | terms.keys()
    written = {storage(node) for node in graph.nodes if node not in gone and _overwritten(node) is not None}
    for node, term in terms.items():
        others, overwritten = [each for each in node.all_input_nodes if each is not term], _overwritten(node)
        if overwritten is not None:
            node.target, node.args = beside if overwritten is term else copied_into, (term, *others)
        elif written.isdisjoint((storage(node), storage(term))):
            node.target, node.args = copied_beside, (term, *others)
        else:
            node.target, node.args = cloned_beside, (term, *others)
    return fx.GraphModule(module, graph)


def _give_zeros(
    graph: fx.Graph, readers: Set[fx.Node], zero: Set[fx.Node], storage: Callable[[fx.Node], fx.Node]
) -> bool:
    """Let nodes read zeros instead of what is computed from zeros only; tell whether any of them does.

    Args:
        readers: the nodes, which other gradients reach, too.
        zero: what is computed from zeros only.
        storage: returns the first node that may share a node's storage.
    """
    pairs = [(node, each) for node in readers for each in node.all_input_nodes if each in zero]
    pairs = [(node, each) for node, each in pairs if _is_made(storage(each))]
    for node, each in pairs:
        with graph.inserting_before(node):
            zeros = graph.call_function(emptied_or_new if storage(each) in zero else aten.zeros_like.default, (each,))
        zeros.meta = dict(each.meta)
        node.replace_input_with(each, zeros)
    return bool(pairs)


def beside(term: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return the first tensor; until then a graph holds the second one too, as where it adds that to the first one."""
    return term


def copied_into(term: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first tensor, in the memory of the second one as a sum in place, if that lies as the first.

    The first may be a part of a larger tensor, which is then freed as after the sum.
    """
    alike = (zeros.shape, zeros.stride(), zeros.dtype) == (term.shape, term.stride(), term.dtype)
    return zeros.copy_(term) if alike else term.clone()


def copied_beside(term: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first tensor, which takes the memory of a sum; the tensor itself if a copy lies otherwise.
    """
    copy = term.clone()
    return copy if copy.stride() == term.stride() else term


def cloned_beside(term: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first tensor; a graph frees the second one then, which it would hold if nothing read it."""
    return term.clone()


def emptied_or_new(zeros: torch.Tensor) -> torch.Tensor:
    """Return zeros of the shape of a tensor: in its own memory if it is contiguous, else in new memory."""
    return zeros.zero_() if zeros.is_contiguous() else torch.zeros_like(zeros)


def _is_made(node: fx.Node) -> bool:
    """Tell whether a node is an op with floating-point results, which may be NaN where it reads zeros."""
    value = node.meta.get("val")
    inexact = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return inexact and node.op == "call_function"


def _only_term(node: fx.Node, zero: Set[fx.Node]) -> fx.Node | None:
    """Return the term of a sum of two tensors that is not zero; None if the node is no such sum, or both are."""
    args = node.args
    if node.target is overwrite_where_alike and args[0] is aten.add.Tensor:
        args = args[2:]
    elif node.target not in (aten.add.Tensor, aten.add_.Tensor):
        return None
    terms = [term for term in args if isinstance(term, fx.Node)]
    if len(terms) != 2 or node.kwargs:
        return None
    others = [term for term in terms if term not in zero]
    return others[0] if len(others) == 1 and _alike(node, others[0]) else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Tell whether both nodes are tensors of the same dtype and shape."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.dtype == b.dtype and a.dim() == b.dim() and all(map(same_size, a.shape, b.shape))


def _lies_otherwise(one: fx.Node, other: fx.Node) -> bool:
    """Tell whether two tensors of the same shape have different memory layouts."""
    return not all(map(same_size, one.meta["val"].stride(), other.meta["val"].stride()))


def _overwritten(node: fx.Node) -> fx.Node | None:
    """Return the operand that a node may overwrite."""
    written: Any = None
    if node.target is overwrite_where_alike:
        place: Any = node.args[1]
        written = node.args[2 + place]
    for number, argument in enumerate(_arguments(node)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = node.args[number] if number < len(node.args) else node.kwargs[argument.name]
    return written if isinstance(written, fx.Node) else None


def _arguments(node: fx.Node) -> list[Any]:
    return [*node.target._schema.arguments] if isinstance(node.target, torch._ops.OpOverload) else []


def _storages(graph: fx.Graph) -> Callable[[fx.Node], fx.Node]:
    """Return a function from a node to the first one that may share its storage: views, and results of in-place ops."""
    base: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        taken = _overwritten(node)
        if taken is None and node.op == "call_function":
            aliases = any(argument.alias_info is not None for argument in _arguments(node))
            if (aliases or node.target is aten.reshape.default) and node.all_input_nodes:
                taken = node.all_input_nodes[0]
        base[node] = node if taken is None else base[taken]
    return base.__getitem__
