"""A cache of search results, so that planning the same model for another budget does not start from nothing.

The Pareto frontier found for a step does not depend on the budget, and the op-by-op search resumes where it
ended; a `Ladder` holds the results of both. They refer to ops and values by number, so results for one graph
also serve an equal graph, and are stored without their graph. For a graph with the same ops and other sizes,
or with another loss outside the model, the programs are evaluated again (`search.replan`). Results are also kept on
disk (`planning.stored`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import NamedTuple, cast

from fxremat.graphs.accounting import device_of, op_keys
from fxremat.planning import stored
from fxremat.search.refine import Ladder
from fxremat.search.replan import replanned
from fxremat.step.costs import Costs
from fxremat.step.step_graph import StepGraph


class Key(NamedTuple):
    """The cache key: all that a search depends on, except the budget."""

    topology: str  # digest of the ops and of what each reads and writes, without sizes
    sizes: tuple[int, ...]  # bytes of the values
    costs: str  # digest of the costs of the ops
    seconds: str  # digest of the seconds of the ops alone
    around: str  # digest of what the program does with the outputs


AT_MOST = 8  # number of search results kept in memory; the least recently used one is dropped
NEAREST = 3  # at new sizes, this many of the latest results for the same ops are tried
NO_GRAPH = cast(StepGraph, None)  # stands for the graph in cached results
_latest: OrderedDict[Key, Ladder] = OrderedDict()


class FrontierCache:
    """The cached search results for one graph, with certain costs and settings.

    Args:
        loss: what is known of the loss outside the model.
    """

    def __init__(self, graph: StepGraph, costs: Costs, settings: object, loss: object) -> None:
        self._graph, self._costs, self._device = graph, costs, device_of(graph)
        self._key = key_of(graph, costs, settings, loss)

    def get(self) -> Ladder | None:
        """Return the result stored last under this key, by this process or an earlier one; None if there is none."""
        known = _latest.get(self._key) or stored.read(self._device, repr(self._key), Ladder)
        if known is None:
            return None
        self._remember(known)
        return known.on(self._graph)

    def of_other_sizes(self) -> Ladder | None:
        """Return a cached result for the same ops at other sizes, re-evaluated at this graph's sizes, or None.

        Results for the same sizes with other costs are not used: a new search is better.
        """
        return self._judged(lambda key, mine: key.around == mine.around and key.sizes != mine.sizes)

    def of_other_loss(self) -> Ladder | None:
        """Return a cached result for the same ops and sizes beside another loss, or other dropped outputs, or None.

        Its programs are evaluated again, and not improved yet.
        """

        def differs(key: Key, mine: Key) -> bool:
            return key.sizes == mine.sizes and key.seconds == mine.seconds and key != mine

        found = self._judged(differs)
        return None if found is None else replace(found, climbed=0)

    def _judged(self, fits: Callable[[Key, Key], bool]) -> Ladder | None:
        """Return one of the latest results for the same ops whose key fits this one, evaluated for this graph."""
        mine = self._key
        known = [ladder for key, ladder in _latest.items() if key.topology == mine.topology and fits(key, mine)]
        judged = (replanned(ladder, self._graph, self._costs) for ladder in reversed(known[-NEAREST:]))
        return next(filter(None, judged), None)

    def put(self, ladder: Ladder) -> None:
        """Store a search result in memory and on disk, replacing an earlier one for the same key."""
        known = _latest.get(self._key)
        if known is not None and (known.climbed, known.of_other_sizes) == (ladder.climbed, ladder.of_other_sizes):
            return
        self._remember(ladder.on(NO_GRAPH))
        stored.write(self._device, repr(self._key), _latest[self._key])

    def _remember(self, ladder: Ladder) -> None:
        _latest[self._key] = ladder
        _latest.move_to_end(self._key)
        if len(_latest) > AT_MOST:
            _latest.popitem(last=False)


def key_of(graph: StepGraph, costs: Costs, settings: object, loss: object = None) -> Key:
    """Return the cache key of a search on a graph with these costs, settings, and what is known of a loss outside."""
    return Key(
        topology=_topology(graph, settings),
        sizes=tuple(v.bytes for v in graph.values),
        costs=_costs(graph, costs),
        seconds=_digest(repr(costs.seconds)),
        around=_digest(repr((sorted(graph.dropped_outputs), loss))),
    )


def _topology(graph: StepGraph, settings: object) -> str:
    """Digest the settings and the ops of a graph, with what each reads and writes, but not the sizes."""
    numbers = [
        [getattr(op, each.name) for each in fields(op) if each.name not in ("name", "key", "sequence")]
        for op in graph.ops
    ]
    values = [(v.origin, v.producer) for v in graph.values]
    outputs = graph.kept_outputs, graph.returned
    sets = [sorted(s) for s in (*outputs, graph.updates, graph.mutated_primals, graph.held_tangents)]
    return _digest(repr((numbers, values, sets, settings)))


def _costs(graph: StepGraph, costs: Costs) -> str:
    keys = "\n".join(f"{op.name} {key}" for op, key in zip(graph.ops, op_keys(graph, costs.fresh), strict=True))
    return _digest(f"{costs}\n{keys}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
