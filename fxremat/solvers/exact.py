"""Finds the fastest schedule of a short chain by A* search over what is stored on the device.

a_i is the output of block i, A_i all that its backward reads.

    state    what each boundary 0..k holds, nothing, a_i or A_i under an option, and the phase k
    forward  of block i, if boundary i-1 holds something: boundary i then holds a_i or A_i
    B_k      if boundary k holds A_k and boundary k-1 holds something
    drop     any boundary but 0, at no cost

A boundary never needs to hold both a_i and A_i: whichever is dropped unused could have been dropped at once. So a
forward also replaces what its boundary held, which is dropped first. And a drop can wait until some operation does not
fit: states with room for every operation have no drops.

The lower bound on the remaining time: a block whose A is not stored runs forward once more. So does, a second time,
every block on the way from the nearest stored boundary to k, and every saved block, that is not among those whose A fit
into memory together while B_k runs: a knapsack, filled fractionally.

States grow like 3^n and more with options: n = 12 takes seconds. Beyond the papers, which have no such solver.
"""

from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op, Schedule, Value
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.jit import jit
from fxremat.solvers.sizes import ChainSizes, Floats, Ints, in_bytes

STATES = 5_000_000  # maximum number of expanded states, which take about half a GiB
_Array = TypeVar("_Array", Ints, Floats)
_PHASE_BITS = 5  # bits of a state's code that store the next backward's index; chains have up to 31 blocks
_STEPS = 50_000  # number of states expanded between two moments at which an interrupt can be handled


class Search(NamedTuple):
    """The states found so far, a hash table of their codes, and a heap of the states to be expanded."""

    code: Ints  # [state]: integer that encodes what is stored in the state
    cost: Floats  # [state]: lowest cost at which the state was reached
    parent: Ints  # [state]: index of the preceding state; -1: none
    table: Ints  # hash table of indices in `code`, plus 1; 0: empty
    heap_key: Floats  # [heap entry]: cost plus a lower bound on the remaining cost
    heap_cost: Floats
    heap_state: Ints  # [heap entry]: index of the state
    ends: Ints  # number of states, number of heap entries, and index of the goal state plus 1


class StateMoves(NamedTuple):
    """Buffers for the moves from one state to others; moves that drop a value come last and take no time."""

    code: Ints  # [move]: code of the state that the move leads to
    seconds: Floats
    need: Ints  # [move]: bytes needed during the move


def schedules(chain: Chain, mem: int, *, states: int = STATES) -> list[Schedule]:
    """Return a list with the fastest schedule that fits into `mem` bytes.

    Args:
        chain: up to about 12 blocks, fewer where they have many options.
        mem: bytes.
        states: states to expand before giving up; a million runs a second or two.

    Raises:
        BudgetTooSmall: nothing fits; the minimum is exact over all schedules.
        FxrematError: the chain is too long to be searched.
    """
    path = _search(chain, mem, states)
    if path is None:
        raise BudgetTooSmall(minimum=least(chain, states=states), budget=mem)
    return [_schedule(chain, path)]


def least(chain: Chain, *, states: int = STATES) -> int:
    """Return the lowest peak of any schedule, in bytes. Raises `FxrematError` if the chain is too long."""
    search = _run(chain, _begin(_start_code(len(chain)), _floor(in_bytes(chain), len(chain))), -1, states)
    return int(search.cost[search.ends[2] - 1])


def _floor(sizes: ChainSizes, n: int) -> float:
    """Return a lower bound on the peak in bytes: the largest need of any op that must run, inputs included."""
    start, out, floor = sizes.start, sizes.out, 0
    for i in range(1, n + 1):
        options = slice(start[i], start[i + 1])
        backward = sizes.phase[i] + sizes.back[options].min()
        forward = sizes.phase[n] + min(sizes.run[i, i], sizes.save[options].min())
        floor = max(
            floor, backward + (out[0] if i > 1 else 0), forward + out[0] + (out[i - 1] if i > 1 else 0)
        )
    return float(floor)


def _search(chain: Chain, mem: int, states: int) -> list[Ints] | None:
    """Return the states on the fastest path within `mem` bytes; None if no schedule fits."""
    n, sizes = len(chain), in_bytes(chain)
    if sizes.phase[n] + sizes.out[0] > mem:
        return None
    search = _run(chain, _begin(_start_code(n), 0.0), mem, states)
    place, path = int(search.ends[2]) - 1, []
    while place >= 0:
        path.append(decode(search.code[place], shifts(sizes, n)))
        place = int(search.parent[place])
    return path[::-1] or None


