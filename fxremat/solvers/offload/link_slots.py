"""The link to the host in slots: how many can be copied during each op, and how long the copy of one takes.

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
    """A schedule, and its seconds in the fluid model, which frees memory byte by byte, with sizes rounded to slots."""

    schedule: Schedule
    time: float


class Carried(NamedTuple):
    """The numbers of slots that can be copied over the link while ops run; index l of an array: during blocks 1..l."""

    forward_out: Ints  # to the host, during forwards
    forward_in: Ints  # from the host, during forwards
    backward_in: Ints  # from the host, during backwards
    slot_out: float  # seconds to copy a slot to the host; 0 if there is no link
    slot_in: float  # seconds to copy a slot from the host
    rate_in: float  # slots a second


def carried(chain: Chain, mem: int, slots: int, platform: Platform | None) -> Carried:
    """Return the slots that can be copied during the ops of a chain; none without a link."""
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
    """Return the bytes per second to the host and from it; zeros unless values can go both ways."""
    if platform is None or not platform.to_host or not platform.from_host:
        return 0.0, 0.0
    return platform.to_host, platform.from_host


def _slots(seconds: Floats, rate: float) -> Ints:
    # rates are capped, so that sums stay small
    return np.minimum(np.floor(seconds * rate + _ROUNDING), 2.0**40).astype(np.int64)
