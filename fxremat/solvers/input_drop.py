"""Checkpointing of a chain by dynamic programming, where a saved block may free its input; the default solver.

    cost[s, t, m]   as in persistent.py: least recomputation to run backward t..s, input of s not counted in m
    drop[s, j, m]   least recomputation to run backward j..s when A_j is already stored, counted in m, and its input is
                    not: the chain is rerun up to a_{j-1} before the backward of j

a_j is the output of block j, A_j all that its backward reads; forward(s..j) are seconds, extra(s) those by which the
backward of the chosen option is slower than the fastest.

Only its backward reads the input of a block, so a_{j-1} may be freed as soon as A_j is stored, and recomputed later.

    cost   keep all           extra(s) + cost[s+1, t, m - saved(s)]
           cut after j        forward(s..j) + cost[j+1, t, m - a(j)] + cost[s, j, m]                  j >= s
           save j, lose a(j-1)  forward(s..j-1) + extra(j) + cost[j+1, t, m - saved(j)] + drop[s, j, m]  j > s
    drop   for j instead of t, with drop[., j, .] for cost[., t, .] at the right end; drop[j, j, m] = 0

Each "save" takes the best option of its block, and a row of `drop` belongs to a block and the option it was
saved with. Both tables are one: columns 0..n are cost[., t], column n+1+o is drop of the block of option o.
The table is in slots and the schedule is read off in bytes, as in persistent.py.

O(slots n^3) for one option a block. Beyond the papers, whose schedules keep the input of a saved block.
"""

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.jit import jit
from fxremat.solvers.op_codes import BACKWARD, DROP, SAVE, emit, emit_pass
from fxremat.solvers.rows import Filled, Grid, Rows, guess, lay_out, relax
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
        "input_drop",
        lambda distance, worker, workers: fill_tiles(grid, distance, worker, workers),
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
    """Return, for each row of the table, the least memory that works, and the least one without recomputation.

    Both are in the unit of `sizes`, bytes or slots.
    """
    width = n + 1 + sizes.saved.size
    low = np.zeros((n + 2, width), dtype=np.int64)
    high = np.zeros((n + 2, width), dtype=np.int64)
    for t in range(1, n + 1):
        for s in range(t, 0, -1):
            _bound_row(sizes, low, high, n, s, t, t, 0)
            for d in range(sizes.start[t], sizes.start[t + 1]):
                if s == t:
                    low[s, n + 1 + d] = high[s, n + 1 + d] = sizes.phase[s] + sizes.back[d]
                else:
                    _bound_row(sizes, low, high, n, s, t, n + 1 + d, sizes.saved[d])
    return low, high


@jit
def _bound_row(sizes: ChainSizes, low: Ints, high: Ints, n: int, s: int, t: int, c: int, kept: int) -> None:
    saved, start, held = sizes.saved, sizes.start, sizes.phase[t] + kept
    least, enough = _NEVER, _NEVER
    for o in range(start[s], start[s + 1]):
        need = max(held + sizes.save[o], sizes.phase[s] + sizes.back[o])
        least = min(least, max(need, saved[o] + low[s + 1, c]))
        if sizes.extra[o] == 0.0:
            enough = min(enough, max(need, saved[o] + high[s + 1, c]))
    for j in range(s, t):
        least = min(least, max(held + sizes.run[s, j], sizes.out[j] + low[j + 1, c], low[s, j]))
        if j > s:
            for o in range(start[j], start[j + 1]):
                need = held + max(sizes.run[s, j - 1], sizes.save_next[o])
                least = min(least, max(need, saved[o] + low[j + 1, c], low[s, n + 1 + o]))
    low[s, c], high[s, c] = least, enough


