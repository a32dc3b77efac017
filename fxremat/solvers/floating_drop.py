"""Checkpointing of a chain by dynamic programming; checkpoints may move, and saved blocks may free their input.

This is the largest class of schedules among the dynamic programs. A checkpoint is a stored a_i, the output of
block i; it "floats" if a later output may replace it. A_i is all that the backward of block i reads.

    cost[s, c, e, m]   least recomputation to run the backwards that bring c down to e, from block s;
                       its input a_{s-1} is stored, not counted in m, and free to go when it is not needed

    c, e   the state of the backward pass: the number of the next backward, or (next backward, option) if its
           saved values are stored already, counted in m, but not its input;  e = 0: no backward is left

    Let t be the next backward of c, l the last one to run: e continues with l - 1 >= s - 1.

    keep      extra(s) + cost[s+1, c, s, m - saved(s)], then backward s              s = l
    move      forward(s) + cost[s+1, c, e, m - a(s) + a(s-1)]                        s < l
    leave     extra(s) + cost[s+1, c, s, m - saved(s) + a(s-1)]                      e = (s, its option), s < l
    cut       forward(s..j) + cost[j+1, c, x, m - a(j)] + cost[s, x, e, m]           x from j or l-1 to below t
    lose      forward(s..j-1) + extra(j) + cost[j+1, c, j, m - saved(j)] + cost[s, (j, option), e, m]

`move` is a checkpoint that floats to the right once the backwards it would have served to the left are left to an
earlier one; `leave` ends with a block saved for that earlier one, which then only has to rebuild the block's input.
Cuts to x = j without moves are persistent.py, with `lose` input_drop.py, with moves and plain x floating.py. All
together they give 8 and 12 on the counter-example of the papers (A. Shilova's thesis, 2021, Fig. 2.3), where each alone
gives 10 and 14.

Beyond the papers, and not quite the optimum: A* is faster on 8 of 24,000 random instances of 2 to 6 blocks
(`benchmarks/optimality.py`; persistent and floating miss 12,300 of them, input_drop 388). In all of these that were
examined, A* rebuilds a lost input before backwards that come earlier, while the gradient held is small; here that
begins when the block's own backward is next. O(slots n^5), (n + options)^3 n^2 slots with options: for short chains.
The table is in slots and the schedule is read off in bytes, as in persistent.py; a move is a difference of rounded
sizes, so that coarse slots may promise a little too much. The schedule fits all the same.
"""

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.errors import FxrematError
from fxremat.jit import jit
from fxremat.progress import progress
from fxremat.solvers.op_codes import BACKWARD, DROP, NONE, SAVE, emit, emit_pass
from fxremat.solvers.rows import Filled, Rows, guess, lay_out, relax
from fxremat.solvers.sizes import ChainSizes, Floats, Ints, in_bytes, in_slots
from fxremat.solvers.table import Table, table_of

_NEVER = 1 << 60  # number of bytes or slots that exceeds any memory
_MOST_WORK = 3e11  # maximum number of additions to fill a table: some minutes
_MOST_ENTRIES = 1 << 28  # maximum number of costs in a table: 8 bytes each, 2 GiB
_KEEP, _MOVE, _LEAVE, _CUT, _LOSE = range(5)


def build(chain: Chain, mem: int, slots: int) -> Table:
    """Build the table of costs for every budget up to `mem` bytes.

    Raises `FxrematError` if the chain is too long.
    """
    n = len(chain)
    if work(chain, slots) > _MOST_WORK:
        raise FxrematError(
            f"floating_drop cannot solve {n} blocks with {slots} slots in reasonable time; input_drop can"
        )
    exact = in_bytes(chain)
    low, high = bounds(exact, n)
    sizes = in_slots(chain, mem, slots)
    first, last = bounds(sizes, n)
    if np.clip(np.minimum(last, slots + 1) - first, 0, None).sum() > _MOST_ENTRIES:
        raise FxrematError(
            f"floating_drop needs more than 2 GiB for {n} blocks with {slots} slots; use fewer"
        )
    rows = lay_out(first, last, slots)
    for t in progress(range(1, n + 1), "floating_drop"):
        for s in range(t, 0, -1):
            _fill(sizes, rows, n, s, t, slots)
    return table_of(
        chain,
        mem,
        slots,
        rows=rows,
        whole=(_row(sizes, n, 1, 0), n),
        low=low,
        high=high,
        trace=lambda m, full: trace(Filled(exact, low, rows, n, slots, full), m),
    )


