"""The host tier (storage for offloaded tensors) that is used if the user names none."""

from __future__ import annotations

import torch

from fxremat.device import Ability, kind_of
from fxremat.host.files import FileTier
from fxremat.host.pinned import PinnedTier
from fxremat.host.tier import HostTier

_default: dict[type[HostTier], HostTier] = {}


def default_tier(device: torch.device) -> HostTier:
    """Return this process's default storage for offloaded tensors: pinned memory if the device has it, else files.

    If the default tier was closed, it is replaced by a new one.
    """
    make = PinnedTier if kind_of(device).can(Ability.PINNED, Ability.STREAMS) else FileTier
    tier = _default.get(make)
    if tier is None or tier.closed:
        tier = _default[make] = make()
    return tier
