"""Joins of several chains."""

from fxremat.solvers.joins.uniform import branch_by_branch, equiv_chain, least_slots, multi_chain, trade_off

__all__ = ["branch_by_branch", "equiv_chain", "least_slots", "multi_chain", "trade_off"]
