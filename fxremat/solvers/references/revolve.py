"""Checkpoints only, without saving for several backwards: optimal schedules of automatic differentiation.

    cost[s, t, m]   least recomputation to run backward t..s from block s with memory m, where nothing but
                    checkpoints a_j is kept and every B_l comes right after an Fall_l of its own

    one block   extra(s)                                                          the best option that fits
    cut after j  forward(s..j-1) + cost[j+1, t, m - a(j)] + cost[s, j, m]         s <= j < t

a_j is the output of block j. Only avoidable recomputation is counted: in every such schedule each forward but that of t
runs at least twice. The table is in slots, the schedule is read off in bytes, as in persistent.py.

A. Griewank and A. Walther, Algorithm 799: Revolve (2000), for unequal blocks as in Appendix C of Gruslys et al.,
Memory-Efficient Backpropagation Through Time (2016); "revolve" in the experiments of Beaumont et al.,
Optimal Re-Materialization Strategies for Heterogeneous Chains. O(slots n^3).
"""

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.jit import jit
from fxremat.solvers.op_codes import BACKWARD, SAVE, emit, emit_pass
from fxremat.solvers.rows import Filled, Rows, guess, lay_out, relax
from fxremat.solvers.sizes import ChainSizes, Ints, in_bytes, in_slots
from fxremat.solvers.table import Table, table_of

_NEVER = 1 << 60


def build(chain: Chain, mem: int, slots: int) -> Table:
    """Build the table of costs for every budget up to `mem` bytes; `enough` keeps every checkpoint."""
    n = len(chain)
    exact = in_bytes(chain)
    low, high = bounds(exact, n)
    sizes = in_slots(chain, mem, slots)
    rows = lay_out(*bounds(sizes, n), slots)
    fill(sizes, rows, n)
    twice = exact.forward[n - 1]
    return table_of(
        chain,
        mem,
        slots,
        rows=rows,
        whole=(1, n),
        low=low,
        high=high,
        trace=lambda m, full: trace(Filled(exact, low, rows, n, slots, full), m),
        always=twice,
    )


@jit
def bounds(sizes: ChainSizes, n: int) -> tuple[Ints, Ints]:
    """Return, for each pair of blocks s and t, the least memory to run s..t, and the least one with every checkpoint.
    """
    phase, out, start = sizes.phase, sizes.out, sizes.start
    low = np.full((n + 2, n + 1), _NEVER)
    high = np.full((n + 2, n + 1), _NEVER)
    low[0, :] = high[0, :] = 0  # row 0 has zero cost
    for t in range(1, n + 1):
        for o in range(start[t], start[t + 1]):
            need = phase[t] + max(sizes.save[o], sizes.back[o])
            low[t, t] = min(low[t, t], need)
            if sizes.extra[o] == 0.0:
                high[t, t] = min(high[t, t], need)
        for s in range(t - 1, 0, -1):
            for j in range(s, t):
                least = max(phase[t] + sizes.run[s, j], out[j] + low[j + 1, t], low[s, j])
                low[s, t] = min(low[s, t], least)
            high[s, t] = max(phase[t] + sizes.run[s, s], out[s] + high[s + 1, t], high[s, s])
    return low, high


@jit
def fill(sizes: ChainSizes, rows: Rows, n: int) -> None:
    """Fill all rows of the table."""
    phase, start, forward = sizes.phase, sizes.start, sizes.forward
    for t in range(1, n + 1):
        for o in range(start[t], start[t + 1]):
            relax(rows, t, t, phase[t] + max(sizes.save[o], sizes.back[o]), sizes.extra[o], 0, 0, 0, 0)
        for s in range(t - 1, 0, -1):
            for j in range(s, t):
                need, again = phase[t] + sizes.run[s, j], forward[j - 1] - forward[s - 1]
                relax(rows, s, t, need, again, j + 1, sizes.out[j], s, j)


@jit
def trace(table: Filled, m: int) -> Ints:
    """Return the op codes of the best schedule of the whole chain within m bytes."""
    sizes, low = table.sizes, table.low
    phase, out, start, forward = sizes.phase, sizes.out, sizes.start, sizes.forward
    codes = np.zeros(64, dtype=np.int64)
    todo = [(1, table.n, m)]
    while todo:
        s, t, m = todo.pop()
        best, save, cut = np.inf, -1, -1
        for o in range(start[s], start[s + 1] if s == t else start[s]):
            if phase[t] + max(sizes.save[o], sizes.back[o]) <= m and sizes.extra[o] < best:
                best, save = sizes.extra[o], o
        for j in range(s, t):
            if max(phase[t] + sizes.run[s, j], out[j] + low[j + 1, t], low[s, j]) <= m:
                cost = forward[j - 1] - forward[s - 1] + guess(table, j + 1, t, m - out[j])
                cost += guess(table, s, j, m)
                if cost < best:
                    best, cut = cost, j
        if cut == -1:
            codes = emit(codes, SAVE, save)
            codes = emit(codes, BACKWARD, s)
        else:
            codes = emit_pass(codes, s, cut)
            todo.append((s, cut, m))
            todo.append((cut + 1, t, m - out[cut]))
    return codes
