"""Optimal checkpointing of a chain if stored values stay stored until their backward, by dynamic programming.

    cost[s, t, m]   least time spent recomputing to run backward t..s from block s with memory m;
                    the input of s is stored and not counted in m, the gradient of a_t is held

    keep all     extra(s) + cost[s+1, t, m - saved(s)]                          for every option of s
    cut after j  forward(s..j) + cost[j+1, t, m - a(j)] + cost[s, j, m]         s <= j < t

a_j is the output of block j; forward(s..j) are seconds, a(j) and saved(s) bytes, extra(s) the seconds by which the
backward of the chosen option is slower than the fastest.

"Persistent": a stored value stays until its backward. Every forward and backward runs at least once whatever the
schedule, so only the additional time is counted: cost is 0 where everything can be kept.

The table is in slots, the schedule is read off in bytes: each choice is one that exactly fits, by the least memory of
its subproblems (`bounds`, which needs no table over m); the table says which of them is fastest.

Beaumont et al., Optimal Re-Materialization Strategies for Heterogeneous Chains, Theorem 4.8. O(slots n^3).
"""

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.jit import jit
from fxremat.solvers.op_codes import BACKWARD, SAVE, emit, emit_pass
from fxremat.solvers.rows import Filled, Grid, guess, lay_out, relax
from fxremat.solvers.sizes import ChainSizes, Ints, in_bytes, in_slots
from fxremat.solvers.table import Table, table_of
from fxremat.solvers.tiles import TILE, fill_tiles_by_diagonal

_NEVER = 1 << 60


def build(chain: Chain, mem: int, slots: int) -> Table:
    """Build the table of costs for every budget up to `mem` bytes."""
    n = len(chain)
    exact = in_bytes(chain)
    low, high = bounds(exact, n)
    sizes = in_slots(chain, mem, slots)
    grid = Grid(sizes, lay_out(*bounds(sizes, n), slots), n, slots)
    fill_tiles_by_diagonal(
        n,
        "persistent",
        lambda distance, worker, workers: _fill_tiles(grid, distance, worker, workers),
    )
    return table_of(
        chain,
        mem,
        slots,
        rows=grid.rows,
        whole=(1, n),
        low=low,
        high=high,
        trace=lambda m, full: trace(Filled(exact, low, grid.rows, n, slots, full), m),
    )


@jit
def bounds(sizes: ChainSizes, n: int) -> tuple[Ints, Ints]:
    """Return, for each pair of blocks s and t, the least memory to run s..t, and the least one without recomputation.

    Both are in the unit of `sizes`, bytes or slots.
    """
    phase, out, start = sizes.phase, sizes.out, sizes.start
    low = np.zeros((n + 2, n + 1), dtype=np.int64)
    high = np.zeros((n + 2, n + 1), dtype=np.int64)
    for t in range(1, n + 1):
        for s in range(t, 0, -1):
            least, enough = _NEVER, _NEVER
            for o in range(start[s], start[s + 1]):
                need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o])
                least = min(least, max(need, sizes.saved[o] + low[s + 1, t]))
                if sizes.extra[o] == 0.0:
                    enough = min(enough, max(need, sizes.saved[o] + high[s + 1, t]))
            for j in range(s, t):
                least = min(least, max(phase[t] + sizes.run[s, j], out[j] + low[j + 1, t], low[s, j]))
            low[s, t], high[s, t] = least, enough
    return low, high


@jit
def _fill_tiles(grid: Grid, distance: int, worker: int, workers: int) -> None:
    """Fill every `workers`-th tile (square block of the table) at this distance from the diagonal."""
    sizes, rows, n = grid.sizes, grid.rows, grid.n
    for tile in range(worker, (n - 1) // TILE + 1 - distance, workers):
        s0, t0 = tile * TILE + 1, (tile + distance) * TILE + 1
        s1, t1 = min(s0 + TILE - 1, n), min(t0 + TILE - 1, n)
        for j in range(s1, t0):  # for these j, rows of a tile depend on no other row of the same tile
            for t in range(t0, t1 + 1):
                for s in range(s1, s0 - 1, -1):
                    _cut(grid, s, t, j)
        for t in range(t0, t1 + 1):
            for s in range(min(s1, t), s0 - 1, -1):
                for j in range(s, min(s1, t)):
                    _cut(grid, s, t, j)
                for j in range(max(s, s1, t0), t):
                    _cut(grid, s, t, j)
                if rows.low[s, t] <= grid.slots:
                    for o in range(sizes.start[s], sizes.start[s + 1]):
                        need = max(sizes.phase[t] + sizes.save[o], sizes.phase[s] + sizes.back[o])
                        relax(rows, s, t, need, sizes.extra[o], s + 1, sizes.saved[o], 0, 0)


@jit
def _cut(grid: Grid, s: int, t: int, j: int) -> None:
    """Lower the costs of running blocks s..t by the choice to store a checkpoint after block j."""
    sizes, rows = grid.sizes, grid.rows
    if rows.low[s, t] <= grid.slots:
        again = sizes.forward[j] - sizes.forward[s - 1]
        relax(rows, s, t, sizes.phase[t] + sizes.run[s, j], again, j + 1, sizes.out[j], s, j)


@jit
def trace(table: Filled, m: int) -> Ints:
    """Return the op codes of the best schedule of the whole chain within m bytes."""
    sizes, low = table.sizes, table.low
    phase, out, start, forward = sizes.phase, sizes.out, sizes.start, sizes.forward
    codes = np.zeros(64, dtype=np.int64)
    todo = [(1, table.n, m)]  # (s, t, bytes) still to be emitted; t = 0: only the backward of s
    while todo:
        s, t, m = todo.pop()
        if t == 0:
            codes = emit(codes, BACKWARD, s)
        if s > t:
            continue
        best, save, cut = np.inf, -1, -1
        for o in range(start[s], start[s + 1]):
            need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o], sizes.saved[o] + low[s + 1, t])
            if need <= m:
                cost = sizes.extra[o] + guess(table, s + 1, t, m - sizes.saved[o])
                if cost < best:
                    best, save = cost, o
        for j in range(s, t):
            if max(phase[t] + sizes.run[s, j], out[j] + low[j + 1, t], low[s, j]) <= m:
                cost = forward[j] - forward[s - 1] + guess(table, j + 1, t, m - out[j])
                cost += guess(table, s, j, m)
                if cost < best:
                    best, cut = cost, j
        if cut == -1:
            codes = emit(codes, SAVE, save)
            todo.append((s, 0, 0))
            todo.append((s + 1, t, m - sizes.saved[save]))
        else:
            codes = emit_pass(codes, s, cut)
            todo.append((s, cut, m))
            todo.append((cut + 1, t, m - out[cut]))
    return codes
