"""Offloads inputs whose copies can be hidden by computation: an interpretation of vDNN++ for chains.

If the forward of a block is long for the bytes of its input, the input is offloaded. For every threshold on
forward time / input bytes: all inputs above it, or every other one. Nothing is recomputed. The original
distinguishes layers by type, which a chain does not have.

A. Shilova's thesis (2021), 3.4.1; Rhu et al., vDNN (MICRO 2016).
"""

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Schedule
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import keep_all
from fxremat.solvers.offload.trips import needs, travel, trips


def schedules(chain: Chain, mem: int) -> list[Schedule]:
    """Return up to two schedules per block. Raises `BudgetTooSmall`; its minimum is exact."""
    everything = keep_all.schedules(chain)[0]
    every = sorted(trips(chain, everything), key=lambda trip: trip.value.index)
    ratios = [chain.blocks[trip.value.index].forward_time / trip.size for trip in every]
    found, peaks = [], []
    for threshold in (*sorted(set(ratios), reverse=True), float("inf")):
        above = [trip for trip, ratio in zip(every, ratios, strict=True) if ratio >= threshold]
        for chosen in (above, above[::2]):
            need = needs(chain, everything)
            for trip in chosen:
                need[trip.away] -= trip.size
            peaks.append(int(need.max()))
            if peaks[-1] <= mem:
                found.append(travel(everything, chosen, need, mem))
    if not found:
        raise BudgetTooSmall(minimum=min(peaks), budget=mem)
    return list(dict.fromkeys(found))
