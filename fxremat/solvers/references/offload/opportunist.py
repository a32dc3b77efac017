"""Opportunist: keeps the link to the host busy, and recomputes what there is no time to copy.

    save block s, and send its input and what it saved to the host;
    run the next blocks without saving until both are sent; then the same again;
    once the rest fits into memory: save all of it

In the backward, a saved block's values come back from the host, and the blocks that ran after it without saving
are recomputed from what it saved, by the persistent dynamic program (persistent.py), in the memory that is
left.

A. Shilova's thesis (2021), 4.3. It sometimes finds nothing that fits if memory is short, as the thesis says.
"""

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Backward, Forward, Keep, Offload, Op, Prefetch, Schedule, Value
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import keep_all, persistent
from fxremat.solvers.offload import min_memory, pofo
from fxremat.solvers.offload.link_slots import speeds
from fxremat.solvers.offload.trips import needs
from fxremat.solvers.sizes import in_bytes


def schedules(chain: Chain, mem: int, platform: Platform | None, slots: int = 100) -> list[Schedule]:
    """Return a list with the only schedule. Raises `BudgetTooSmall`; its minimum works, but may not be the least."""
    schedule = _schedule(chain, mem, platform, slots) if mem > 0 else None
    if schedule is not None:
        return [schedule]
    low, high = mem, int(needs(chain, keep_all.schedules(chain)[0]).max())
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if _schedule(chain, max(1, middle), platform, slots) else (middle, high)
    raise BudgetTooSmall(minimum=high, budget=mem)


def _schedule(chain: Chain, mem: int, platform: Platform | None, slots: int) -> Schedule | None:
    """Return the schedule for `mem` bytes, or None if it does not fit."""
    task = pofo.task_of(chain, mem, None, slots)
    back = pofo.fill_back(task)
    sizes = in_bytes(chain)
    low, _ = persistent.bounds(sizes, len(chain))
    groups, tail = _groups(chain, mem, speeds(platform)[0])
    forward: list[Op] = []
    fetches: list[Op] = []
    backward: list[Op] = [Backward(block) for block in range(len(chain), tail - 1, -1)]
    value = Value("a", 0)
    for s, t in groups:
        forward += [*([Offload(value)] if value.kind == "a" else []), _save(chain, s), Offload(Value("A", s))]
        forward += [Forward(block, Keep.NONE) for block in range(s + 1, t + 1)]
        value = Value("a", t) if t > s else Value("A", s)
    forward += [_save(chain, block) for block in range(tail, len(chain) + 1)]
    for s, t in reversed(groups):
        held = _saved(chain, s)
        if t > s:
            if low[s + 1, t] + held > mem:
                return None
            slots_held = -(-held * slots // mem)
            if slots_held <= slots and pofo.lost(back, s + 1, t, slots_held) < float("inf"):
                backward += pofo.rerun(task, back, s + 1, t, slots_held, 0)
            else:  # possible only because sizes were rounded up
                backward += min_memory.rerun(sizes, low, s + 1, t, mem - held)
        backward.append(Backward(s))
        fetches.append(Prefetch(Value("A", s)))
        if s == 1 or (s - 1, s - 1) not in groups:
            fetches.append(Prefetch(Value("a", s - 1)))
    schedule = Schedule((*forward, *fetches, *backward))
    return schedule if needs(chain, schedule).max() <= mem else None


def _groups(chain: Chain, mem: int, speed: float) -> tuple[list[tuple[int, int]], int]:
    """Return (s, t) of each block s that is saved and sent while blocks s+1..t run, and the first block that is kept.
    """
    n, s, size = len(chain), 1, chain.input_bytes
    groups: list[tuple[int, int]] = []
    unsent = size
    while s < n and (_kept(chain, s, size) > mem) and speed:
        seconds = max(unsent / speed, chain.blocks[s - 1].forward_time) + _saved(chain, s) / speed
        seconds -= chain.blocks[s - 1].forward_time
        t = s
        while seconds > 0 and t < n - 1:
            t += 1
            seconds -= chain.blocks[t - 1].forward_time
        groups.append((s, t))
        size = chain.output_sizes[t] if t > s else _saved(chain, s)
        unsent = size if t > s else 0
        s = t + 1
    return groups, s


def _kept(chain: Chain, s: int, held: int) -> int:
    """Return the bytes that blocks s..n need if all are saved, with `held` bytes for the input of block s."""
    n, most = len(chain), 0
    for number in range(s, n + 1):
        option = chain.blocks[number - 1].choices[keep_all.fastest(chain.blocks[number - 1])]
        forward = chain.phase_sizes[n] + option.saved_bytes + (option.save_scratch or 0)
        grad = chain.grad_sizes[number - 1]
        backward = chain.phase_sizes[number] + option.saved_bytes + grad + option.backward_scratch
        most = max(most, held + forward, held + backward)
        held += option.saved_bytes
    return most


def _saved(chain: Chain, number: int) -> int:
    block = chain.blocks[number - 1]
    return block.choices[keep_all.fastest(block)].saved_bytes


def _save(chain: Chain, number: int) -> Forward:
    return Forward(number, Keep.ALL, keep_all.fastest(chain.blocks[number - 1]))
