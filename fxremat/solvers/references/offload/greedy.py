"""Offloads without recomputation: saved values leave for the host in order until enough memory is freed.

A_l is all that the backward of block l reads, A_0 the input. Nothing is recomputed. A. Shilova's thesis (2021), Theorem
8: optimal if parts of a value may travel. Here, as in its GREEDY, all of the last value leaves; if that is too little,
because the last values are in use at the peak, more do.
"""

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Schedule
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import keep_all
from fxremat.solvers.offload.trips import needs, travel, trips


def schedules(chain: Chain, mem: int) -> list[Schedule]:
    """Return a list with the only schedule. Raises `BudgetTooSmall`; its minimum is exact."""
    everything = keep_all.schedules(chain)[0]
    need = needs(chain, everything)
    eager = sorted(trips(chain, everything), key=lambda trip: trip.value.index)
    missing = int(need.max()) - mem
    count = gone = 0
    while count < len(eager) and (gone < missing or need.max() > mem):
        need[eager[count].away] -= eager[count].size
        gone += eager[count].size
        count += 1
    if need.max() > mem:
        raise BudgetTooSmall(minimum=int(need.max()), budget=mem)
    return [travel(everything, eager[:count], need, mem)]
