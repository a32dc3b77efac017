"""Functions that the nodes of a graph with transfers call, with tensors and the name of a host tier as arguments.

    host  = offload(x, tier)            right after the last op that writes x
    host  = release(host, x, tier)      where the plan needs the memory of x
    back  = prefetch(host, device, tier)
    x     = wait(back, host, tier)      before the first op that reads it

Each returns what the next one reads, so that no pass of torch sees a node without a user.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat.host.tier import tier_named


def offload(tensor: torch.Tensor, tier: str) -> torch.Tensor:
    """Begin to copy a tensor to the host."""
    return tier_named(tier).offload(tensor)


def release(host: torch.Tensor, tensor: torch.Tensor, tier: str) -> torch.Tensor:
    """Wait for the copy out; the caller then drops its reference to `tensor`."""
    tier_named(tier).release(host)
    return host


def prefetch(host: torch.Tensor, device: torch.device, tier: str) -> torch.Tensor:
    """Begin to copy back into newly allocated memory on the device."""
    return tier_named(tier).prefetch(host, device)


def wait(back: torch.Tensor, host: torch.Tensor, tier: str) -> torch.Tensor:
    """Wait for the copy back."""
    tier_named(tier).wait(host)
    return back


for _function in (offload, release, prefetch, wait):
    fx.node.has_side_effect(_function)
