"""Rows of a table of costs by memory, stored only where they change, and the operation that all recursions share.

A row is the least time spent recomputing, as a function of the memory m, for one subproblem:

    infinite        m < low      nothing fits
    cost[m - low]   low <= m < high, never increasing
    0               m >= high    everything is kept

`relax` takes the minimum of a row and  base + left(m - shift) + right(m)  wherever m >= need. Nearly all the time is
spent there: one pass over contiguous memory, in vector instructions.
"""

from typing import NamedTuple

import numpy as np

from fxremat.errors import FxrematError
from fxremat.jit import jit
from fxremat.solvers.sizes import ChainSizes, Floats, Ints
from fxremat.units import format_bytes

MOST_BYTES = 16 << 30  # maximum bytes of a table


class Rows(NamedTuple):
    """All rows of a table of costs in one array: row (i, j) is cost[at[i, j] : at[i, j] + high[i, j] - low[i, j]]."""

    low: Ints
    high: Ints
    at: Ints
    cost: Floats


class Grid(NamedTuple):
    """A table that is being filled; all memory is in slots."""

    sizes: ChainSizes
    rows: Rows
    n: int  # number of blocks
    slots: int


class Filled(NamedTuple):
    """A filled table, and what is needed to read schedules off it with memory in bytes."""

    sizes: ChainSizes  # sizes of the chain in bytes
    low: Ints  # [i, j]: the least memory of row (i, j), in bytes
    rows: Rows  # costs of each row; memory in slots
    n: int  # number of blocks
    slots: int
    full: int  # bytes that all slots together stand for


def lay_out(low: Ints, high: Ints, slots: int) -> Rows:
    """Allocate all rows, cut off above `slots`, with infinite costs.

    Raises `FxrematError` if the table would be too large.
    """
    at, total = _places(low, high, slots)
    if total * 8 > MOST_BYTES:
        raise FxrematError(
            f"a table of {slots} slots takes {format_bytes(total * 8)} here; {_fewer(slots, total)} slots would do"
        )
    # not in compiled code, which crashes if Ctrl-C comes while it makes a named tuple
    return Rows(low, high, at, np.full(total, np.inf))


def _fewer(slots: int, total: int) -> int:
    return max(1, slots * (MOST_BYTES // 8) // total)


@jit
def _places(low: Ints, high: Ints, slots: int) -> tuple[Ints, int]:
    """Return the offset of each row in one array, and the array's length; `high` is limited to `slots` + 1 in place."""
    at = np.zeros(low.shape, dtype=np.int64)
    total = 0
    for i in range(low.shape[0]):
        for j in range(low.shape[1]):
            high[i, j] = max(low[i, j], min(high[i, j], slots + 1))
            at[i, j] = total
            if low[i, j] <= slots:
                total += high[i, j] - low[i, j]
    return at, total


@jit
def least(x: float, y: float) -> float:
    """Return min(x, y), in the form that compiles to one vector instruction."""
    return y if y < x else x  # noqa: FURB136


@jit
def value(rows: Rows, i: int, j: int, m: int) -> float:
    """Return the seconds of row (i, j) with memory m."""
    if m < rows.low[i, j]:
        return np.inf
    if m >= rows.high[i, j]:
        return 0.0
    return float(rows.cost[rows.at[i, j] + m - rows.low[i, j]])


@jit
def guess(table: Filled, i: int, j: int, m: int) -> float:
    """Return the seconds of row (i, j) in m bytes; each slot that is missing because of rounding adds a high cost."""
    rows, slots, dear = table.rows, table.slots, float(table.sizes.forward[table.n]) + 1.0
    m, low = m * slots // table.full, int(rows.low[i, j])
    if m >= low:
        return value(rows, i, j, m)
    return float((low - m) * dear + (value(rows, i, j, low) if low <= slots else slots * dear))


@jit
def relax(
    rows: Rows, i: int, j: int, need: int, base: float, left: int, shift: int, right: int, column: int
) -> None:
    """Lower row(i, j)(m) to base + row(left, j)(m - shift) + row(right, column)(m), for all memories m >= need.

    Rows never increase with m: from the first m at which this row is at most `base`, it cannot improve.
    """
    low, cost = rows.low[i, j], rows.cost
    left_low, right_low = rows.low[left, j] + shift, rows.low[right, column]
    left_high, right_high = rows.high[left, j] + shift, rows.high[right, column]
    x, y = rows.at[left, j] - left_low, rows.at[right, column] - right_low
    out = rows.at[i, j] - low  # cost[out + m] is the entry of this row for memory m
    begin, end = max(low, need, left_low, right_low), rows.high[i, j]
    if begin >= end or cost[out + begin] <= base:
        return
    while end - begin > 32 and cost[out + (begin + end) // 2] <= base:
        end = (begin + end) // 2
    left_end, right_end = min(end, left_high), min(end, right_high)
    _add_both(cost, out + begin, x + begin, y + begin, min(left_end, right_end) - begin, base)
    begin = max(begin, min(left_end, right_end))
    _add_one(cost, out + begin, x + begin, left_end - begin, base)
    _add_one(cost, out + begin, y + begin, right_end - begin, base)
    begin = max(begin, left_end, right_end)
    for m in range(begin, end):
        cost[out + m] = least(cost[out + m], base)


@jit
def _add_both(cost: Floats, out: int, x: int, y: int, count: int, base: float) -> None:
    if count > 0:
        mine, left, right = cost[out : out + count], cost[x : x + count], cost[y : y + count]
        for k in range(count):
            mine[k] = least(mine[k], base + left[k] + right[k])


@jit
def _add_one(cost: Floats, out: int, x: int, count: int, base: float) -> None:
    if count > 0:
        mine, other = cost[out : out + count], cost[x : x + count]
        for k in range(count):
            mine[k] = least(mine[k], base + other[k])