def _run(chain: Chain, search: Search, mem: int, states: int) -> Search:
    """Continue the search until it reaches the end of the step, or has expanded every state.

    mem < 0: search for the lowest peak instead of the least time. Raises `FxrematError` after more than
    `states` states.
    """
    n, sizes = len(chain), in_bytes(chain)
    if shifts(sizes, n)[-1] > 62:
        raise FxrematError(_too_long(n))
    while search.ends[1] and not search.ends[2]:
        if search.ends[0] > states:
            raise FxrematError(f"{_too_long(n)}; gave up after {states} states")
        search = advance(search, sizes, n, mem)
    return search


def _too_long(n: int) -> str:
    return f"a chain of {n} blocks is too long for an exact search; up to about 12 are practical"


def _schedule(chain: Chain, path: list[Ints]) -> Schedule:
    """Return the ops that lead from each state of the path to the next; each value is dropped right after its last use.
    """
    ops: list[Op] = []
    for before, after in pairwise(path):
        if after[-1] < before[-1]:
            ops.append(Backward(int(before[-1])))
            continue
        boundary = int(np.flatnonzero(before != after)[0])
        held, holds = int(before[boundary]), int(after[boundary])
        if held:
            _drop(ops, Value("a" if held == 1 else "A", boundary))
        if holds == 1:
            ops.append(Forward(boundary, Keep.CHECKPOINT))
        elif holds:
            ops.append(Forward(boundary, Keep.ALL, holds - 2))
    return Schedule(tuple(ops))


def _drop(ops: list[Op], value: Value) -> None:
    """Drop `value` right after the last op in `ops` that reads or writes it."""
    place = len(ops)
    while True:
        match ops[place - 1]:
            case Forward(block, Keep.CHECKPOINT) if block == value.index + 1 and value.kind == "a":
                ops[place - 1] = Forward(block, Keep.NONE)
                return
            case Forward(block) | Backward(block) if block - value.index in (0, 1):
                ops.insert(place, Drop(value))
                return
        place -= 1


@jit
def shifts(sizes: ChainSizes, n: int) -> Ints:
    """Return the first bit, in a state's code, of what is stored of each block 0..n, and the number of bits."""
    shift = np.zeros(n + 2, dtype=np.int64)
    shift[0] = _PHASE_BITS
    shift[1] = _PHASE_BITS + 1
    for i in range(1, n + 1):
        most, bits = 1 + sizes.start[i + 1] - sizes.start[i], 0
        while most >> bits:
            bits += 1
        shift[i + 1] = shift[i] + bits
    return shift if n < 1 << _PHASE_BITS else shift + 64


@jit
def decode(code: int, shift: Ints) -> Ints:
    """Decode a state: what is stored of blocks 0..n (0: nothing, 1: output, 2 + option: saved), then the next backward.
    """
    state = np.zeros(shift.size, dtype=np.int64)
    for i in range(shift.size - 1):
        state[i] = (code >> shift[i]) & ((1 << (shift[i + 1] - shift[i])) - 1)
    state[-1] = code & ((1 << _PHASE_BITS) - 1)
    return state


def _start_code(n: int) -> int:
    return (1 << _PHASE_BITS) + n  # at first, only the chain's input is stored


@jit
def _begin(code: int, cost: float) -> Search:
    """Begin a search with one state."""
    search = Search(
        np.zeros(256, dtype=np.int64),
        np.zeros(256),
        np.zeros(256, dtype=np.int64),
        np.zeros(1024, dtype=np.int64),
        np.zeros(256),
        np.zeros(256),
        np.zeros(256, dtype=np.int64),
        np.zeros(3, dtype=np.int64),
    )
    return _meet(search, code, cost, cost, -1)


