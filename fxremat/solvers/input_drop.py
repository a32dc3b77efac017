"""Checkpointing of a chain where a saved block may lose its input, by dynamic programming. The default solver.

    cost[s, t, m]   as in persistent.py: least recomputation to run backward t..s, input of s stored, not counted
    drop[s, j, m]   the same for j..s when A_j is already stored, counted in m, and its input is not:
                    the chain is rerun up to a_{j-1} before the backward of j

Only its backward reads the input of a block, so a_{j-1} may go as soon as A_j is there, and come back later.

    cost   keep all              extra(s) + cost[s+1, t, m - saved(s)]
           cut after j           forward(s..j) + cost[j+1, t, m - a(j)] + cost[s, j, m]                 s <= j < t
           save j, drop input    forward(s..j-1) + extra(j) + cost[j+1, t, m - saved(j)] + drop[s, j, m] s < j < t
    drop   nothing to rerun      0                                                                      s = j
           keep all              extra(s) + drop[s+1, j, m - saved(s)]
           cut after i           forward(s..i) + drop[i+1, j, m - a(i)] + cost[s, i, m]                 s <= i < j
           save i, drop input    forward(s..i-1) + extra(i) + drop[i+1, j, m - saved(i)] + drop[s, i, m] s < i < j

Each "save" takes the best option of its block; a row of `drop` belongs to block j and the option it was saved with.
The table is in slots and the schedule is read off in bytes, as in persistent.py. O(slots n^3) for one option a block.
This goes beyond the papers, whose schedules never drop the input of a saved block.
"""

import numpy as np

from fxremat.chain import Chain
from fxremat.schedule import Schedule
from fxremat.solvers.rows import Rows, guess, jit, lay_out, relax, value
from fxremat.solvers.sizes import Ints, Sizes, in_bytes, in_slots
from fxremat.solvers.table import Table
from fxremat.solvers.tape import BACKWARD, CHECKPOINT, DROP, SAVE, emit, emit_pass

_NEVER = 1 << 60
_COST, _DROP, _BACKWARD = range(3)


def frontier(chain: Chain, mem: int, *, slots: int = 500, count: int = 100) -> list[Schedule]:
    """At most `count` schedules from one table for `mem` bytes, from the fastest to the least memory.

    Raises `BudgetTooSmall`. The cost of the call is that of one table.
    """
    return build(chain, mem, slots).frontier(count)


def build(chain: Chain, mem: int, slots: int) -> Table:
    """The table of costs for every budget up to `mem` bytes."""
    n = len(chain)
    exact = in_bytes(chain)
    low, high, drop_low, _ = bounds(exact, n)
    sizes = in_slots(chain, mem, slots)
    slot_low, slot_high, slot_drop_low, slot_drop_high = bounds(sizes, n)
    rows = lay_out(slot_low, slot_high, slots)
    drops = lay_out(slot_drop_low, slot_drop_high, slots)
    fill(sizes, rows, drops, n, slots)

    def read(m: int, full: int) -> Ints:
        tape: Ints = trace(exact, low, drop_low, rows, drops, n, m, full, slots)
        return tape

    return Table(
        chain=chain,
        mem=mem,
        slots=slots,
        least=int(low[1, n]) + chain.input_bytes,
        enough=int(high[1, n]) + chain.input_bytes,
        curve=np.array([value(rows, 1, n, k - sizes.out[0]) for k in range(slots + 1)]),
        trace=read,
    )


