"""The memory below which no schedule of a model's ops can go: that of the one op that needs most.

floor = max over ops of    bytes it reads and writes + its workspace + gradients returned before it
"""

from __future__ import annotations

from collections.abc import Iterable

import fxremat
from fxremat.step.step_graph import Origin


def floor_bytes(plan: fxremat.Plan) -> int:
    """The floor of the model behind a plan, its gradients in the order in which plain PyTorch makes them."""
    joint, sizes = plan.alternatives.keep_all.layout.graph, plan.costs.sizes

    def size(values: Iterable[int]) -> int:
        return sum(sizes.values[v] for v in values if joint.values[v].origin is not Origin.PRIMAL)

    gradients: set[int] = set()
    most = 0
    for op in joint.ops:
        most = max(most, size({*op.reads, *op.writes} | gradients) + sizes.workspace[op.index])
        gradients |= set(op.writes) & joint.returned
    return most
