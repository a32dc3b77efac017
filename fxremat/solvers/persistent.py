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

from fxremat.chain import Chain
from fxremat.schedule import Schedule
from fxremat.solvers.rows import Rows, guess, jit, lay_out, relax, value
from fxremat.solvers.sizes import Ints, Sizes, in_bytes, in_slots
from fxremat.solvers.table import Table
from fxremat.solvers.tape import BACKWARD, SAVE, emit, emit_pass

_NEVER = 1 << 60


def frontier(chain: Chain, mem: int, *, slots: int = 500, count: int = 100) -> list[Schedule]:
    """At most `count` schedules from one table for `mem` bytes, from the fastest to the least memory.

    Raises `BudgetTooSmall`. The cost of the call is that of one table.
    """
    return build(chain, mem, slots).frontier(count)


def build(chain: Chain, mem: int, slots: int) -> Table:
    """The table of costs for every budget up to `mem` bytes."""
    n = len(chain)
    exact = in_bytes(chain)
    low, high = bounds(exact, n)
    sizes = in_slots(chain, mem, slots)
    rows = lay_out(*bounds(sizes, n), slots)
    fill(sizes, rows, n, slots)

    def read(m: int, full: int) -> Ints:
        tape: Ints = trace(exact, low, rows, n, m, full, slots)
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
def fill(sizes: Sizes, rows: Rows, n: int, slots: int) -> None:
    """Fill every row by the recursion."""
    phase, out, start, forward = sizes.phase, sizes.out, sizes.start, sizes.forward
    for t in range(1, n + 1):
        for s in range(t, 0, -1):
            if rows.low[s, t] > slots:
                continue
            for o in range(start[s], start[s + 1]):
                need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o])
                relax(rows, s, t, need, sizes.extra[o], s + 1, sizes.saved[o], 0, 0)
            for j in range(s, t):
                relax(
                    rows, s, t, phase[t] + sizes.run[s, j], forward[j] - forward[s - 1], j + 1, out[j], s, j
                )


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
