"""Optimal schedules for joins of uniform chains (Theorem 3 of RR-9273), and the baselines of that report."""

from fxremat.solvers.references.joins.uniform import (
    branch_by_branch,
    equiv_chain,
    least_slots,
    multi_chain,
    trade_off,
)

__all__ = ["branch_by_branch", "equiv_chain", "least_slots", "multi_chain", "trade_off"]
