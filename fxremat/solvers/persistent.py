"""Optimal persistent checkpointing of a chain, by dynamic programming.

    cost[s, t, m]   least time spent recomputing to run backward t..s from block s with memory m;
                    the input of s is stored and not counted in m, the gradient of a_t is held

    keep all     extra(s) + cost[s+1, t, m - saved(s)]                          for every option of s
    cut after j  forward(s..j) + cost[j+1, t, m - a(j)] + cost[s, j, m]         s <= j < t

"Persistent": a value once stored stays until its backward. Every forward and backward runs at least once
whatever the schedule, so only what comes on top is counted: cost is 0 where everything can be kept.

The table is in slots, the schedule is read off in bytes: each choice is one that exactly fits, by the least
memory of its subproblems (`bounds`, which needs no table over m); the table says which of them is fastest.

Beaumont et al., Optimal Re-Materialization Strategies for Heterogeneous Chains, Theorem 4.8. O(slots n^3).
"""

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.jit import jit
from fxremat.solvers.op_codes import BACKWARD, SAVE, emit, emit_pass
from fxremat.solvers.rows import Rows, guess, lay_out, relax
from fxremat.solvers.sizes import Ints, Sizes, in_bytes, in_slots
from fxremat.solvers.table import Table, frontier_of, table_of
from fxremat.solvers.tiles import TILE, fill_squares

_NEVER = 1 << 60


def build(chain: Chain, mem: int, slots: int) -> Table:
    """The table of costs for every budget up to `mem` bytes."""
    n = len(chain)
    exact = in_bytes(chain)
    low, high = bounds(exact, n)
    sizes = in_slots(chain, mem, slots)
    rows = lay_out(*bounds(sizes, n), slots)
    fill_squares(
        n,
        "persistent",
        lambda distance, worker, workers: _fill_squares(sizes, rows, n, slots, distance, worker, workers),
    )
    return table_of(
        chain,
        mem,
        slots,
        rows=rows,
        whole=(1, n),
        low=low,
        high=high,
        trace=lambda m, full: trace(exact, low, rows, n, m, full, slots),
    )


frontier = frontier_of(build)


@jit
def bounds(sizes: Sizes, n: int) -> tuple[Ints, Ints]:
    """For each (s, t), the least memory that works and one from which on everything is kept, in any unit."""
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
def _fill_squares(
    sizes: Sizes, rows: Rows, n: int, slots: int, distance: int, worker: int, workers: int
) -> None:
    """Fill every `workers`-th of the tiles that lie so far from the diagonal."""
    for square in range(worker, (n - 1) // TILE + 1 - distance, workers):
        s0, t0 = square * TILE + 1, (square + distance) * TILE + 1
        s1, t1 = min(s0 + TILE - 1, n), min(t0 + TILE - 1, n)
        for j in range(s1, t0):  # here the rows of a tile read no other row of it
            for t in range(t0, t1 + 1):
                for s in range(s1, s0 - 1, -1):
                    _cut(sizes, rows, s, t, j, slots)
        for t in range(t0, t1 + 1):
            for s in range(min(s1, t), s0 - 1, -1):
                for j in range(s, min(s1, t)):
                    _cut(sizes, rows, s, t, j, slots)
                for j in range(max(s, s1, t0), t):
                    _cut(sizes, rows, s, t, j, slots)
                if rows.low[s, t] <= slots:
                    for o in range(sizes.start[s], sizes.start[s + 1]):
                        need = max(sizes.phase[t] + sizes.save[o], sizes.phase[s] + sizes.back[o])
                        relax(rows, s, t, need, sizes.extra[o], s + 1, sizes.saved[o], 0, 0)


@jit
def _cut(sizes: Sizes, rows: Rows, s: int, t: int, j: int, slots: int) -> None:
    """Let the row of (s, t) run on to j and store a_j."""
    if rows.low[s, t] <= slots:
        again = sizes.forward[j] - sizes.forward[s - 1]
        relax(rows, s, t, sizes.phase[t] + sizes.run[s, j], again, j + 1, sizes.out[j], s, j)


@jit
def trace(sizes: Sizes, low: Ints, rows: Rows, n: int, m: int, full: int, slots: int) -> Ints:
    """The ops of cost[1, n, m] on a tape; m, `sizes`, `low` are in bytes, `slots` stand for `full` bytes."""
    phase, out, start, forward = sizes.phase, sizes.out, sizes.start, sizes.forward
    dear = forward[n] + 1.0
    tape = np.zeros(64, dtype=np.int64)
    todo = [(1, n, m)]  # t = 0: the backward of s
    while todo:
        s, t, m = todo.pop()
        if t == 0:
            tape = emit(tape, BACKWARD, s)
        if s > t:
            continue
        best, save, cut = np.inf, -1, -1
        for o in range(start[s], start[s + 1]):
            need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o], sizes.saved[o] + low[s + 1, t])
            if need <= m:
                left = (m - sizes.saved[o]) * slots // full
                cost = sizes.extra[o] + guess(rows, s + 1, t, left, slots, dear)
                if cost < best:
                    best, save = cost, o
        for j in range(s, t):
            if max(phase[t] + sizes.run[s, j], out[j] + low[j + 1, t], low[s, j]) <= m:
                left = (m - out[j]) * slots // full
                cost = forward[j] - forward[s - 1] + guess(rows, j + 1, t, left, slots, dear)
                cost += guess(rows, s, j, m * slots // full, slots, dear)
                if cost < best:
                    best, cut = cost, j
        if cut == -1:
            tape = emit(tape, SAVE, save)
            todo.append((s, 0, 0))
            todo.append((s + 1, t, m - sizes.saved[save]))
        else:
            tape = emit_pass(tape, s, cut)
            todo.append((s, cut, m))
            todo.append((cut + 1, t, m - out[cut]))
    return tape
