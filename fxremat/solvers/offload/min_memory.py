"""Finds the schedule with the lowest peak if there is a link to the host: values are offloaded or recomputed.

a_s is the output of block s, A_s all that its backward reads; F_s and B_s are its forward and backward.

    least[s, x]   bytes to run forward from block s and back to it; its input x, a[s-1] or A[s-1], is on the device
    save s        max(what F_s and B_s need in addition to the input, least[s+1, A_s])
    run to t      max(what the forwards s..t need, the input during F_s only, the input and low[s, t], least[t+1, a_t])

`low[s, t]` is the least memory of persistent.py for running backwards t..s; without a link, low[1, n] is the
result.
"""

from dataclasses import dataclass

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Backward, Forward, Keep, Offload, Op, Prefetch, Schedule, Value
from fxremat.solvers import persistent
from fxremat.solvers.offload.link_slots import speeds
from fxremat.solvers.sizes import ChainSizes, Ints, in_bytes


@dataclass(frozen=True, kw_only=True)
class MinMemorySchedule:
    """The schedule with the lowest peak, and that peak, which does not depend on the speed of the link."""

    schedule: Schedule
    peak: int  # bytes


def plan(chain: Chain, platform: Platform | None) -> MinMemorySchedule:
    """Return the schedule with the lowest peak among those in which a stored value stays stored until its last use.

    It may be stored on the host.
    """
    table = persistent.build(chain, 1, 1)
    if speeds(platform) == (0.0, 0.0):
        return MinMemorySchedule(schedule=table.schedule(table.least), peak=table.least)
    sizes, n = in_bytes(chain), len(chain)
    low, _ = persistent.bounds(sizes, n)

    def size(s: int, option: int) -> int:
        return int(sizes.out[s - 1] if option < 0 else sizes.saved[option])

    # (s, its input) -> (bytes, t, option to save s, or -1 to run blocks s..t without saving)
    ways: dict[tuple[int, int], tuple[int, int, int]] = {}
    for s in range(n, 0, -1):
        for option in (-1, *(range(sizes.start[s - 1], sizes.start[s]) if s > 1 else ())):
            kept = size(s, option)
            found = []
            for o in range(sizes.start[s], sizes.start[s + 1]):
                need = kept + max(int(sizes.phase[n] + sizes.save[o]), int(sizes.phase[s] + sizes.back[o]))
                found.append((max(need, ways[s + 1, o][0] if s < n else 0), s, o))
            most = 0
            for t in range(s, n):
                if t > s:
                    most = max(most, _later(chain, t))
                need = max(
                    int(sizes.phase[n]) + max(kept + int(sizes.run[s, s]), most), kept + int(low[s, t])
                )
                found.append((max(need, ways[t + 1, -1][0]), t, -1))
            ways[s, option] = min(found, key=lambda way: (way[0], way[1] - way[2]))
    return MinMemorySchedule(schedule=_schedule(chain, ways, low), peak=ways[1, -1][0])


def _schedule(chain: Chain, ways: dict[tuple[int, int], tuple[int, int, int]], low: Ints) -> Schedule:
    sizes, n, peak = in_bytes(chain), len(chain), ways[1, -1][0]
    forward: list[Op] = []
    backward: list[list[Op]] = []
    s, held = 1, -1
    while s <= n:
        _, t, option = ways[s, held]
        value, kept = Value("a", s - 1), int(sizes.out[s - 1])
        if held >= 0:
            value, kept = Value("A", s - 1), int(sizes.saved[held])
        if s < n:
            forward.append(Offload(value))
            backward.append([Prefetch(value)])
        forward += passing(s, t) if option < 0 else [saving(sizes, s, option)]
        backward.append(rerun(sizes, low, s, t, peak - kept) if option < 0 else [Backward(s)])
        s, held = t + 1, option
    fetches = [ops[0] for ops in reversed(backward) if isinstance(ops[0], Prefetch)]
    runs = [op for ops in reversed(backward) if not isinstance(ops[0], Prefetch) for op in ops]
    return Schedule((*forward, *fetches, *runs))


def rerun(sizes: ChainSizes, low: Ints, s: int, t: int, mem: int) -> list[Op]:
    """Return ops that run the backwards t..s within `mem` bytes beyond the input of block s.

    Blocks are saved if that fits.
    """
    ops: list[Op] = []
    todo: list[tuple[int, int, int] | Backward] = [(s, t, mem)]
    while todo:
        item = todo.pop()
        if isinstance(item, Backward):
            ops.append(item)
            continue
        s, t, mem = item
        saves = [
            o
            for o in range(sizes.start[s], sizes.start[s + 1])
            if max(
                sizes.phase[t] + sizes.save[o], sizes.phase[s] + sizes.back[o], sizes.saved[o] + low[s + 1, t]
            )
            <= mem
        ]
        if saves:
            save = min(saves, key=lambda o: (sizes.extra[o], sizes.saved[o]))
            ops.append(saving(sizes, s, save))
            todo.append(Backward(s))
            if s < t:
                todo.append((s + 1, t, mem - int(sizes.saved[save])))
        else:
            cut = next(
                j
                for j in range(s, t)
                if max(sizes.phase[t] + sizes.run[s, j], sizes.out[j] + low[j + 1, t], low[s, j]) <= mem
            )
            ops += passing(s, cut)
            todo.append((s, cut, mem))
            todo.append((cut + 1, t, mem - int(sizes.out[cut])))
    return ops


def passing(s: int, t: int) -> list[Op]:
    """Return the forwards of blocks s..t, which keep the input of block s and store only the output of block t."""
    return [Forward(s, Keep.CHECKPOINT), *(Forward(block, Keep.NONE) for block in range(s + 1, t + 1))]


def saving(sizes: ChainSizes, s: int, option: int) -> Forward:
    """Return the forward of block s that saves; `option` is an index over the options of all blocks."""
    return Forward(s, Keep.ALL, option - int(sizes.start[s]))


def _later(chain: Chain, block: int) -> int:
    """Return the bytes of a block's input, its output and its forward's scratch memory."""
    out, scratch = chain.output_sizes, chain.blocks[block - 1].forward_scratch
    return out[block - 1] + out[block] + scratch