@jit
def bounds(sizes: Sizes, n: int) -> tuple[Ints, Ints, Ints, Ints]:
    """For each row, the least memory that works and one from which on everything is kept, in any unit."""
    phase, out, start, saved = sizes.phase, sizes.out, sizes.start, sizes.saved
    low = np.zeros((n + 2, n + 1), dtype=np.int64)
    high = np.zeros((n + 2, n + 1), dtype=np.int64)
    drop_low = np.zeros((n + 2, saved.size), dtype=np.int64)
    drop_high = np.zeros((n + 2, saved.size), dtype=np.int64)
    for t in range(1, n + 1):
        for s in range(t, 0, -1):
            least, enough = _NEVER, _NEVER
            for o in range(start[s], start[s + 1]):
                need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o])
                least = min(least, max(need, saved[o] + low[s + 1, t]))
                if sizes.extra[o] == 0.0:
                    enough = min(enough, max(need, saved[o] + high[s + 1, t]))
            before, run = 0, sizes.first[s]  # the needs of the forwards s..j-1 and s..j
            for j in range(s, t):
                if j > s:
                    before, run = run, max(run, sizes.next[j])
                    for o in range(start[j], start[j + 1]):
                        need = phase[t] + max(before, sizes.save_next[o])
                        least = min(least, max(need, saved[o] + low[j + 1, t], drop_low[s, o]))
                least = min(least, max(phase[t] + run, out[j] + low[j + 1, t], low[s, j]))
            low[s, t], high[s, t] = least, enough
            for d in range(start[t], start[t + 1]):  # A_t saved with option d: t is the j of drop[s, j]
                if s == t:
                    drop_low[s, d] = drop_high[s, d] = phase[s] + sizes.back[d]
                    continue
                held = phase[t] + saved[d]
                least, enough = _NEVER, _NEVER
                for o in range(start[s], start[s + 1]):
                    need = max(held + sizes.save[o], phase[s] + sizes.back[o])
                    least = min(least, max(need, saved[o] + drop_low[s + 1, d]))
                    if sizes.extra[o] == 0.0:
                        enough = min(enough, max(need, saved[o] + drop_high[s + 1, d]))
                before, run = 0, sizes.first[s]
                for i in range(s, t):
                    if i > s:
                        before, run = run, max(run, sizes.next[i])
                        for o in range(start[i], start[i + 1]):
                            need = held + max(before, sizes.save_next[o])
                            least = min(least, max(need, saved[o] + drop_low[i + 1, d], drop_low[s, o]))
                    least = min(least, max(held + run, out[i] + drop_low[i + 1, d], low[s, i]))
                drop_low[s, d], drop_high[s, d] = least, enough
    return low, high, drop_low, drop_high


@jit
def fill(sizes: Sizes, rows: Rows, drops: Rows, n: int, slots: int) -> None:
    """Fill every row of both tables by the recursion."""
    start = sizes.start
    for t in range(1, n + 1):
        for s in range(t, 0, -1):
            _fill_row(sizes, rows, drops, rows, s, t, t, 0, slots)
            if s < t:
                for d in range(start[t], start[t + 1]):
                    _fill_row(sizes, rows, drops, drops, s, t, d, sizes.saved[d], slots)


@jit
def _fill_row(
    sizes: Sizes, rows: Rows, drops: Rows, table: Rows, s: int, t: int, column: int, kept: int, slots: int
) -> None:
    """Fill row (s, column) of `table`: `rows` with column t, or `drops` with the option of t and A_t kept."""
    phase, start, saved, forward = sizes.phase, sizes.start, sizes.saved, sizes.forward
    low = table.low[s, column]
    if low > slots or low == table.high[s, column]:
        return
    row = table.cost[table.at[s, column] : table.at[s, column] + table.high[s, column] - low]
    held = phase[t] + kept
    for o in range(start[s], start[s + 1]):
        need = max(held + sizes.save[o], phase[s] + sizes.back[o])
        relax(row, low, need, sizes.extra[o], table, s + 1, column, saved[o], rows, 0, 0)
    before, run = 0, sizes.first[s]
    for j in range(s, t):
        if j > s:
            before, run = run, max(run, sizes.next[j])
            again = forward[j - 1] - forward[s - 1]
            for o in range(start[j], start[j + 1]):
                need = held + max(before, sizes.save_next[o])
                base = again + sizes.extra[o]
                relax(row, low, need, base, table, j + 1, column, saved[o], drops, s, o)
        again = forward[j] - forward[s - 1]
        relax(row, low, held + run, again, table, j + 1, column, sizes.out[j], rows, s, j)


