"""The latest surveys, so that the same model under another budget is not planned from nothing.

A survey does not depend on the budget, and the search op by op goes on where it was left. Both refer to ops and values
by number, so that those of an equal graph serve: only the graph itself is exchanged. Nothing of the old graph is kept.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import fields
from typing import cast

from fxremat.search.refine import Ladder
from fxremat.step.costs import Costs, op_key
from fxremat.step.joint import Joint

AT_MOST = 4
_NO_GRAPH = cast(Joint, None)
_latest: OrderedDict[str, Ladder] = OrderedDict()


class FrontierCache:
    """What this process knows of a graph with these costs and settings."""

    def __init__(self, joint: Joint, costs: Costs, settings: object) -> None:
        self._joint, self._key = joint, _digest(joint, costs, settings)

    def get(self) -> Ladder | None:
        """The ladder that was put last; None where none was, or it was too long ago."""
        if self._key not in _latest:
            return None
        _latest.move_to_end(self._key)
        return _latest[self._key].on(self._joint)

    def put(self, ladder: Ladder) -> None:
        """Remember a ladder, in place of an earlier one of the same graph."""
        _latest[self._key] = ladder.on(_NO_GRAPH)
        _latest.move_to_end(self._key)
        if len(_latest) > AT_MOST:
            _latest.popitem(last=False)


def _digest(joint: Joint, costs: Costs, settings: object) -> str:
    """Equal for graphs that number equal ops and values in the same way, at equal costs."""
    numbers = [
        tuple(getattr(op, field.name) for field in fields(op) if field.name != "node") for op in joint.ops
    ]
    values = [(v.name, v.bytes, v.origin, v.producer) for v in joint.values]
    sets = [sorted(s) for s in (joint.kept_outputs, joint.returned, joint.updates, joint.mutated_primals)]
    text = repr((numbers, values, sets, sorted(joint.root_tangents), costs, settings))
    keys = "\n".join(f"{op.name} {op_key(op.node)}" for op in joint.ops)
    return hashlib.sha256(f"{text}\n{keys}".encode()).hexdigest()
