"""POFO: offloading and recomputation chosen together, by dynamic programming.

a_l is the output of block l, A_l all that its backward reads; F_l and B_l are its forward and backward.

    forward[s, x, A, F, B]   least time lost up to block s, whose input is a[s-1] (x = 0) or A[s-1] saved with
                             option x - 1; A slots of earlier values stay on the device, F have yet to leave
                             when F_{s-1} ends, B must be back before B_{s-1} starts
    back[s, t, A, D]         least time lost in running backward t..s from the input of s, which is counted in A,
                             if D slots must have come from the host in the end

From a state of `forward`, with the input I of s either kept (A grows) or offloaded (F and B grow):

    save s        to s+1     forward idles until A + F + I leave room for F_s, backward after B_s likewise
    run to t      to t+1     and runs t..s backward again later, in back[s, t, A + I, B]      s <= t < n
    at the split  all of F leaves, then all of B comes back: F slots out, B slots in

    back   keep all       extra(s) + back[s+1, t, A + saved(s), D1] + idle
           cut after j    forward(s..j) + back[j+1, t, A + a(j), D2] + back[s, j, A, D] + idle

D1 = D minus the slots that are copied during B_s and the idle time, D2 = D minus those during back[s, j, A, D]. A pass
of forwards idles until what it needs, minus what has left meanwhile, fits (`leaving`, `coming`: Lemma 8). "Lost" is the
time in addition to one forward and one fastest backward of each block.

a_l is the output of block l, A_l all that its backward reads; F_l and B_l are its forward and backward.

O(slots^3 n^2 + slots^2 n^3). Beaumont, Eyraud-Dubois, Shilova, Efficient Combination of Rematerialization and
Offloading for Training DNNs (NeurIPS 2021), Theorem 1; A. Shilova's thesis (2021), chapter 4. Beyond them: two speeds,
options of a block, slots of forwards and backwards rounded together. Here nothing bounds D by the memory left next to
the input of s: B_s drops that input, so D may fill its place.

The schedule prefetches everything at the forward/backward split; that is early, and harmless: a copy waits for room.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Backward, Offload, Op, Prefetch, Schedule, Value
from fxremat.errors import BudgetTooSmall
from fxremat.jit import jit
from fxremat.progress import progress
from fxremat.solvers.offload import min_memory
from fxremat.solvers.offload.link_slots import Carried, FluidSchedule, carried, speeds
from fxremat.solvers.offload.trips import needs
from fxremat.solvers.rows import least
from fxremat.solvers.sizes import ChainSizes, Floats, Ints, in_slots
from fxremat.solvers.table import grain

_ROUNDING = 1e-9
_QUICK = 5.0  # seconds; several tables are built if one takes less
_ROUNDS = 4  # number of bisections of the budget that a table is built for
_CELLS = 60_000_000  # maximum number of entries of the table `forward` for saved inputs


class PofoTask(NamedTuple):
    """The problem with memory in slots, as arrays for compiled code."""

    n: int  # number of blocks
    slots: int
    sizes: ChainSizes
    first: Ints  # [l]: output of block l and scratch of its forward
    link: Carried
    leaving: Ints  # [s, j]: slots needed by forwards s..j, each minus what has been copied to the host before
    coming: Ints  # [s, j]: slots needed by forwards s..j, each minus what comes back from the host later
    beyond: Ints  # [s, j]: the largest number of slots that one of the forwards s+1..j needs
    saves: Ints  # indices of the options that the table `forward` considers
    linked: bool  # True if there is a link to the host


def schedules(chain: Chain, mem: int, platform: Platform | None, slots: int = 50) -> list[Schedule]:
    """Return schedules that fit into `mem` bytes, whatever the speed of the link.

    Sizes are rounded up to slots, so a table for more than `mem` bytes may give a schedule that fits; and if
    there are more blocks than slots, it is better to round sums of sizes. If a table takes seconds, several are
    built; if it takes a minute, only one, for a budget found by tables without the link, which take a second
    each.

    Raises `BudgetTooSmall`; its minimum is exact.
    """
    least = min_memory.plan(chain, platform)
    if mem < least.peak:
        raise BudgetTooSmall(minimum=least.peak, budget=mem)
    found = [least.schedule]
    exact = mem % slots == 0 and grain(chain) % (mem // slots) == 0
    in_sums = len(chain) > slots and not exact

    def fits(nominal: float, link: Platform | None) -> bool:
        try:
            schedule = build(chain, int(mem * nominal), link, slots, in_sums=in_sums).schedule
        except BudgetTooSmall:  # raised only because sizes were rounded up
            return nominal <= 1.0
        if needs(chain, schedule).max() <= mem:
            found.append(schedule)
            return True
        return False

    def widest(link: Platform | None, rounds: int) -> float:
        sound, hopeful = (0.6, 1.4) if in_sums else (1.0, min(1.0 + len(chain) / slots, 4.0))
        for _ in range(rounds):
            nominal = (sound + hopeful) / 2
            sound, hopeful = (nominal, hopeful) if fits(nominal, link) else (sound, nominal)
        return sound

    if exact:
        fits(1.0, platform)
    elif seconds(chain, slots) < _QUICK:
        fits(0.6 if in_sums else 1.0, platform)
        widest(platform, _ROUNDS)
    else:
        nominal = widest(None, _ROUNDS)
        if speeds(platform) != (0.0, 0.0):
            fits(0.95 * nominal, platform)
    return list(dict.fromkeys(found))


def seconds(chain: Chain, slots: int) -> float:
    """Estimate the seconds that `build` takes on two cores."""
    options = sum(len(block.choices) for block in chain.blocks) / len(chain)
    return 7e-10 * len(chain) ** 3 * slots**2 + 2e-9 * options**2 * len(chain) ** 2 * slots**2


def build(
    chain: Chain, mem: int, platform: Platform | None, slots: int = 50, *, in_sums: bool = False
) -> FluidSchedule:
    """Return the best schedule if memory is divided into `slots` equal parts, and sizes are rounded up to them.

    Raises `BudgetTooSmall` if slots are too coarse. With `in_sums`, the sums of sizes along the chain are
    rounded up instead of each size: the schedule may need more than `mem` bytes.
    """
    task = task_of(chain, mem, platform, slots)
    if in_sums:
        task = _rounded_in_sums(chain, mem, task)
    back = fill_back(task)
    plan = _plan(chain, task, back, fill_forward(task, back))
    if plan is None:
        raise BudgetTooSmall(minimum=min_memory.plan(chain, platform).peak, budget=mem)
    return plan


def task_of(chain: Chain, mem: int, platform: Platform | None, slots: int) -> PofoTask:
    """Return the problem with sizes, budget and link rounded to `slots` equal parts of the memory."""
    n = len(chain)
    sizes = in_slots(chain, mem, slots)
    link = carried(chain, mem, slots, platform)
    first = np.array([0] + [sizes.run[k, k] for k in range(1, n + 1)], dtype=np.int64)
    out = chain.output_sizes
    later = np.array(
        [0]
        + [
            min(-(-(out[k - 1] + block.output_bytes + block.forward_scratch) * slots // mem), 2 * slots + 2)
            for k, block in enumerate(chain.blocks, start=1)
        ],
        dtype=np.int64,
    )
    leaving, coming, beyond = _passes(n, first, later, link.forward_out, link.forward_in)
    linked = speeds(platform) != (0.0, 0.0)
    return PofoTask(
        n, slots, sizes, first, link, leaving, coming, beyond, _considered(sizes, n, slots), linked
    )


def _rounded_in_sums(chain: Chain, mem: int, task: PofoTask) -> PofoTask:
    """Round sums of sizes instead of each size.

    A value has as many slots as it adds to the rounded sum of all values up to it. A. Shilova's thesis (2021),
    3.3.3.2.
    """

    def slots(before: int, size: int) -> int:
        return -(-(before + size) * task.slots // mem) + before * task.slots // -mem

    before_out = [0, *accumulate(chain.output_sizes)]
    before_saved = [0, *accumulate(block.saved_bytes for block in chain.blocks)]
    out = [slots(before, size) for before, size in zip(before_out, chain.output_sizes, strict=False)]
    saved = [
        slots(before, option.saved_bytes)
        for before, block in zip(before_saved, chain.blocks, strict=False)
        for option in block.choices
    ]
    most = 2 * task.slots + 2
    return task._replace(
        sizes=task.sizes._replace(
            out=np.minimum(np.array(out, dtype=np.int64), most),
            saved=np.minimum(np.array(saved, dtype=np.int64), most),
        )
    )


def _considered(sizes: ChainSizes, n: int, slots: int) -> Ints:
    """Return the indices of the options that the table `forward` considers: all, or as many as keep it within `_CELLS`.
    """
    room = max(1, _CELLS // (slots + 1) ** 3 // n)
    picks = []
    for first, last in pairwise(sizes.start[1:].tolist()):
        fastest = first + int(np.argmin(sizes.extra[first:last]))
        picks += sorted({fastest, *np.linspace(first, last - 1, min(room, last - first)).round().astype(int)})
    return np.array(picks[: room * n], dtype=np.int64)


@jit
def _passes(n: int, first: Ints, later: Ints, out: Ints, back: Ints) -> tuple[Ints, Ints, Ints]:
    leaving = np.zeros((n + 1, n + 1), dtype=np.int64)
    coming = np.zeros((n + 1, n + 1), dtype=np.int64)
    beyond = np.zeros((n + 1, n + 1), dtype=np.int64)
    for s in range(1, n + 1):
        early, late, most = first[s], first[s] + back[s], 0
        for j in range(s, n + 1):
            if j > s:
                early = max(early, later[j] - (out[j - 1] - out[s - 1]))
                late = max(late, later[j] + back[j])
                most = max(most, later[j])
            leaving[s, j], coming[s, j], beyond[s, j] = early, late - back[j], most
    return leaving, coming, beyond


class Back(NamedTuple):
    """The table `back`, the least time lost in running backwards t..s, for A slots in use and D slots to copy back.

    back[s, t, A, D] is cost[row[s, t] + at[s, A] + D] for D <= reach[s, A], else infinite.
    """

    row: Ints
    at: Ints
    reach: Ints
    cost: Floats


def _lay_out(n: int, slots: int, out: Ints, linked: bool) -> Back:
    row = np.zeros((n + 2, n + 1), dtype=np.int64)
    at = np.zeros((n + 2, slots + 1), dtype=np.int64)
    reach = np.zeros((n + 2, slots + 1), dtype=np.int64)
    total = 0
    for s in range(1, n + 1):
        size = 0
        for kept in range(slots + 1):
            at[s, kept] = size
            reach[s, kept] = min(slots, slots - kept + out[s - 1]) if linked else 0
            size += reach[s, kept] + 1
        for t in range(s, n + 1):
            row[s, t] = total
            total += size
    return Back(row, at, reach, np.full(total, np.inf))


@jit
def _back(back: Back, s: int, t: int, kept: int, due: int) -> float:
    if due > back.reach[s, kept]:
        return np.inf
    return float(back.cost[back.row[s, t] + back.at[s, kept] + due])


@jit
def _whole(seconds: float, rate: float) -> int:
    """Return the memory slots that are copied in `seconds`, rounded down."""
    return int(min(seconds * rate, 1e12) + _ROUNDING)


@jit
def _carries(link: Carried, s: int, t: int) -> int:
    """Return the memory slots copied from the host while blocks s..t run once forward and once backward."""
    return int(link.backward_in[t] - link.backward_in[s - 1] + link.forward_in[t] - link.forward_in[s - 1])


@jit
def _relax_save(
    mine: Floats, begin: int, inner: Floats, extra: float, save: int, run: int, sent: int, inner_sent: int,
    rate: float, slot: float,
) -> None:  # fmt: skip
    """Lower mine[k], for each k, to the time lost if block s is saved and begin + k slots have to be copied back.

    `mine` is a part of the table `back` for blocks s..t. `save`, `run`: slots that the forward and the backward
    of s lack if nothing is copied (0 or less). `extra`: seconds by which the option's backward is slower.
    `sent`: slots copied during that backward. `inner`: the row of blocks s+1..t, empty if s = t; `inner_sent`:
    slots copied during their ops. `rate`, `slot`: slots per second, seconds per slot.
    """
    for k in range(mine.size):
        after = max(run + begin + k, 0)
        early = max(begin + k - after - sent, 0)
        lost = extra + after * slot
        if inner.size:
            if early >= inner.size:
                continue
            lost += inner[early]
            early = max(early - inner_sent - _whole(inner[early], rate), 0)
        mine[k] = least(mine[k], lost + max(save + early, 0) * slot)


@jit
def _relax_cut(
    mine: Floats, begin: int, left: Floats, right: Floats, again: float, over: int, left_sent: int, right_sent: int,
    rate: float, slot: float,
) -> None:  # fmt: skip
    """Lower mine[k], for each k, to the time lost with a checkpoint after block j and begin + k slots to copy back.

    `mine` is a part of the table `back` for blocks s..t. `again`: seconds of the forwards s..j. `over`: slots
    that they lack if nothing is copied (0 or less). `left`, `right`: the rows of blocks s..j and j+1..t;
    `left_sent`, `right_sent`: slots copied during their ops. `rate`, `slot`: slots per second, seconds per
    slot.
    """
    for k in range(mine.size):
        x = left[begin + k]
        if again + x < mine[k]:
            rest = max(begin + k - left_sent - _whole(x, rate), 0)
            if rest < right.size:
                y = right[rest]
                if again + x + y < mine[k]:
                    early = max(rest - right_sent - _whole(y, rate), 0)
                    mine[k] = least(mine[k], again + x + y + max(over + early, 0) * slot)


@jit
def _line(back: Back, s: int, t: int, kept: int) -> Floats:
    """Return the seconds lost in running backwards t..s with `kept` memory slots in use, by slots to copy back."""
    begin = back.row[s, t] + back.at[s, kept]
    return back.cost[begin : begin + back.reach[s, kept] + 1]


@jit
def _try_save(
    task: PofoTask, back: Back, s: int, t: int, kept: int, o: int, mine: Floats, begin: int
) -> None:
    """Lower the costs `mine` of running backwards t..s by the choice to save block s with option o.

    `mine` is for `kept` slots in use, and for `begin` or more slots to copy back.
    """
    sizes, link, full = task.sizes, task.link, task.slots
    save, run = sizes.phase[t] + sizes.save[o] + kept, sizes.phase[s] + sizes.back[o] + kept
    if max(save, run) <= full and (s == t or kept + sizes.saved[o] <= full):
        sent = link.backward_in[s] - link.backward_in[s - 1] + _whole(sizes.extra[o], link.rate_in)
        inner, inner_sent = mine[:0], 0
        if s < t:
            inner, inner_sent = _line(back, s + 1, t, kept + sizes.saved[o]), _carries(link, s + 1, t)
        _relax_save(
            mine, begin, inner, sizes.extra[o], save - full, run - full, sent, inner_sent, link.rate_in, link.slot_in
        )  # fmt: skip


@jit
def _try_cut(task: PofoTask, back: Back, s: int, t: int, kept: int, j: int, mine: Floats, begin: int) -> None:
    """Lower the costs `mine` of running backwards t..s by the choice to store a checkpoint after block j.

    `mine` is for `kept` slots in use, and for `begin` or more slots to copy back.
    """
    sizes, link, full = task.sizes, task.link, task.slots
    if sizes.phase[t] + sizes.run[s, j] + kept <= full and kept + sizes.out[j] <= full:
        _relax_cut(
            mine,
            begin,
            _line(back, s, j, kept),
            _line(back, j + 1, t, kept + sizes.out[j]),
            sizes.forward[j] - sizes.forward[s - 1],
            sizes.phase[t] + task.coming[s, j] + kept - full,
            _carries(link, s, j),
            _carries(link, j + 1, t),
            link.rate_in,
            link.slot_in,
        )


@jit
def _fill_rows(task: PofoTask, back: Back, distance: int, worker: int, workers: int) -> None:
    """Fill every `workers`-th of the table rows of blocks s..s + distance."""
    start, forward = task.sizes.start, task.sizes.forward
    for s in range(1 + worker, task.n + 1 - distance, workers):
        t = s + distance
        for kept in range(task.slots + 1):
            mine = _line(back, s, t, kept)
            for o in range(start[s], start[s + 1]):
                _try_save(task, back, s, t, kept, o, mine, 0)
            for j in range(s, t):
                if mine[-1] <= forward[j] - forward[s - 1]:
                    break  # costs grow with the number of slots to copy back, and the forwards' time with j
                _try_cut(task, back, s, t, kept, j, mine, 0)


def fill_back(task: PofoTask) -> Back:
    """Fill and return the table `back`, in the order of increasing distance between s and t."""
    back: Back = _lay_out(task.n, task.slots, task.sizes.out, task.linked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    workers = min(cores, 4) if task.n > 16 else 1
    with ThreadPoolExecutor(workers) as pool:
        for distance in progress(range(task.n), "pofo, backward"):
            jobs = [pool.submit(_fill_rows, task, back, distance, k, workers) for k in range(workers)]
            for job in jobs:
                job.result()
    return back


@jit
def _save(
    task: PofoTask, s: int, size: int, away: bool, kept: int, behind: int, ahead: int, o: int
) -> tuple[float, int, int, int]:
    """Return the seconds lost by saving block s with option o in a state of the forward, and the next state.

    A state is (memory slots in use, slots still to be copied to the host, slots to be back before the
    backward): `kept`, `behind`, `ahead`. `size`: slots of the input of block s; `away`: the input is offloaded.
    Infinite seconds if it does not fit.
    """
    sizes, link, full = task.sizes, task.link, task.slots
    save = sizes.phase[task.n] + sizes.save[o] + kept + size
    run = sizes.phase[s] + sizes.back[o] + kept + size
    if max(save, run) > full:
        return np.inf, 0, 0, 0
    idle, idle_back = max(save + behind - full, 0), max(run + ahead - full, 0)
    sent = link.forward_out[s] - link.forward_out[s - 1] + idle
    came = link.backward_in[s] - link.backward_in[s - 1] + _whole(sizes.extra[o], link.rate_in) + idle_back
    lost = sizes.extra[o] + idle * link.slot_out + idle_back * link.slot_in
    if away:
        return lost, kept, max(behind + size - sent, 0), max(ahead - came, 0) + size
    return lost, kept + size, max(behind - sent, 0), max(ahead - came, 0)


@jit
def _run(
    task: PofoTask, s: int, t: int, size: int, away: bool, kept: int, behind: int, ahead: int, later: float
) -> tuple[float, int, int, int]:
    """Return the seconds lost by running blocks s..t without saving in a state of the forward pass, and the next state.

    The arguments are those of `_save`; `later`: seconds lost in running the backwards t..s, from the table
    `back`.
    """
    sizes, link, full = task.sizes, task.link, task.slots
    held = sizes.phase[task.n] + kept
    # an offloaded input stays on the device while the first forward reads it
    if held + max(size + task.first[s], (0 if away else size) + task.beyond[s, t]) > full:
        return np.inf, 0, 0, 0
    idle = max(held + size + behind + task.leaving[s, t] - full, 0)
    sent = link.forward_out[t] - link.forward_out[s - 1] + idle
    came = _carries(link, s, t) + _whole(later, link.rate_in)
    lost = sizes.forward[t] - sizes.forward[s - 1] + later + idle * link.slot_out
    if away:
        return lost, kept, max(behind + size - sent, 0), max(ahead - came, 0) + size
    return lost, kept + size, max(behind - sent, 0), max(ahead - came, 0)


class PofoStates(NamedTuple):
    """The table `forward`: least seconds lost, by [slots in use, slots to be back, slots still to be copied out].

    `plain[s]`: the input of block s is the output of the block before; `saved[k]`: it is part of what option
    saves[k] saved.
    """

    plain: Floats
    saved: Floats
    block: Ints  # [k]: index of the block that saves[k] is an option of


def fill_forward(task: PofoTask, back: Back) -> PofoStates:
    """Fill the table `forward`, block by block; states that cannot beat a plan without the link are skipped."""
    side = task.slots + 1
    block = np.searchsorted(task.sizes.start, task.saves, side="right") - 1
    states = PofoStates(
        np.full((task.n + 1, side, side, side), np.inf),
        np.full((task.saves.size, side, side, side), np.inf),
        block,
    )
    states.plain[1, 0, 0, 0] = 0.0
    first = int(task.sizes.out[0])
    bound = _back(back, 1, task.n, first, 0) if first <= task.slots else np.inf
    for s in progress(range(1, task.n + 1), "pofo, forward"):
        for k in (-1, *np.flatnonzero(block == s - 1).tolist()):
            _push(task, back, states, s, k, bound)
    return states


@jit
def _push(task: PofoTask, back: Back, states: PofoStates, s: int, k: int, bound: float) -> None:
    """Expand the states of block s, whose input is the previous block's output (k = -1) or part of what it saved.

    It was then saved with option saves[k].
    """
    link, slots = task.link, task.slots
    size = task.sizes.out[s - 1] if k < 0 else task.sizes.saved[task.saves[k]]
    here = states.plain[s] if k < 0 else states.saved[k]
    most_out = link.forward_out[task.n] - link.forward_out[s - 1]  # slots that can still be copied to the host
    most_in = _carries(link, s, task.n)
    for kept in range(slots + 1 - size):
        for ahead in range(slots + 1):
            late = max(ahead - most_in, 0) * link.slot_in
            if _forget(here[kept, ahead], most_out, link.slot_out, late, bound * (1 + _ROUNDING)):
                _push_saves(task, states, here[kept, ahead], s, size, kept, ahead)
                _push_runs(task, back, states, here[kept, ahead], s, size, kept, ahead, bound)


@jit
def _forget(here: Floats, most_out: int, slot_out: float, late: float, bound: float) -> bool:
    """Discard states that lose at least `bound` seconds in total; return whether any are left.

    `here` is indexed by the slots still to be copied to the host. `late`: least seconds by which copies back
    from the host take longer than the remaining ops.
    """
    live = False
    for behind in range(here.size):
        if here[behind] < np.inf:
            if here[behind] + max(behind - most_out, 0) * slot_out + late > bound:
                here[behind] = np.inf
            else:
                live = True
    return live


@jit
def _push_saves(
    task: PofoTask, states: PofoStates, here: Floats, s: int, size: int, kept: int, ahead: int
) -> None:
    """Expand states of block s by saving it with each option; `here` has their costs by slots still to be copied out.
    """
    begin, end = np.searchsorted(states.block, s), np.searchsorted(states.block, s + 1)
    for behind in range(task.slots + 1):
        cost = here[behind]
        if cost < np.inf:
            for away in range(2 if task.linked and s < task.n else 1):
                for g in range(begin, end):
                    lost, a, f, b = _save(task, s, size, away == 1, kept, behind, ahead, task.saves[g])
                    if max(a + f, a + b) <= task.slots and cost + lost < states.saved[g, a, b, f]:
                        states.saved[g, a, b, f] = cost + lost


@jit
def _push_runs(
    task: PofoTask, back: Back, states: PofoStates, here: Floats, s: int, size: int, kept: int, ahead: int, bound: float
) -> None:  # fmt: skip
    """Expand states of block s by running blocks s..t without saving, for each t.

    `here` has the costs of the states, by slots still to be copied to the host.
    """
    forward = task.sizes.forward
    for t in range(s, task.n):
        later = _back(back, s, t, kept + size, ahead)
        if later + forward[t] - forward[s - 1] > bound * (1 + _ROUNDING):
            continue
        for behind in range(task.slots + 1):
            cost = here[behind]
            if cost < np.inf:
                for away in range(2 if task.linked else 1):
                    lost, a, f, b = _run(task, s, t, size, away == 1, kept, behind, ahead, later)
                    if max(a + f, a + b) <= task.slots and cost + lost < states.plain[t + 1, a, b, f]:
                        states.plain[t + 1, a, b, f] = cost + lost


@jit
def _came_from(
    task: PofoTask, back: Back, states: PofoStates, g: int, s1: int, a1: int, b1: int, f1: int
) -> tuple[int, int, int, int, int, int]:
    """Return the state of the table `forward` from which a given state was reached, and how.

    The given state is of block s1, with (a1, b1, f1) slots in use, to be back, and still to be copied out; its
    input is what option saves[g] saved, or the previous block's output if g = -1. The result is (block, input,
    is the input offloaded, slots in use, slots to be back, slots to be copied out).
    """
    target = states.plain[s1, a1, b1, f1] if g < 0 else states.saved[g, a1, b1, f1]
    sizes = task.sizes
    for s in range(1 if g < 0 else s1 - 1, s1):
        begin, end = np.searchsorted(states.block, s - 1), np.searchsorted(states.block, s)
        for k in range(begin - 1, end):
            k = k if k >= begin else -1
            size = sizes.out[s - 1] if k < 0 else sizes.saved[task.saves[k]]
            here = states.plain[s] if k < 0 else states.saved[k]
            for away in range(2 if task.linked else 1):
                kept = a1 if away else a1 - size
                if kept < 0 or kept + size > task.slots or (away and g >= 0 and s == task.n):
                    continue
                for ahead in range(task.slots + 1):
                    later = _back(back, s, s1 - 1, kept + size, ahead) if g < 0 else 0.0
                    for behind in range(task.slots + 1):
                        if here[kept, ahead, behind] <= target:
                            if g < 0:
                                lost, a, f, b = _run(
                                    task, s, s1 - 1, size, away == 1, kept, behind, ahead, later
                                )
                            else:
                                lost, a, f, b = _save(
                                    task, s, size, away == 1, kept, behind, ahead, task.saves[g]
                                )
                            if a == a1 and b == b1 and f == f1 and here[kept, ahead, behind] + lost == target:
                                return s, k, away, kept, ahead, behind
    return 0, 0, 0, 0, 0, 0  # never reached: every state but the first has a predecessor


class Move(NamedTuple):
    """Blocks s..t in the forward pass: s is saved with an option, or all run without saving (option -1)."""

    s: int
    t: int
    option: int
    value: Value  # the input of block s
    away: bool  # True if the input is offloaded
    held: int  # slots in use, including the input
    due: int  # slots that have to be back on the device before the backward


def _plan(chain: Chain, task: PofoTask, back: Back, states: PofoStates) -> FluidSchedule | None:
    """Return the best schedule in the tables; None if nothing fits."""
    ends = np.flatnonzero(states.block == task.n)
    turn = np.arange(task.slots + 1)
    wait = np.where(turn > 0, turn, 0.0)
    slot_out, slot_in = (slot if task.linked else 0.0 for slot in (task.link.slot_out, task.link.slot_in))
    total = (
        states.saved[ends] + (wait * slot_in)[None, None, :, None] + (wait * slot_out)[None, None, None, :]
    )
    if not np.isfinite(total).any():
        return None
    k, a, b, f = (int(place) for place in np.unravel_index(int(np.argmin(total)), total.shape))
    time = chain.least_time + float(total[k, a, b, f])
    moves: list[Move] = []
    g, s1 = int(ends[k]), task.n + 1
    while s1 > 1:
        s, k, away, a, b, f1 = (int(number) for number in _came_from(task, back, states, g, s1, a, b, f))
        value = Value("a", s - 1) if k < 0 else Value("A", s - 1)
        size = int(task.sizes.out[s - 1] if k < 0 else task.sizes.saved[task.saves[k]])
        moves.append(Move(s, s1 - 1, int(task.saves[g]) if g >= 0 else -1, value, bool(away), a + size, b))
        g, s1, f = k, s, f1
    return FluidSchedule(schedule=_schedule(task, back, moves[::-1]), time=time)


def _schedule(task: PofoTask, back: Back, moves: list[Move]) -> Schedule:
    ops: list[Op] = []
    for move in moves:
        if move.away:
            ops.append(Offload(move.value))
        ops += (
            min_memory.passing(move.s, move.t)
            if move.option < 0
            else [min_memory.saving(task.sizes, move.s, move.option)]
        )
    ops += [Prefetch(move.value) for move in reversed(moves) if move.away]
    for move in reversed(moves):
        if move.option >= 0:
            ops.append(Backward(move.s))
        else:
            ops += rerun(task, back, move.s, move.t, move.held, move.due)
    return Schedule(tuple(ops))


def lost(back: Back, s: int, t: int, held: int) -> float:
    """Return the seconds lost in running backwards t..s beside `held` memory slots in use; infinite if impossible."""
    return float(_line(back, s, t, held)[0])


def rerun(task: PofoTask, back: Back, s: int, t: int, held: int, due: int) -> list[Op]:
    """Return the ops that run backwards t..s with `held` memory slots occupied and `due` slots to be copied in."""
    ops: list[Op] = []
    todo: list[tuple[int, int, int, int] | Backward] = [(s, t, held, due)]
    while todo:
        item = todo.pop()
        if isinstance(item, Backward):
            ops.append(item)
            continue
        s, t, held, due = item
        save, cut, rest = _choose(task, back, s, t, held, due)
        if cut >= 0:
            ops += min_memory.passing(s, cut)
            todo.append((s, cut, held, due))
            todo.append((cut + 1, t, held + int(task.sizes.out[cut]), rest))
        else:
            ops.append(min_memory.saving(task.sizes, s, save))
            todo.append(Backward(s))
            if s < t:
                todo.append((s + 1, t, held + int(task.sizes.saved[save]), rest))
    return ops


@jit
def _choose(task: PofoTask, back: Back, s: int, t: int, kept: int, due: int) -> tuple[int, int, int]:
    """Return the best choice for backwards t..s: (option to save s, block to cut after, slots left to copy back).

    `kept` slots are in use, and `due` slots are to be copied back. Option or cut is -1.
    """
    sizes, link = task.sizes, task.link
    best, save, cut, rest = np.inf, -1, -1, 0
    trial = np.full(1, np.inf)
    for o in range(sizes.start[s], sizes.start[s + 1]):
        _try_save(task, back, s, t, kept, o, trial, due)
        if trial[0] < best:
            best, save = trial[0], o
            after = max(sizes.phase[s] + sizes.back[o] + kept + due - task.slots, 0)
            sent = link.backward_in[s] - link.backward_in[s - 1] + _whole(sizes.extra[o], link.rate_in)
            rest = max(due - after - sent, 0)
    for j in range(s, t):
        _try_cut(task, back, s, t, kept, j, trial, due)
        if trial[0] < best:
            best, save, cut = trial[0], -1, j
            left = _line(back, s, j, kept)[due]
            rest = max(due - _carries(link, s, j) - _whole(left, link.rate_in), 0)
    return save, cut, rest