@jit
def advance(search: Search, sizes: ChainSizes, n: int, mem: int) -> Search:
    """Expand up to `_STEPS` states, for the least time within `mem` bytes, or for the lowest peak if mem < 0."""
    shift = shifts(sizes, n)
    most = (n + 1) * 2 + sizes.saved.size
    moves = StateMoves(np.zeros(most, dtype=np.int64), np.zeros(most), np.zeros(most, dtype=np.int64))
    for _ in range(_STEPS):
        if search.ends[1] == 0:
            break
        place, cost = _pop(search)
        if cost > search.cost[place]:
            continue
        code = search.code[place]
        state = decode(code, shift)
        if state[-1] == 0:
            search.ends[2] = place + 1
            break
        limit = mem if mem >= 0 else int(cost)
        count = _moves(sizes, n, code, state, shift, moves)
        blocked = False
        for k in range(count):
            blocked = blocked or moves.need[k] > limit
            if mem < 0:
                peak = max(cost, float(moves.need[k]))
                search = _meet(search, moves.code[k], peak, peak, place)
            elif moves.need[k] <= mem:
                search = _try(search, sizes, n, moves.code[k], cost + moves.seconds[k], shift, mem, place)
        for i in range(1, state[-1] + 1 if blocked else 0):
            if state[i]:
                less = code - (state[i] << shift[i])
                if mem < 0:
                    search = _meet(search, less, cost, cost, place)
                else:
                    search = _try(search, sizes, n, less, cost, shift, mem, place)
    return search


@jit
def _try(
    search: Search, sizes: ChainSizes, n: int, code: int, cost: float, shift: Ints, mem: int, parent: int
) -> Search:
    """Add a state to the search, with its cost plus a lower bound on the remaining seconds as its key."""
    return _meet(search, code, cost, cost + _bound(sizes, n, decode(code, shift), mem), parent)


@jit
def _moves(sizes: ChainSizes, n: int, code: int, state: Ints, shift: Ints, moves: StateMoves) -> int:
    """Write the forwards and backwards possible in a state to `moves`, with seconds and bytes; return their number."""
    phase, start, saved, out = sizes.phase, sizes.start, sizes.saved, sizes.out
    k, count = state[-1], 0
    used = phase[k] + (out[0] if state[0] else 0)
    for i in range(1, k + 1):
        used += _held(sizes, i, state[i])
    for i in range(1, k + 1):
        if state[i - 1]:
            bare = code - (state[i] << shift[i])
            rest = used - _held(sizes, i, state[i])
            seconds = sizes.forward[i] - sizes.forward[i - 1]
            if i < k and state[i] != 1:
                moves.code[count] = bare + (1 << shift[i])
                moves.seconds[count] = seconds
                moves.need[count] = rest + sizes.run[i, i]
                count += 1
            for o in range(start[i], start[i + 1]):
                if state[i] != 2 + o - start[i]:
                    moves.code[count] = bare + ((2 + o - start[i]) << shift[i])
                    moves.seconds[count] = seconds
                    moves.need[count] = rest + sizes.save[o]
                    count += 1
    if state[k] >= 2 and state[k - 1]:
        o = start[k] + state[k] - 2
        # the previous block's output is freed, unless it is part of what that block saved
        consumed = 1 if state[k - 1] == 1 else 0
        after = used - saved[o] - consumed * out[k - 1] + phase[k - 1] - phase[k]
        moves.code[count] = code - 1 - (state[k] << shift[k]) - (consumed << shift[k - 1])
        moves.seconds[count] = sizes.extra[o]
        moves.need[count] = max(used - saved[o] + sizes.back[o], after)
        count += 1
    return count


@jit
def _held(sizes: ChainSizes, i: int, holds: int) -> int:
    """Return the bytes of what is stored of block i: nothing, its output, or what it saved under an option."""
    if holds == 0:
        return 0
    return int(sizes.out[i] if holds == 1 else sizes.saved[sizes.start[i] + holds - 2])


@jit
def _bound(sizes: ChainSizes, n: int, state: Ints, mem: int) -> float:
    """Return a lower bound on the seconds of recomputation that remain from a state."""
    start, k = sizes.start, state[-1]
    if k == 0:
        return 0.0
    nearest = k - 1
    while not state[nearest]:
        nearest -= 1
    left, excess, items = 0.0, 0, 0
    # bytes and seconds of the saved sets that may be stored during the next backward
    weight, price = np.zeros(n, dtype=np.int64), np.zeros(n)
    excess = sizes.phase[k] + sizes.out[0] + sizes.back[start[k] : start[k + 1]].min() - mem
    for i in range(1, k + 1):
        seconds = sizes.forward[i] - sizes.forward[i - 1]
        least = sizes.saved[start[i] : start[i + 1]].min()
        spared = 0.0
        if state[i] >= 2:
            o = start[i] + state[i] - 2
            least = sizes.saved[o]
            spared = max(0.0, seconds - sizes.extra[o])
            left += seconds - spared
        elif i > nearest:
            left += seconds
            spared = seconds
        else:
            left += seconds
        if i < k and spared > 0.0 and least > 0:
            excess += least
            items = _insert(weight, price, items, least, spared)
    for item in range(items):
        if excess <= 0:
            break
        left += price[item] * min(1.0, excess / weight[item])
        excess -= weight[item]
    return left


