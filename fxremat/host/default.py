"""The host tier of those who name none."""

from __future__ import annotations

import torch

from fxremat.device import Ability, kind_of
from fxremat.host.files import FileTier
from fxremat.host.pinned import PinnedTier
from fxremat.host.tier import HostTier

_default: dict[type[HostTier], HostTier] = {}


def default_tier(device: torch.device) -> HostTier:
    """Pinned memory where the device has it, else files; one for the whole process, another once it is closed."""
    make = PinnedTier if kind_of(device).can(Ability.PINNED, Ability.STREAMS) else FileTier
    tier = _default.get(make)
    if tier is None or tier.closed:
        tier = _default[make] = make()
    return tier
