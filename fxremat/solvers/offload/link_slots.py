"""The link to the host in slots: how much each op's time can carry, and how long a slot takes.

    carried[l]   slots that cross the link while the ops of blocks 1..l run, rounded down; what blocks s..t
                 carry is carried[t] - carried[s-1], so that roundings do not add up

The thesis, 3.3.3.2, rounds in the same way.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.solvers.sizes import Floats, Ints

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class FluidSchedule:
    """A schedule, and the seconds it takes in the fluid model where sizes are whole numbers of slots."""

    schedule: Schedule
    time: float


class Carried(NamedTuple):
    """Slots that the forwards carry to the host, and that forwards and backwards carry from it."""

    forward_out: Ints
    forward_in: Ints
    backward_in: Ints
    slot_out: float  # seconds that a slot takes to the host; 0 where there is no link
    slot_in: float
    rate_in: float  # slots a second


def carried(chain: Chain, mem: int, slots: int, platform: Platform | None) -> Carried:
    """The slots that the link carries during the ops of a chain; without a link, none."""
    out, back = speeds(platform)
    forward = np.cumsum([0.0] + [block.forward_time for block in chain.blocks])
    backward = np.cumsum([0.0] + [min(o.backward_time for o in block.choices) for block in chain.blocks])
    slot = mem / slots
    return Carried(
        _slots(forward, out / slot),
        _slots(forward, back / slot),
        _slots(backward, back / slot),
        slot / out if out else 0.0,
        slot / back if back else 0.0,
        back / slot,
    )


def speeds(platform: Platform | None) -> tuple[float, float]:
    """Bytes per second to the host and from it; zeros where values cannot go there and back."""
    if platform is None or not platform.to_host or not platform.from_host:
        return 0.0, 0.0
    return platform.to_host, platform.from_host


def _slots(seconds: Floats, rate: float) -> Ints:
    # more than everything is all the same, and sums stay small
    return np.minimum(np.floor(seconds * rate + _ROUNDING), 2.0**40).astype(np.int64)
