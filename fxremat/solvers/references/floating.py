"""Optimal checkpointing of a chain if a later output may replace a stored one, by dynamic programming.

    cost[s, t, l, m]  least recomputation to run backward t..l from block s, l in s..t; a_{s-1} is stored, may be
                      freed at any time unless s = l, and is not counted in m; the gradient of a_t is held

    keep all   extra(s) + cost[s+1, t, s+1, m - saved(s)]                                            s = l
    move       forward(s..r-1) + cut[r, t, l, m - x]      x = a(r-1) - a(s-1) >= 0                 s <= r <= l
    cut[r, t, l, m] = forward(r..j) + cost[j+1, t, q, m - a(j)] + cost[r, q-1, l, m]   r <= j < q <= t, l < q

a_i is the output of block i, A_i all that its backward reads. "Floating": the checkpoint from which B_t..B_q start
again and again may be anywhere left of q, and the backwards that it leaves, B_{q-1}..B_l, start from a checkpoint
further left. A move replaces a_{s-1} by a_{r-1} on the way; as a separate step it saves one loop over the chain:
O(slots n^5) instead of O(slots n^6).

Memory of the moving forwards h = s..r-1, beyond phase[t]:  a(s) + scratch for h = s, a(h-1) + a(h) + scratch
- a(s-1) for the others. The theorem as printed has one bound for all forwards up to t, without x: it refuses
moves that fit and admits some that do not. Nor does the theorem give what its paper announces for the
counter-example of A. Shilova's thesis (2021), Fig. 2.3 (2n; here 10, 14, 18 for n = 4, 6, 8): that schedule keeps A_2
and drops its input a_1, which no step here can do. `exact` finds it.

Sizes that are differences are rounded up as such. Read off in bytes, as in persistent.py.

Beaumont et al., Optimal Re-Materialization Strategies for Heterogeneous Chains, Theorem 4.7.
"""

from typing import NamedTuple

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.errors import FxrematError
from fxremat.jit import jit
from fxremat.progress import progress
from fxremat.solvers.op_codes import BACKWARD, NONE, SAVE, emit, emit_pass
from fxremat.solvers.rows import Filled, Rows, guess, lay_out, relax
from fxremat.solvers.sizes import ChainSizes, Ints, in_bytes, in_slots
from fxremat.solvers.table import Table, table_of

_NEVER = 1 << 60
_ENTRIES = 1 << 27  # maximum number of costs in a table: 8 bytes each, 1 GiB


class CheckpointMoves(NamedTuple):
    """The memory needed to replace the stored output of block s-1 by that of block r-1, in bytes or in slots."""

    allowed: Ints  # [s, r]: 1 if the output of block r-1 has at least the bytes of that of s-1, else 0
    more: Ints  # [s, r]: by how much the output of block r-1 is larger than that of s-1
    run: Ints  # [s, r]: what the forwards s..r-1 need in addition to memory that is in use anyway


def build(chain: Chain, mem: int, slots: int) -> Table:
    """Build the table of costs for every budget up to `mem` bytes."""
    n = len(chain)
    exact, exact_moves = in_bytes(chain), _moves(chain, 1, 1)
    low, high = bounds(exact, exact_moves, n)
    sizes, moves = in_slots(chain, mem, slots), _moves(chain, slots, mem)
    rows = lay_out(*_affordable(*bounds(sizes, moves, n), slots), slots)
    for t in progress(range(1, n + 1), "floating"):
        for s in range(t, 0, -1):
            fill(sizes, moves, rows, n, s, t)
    return table_of(
        chain,
        mem,
        slots,
        rows=rows,
        whole=(int(place(n, 1, n, 1)), 0),
        low=low,
        high=high,
        trace=lambda m, full: trace(Filled(exact, low, rows, n, slots, full), exact_moves, m),
    )


def _affordable(low: Ints, high: Ints, slots: int) -> tuple[Ints, Ints]:
    """Return the bounds unchanged. Raises `FxrematError` if the table would have more than `_ENTRIES` costs."""
    entries = int(np.where(low <= slots, np.minimum(high, slots + 1) - low, 0).sum())
    if entries > _ENTRIES:
        most = slots * _ENTRIES // entries
        raise FxrematError(f"a table of {entries} costs is too large; try {most} slots instead of {slots}")
    return low, high


