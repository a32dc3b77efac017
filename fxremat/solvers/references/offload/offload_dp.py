"""Offloads without recomputation, by dynamic programming over the values that are being copied: DYNPROG.

    lost[i, A, F, B]   least idle time of the forwards before block i and the backwards that mirror them;
                       of the values before A_{i-1}, A slots stay, F have yet to leave when F_{i-1} ends (below
                       0: the link has been idle that long), B must be back before B_{i-1} starts (likewise)

    idle before F_i    max(save(i) + A + max(F, 0) + A_{i-1} - slots, 0)          for B_i likewise
    A_{i-1} goes       A,           max(max(F, 0) + A_{i-1} - sent, 0),   max(B - came, 0) + A_{i-1}
    A_{i-1} stays      A + A_{i-1}, F - sent,                             B - came

`sent` and `came` are the slots that are copied meanwhile. At the forward/backward split (`_turn`): what has yet to
leave is copied during the first backwards, or what must be back is copied during the last forwards, as far as memory
allows; if both are left, one after the other. With `synchronized` neither, as in pofo.py.

All states that no other dominates are kept, block by block; beyond `_STATES` of them, those that have lost least. Every
block is saved with its fastest option, and nothing is recomputed.

A_l is all that the backward of block l reads; F_l and B_l are its forward and backward. A. Shilova's thesis (2021),
Algorithm 5, equations 3.4-3.17, and the rounding of 3.3.3.2: sums of values are rounded up, not each value, so some
values round down; while the result does not fit, the value that was rounded down most is rounded up. Equation 3.10 lets
F fall below 0 while F_i runs that reads A_{i-1}, so that A_{i-1} may be back before it has been read: here it does not.
Optimal for the fluid model on one link, as long as `_STATES` suffice and nothing is rounded.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.errors import BudgetTooSmall
from fxremat.jit import jit
from fxremat.progress import progress
from fxremat.solvers import keep_all
from fxremat.solvers.offload.link_slots import Carried, FluidSchedule, carried, speeds
from fxremat.solvers.offload.trips import needs, travel, trips
from fxremat.solvers.references.offload import greedy
from fxremat.solvers.sizes import Floats, Ints, in_slots

_STATES = 60_000
_ROUNDS = 3  # attempts at rounding sizes, after which all sizes are rounded up


class DynprogTask(NamedTuple):
    """The problem with memory in slots (equal parts of the budget).

    Entry 0 of an array is unused, or belongs to the chain's input.
    """

    slots: int
    value: Ints  # [l]: what the backward of block l reads; [0]: the chain's input
    save: Ints  # [i]: what the forward of block i needs in addition to its input
    run: Ints  # [i]: what the backward of block i needs in addition to its input
    # [j]: what the backward of j needs in addition to saved values, minus those of later blocks, already freed
    end: Ints
    # [j]: what the forward of j needs in addition to saved values, minus those of later blocks, not yet saved
    begin: Ints
    link: Carried


class DynprogStates(NamedTuple):
    """States of the dynamic program before one block, one per row.

    `came` is the row of the preceding state; -1 - row if the decision was to offload.
    """

    kept: Ints  # slots of values that stay on the device
    behind: Ints  # slots of values still to be copied to the host
    ahead: Ints  # slots of values that must be back on the device before the backward
    lost: Floats  # seconds of idle time
    came: Ints


def schedules(chain: Chain, mem: int, platform: Platform | None, slots: int = 500) -> list[Schedule]:
    """Return the schedule of the table, and greedy ones. Raises `BudgetTooSmall`; its minimum is exact."""
    fallback = greedy.schedules(chain, mem)
    if speeds(platform) == (0.0, 0.0):
        if any(trip in str(fallback[0]) for trip in ("Off", "Pre")):
            raise BudgetTooSmall(minimum=int(needs(chain, keep_all.schedules(chain)[0]).max()), budget=mem)
        return fallback
    try:
        return list(dict.fromkeys([build(chain, mem, platform, slots).schedule, *fallback]))
    except BudgetTooSmall:  # raised only because sizes were rounded
        return fallback


def build(
    chain: Chain, mem: int, platform: Platform | None, slots: int = 500, *, synchronized: bool = False
) -> FluidSchedule:
    """Return the best schedule if memory is divided into `slots` equal parts.

    Raises `BudgetTooSmall` if they are too coarse.
    """
    everything = keep_all.schedules(chain)[0]
    every = {trip.value.index: trip for trip in trips(chain, everything)}
    values = [
        chain.input_bytes,
        *(block.choices[keep_all.fastest(block)].saved_bytes for block in chain.blocks),
    ]
    exact = np.array(values) * slots / mem
    raised = np.zeros(exact.size, dtype=bool)
    for attempt in range(_ROUNDS + 1):
        if attempt == _ROUNDS:
            raised[:] = True
        rounded = _rounded(exact, raised)
        task = _task(chain, mem, platform, slots, rounded)
        away, lost = _solve(task, synchronized)
        chosen = [every[i] for i in away if i in every]
        need = needs(chain, everything)
        for trip in chosen:
            need[trip.away] -= trip.size
        if need.max() <= mem and np.isfinite(lost):
            return FluidSchedule(
                schedule=travel(everything, chosen, need, mem, in_part=True), time=chain.least_time + lost
            )
        down = np.flatnonzero(rounded < exact)
        if not down.size:
            break
        raised[down[np.argmin((exact - rounded)[down])]] = True
    peaks = needs(chain, everything)
    for trip in every.values():
        peaks[trip.away] -= trip.size
    raise BudgetTooSmall(minimum=int(peaks.max()), budget=mem)


def _rounded(exact: Floats, raised: npt.NDArray[np.bool_]) -> Ints:
    """Round sizes to whole slots so that their sums are rounded up; sizes marked in `raised` are rounded up themselves.
    """
    sums = np.ceil(np.cumsum(np.where(raised, 0.0, exact)) - 1e-9)
    return np.where(raised, np.ceil(exact - 1e-9), np.diff(sums, prepend=0.0)).astype(np.int64)


def _task(chain: Chain, mem: int, platform: Platform | None, slots: int, value: Ints) -> DynprogTask:
    n, sizes = len(chain), in_slots(chain, mem, slots)
    pick = np.array([0] + [sizes.start[i] + keep_all.fastest(chain.blocks[i - 1]) for i in range(1, n + 1)])
    save, run = sizes.phase[n] + sizes.save[pick], sizes.phase + sizes.back[pick]
    gone = np.concatenate((np.cumsum(value[::-1])[::-1][1:], [0]))  # [j]: slots of what the blocks after j save
    return DynprogTask(
        slots=slots,
        value=value,
        save=save,
        run=run,
        end=run - value - gone,
        begin=save - value - gone,
        link=carried(chain, mem, slots, platform),
    )


def _solve(task: DynprogTask, synchronized: bool) -> tuple[list[int], float]:
    """Return each block whose saved values are offloaded, and the seconds of idle time; ([], inf) if nothing fits."""
    n = task.value.size - 1
    room = task.slots - np.maximum(task.save, task.run)
    # [i]: slots of values that may stay on the device before block i if the rest is to fit
    rooms = np.concatenate((np.minimum.accumulate((room[1:] - task.value[:-1])[::-1])[::-1], [task.slots]))
    zero = np.zeros(1, dtype=np.int64)
    layers = [DynprogStates(zero, zero, zero, np.zeros(1), zero)]
    for i in progress(range(1, n + 1), "offload_dp"):
        layers.append(_prune(_step(task, layers[-1], i, int(rooms[i]), synchronized)))
    last = layers[-1]
    if not last.kept.size:
        return [], np.inf
    total = np.array([_turn(task, last, k, synchronized) for k in range(last.kept.size)])
    k = int(np.argmin(total))
    lost, away = float(total[k]), []
    for i in range(n, 0, -1):
        came = int(layers[i].came[k])
        if came < 0:
            away.append(i - 1)
        k = came if came >= 0 else -1 - came
    return away, lost


@jit
def _step(task: DynprogTask, states: DynprogStates, i: int, room: int, synchronized: bool) -> DynprogStates:
    """Return the states before block i + 1; at most `room` memory slots of values may stay on the device then."""
    link, size, n = task.link, task.value[i - 1], task.value.size - 1
    kept, behind, ahead = np.zeros((3, 2 * states.kept.size), dtype=np.int64)
    came = np.zeros(2 * states.kept.size, dtype=np.int64)
    lost = np.zeros(2 * states.kept.size)
    count = 0
    for k in range(states.kept.size):
        a, f, b = states.kept[k], states.behind[k], states.ahead[k]
        if max(task.save[i], task.run[i]) + a + size > task.slots:
            continue
        idle = max(task.save[i] + a + max(f, 0) + size - task.slots, 0)
        idle_back = max(task.run[i] + a + max(b, 0) + size - task.slots, 0)
        sent = link.forward_out[i] - link.forward_out[i - 1] + idle
        back = link.backward_in[i] - link.backward_in[i - 1] + idle_back
        cost = states.lost[k] + idle * link.slot_out + idle_back * link.slot_in
        for goes in range(2):
            if goes and i == n:  # the last backward reads this value at once
                continue
            if not goes and a + size > room:
                continue
            kept[count] = a if goes else a + size
            behind[count] = max(max(f, 0) + size - sent, 0) if goes else f - sent
            ahead[count] = max(b - back, 0) + size if goes else b - back
            if synchronized:
                behind[count], ahead[count] = max(behind[count], 0), max(ahead[count], 0)
            lost[count] = cost
            came[count] = -1 - k if goes else k
            count += 1
    return DynprogStates(kept[:count], behind[:count], ahead[:count], lost[:count], came[:count])


def _prune(states: DynprogStates) -> DynprogStates:
    """Discard states that another state equals or beats in all respects.

    If too many remain, keep those with least idle time.
    """
    states = _pick(states, np.lexsort((states.lost, states.behind, states.ahead, states.kept)))
    states = _pick(states, np.flatnonzero(_undominated(states)))
    if states.kept.size > _STATES:
        states = _pick(states, np.sort(np.lexsort((states.kept, states.lost))[:_STATES]))
    return states


def _pick(states: DynprogStates, rows: npt.NDArray[np.intp]) -> DynprogStates:
    kept, behind, ahead, lost, came = states
    return DynprogStates(kept[rows], behind[rows], ahead[rows], lost[rows], came[rows])


@jit
def _undominated(states: DynprogStates) -> npt.NDArray[np.bool_]:
    """Tell for each of the sorted states whether it loses less time than all earlier ones with equal slots.

    States are sorted by slots that stay, slots to be back, slots to be copied out, and seconds lost.
    """
    keep = np.zeros(states.kept.size, dtype=np.bool_)
    best = np.inf
    for k in range(states.kept.size):
        if k == 0 or states.kept[k] != states.kept[k - 1] or states.ahead[k] != states.ahead[k - 1]:
            best = np.inf
        if states.lost[k] < best:
            keep[k], best = True, states.lost[k]
    return keep


@jit
def _turn(task: DynprogTask, states: DynprogStates, k: int, synchronized: bool) -> float:
    """Return the seconds lost by a final state, including idle time between the last forward and the first backward."""
    link, n = task.link, task.value.size - 1
    a, f, b, lost = states.kept[k], states.behind[k], states.ahead[k], states.lost[k]
    if synchronized or (f > 0 and b > 0):
        return float(lost + max(f, 0) * link.slot_out + max(b, 0) * link.slot_in)
    if f <= 0 and b <= 0:
        return float(lost)
    held = a + task.value[n] + max(f, b) - task.slots
    wait = 0.0
    for j in range(n, 0, -1):
        if f > 0:
            later = link.slot_in * (link.backward_in[n] - link.backward_in[j])
            if later >= -b * link.slot_in:
                break
            wait = max(wait, (task.end[j] + held) * link.slot_out - later)
        else:
            later = link.slot_out * (link.forward_out[n] - link.forward_out[j])
            if later >= -f * link.slot_out:
                break
            wait = max(wait, (task.begin[j] + held) * link.slot_in - later)
    if f > 0:
        return float(lost + max(wait, f * link.slot_out + b * link.slot_in))
    return float(lost + max(wait, b * link.slot_in + f * link.slot_out))
