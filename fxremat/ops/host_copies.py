"""Functions by which generated graphs copy tensors to the host and back; `tier` names the storage on the host.

    host  = offload(x, tier)            right after the last op that writes x
    host  = release(host, x, tier)      where the plan needs the memory of x
    back  = prefetch(host, device, tier)
    x     = wait(back, host, tier)      before the first op that reads it

Each returns what the next one reads, so that torch's passes do not remove them as unused.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.host.tier import tier_named


def offload(tensor: torch.Tensor, tier: str) -> torch.Tensor:
    """Begin to copy a tensor to the host; return its copy there."""
    return tier_named(tier).offload(tensor)


def release(host: torch.Tensor, tensor: torch.Tensor, tier: str) -> torch.Tensor:
    """Wait until `tensor` is copied to `host`, and return `host`; the caller then drops its reference to `tensor`."""
    tier_named(tier).release(host)
    return host


def prefetch(host: torch.Tensor, device: torch.device, tier: str) -> torch.Tensor:
    """Allocate a tensor on the device, begin to copy `host` into it, and return it."""
    return tier_named(tier).prefetch(host, device)


def wait(back: torch.Tensor, host: torch.Tensor, tier: str) -> torch.Tensor:
    """Wait until `host` is copied into `back`, and return `back`."""
    tier_named(tier).wait(host)
    return back


for _function in (offload, release, prefetch, wait):
    fx.node.has_side_effect(_function)
