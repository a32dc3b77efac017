"""Ops that are never recomputed, whatever the budget.

These are the ops that the options `never_again` and `keep` name, those that selective checkpointing marks in
the graph, and on CUDA two more kinds: ops that turn floats into decisions, which expert a token goes to or which
entries a mask selects, since a decision that is computed a second time, from floats that differ in the last bits, may
come out differently; and recurrent layers with dropout, since cuDNN's dropout has a state that nobody can set.

No plan recomputes such an op. During the search each run of it costs as much as ten steps (`dear`); afterwards
candidates that still recompute one are dropped, and times are corrected (`fair`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from fxremat.device import kind_of
from fxremat.errors import FxrematError, answer_of
from fxremat.graphs.accounting import device_of
from fxremat.graphs.captured import Captured
from fxremat.graphs.nodes import tensors_of
from fxremat.ops import recurrent
from fxremat.search.candidate import Candidate, Frontier
from fxremat.settings import Wish
from fxremat.step.costs import Costs

aten = torch.ops.aten

# policies of selective checkpointing that forbid recomputation
PINNED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD)
STEPS = 10.0  # cost of one run, during the search, of an op that must not be recomputed: in times of a whole step

CHOOSING = {  # ops that compute indices from floats
    *(aten.topk, aten.sort, aten.argsort, aten.argmax, aten.argmin, aten.kthvalue, aten.mode, aten.multinomial),
    *(aten.bucketize, aten.searchsorted, aten.nonzero),
}
COMPARING = {
    *(aten.gt, aten.ge, aten.lt, aten.le, aten.eq, aten.ne, aten.isfinite, aten.isnan, aten.isinf, aten.max, aten.min),
    *(aten.bernoulli,),
}
INDEXING = {
    *(aten.index, aten.index_put, aten._unsafe_index, aten._unsafe_index_put, aten.index_select, aten.gather),
    *(aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_add, aten.index_copy, aten.masked_select),
    *(aten.nonzero, aten.masked_scatter, aten.histc, aten.bincount, aten.embedding, aten._grouped_mm),
}


def run_once(graph: Captured, never_again: Sequence[Wish]) -> frozenset[int]:
    """Return the forward ops that must not be recomputed. O(ops)."""
    if not kind_of(device_of(graph)).of_cuda:
        return wished(graph, never_again)
    drawn = {op.index for op in graph.forward_ops if graph.nodes[op.index].target is recurrent.DROPPING}
    return wished(graph, never_again) | set(_decisions(graph)) | drawn


def wished(graph: Captured, never_again: Sequence[Wish]) -> frozenset[int]:
    """Return the forward ops that the user, or selective checkpointing, does not want to be recomputed. O(ops)."""
    named = {op.index for op in graph.forward_ops if any(_is_meant(graph, op.index, wish) for wish in never_again)}
    marked = {op.index for op in graph.forward_ops if graph.nodes[op.index].meta.get("recompute") in PINNED}
    return frozenset(named | marked)


def staying(graph: Captured, keep: Sequence[Wish]) -> frozenset[int]:
    """Return the forward values that the option `keep` holds on the device instead of copying them to the host.

    O(ops).
    """
    meant = [op for op in graph.forward_ops if any(_is_meant(graph, op.index, wish) for wish in keep)]
    return frozenset(value for op in meant for value in op.writes)


def check_meant(graph: Captured, never_again: Sequence[Wish]) -> None:
    """Raise `FxrematError` for a pattern of module names that matches no forward op."""
    for wish in never_again:
        if isinstance(wish, str) and not any(_is_meant(graph, op.index, wish) for op in graph.forward_ops):
            modules = {source.module for source in graph.sources}
            raise _unmatched(wish, "no op of the forward belongs to a module", modules)


def check_named(model: nn.Module, never_again: Sequence[Wish]) -> None:
    """Raise `FxrematError` for a pattern that matches no module of a model, of which each graph has some."""
    names = {name for name, _ in model.named_modules()}
    for wish in never_again:
        if isinstance(wish, str) and not any(fnmatchcase(name, wish) for name in names):
            raise _unmatched(wish, "the model has no module", names)


def _unmatched(wish: str, trouble: str, modules: Set[str]) -> FxrematError:
    names = ", ".join(sorted(modules - {""})[:4])
    some = f"; some modules are {names}" if names else ""
    return FxrematError(f"never_again or keep: {trouble} {wish!r}{some}")


def _is_meant(graph: Captured, op: int, wish: Wish) -> bool:
    if not isinstance(wish, str):
        return bool(answer_of(wish, graph.nodes[op], option="never_again or keep"))
    parts = graph.sources[op].module.split(".")
    return any(fnmatchcase(".".join(parts[:end]), wish) for end in range(1, len(parts) + 1))


def _decisions(graph: Captured) -> Iterator[int]:
    """Yield the forward ops that turn floats into indices or into masks that select entries."""
    of_node = {node: op.index for op, node in zip(graph.forward_ops, graph.nodes, strict=False)}
    deciding: dict[fx.Node, bool] = {}
    for node in reversed(graph.module.graph.nodes):
        deciding[node] = _packet(node) in INDEXING or (
            _is_of_integers(node) and any(deciding[user] for user in node.users)
        )
    for node, op in of_node.items():
        reads_floats = any(_has_floats(parent) for parent in node.all_input_nodes)
        chosen = _packet(node) in CHOOSING
        compared = _packet(node) in COMPARING and any(_leads_to_index(user, deciding) for user in node.users)
        if reads_floats and (chosen or compared):
            yield op


def _leads_to_index(user: fx.Node, deciding: dict[fx.Node, bool]) -> bool:
    return deciding[user] and (_packet(user) in INDEXING or _is_of_integers(user))


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


def _is_of_integers(node: fx.Node) -> bool:
    tensors = [tensor for tensor in tensors_of(node) if tensor is not None]
    return bool(tensors) and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _has_floats(node: fx.Node) -> bool:
    return any(tensor is not None and tensor.is_floating_point() for tensor in tensors_of(node))




def dear(costs: Costs, once: Iterable[int]) -> Costs:
    """Return the costs with the seconds of the ops `once` raised so far that the search avoids recomputing them."""
    seconds, price = list(costs.seconds), STEPS * sum(costs.seconds)
    for op in once:
        seconds[op] += price
    return replace(costs, seconds=tuple(seconds))


def obedient(candidates: Iterable[Candidate], once: frozenset[int]) -> tuple[Candidate, ...]:
    """Return the candidates that run each of the ops `once` only once. O(steps) per candidate."""
    return tuple(candidate for candidate in candidates if not candidate.order().repeats(once))


def fair(frontier: Frontier, costs: Costs, once: frozenset[int]) -> Frontier:
    """Return a frontier found with the costs of `dear`, with real times, without programs that recompute `once`.

    Args:
        costs: the real costs.
    """
    price = STEPS * sum(costs.seconds) * len(once)
    left = Frontier(keep_all=frontier.keep_all, candidates=obedient(frontier.candidates, once))
    return left.each(lambda candidate: replace(candidate, time=candidate.time - price))