@jit
def _insert(weight: Ints, price: Floats, items: int, bytes_: int, seconds: float) -> int:
    """Insert an item into a knapsack's list of items, which is sorted by seconds per byte; return the list's length."""
    place = items
    while place > 0 and price[place - 1] * bytes_ > seconds * weight[place - 1]:
        weight[place], price[place] = weight[place - 1], price[place - 1]
        place -= 1
    weight[place], price[place] = bytes_, seconds
    return items + 1


@jit
def _meet(search: Search, code: int, cost: float, key: float, parent: int) -> Search:
    """Add a state reached from `parent` to the search, unless it was reached before at the same or a lower cost."""
    slot = _slot(search.table, search.code, code)
    place = search.table[slot] - 1
    if place < 0:
        place = search.ends[0]
        if place == search.code.size:
            search = _grow(search)
            slot = _slot(search.table, search.code, code)
        search.code[place] = code
        search.table[slot] = place + 1
        search.ends[0] += 1
    elif search.cost[place] <= cost:
        return search
    search.cost[place], search.parent[place] = cost, parent
    if search.ends[1] == search.heap_key.size:
        search = _heighten(search)
    _push(search, key, cost, place)
    return search


@jit
def _slot(table: Ints, codes: Ints, code: int) -> int:
    """Return the index in the hash table at which a code is stored, or would be inserted."""
    slot = (code * 0x9E3779B97F4A7C1 >> 20) & (table.size - 1)
    while table[slot] and codes[table[slot] - 1] != code:
        slot = (slot + 1) & (table.size - 1)
    return slot


@jit
def _grow(search: Search) -> Search:
    """Reallocate the arrays for twice as many states."""
    code, table = _longer(search.code), np.zeros(2 * search.table.size, dtype=np.int64)
    for place in range(search.ends[0]):
        table[_slot(table, code, code[place])] = place + 1
    cost, parent = _longer(search.cost), _longer(search.parent)
    heap_key, heap_cost, heap_state = search.heap_key, search.heap_cost, search.heap_state
    return Search(code, cost, parent, table, heap_key, heap_cost, heap_state, search.ends)


@jit
def _heighten(search: Search) -> Search:
    """Reallocate the heap for twice as many entries."""
    heap_key, heap_cost = _longer(search.heap_key), _longer(search.heap_cost)
    heap_state = _longer(search.heap_state)
    code, cost, parent, table = search.code, search.cost, search.parent, search.table
    return Search(code, cost, parent, table, heap_key, heap_cost, heap_state, search.ends)


@jit
def _longer(array: _Array) -> _Array:
    """Return an array of twice the length, with zeros at the end."""
    return np.concatenate((array, np.zeros_like(array)))


@jit
def _push(search: Search, key: float, cost: float, state: int) -> None:
    keys, costs, states = search.heap_key, search.heap_cost, search.heap_state
    place = search.ends[1]
    search.ends[1] += 1
    while place:
        above = (place - 1) // 2
        if keys[above] < key or (keys[above] == key and states[above] >= state):
            break
        keys[place], costs[place], states[place] = keys[above], costs[above], states[above]
        place = above
    keys[place], costs[place], states[place] = key, cost, state


@jit
def _pop(search: Search) -> tuple[int, float]:
    """Pop the heap entry with the lowest key, among equal keys the newest state; return the state and its cost."""
    keys, costs, states = search.heap_key, search.heap_cost, search.heap_state
    found = states[0], costs[0]
    search.ends[1] -= 1
    last = search.ends[1]
    key, cost, state = keys[last], costs[last], states[last]
    place = 0
    while True:
        below = 2 * place + 1
        if below >= last:
            break
        right = below + 1
        if right < last and (
            keys[right] < keys[below] or (keys[right] == keys[below] and states[right] > states[below])
        ):
            below = right
        if key < keys[below] or (key == keys[below] and state >= states[below]):
            break
        keys[place], costs[place], states[place] = keys[below], costs[below], states[below]
        place = below
    keys[place], costs[place], states[place] = key, cost, state
    return found