@jit
def fill_tiles(grid: Grid, distance: int, worker: int, workers: int) -> None:
    """Fill every `workers`-th tile (square block of the table) at this distance from the diagonal."""
    sizes, rows, n, slots = grid
    for tile in range(worker, (n - 1) // TILE + 1 - distance, workers):
        s0, t0 = tile * TILE + 1, (tile + distance) * TILE + 1
        s1, t1 = min(s0 + TILE - 1, n), min(t0 + TILE - 1, n)
        for j in range(s1, t0):  # for these j, rows of a tile depend on no other row of the same tile
            for t in range(t0, t1 + 1):
                for s in range(s1, s0 - 1, -1):
                    _split(sizes, rows, n, s, t, j, slots)
        for t in range(t0, t1 + 1):
            for s in range(min(s1, t), s0 - 1, -1):
                for j in range(s, min(s1, t)):
                    _split(sizes, rows, n, s, t, j, slots)
                for j in range(max(s, s1, t0), t):
                    _split(sizes, rows, n, s, t, j, slots)
                _keep(sizes, rows, n, s, t, slots)


@jit
def _keep(sizes: ChainSizes, rows: Rows, n: int, s: int, t: int, slots: int) -> None:
    """Lower the costs of running blocks s..t by the choice to save block s, with each of its options."""
    start, saved = sizes.start, sizes.saved
    for d in range(start[t] - 1, start[t + 1] if s < t else start[t]):
        c = t if d < start[t] else n + 1 + d
        held = sizes.phase[t] + (0 if d < start[t] else saved[d])
        if rows.low[s, c] <= slots:
            for o in range(start[s], start[s + 1]):
                need = max(held + sizes.save[o], sizes.phase[s] + sizes.back[o])
                relax(rows, s, c, need, sizes.extra[o], s + 1, saved[o], 0, 0)


@jit
def _split(sizes: ChainSizes, rows: Rows, n: int, s: int, t: int, j: int, slots: int) -> None:
    """Lower the costs of running blocks s..t by a checkpoint after block j, or by saving block j without its input."""
    start, saved, forward = sizes.start, sizes.saved, sizes.forward
    for d in range(start[t] - 1, start[t + 1]):
        c = t if d < start[t] else n + 1 + d
        held = sizes.phase[t] + (0 if d < start[t] else saved[d])
        if rows.low[s, c] <= slots:
            again = forward[j] - forward[s - 1]
            relax(rows, s, c, held + sizes.run[s, j], again, j + 1, sizes.out[j], s, j)
            if j > s:
                again = forward[j - 1] - forward[s - 1]
                for o in range(start[j], start[j + 1]):
                    need = held + max(sizes.run[s, j - 1], sizes.save_next[o])
                    relax(rows, s, c, need, again + sizes.extra[o], j + 1, saved[o], s, n + 1 + o)


@jit
def trace(table: Filled, m: int) -> Ints:
    """Return the op codes of the best schedule of the whole chain within m bytes."""
    codes: Ints = trace_row(table, 1, table.n, table.n, m)
    return codes


@jit
def trace_row(table: Filled, s: int, t: int, c: int, m: int) -> Ints:
    """Return the op codes of the best schedule that runs backwards t..s within m bytes, from the input of block s.

    c = t: nothing of block t is saved yet. c = n + 1 + option: block t is already saved with that option, but
    its input is not stored.
    """
    sizes, n = table.sizes, table.n
    codes = np.zeros(64, dtype=np.int64)
    todo = [(s, t, c, m)]  # (s, t, c, bytes) still to be emitted; c = 0: only the backward of s
    while todo:
        s, t, c, m = todo.pop()
        if c == 0 or (c > n and s == t):
            codes = emit(codes, BACKWARD, s)
        elif s <= t:
            save, cut, lose = _choose(table, s, t, c, m)
            if cut >= 0:
                codes = emit_pass(codes, s, cut)
                todo.append((s, cut, cut, m))
                todo.append((cut + 1, t, c, m - sizes.out[cut]))
            elif lose >= 0:
                j = s
                while sizes.start[j + 1] <= lose:
                    j += 1
                codes = emit_pass(codes, s, j - 1)
                codes = emit(codes, SAVE, lose)
                codes = emit(codes, DROP, j - 1)
                todo.append((s, j, n + 1 + lose, m))
                todo.append((j + 1, t, c, m - sizes.saved[lose]))
            else:
                codes = emit(codes, SAVE, save)
                todo.append((s, 0, 0, 0))
                todo.append((s + 1, t, c, m - sizes.saved[save]))
    return codes


@jit
def _choose(table: Filled, s: int, t: int, c: int, m: int) -> tuple[int, int, int]:
    """Return the fastest choice that fits into m bytes: (option to save s, last block before a cut, option to save it).

    If block s is saved, the other two are -1; at a plain checkpoint only the second is set; if a later block is
    saved without its input, only the third is.
    """
    sizes, low, n = table.sizes, table.low, table.n
    saved, start, forward = sizes.saved, sizes.start, sizes.forward
    held = sizes.phase[t] + (saved[c - n - 1] if c > n else 0)
    best, save, cut, lose = np.inf, -1, -1, -1
    for o in range(start[s], start[s + 1]):
        need = max(held + sizes.save[o], sizes.phase[s] + sizes.back[o], saved[o] + low[s + 1, c])
        if need <= m:
            cost = sizes.extra[o] + guess(table, s + 1, c, m - saved[o])
            if cost < best:
                best, save = cost, o
    for j in range(s, t):
        if max(held + sizes.run[s, j], sizes.out[j] + low[j + 1, c], low[s, j]) <= m:
            cost = forward[j] - forward[s - 1] + guess(table, j + 1, c, m - sizes.out[j])
            cost += guess(table, s, j, m)
            if cost < best:
                best, save, cut, lose = cost, -1, j, -1
        if j > s:
            again = forward[j - 1] - forward[s - 1]
            for o in range(start[j], start[j + 1]):
                held_pass = held + max(sizes.run[s, j - 1], sizes.save_next[o])
                need = max(held_pass, saved[o] + low[j + 1, c], low[s, n + 1 + o])
                if need <= m:
                    cost = again + sizes.extra[o] + guess(table, j + 1, c, m - saved[o])
                    cost += guess(table, s, n + 1 + o, m)
                    if cost < best:
                        best, save, cut, lose = cost, -1, -1, o
    return save, cut, lose
