"""Autocapper: checkpoint for more memory than there is, then offload until the schedule fits.

For 40 budgets M' from `mem` to the peak of keep-all: take the schedule that a chain solver has for M'; then, while it
does not fit in `mem`, offload the value of the lowest index that is idle at the peak. All these are proposed; the
caller keeps the fastest.

The thesis of A. Shilova (2021), 4.3 (its "capper" offloads the same values; there M' below the least budget of the
chain solver is not tried, here the range starts at that budget).
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
    """Return schedules that fit in `mem` bytes; if `solve(mem)` exists it is among them.

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
    """Return trips to the host that make a schedule fit in `mem` bytes, and the bytes that it then needs at each place.

    If no trips make it fit, all that lower its peak are returned.
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
