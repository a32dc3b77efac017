"""Capacity of the link to the host in memory slots: how many can be copied during each op, and the time for one.

    carried[l]   slots that can be copied while the ops of blocks 1..l run, rounded down; during blocks s..t it is
                 carried[t] - carried[s-1], so that roundings do not add up

The thesis of A. Shilova (2021), 3.3.3.2, rounds in the same way.
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
    """A schedule with its seconds, if memory were freed byte by byte as copies proceed, and sizes rounded to slots."""

    schedule: Schedule
    time: float


class Carried(NamedTuple):
    """Numbers of memory slots that can be copied over the link to the host while ops run.

    Entry l of an array is for the ops of blocks 1..l.
    """

    forward_out: Ints  # slots copied to the host during forwards
    forward_in: Ints  # slots copied from the host during forwards
    backward_in: Ints  # slots copied from the host during backwards
    slot_out: float  # seconds to copy one slot to the host; 0 without a link
    slot_in: float  # seconds to copy one slot from the host; 0 without a link
    rate_in: float  # slots copied from the host per second


def carried(chain: Chain, mem: int, slots: int, platform: Platform | None) -> Carried:
    """Return the numbers of memory slots that can be copied during the ops of a chain.

    Zeros without a link to the host.
    """
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
    """Return the bytes per second to the host and from it; zeros unless copies are possible both ways."""
    if platform is None or not platform.to_host or not platform.from_host:
        return 0.0, 0.0
    return platform.to_host, platform.from_host


def _slots(seconds: Floats, rate: float) -> Ints:
    # capped, so that sums do not overflow
    return np.minimum(np.floor(seconds * rate + _ROUNDING), 2.0**40).astype(np.int64)
