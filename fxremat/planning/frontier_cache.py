"""A cache of the latest surveys, so that the same model under another budget is not planned from nothing.

A survey does not depend on the budget, and the op-by-op search resumes where it ended: a `Ladder` holds the results of
both. They refer to ops and values by number, so that the results for one graph serve an equal one: only the graph
itself is exchanged, and nothing of the old graph is kept. For a graph with the same ops and other sizes, the programs
are evaluated again (`search.replan`). Results are also kept on disk (`planning.stored`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import fields
from typing import NamedTuple, cast

from fxremat.graphs.accounting import device_of, op_keys
from fxremat.planning import stored
from fxremat.search.refine import Ladder
from fxremat.search.replan import replanned
from fxremat.step.costs import Costs
from fxremat.step.step_graph import StepGraph


class Key(NamedTuple):
    """A key for all that a search depends on, apart from the budget."""

    topology: str  # digest, equal for graphs that number equal ops and values in the same way, whatever their sizes
    sizes: tuple[int, ...]  # bytes of the values
    costs: str  # digest of the costs of the ops


AT_MOST = 8  # ladders, the latest used, that are kept in memory
NEAREST = 3  # latest ladders of a graph with the same ops that are tried when sizes change
NO_GRAPH = cast(StepGraph, None)  # in place of the graph in what is cached
_latest: OrderedDict[Key, Ladder] = OrderedDict()


class FrontierCache:
    """Access to the cached results of a search, for a graph with certain costs and settings."""

    def __init__(self, graph: StepGraph, costs: Costs, settings: object) -> None:
        self._graph, self._costs, self._device = graph, costs, device_of(graph)
        self._key = key_of(graph, costs, settings)

    def get(self) -> Ladder | None:
        """Return the ladder that was put last, in this process or an earlier one; None if there is none any more."""
        known = _latest.get(self._key) or stored.read(self._device, repr(self._key), Ladder)
        if known is None:
            return None
        self._remember(known)
        return known.on(self._graph)

    def of_other_sizes(self) -> Ladder | None:
        """Return the latest ladder of a graph with the same ops and similar sizes, evaluated at this graph's sizes.

        None where there is none. A ladder of the same sizes with other costs does not count: a new search is better.
        """
        mine = self._key
        known = [
            ladder
            for key, ladder in _latest.items()
            if key.topology == mine.topology and key.sizes != mine.sizes
        ]
        judged = (replanned(ladder, self._graph, self._costs) for ladder in reversed(known[-NEAREST:]))
        return next(filter(None, judged), None)

    def put(self, ladder: Ladder) -> None:
        """Keep a ladder, in memory and on disk, in place of an earlier one for the same key."""
        known = _latest.get(self._key)
        if known is not None and known.climbed == ladder.climbed:
            return
        self._remember(ladder.on(NO_GRAPH))
        stored.write(self._device, repr(self._key), _latest[self._key])

    def _remember(self, ladder: Ladder) -> None:
        _latest[self._key] = ladder
        _latest.move_to_end(self._key)
        if len(_latest) > AT_MOST:
            _latest.popitem(last=False)


def key_of(graph: StepGraph, costs: Costs, settings: object) -> Key:
    """Return the key of a search on a graph with these costs and settings."""
    return Key(_topology(graph, settings), tuple(v.bytes for v in graph.values), _costs(graph, costs))


def _topology(graph: StepGraph, settings: object) -> str:
    """Digest the ops of a graph, with what each reads and writes, and the settings; sizes do not count."""
    numbers = [
        [getattr(op, each.name) for each in fields(op) if each.name not in ("name", "key", "sequence")]
        for op in graph.ops
    ]
    values = [(v.origin, v.producer) for v in graph.values]
    sets = [sorted(s) for s in (graph.kept_outputs, graph.returned, graph.updates, graph.mutated_primals)]
    text = repr((numbers, values, sets, sorted(graph.held_tangents), settings))
    return hashlib.sha256(text.encode()).hexdigest()


def _costs(graph: StepGraph, costs: Costs) -> str:
    keys = "\n".join(f"{op.name} {key}" for op, key in zip(graph.ops, op_keys(graph, costs.fresh), strict=True))
    return hashlib.sha256(f"{costs}\n{keys}".encode()).hexdigest()