def _moves(chain: Chain, slots: int, mem: int) -> CheckpointMoves:
    """Return the memory for replacing stored outputs, in slots of mem / slots bytes each, rounded up."""
    n, out = len(chain), np.array(chain.output_sizes, dtype=np.int64)
    more, run = np.zeros((n + 2, n + 2), dtype=np.int64), np.zeros((n + 2, n + 2), dtype=np.int64)
    for s in range(1, n + 1):
        more[s, s : n + 1] = out[s - 1 : n] - out[s - 1]
        for r in range(s + 1, n + 1):  # run[s, s] stays 0: no forward runs
            one = int(out[r - 1]) + chain.blocks[r - 2].forward_scratch
            before = int(out[r - 2] - out[s - 1]) if r - 1 > s else 0
            run[s, r] = max(run[s, r - 1], one + before)
    limit = 2 * slots + 2 if slots != mem else _NEVER

    def units(sizes: Ints) -> Ints:
        return np.array([[min(-(-int(x) * slots // mem), limit) for x in row] for row in sizes.tolist()])

    allowed = np.array(more >= 0, dtype=np.int64)
    return CheckpointMoves(allowed, units(more), units(run))


@jit
def place(n: int, s: int, t: int, l: int) -> int:  # noqa: E741
    """Return the index of the row cost[s, t, l]; that of cut[s, t, l] is larger by (n + 2)^3. Row 0 is all zeros."""
    return (s * (n + 2) + t) * (n + 2) + l


@jit
def bounds(sizes: ChainSizes, moves: CheckpointMoves, n: int) -> tuple[Ints, Ints]:
    """Return, for each row of the table, the least memory that works, and the least one without recomputation.

    Both are in the unit of `sizes`, bytes or slots.
    """
    phase, out, start, saved = sizes.phase, sizes.out, sizes.start, sizes.saved
    cuts = (n + 2) ** 3
    low = np.full((2 * cuts, 1), _NEVER)
    high = np.full((2 * cuts, 1), _NEVER)
    low[0, 0] = high[0, 0] = 0
    for t in range(1, n + 1):
        done = place(n, t + 1, t, t + 1)
        low[done, 0] = high[done, 0] = 0
        for s in range(t, 0, -1):
            for last in range(s, t):
                least = _NEVER
                for j in range(s, t):
                    for q in range(max(last, j) + 1, t + 1):
                        right = low[place(n, s, q - 1, last), 0]
                        left = out[j] + low[place(n, j + 1, t, q), 0]
                        least = min(least, max(phase[t] + sizes.run[s, j], left, right))
                low[cuts + place(n, s, t, last), 0] = least
            for last in range(s, t + 1):
                here = place(n, s, t, last)
                for r in range(s, last + 1):
                    if moves.allowed[s, r]:
                        moved = moves.more[s, r] + low[cuts + place(n, r, t, last), 0]
                        passing = phase[t] + moves.run[s, r] if r > s else 0
                        low[here, 0] = min(low[here, 0], max(passing, moved))
            here, rest = place(n, s, t, s), place(n, s + 1, t, s + 1)
            for o in range(start[s], start[s + 1]):
                need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o])
                low[here, 0] = min(low[here, 0], max(need, saved[o] + low[rest, 0]))
                if sizes.extra[o] == 0.0:
                    high[here, 0] = min(high[here, 0], max(need, saved[o] + high[rest, 0]))
    return low, high


@jit
def fill(sizes: ChainSizes, moves: CheckpointMoves, rows: Rows, n: int, s: int, t: int) -> None:
    """Fill the rows of blocks s..t; those of all shorter ranges s..t' and s'..t must be filled."""
    phase, out, start, forward = sizes.phase, sizes.out, sizes.start, sizes.forward
    cuts = (n + 2) ** 3
    for last in range(s, t):
        for j in range(s, t):
            need, again = phase[t] + sizes.run[s, j], forward[j] - forward[s - 1]
            for q in range(max(last, j) + 1, t + 1):
                left, right = place(n, j + 1, t, q), place(n, s, q - 1, last)
                relax(rows, cuts + place(n, s, t, last), 0, need, again, left, out[j], right, 0)
    for o in range(start[s], start[s + 1]):
        need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o])
        rest = place(n, s + 1, t, s + 1)
        relax(rows, place(n, s, t, s), 0, need, sizes.extra[o], rest, sizes.saved[o], 0, 0)
    for last in range(s, t):
        for r in range(s, last + 1):
            if moves.allowed[s, r]:
                need = phase[t] + moves.run[s, r] if r > s else 0
                moved, again = cuts + place(n, r, t, last), forward[r - 1] - forward[s - 1]
                relax(rows, place(n, s, t, last), 0, need, again, moved, moves.more[s, r], 0, 0)


@jit
def trace(table: Filled, moves: CheckpointMoves, m: int) -> Ints:
    """Return the op codes of the best schedule of the whole chain within m bytes."""
    sizes = table.sizes
    codes = np.zeros(64, dtype=np.int64)
    todo = [(1, table.n, 1, m)]  # (s, t, last, bytes) still to be emitted; t = 0: only the backward of s
    while todo:
        s, t, last, m = todo.pop()
        if t == 0:
            codes = emit(codes, BACKWARD, s)
        if s > t:
            continue
        save, r = _choose(table, moves, s, t, last, m)
        if r == 0:
            codes = emit(codes, SAVE, save)
            todo.append((s, 0, 0, 0))
            todo.append((s + 1, t, s + 1, m - sizes.saved[save]))
        else:
            for block in range(s, r):
                codes = emit(codes, NONE, block)
            m -= moves.more[s, r]
            j, q = _choose_cut(table, r, t, last, m)
            codes = emit_pass(codes, r, j)
            todo.append((r, q - 1, last, m))
            todo.append((j + 1, t, q, m - sizes.out[j]))
    return codes


@jit
def _choose(table: Filled, moves: CheckpointMoves, s: int, t: int, last: int, m: int) -> tuple[int, int]:
    """Return the fastest choice that fits into m bytes: (option, 0) to save block s, or (any, r) for a move.

    The move replaces the checkpoint by the output of block r-1.
    """
    sizes, low, n = table.sizes, table.low, table.n
    phase, start, saved, forward = sizes.phase, sizes.start, sizes.saved, sizes.forward
    cuts = (n + 2) ** 3
    best, save, to = np.inf, -1, 0
    for o in range(start[s], start[s + 1] if s == last else start[s]):
        rest = place(n, s + 1, t, s + 1)
        need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o], saved[o] + low[rest, 0])
        if need <= m:
            cost = sizes.extra[o] + guess(table, rest, 0, m - saved[o])
            if cost < best:
                best, save = cost, o
    for r in range(s, last + 1):
        moved = cuts + place(n, r, t, last)
        need = max(phase[t] + moves.run[s, r] if r > s else 0, moves.more[s, r] + low[moved, 0])
        if moves.allowed[s, r] and need <= m:
            cost = forward[r - 1] - forward[s - 1] + guess(table, moved, 0, m - moves.more[s, r])
            if cost < best:
                best, to = cost, r
    return save, to


@jit
def _choose_cut(table: Filled, s: int, t: int, last: int, m: int) -> tuple[int, int]:
    """Return (j, q) of the fastest cut that fits: a checkpoint after block j, from which backwards t..q are run."""
    sizes, low, n = table.sizes, table.low, table.n
    forward, out = sizes.forward, sizes.out
    best, cut, until = np.inf, 0, 0
    for j in range(s, t):
        for q in range(max(last, j) + 1, t + 1):
            left, right = place(n, j + 1, t, q), place(n, s, q - 1, last)
            if max(sizes.phase[t] + sizes.run[s, j], out[j] + low[left, 0], low[right, 0]) <= m:
                cost = forward[j] - forward[s - 1] + guess(table, left, 0, m - out[j])
                cost += guess(table, right, 0, m)
                if cost < best:
                    best, cut, until = cost, j, q
    return cut, until