def work(chain: Chain, slots: int) -> float:
    """Estimate the number of additions needed to fill a table."""
    n, options = len(chain), sum(len(block.choices) for block in chain.blocks)
    return slots * n**2 * float(n + options) ** 3 / 60


@jit
def _row(sizes: ChainSizes, n: int, s: int, e: int) -> int:
    """Return the index of the table row for first block s and end state e.

    All start states share it; they are columns.
    """
    return s * (n + 1 + sizes.saved.size) + e


@jit
def _block(sizes: ChainSizes, n: int, c: int) -> int:
    """Return the block whose backward is next in state c: c itself, or for c > n, the block of option c - n - 1."""
    return c if c <= n else int(np.searchsorted(sizes.start, c - n - 1, side="right")) - 1


@jit
def _moves(sizes: ChainSizes, n: int, s: int, c: int, e: int, moves: Ints, costs: Floats) -> int:
    """Write every move from a state (s, c, e) of the recursion to `moves` and `costs`; return their number.

    moves[k] = (kind, block or option, x, memory needed to run it, row of the subproblem solved first, memory
    not available to it, row and column of the subproblem solved second). costs[k]: seconds of recomputation.
    """
    saved, start, out, forward = sizes.saved, sizes.start, sizes.out, sizes.forward
    t, rest, width = _block(sizes, n, c), _block(sizes, n, e), n + 1 + sizes.saved.size
    held = sizes.phase[t] + (saved[c - n - 1] if c > n else 0)
    count = 0
    if s == rest + 1:
        for o in range(start[s], start[s + 1]):
            need = max(held + sizes.save[o], sizes.phase[s] + sizes.back[o])
            moves[count] = (_KEEP, o, 0, need, (s + 1) * width + s, saved[o], 0, 0)
            costs[count] = sizes.extra[o]
            count += 1
    else:
        moves[count] = (_MOVE, s, 0, held + sizes.run[s, s], (s + 1) * width + e, out[s] - out[s - 1], 0, 0)
        costs[count] = forward[s] - forward[s - 1]
        count += 1
        if s == rest and e > n:
            o = e - n - 1
            need, less = held + sizes.save[o], saved[o] - out[s - 1]
            moves[count] = (_LEAVE, o, 0, need, (s + 1) * width + s, less, 0, 0)
            costs[count] = sizes.extra[o]
            count += 1
    for j in range(s, t):
        need, again = held + sizes.run[s, j], forward[j] - forward[s - 1]
        for x in range(max(j, rest + 1), t):
            moves[count] = (_CUT, j, x, need, (j + 1) * width + x, out[j], s * width + e, x)
            costs[count] = again
            count += 1
        for x in range(n + 1 + start[max(j + 1, rest + 1)], n + 1 + start[t]):
            moves[count] = (_CUT, j, x, need, (j + 1) * width + x, out[j], s * width + e, x)
            costs[count] = again
            count += 1
        if j > s and j > rest:
            for o in range(start[j], start[j + 1]):
                need = held + max(sizes.run[s, j - 1], sizes.save_next[o])
                moves[count] = (_LOSE, o, j, need, (j + 1) * width + j, saved[o], s * width + e, n + 1 + o)
                costs[count] = forward[j - 1] - forward[s - 1] + sizes.extra[o]
                count += 1
    return count


@jit
def _room(sizes: ChainSizes, n: int) -> tuple[Ints, Floats]:
    """Allocate arrays that are large enough for the moves of the recursion from any state."""
    most = (n + 1) * (n + 2 + sizes.saved.size) + sizes.saved.size + 2
    return np.zeros((most, 8), dtype=np.int64), np.zeros(most)


@jit
def _states(sizes: ChainSizes, n: int, s: int, t: int) -> Ints:
    """Return the pairs (start state c, end state e) in the table for first block s, if backward t is next in c."""
    start = sizes.start
    states = [(t, t)][:0]
    for c in _both(start, n, t):
        for rest in range(s - 1, t):
            for e in _both(start, n, rest):
                if (e <= n or rest >= s) and (c <= n or s < t or e == s - 1):
                    states.append((c, e))
    return np.array(states)


