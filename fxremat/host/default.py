"""The host tier of those who name none."""

from __future__ import annotations

import torch

from fxremat.host.files import FileTier
from fxremat.host.pinned import PinnedTier
from fxremat.host.tier import HostTier

_default: dict[str, HostTier] = {}


def default_tier(device: torch.device) -> HostTier:
    """Pinned memory for a CUDA device, else files; one for the whole process, and another once it is closed."""
    kind = "cuda" if device.type == "cuda" else "files"
    tier = _default.get(kind)
    if tier is None or tier.closed:
        tier = _default[kind] = PinnedTier() if kind == "cuda" else FileTier()
    return tier