@jit
def trace(
    sizes: Sizes,
    low: Ints,
    drop_low: Ints,
    rows: Rows,
    drops: Rows,
    n: int,
    m: int,
    full: int,
    slots: int,
) -> Ints:
    """The ops of cost[1, n, m] on a tape; m, `sizes` and lows are in bytes, and `slots` stand for `full` bytes."""
    start, saved = sizes.start, sizes.saved
    tape = np.zeros(64, dtype=np.int64)
    todo = [(_COST, 1, n, 0, m)]
    while todo:
        kind, s, t, d, m = todo.pop()
        if kind == _BACKWARD:
            tape = emit(tape, BACKWARD, s)
            continue
        if kind == _DROP and s == t:
            tape = emit(tape, BACKWARD, s)
            continue
        if s > t:
            continue
        if kind == _COST:
            save, cut, lose = _choose(
                sizes, low, drop_low, rows, drops, low, rows, s, t, t, 0, m, full, slots
            )
        else:
            kept = saved[d]
            save, cut, lose = _choose(
                sizes, low, drop_low, rows, drops, drop_low, drops, s, t, d, kept, m, full, slots
            )
        if cut >= 0:
            tape = emit_pass(tape, s, cut)
            todo.append((_COST, s, cut, 0, m))
            todo.append((kind, cut + 1, t, d, m - sizes.out[cut]))
        elif lose >= 0:
            j = np.searchsorted(start, lose, side="right") - 1
            tape = emit_pass(tape, s, j - 1)
            tape = emit(tape, SAVE, lose)
            tape = emit(tape, DROP, j - 1)
            todo.append((_DROP, s, j, lose, m))
            todo.append((kind, j + 1, t, d, m - saved[lose]))
        else:
            tape = emit(tape, SAVE, save)
            todo.append((_BACKWARD, s, 0, 0, 0))
            todo.append((kind, s + 1, t, d, m - saved[save]))
    return tape


@jit
def _choose(
    sizes: Sizes,
    low: Ints,
    drop_low: Ints,
    rows: Rows,
    drops: Rows,
    table_low: Ints,
    table: Rows,
    s: int,
    t: int,
    column: int,
    kept: int,
    m: int,
    full: int,
    slots: int,
) -> tuple[int, int, int]:
    """Of what fits in m bytes the choice that the table thinks fastest: (option of s, cut, option of j), -1 if not."""
    phase, start, saved, forward = sizes.phase, sizes.start, sizes.saved, sizes.forward
    dear = forward[-1] + 1.0
    held = phase[t] + kept
    best, save, cut, lose = np.inf, -1, -1, -1
    for o in range(start[s], start[s + 1]):
        need = max(held + sizes.save[o], phase[s] + sizes.back[o], saved[o] + table_low[s + 1, column])
        if need <= m:
            left = (m - saved[o]) * slots // full
            cost = sizes.extra[o] + guess(table, s + 1, column, left, slots, dear)
            if cost < best:
                best, save = cost, o
    before, run = 0, sizes.first[s]
    whole = m * slots // full
    for j in range(s, t):
        if j > s:
            before, run = run, max(run, sizes.next[j])
            again = forward[j - 1] - forward[s - 1]
            for o in range(start[j], start[j + 1]):
                need = max(held + max(before, sizes.save_next[o]), saved[o] + table_low[j + 1, column])
                if need <= m and drop_low[s, o] <= m:
                    left = (m - saved[o]) * slots // full
                    cost = again + sizes.extra[o] + guess(table, j + 1, column, left, slots, dear)
                    cost += guess(drops, s, o, whole, slots, dear)
                    if cost < best:
                        best, save, cut, lose = cost, -1, -1, o
        if max(held + run, sizes.out[j] + table_low[j + 1, column], low[s, j]) <= m:
            left = (m - sizes.out[j]) * slots // full
            cost = forward[j] - forward[s - 1] + guess(table, j + 1, column, left, slots, dear)
            cost += guess(rows, s, j, whole, slots, dear)
            if cost < best:
                best, save, cut, lose = cost, -1, j, -1
    return save, cut, lose
