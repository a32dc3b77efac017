"""Autocapper: solves for more memory than there is, then offloads tensors until the schedule fits.

For 40 budgets M' from `mem` up to the peak without recomputation: take a chain solver's schedule for M'; while
it does not fit into `mem`, offload the value with the lowest block index that is unused at the peak. All these
schedules are proposed; the caller keeps the fastest.

The thesis of A. Shilova (2021), 4.3. Its "capper" offloads the same values; it does not try M' below the least
budget of the chain solver, whereas here the range starts at that budget.
"""

from collections.abc import Callable

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Schedule
from fxremat.errors import BudgetTooSmall
from fxremat.solvers.offload.trips import ChainTrip, needs, travel, trips
from fxremat.solvers.sizes import Ints


def schedules(
    chain: Chain, mem: int, *, least: int, enough: int, solve: Callable[[int], Schedule], count: int = 40
) -> list[Schedule]:
    """Return schedules that fit into `mem` bytes; if `solve(mem)` exists it is among them.

    Args:
        least, enough: the least budget of the chain solver in bytes, and one from which on it keeps everything.
        solve: returns the chain solver's schedule, without copies, for any budget from `least` on.
        count: the number of budgets that are tried.

    Raises:
        BudgetTooSmall: even with all possible values away, no schedule fits; the minimum is the least budget for
            which one does.
    """
    start = max(mem, least)
    budgets = np.linspace(start, max(start, enough), count).astype(int).tolist()
    found, peaks = [], []
    for schedule in dict.fromkeys(solve(budget) for budget in sorted(set(budgets))):
        chosen, need = cap(chain, schedule, mem)
        peaks.append(int(need.max()))
        if peaks[-1] <= mem:
            found.append(travel(schedule, chosen, need, mem))
    if not found:
        raise BudgetTooSmall(minimum=min(peaks), budget=mem)
    return list(dict.fromkeys(found))


def cap(chain: Chain, schedule: Schedule, mem: int) -> tuple[list[ChainTrip], Ints]:
    """Return trips to the host that make a schedule fit into `mem` bytes, and the bytes it then needs at each moment.

    If no trips make it fit, return all that lower its peak.
    """
    need = needs(chain, schedule)
    waiting = sorted(
        trips(chain, schedule), key=lambda trip: (trip.value.index, trip.value.kind == "a", trip.end)
    )
    chosen = []
    while need.max() > mem:
        peak = int(need.argmax())
        idle = next((trip for trip in waiting if trip.away.start <= peak < trip.away.stop), None)
        if idle is None:
            break
        waiting.remove(idle)
        chosen.append(idle)
        need[idle.away] -= idle.size
    return chosen, need
