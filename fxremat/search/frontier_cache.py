"""The latest surveys, so that the same model under another budget is not planned from nothing.

A survey does not depend on the budget. It refers to ops and values by number, so that of an equal graph serves: only
the graph itself is exchanged. Nothing of the old graph is kept.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields
from typing import cast

from fxremat.search.candidate import Frontier
from fxremat.step.costs import Costs, op_key
from fxremat.step.joint import Joint

AT_MOST = 4
_NO_GRAPH = cast(Joint, None)
_latest: OrderedDict[str, Frontier] = OrderedDict()


def remembered(
    joint: Joint, costs: Costs, settings: object, survey: Callable[[Joint, Costs], Frontier]
) -> Frontier:
    """The survey of this graph with these costs and settings, made now or earlier in this process."""
    key = _digest(joint, costs, settings)
    if key in _latest:
        _latest.move_to_end(key)
        return _latest[key].on(joint)
    frontier = survey(joint, costs)
    _latest[key] = frontier.on(_NO_GRAPH)
    if len(_latest) > AT_MOST:
        _latest.popitem(last=False)
    return frontier


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
