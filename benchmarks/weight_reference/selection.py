"""The published choice of weights that leave: gaps one by one, by the bytes of excess that each byte copied removes.

    excess(o) = beside(o) + all units - M
    profit(g) = sum over covered o of min(excess(o), w) / w      halved where the unit's copy out is not yet paid for

Algorithm 1 of Weight Offloading Strategies (see `cycle`): O(gaps^2 * ops), vectorized. Excess below 0 counts as 0.
The reference for `fxremat.transfers.weights`, which chooses by this profit among parameters and activations.
"""

from __future__ import annotations

import numpy as np

from benchmarks.weight_reference.cycle import Cycle, Gap
from fxremat.errors import BudgetTooSmall


def select(cycle: Cycle, memory: float, *, discount: bool = True) -> tuple[Gap, ...]:
    """Gaps after which every op fits into `memory` bytes, in order of unit and start.

    Args:
        discount: that one copy out serves several gaps of a unit; without it this is the paper's Greedy*.

    Raises:
        BudgetTooSmall: some op does not fit even alone.
    """
    if memory < cycle.least_memory:
        raise BudgetTooSmall(minimum=int(-(-cycle.least_memory // 1)), budget=int(memory))
    gaps = [gap for gap in cycle.gaps() if cycle.units[gap.unit] > 0]
    sizes = np.array([cycle.units[gap.unit] for gap in gaps])
    cover = np.zeros((len(gaps), len(cycle.ops)), dtype=bool)
    for row, gap in enumerate(gaps):
        cover[row, cycle.covered(gap)] = True
    excess = np.array([op.beside for op in cycle.ops]) + sum(cycle.units) - memory
    left = np.ones(len(gaps), dtype=bool)
    factor = np.full(len(gaps), 0.5)
    chosen = []
    while excess.max() > _ROUNDING * max(1.0, memory):
        removed = np.minimum(np.maximum(excess, 0.0), sizes[:, None]) * cover
        profit = np.where(left, removed.sum(axis=1) / sizes * factor, -1.0)
        best = int(profit.argmax())
        left[best] = False
        chosen.append(gaps[best])
        if discount:
            factor[[gap.unit == gaps[best].unit for gap in gaps]] = 1.0
        excess[cover[best]] = np.maximum(excess[cover[best]] - sizes[best], 0.0)
    return tuple(sorted(chosen))


_ROUNDING = 1e-12
