"""The latest surveys, so that the same model under another budget is not planned from nothing.

A survey does not depend on the budget. It refers to ops and values by number, so that of an equal graph serves: only
the graph itself is exchanged. Nothing of the old graph is kept.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import cast

from fxremat.search.frontier import Prospect, Prospects
from fxremat.step.costs import Costs, op_key
from fxremat.step.joint import Joint
from fxremat.step.layout import Layout

AT_MOST = 4
_NO_GRAPH = cast(Joint, None)
_latest: OrderedDict[str, Prospects] = OrderedDict()


def remembered(
    joint: Joint, costs: Costs, settings: object, survey: Callable[[Joint, Costs], Prospects]
) -> Prospects:
    """The survey of this graph with these costs and settings, made now or earlier in this process."""
    key = _digest(joint, costs, settings)
    if key in _latest:
        _latest.move_to_end(key)
        return _on(_latest[key], joint)
    prospects = survey(joint, costs)
    _latest[key] = _on(prospects, _NO_GRAPH)
    if len(_latest) > AT_MOST:
        _latest.popitem(last=False)
    return prospects


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


def _on(prospects: Prospects, joint: Joint) -> Prospects:
    """The same prospects of another graph."""
    layouts: dict[int, Layout] = {}

    def moved(prospect: Prospect) -> Prospect:
        layout = layouts.setdefault(id(prospect.layout), replace(prospect.layout, joint=joint))
        refined = replace(prospect.refined, layout=layout) if prospect.refined else None
        return replace(prospect, layout=layout, refined=refined)

    return Prospects(keep_all=moved(prospects.keep_all), frontier=tuple(map(moved, prospects.frontier)))
