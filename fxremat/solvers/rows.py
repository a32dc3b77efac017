"""Rows of a cost table over memory, stored only where they change, and the step that all recursions share.

A row is the least time spent recomputing, as a function of the memory m, for one subproblem:

    infinite        m < low      nothing fits
    cost[m - low]   low <= m < high, never increasing
    0               m >= high    everything is kept

`relax` takes the minimum of a row and  base + left(m - shift) + right(m)  wherever m >= need.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from fxremat.solvers.sizes import Floats, Ints

jit: Any = numba.njit(cache=True, nogil=True, error_model="numpy")


class Rows(NamedTuple):
    """Row (i, j) is cost[at[i, j] : at[i, j] + high[i, j] - low[i, j]]."""

    low: Ints
    high: Ints
    at: Ints
    cost: Floats


@jit
def lay_out(low: Ints, high: Ints, slots: int) -> Rows:
    """Room for every row, cut off above `slots`, all infinite."""
    at = np.zeros(low.shape, dtype=np.int64)
    total = 0
    for i in range(low.shape[0]):
        for j in range(low.shape[1]):
            high[i, j] = max(low[i, j], min(high[i, j], slots + 1))
            at[i, j] = total
            if low[i, j] <= slots:
                total += high[i, j] - low[i, j]
    return Rows(low, high, at, np.full(total, np.inf))


@jit
def least(x: float, y: float) -> float:
    """min(x, y) in the form that becomes one vector instruction."""
    return y if y < x else x


@jit
def value(rows: Rows, i: int, j: int, m: int) -> float:
    """The cost of row (i, j) at memory m."""
    if m < rows.low[i, j]:
        return np.inf
    if m >= rows.high[i, j]:
        return 0.0
    return rows.cost[rows.at[i, j] + m - rows.low[i, j]]


@jit
def guess(rows: Rows, i: int, j: int, m: int, slots: int, dear: float) -> float:
    """The cost of row (i, j), where m may lie below what the rounded sizes need: then `dear` for each slot short."""
    low = rows.low[i, j]
    if m >= low:
        return value(rows, i, j, m)
    return (low - m) * dear + (value(rows, i, j, low) if low <= slots else slots * dear)


@jit
def relax(
    out: Floats,
    low: int,
    need: int,
    base: float,
    left: Rows,
    li: int,
    lj: int,
    shift: int,
    right: Rows,
    ri: int,
    rj: int,
) -> None:
    """out[m - low] = min(out[m - low], base + left(m - shift) + right(m)) for every m >= need.

    Both rows never increase, nor does `out`: where out <= base nothing can improve, and that is a suffix.
    """
    begin = max(low, need, left.low[li, lj] + shift, right.low[ri, rj])
    end = low + out.size
    if begin >= end or out[begin - low] <= base:
        return
    if out[end - 1 - low] <= base:  # the first m with out <= base, by bisection
        above, below = begin, end - 1
        while below - above > 1:
            middle = (above + below) // 2
            if out[middle - low] <= base:
                below = middle
            else:
                above = middle
        end = below
    left_end = left.high[li, lj] + shift
    right_end = right.high[ri, rj]
    both = min(end, left_end, right_end)
    if begin < both:
        x = left.cost[left.at[li, lj] + begin - shift - left.low[li, lj] :]
        y = right.cost[right.at[ri, rj] + begin - right.low[ri, rj] :]
        o = out[begin - low :]
        for k in range(both - begin):
            o[k] = least(o[k], base + x[k] + y[k])
        begin = both
    if begin < min(end, left_end):
        stop = min(end, left_end)
        x = left.cost[left.at[li, lj] + begin - shift - left.low[li, lj] :]
        o = out[begin - low :]
        for k in range(stop - begin):
            o[k] = least(o[k], base + x[k])
        begin = stop
    elif begin < min(end, right_end):
        stop = min(end, right_end)
        y = right.cost[right.at[ri, rj] + begin - right.low[ri, rj] :]
        o = out[begin - low :]
        for k in range(stop - begin):
            o[k] = least(o[k], base + y[k])
        begin = stop
    for m in range(begin, end):
        out[m - low] = least(out[m - low], base)