@jit
def _both(start: Ints, n: int, block: int) -> Ints:
    """Return the states in which the backward of `block` is next: with nothing saved, or saved with one of its options.
    """
    count = start[block + 1] - start[block] if block else 0
    columns = np.full(count + 1, block, dtype=np.int64)
    columns[1:] = n + 1 + start[block] + np.arange(count)
    return columns


@jit
def bounds(sizes: ChainSizes, n: int) -> tuple[Ints, Ints]:
    """Return, for each row of the table, the least memory that works, and the least one without recomputation.

    Both are in the unit of `sizes`, bytes or slots.
    """
    width = n + 1 + sizes.saved.size
    low = np.full(((n + 2) * width, width), _NEVER, dtype=np.int64)
    high = np.full(((n + 2) * width, width), _NEVER, dtype=np.int64)
    moves, costs = _room(sizes, n)
    low[0, 0] = high[0, 0] = 0
    for t in range(1, n + 1):
        # block t is saved and its backward is next, so nothing has to run before it
        low[(t + 1) * width + t, t] = high[(t + 1) * width + t, t] = 0
        for s in range(t, 0, -1):
            for c, e in _states(sizes, n, s, t):
                least = enough = _NEVER
                if s == t and c > n:
                    least = enough = sizes.phase[t] + sizes.back[c - n - 1]
                else:
                    for k in range(_moves(sizes, n, s, c, e, moves, costs)):
                        _, _, _, need, left, shift, right, column = moves[k]
                        least = min(least, max(need, low[left, c] + shift, low[right, column]))
                        if costs[k] == 0.0:
                            enough = min(enough, max(need, high[left, c] + shift, high[right, column]))
                low[s * width + e, c], high[s * width + e, c] = least, enough
    return low, high


@jit
def _fill(sizes: ChainSizes, rows: Rows, n: int, s: int, t: int, slots: int) -> None:
    """Fill the table rows of first block s and all start states in which backward t is next."""
    moves, costs = _room(sizes, n)
    for c, e in _states(sizes, n, s, t):
        row = _row(sizes, n, s, e)
        if (s < t or c <= n) and rows.low[row, c] <= slots:
            for k in range(_moves(sizes, n, s, c, e, moves, costs)):
                _, _, _, need, left, shift, right, column = moves[k]
                relax(rows, row, c, need, costs[k], left, shift, right, column)


@jit
def trace(table: Filled, m: int) -> Ints:
    """Return the op codes of the best schedule of the whole chain within m bytes."""
    sizes, low, n = table.sizes, table.low, table.n
    codes = np.zeros(64, dtype=np.int64)
    moves, costs = _room(sizes, n)
    width = n + 1 + sizes.saved.size
    # (first block, start state, end state, bytes) still to be emitted; first block 0: only the backward of the
    # start state
    todo = [(1, n, 0, m)]
    while todo:
        s, c, e, m = todo.pop()
        if s == 0 or (c > n and s == _block(sizes, n, c)):
            codes = emit(codes, BACKWARD, s or c)
        elif s <= _block(sizes, n, c):
            best, choice = np.inf, -1
            for k in range(_moves(sizes, n, s, c, e, moves, costs)):
                _, _, _, need, left, shift, right, column = moves[k]
                if max(need, low[left, c] + shift, low[right, column]) <= m:
                    cost = costs[k] + guess(table, left, c, m - shift)
                    cost += guess(table, right, column, m)
                    if cost < best:
                        best, choice = cost, k
            kind, number, j, _, left, shift, _, column = moves[choice]
            if kind == _KEEP:
                codes = emit(codes, SAVE, number)
                todo.append((0, s, 0, 0))
            elif kind == _MOVE:
                codes = emit(codes, NONE, s)
            elif kind == _LEAVE:
                codes = emit(emit(codes, SAVE, number), DROP, s - 1)
            elif kind == _CUT:
                codes = emit_pass(codes, s, number)
                todo.append((s, column, e, m))
            else:
                codes = emit(emit(emit_pass(codes, s, j - 1), SAVE, number), DROP, j - 1)
                todo.append((s, column, e, m))
            todo.append((left // width, c, left % width, m - shift))
    return codes
