"""Free memory of a device, minus a margin: the bytes of mem="auto"."""

from __future__ import annotations

import torch

from fxremat.device import Ability, kind_of
from fxremat.errors import InvalidBudget
from fxremat.torch_private import allocates_in_expandable_segments

AUTO_MARGIN = 0.05  # share of the free memory that mem="auto" does not use, if segments are expandable
BLOCKS_MARGIN = 0.2  # that share if segments are not expandable: the allocator then reserves up to a third too much
LEAST_MARGIN = 40 * 2**20  # bytes that "auto" leaves at least: two segments of large blocks of CUDA's allocator
FRAGMENTS = 1.5  # times the bytes of the largest tensor: what may be free in pieces that are too small for it
SHRUNK = 0.97  # times the bytes that were free at planning: if fewer are free now, "auto" is planned again


def free_bytes(device: torch.device, largest: int) -> int:
    """Return the bytes that a device has free now, including what torch's allocator has reserved, minus a margin.

    Args:
        largest: bytes of the step's largest tensor, which does not fit into smaller free pieces.

    Raises:
        InvalidBudget: the device does not tell how much is free.
    """
    if not (kind := kind_of(device)).can(Ability.FREE):
        raise InvalidBudget(
            f'mem="auto" reads the free memory of a CUDA device, and this model is on {device.type}; give bytes, such '
            'as mem="4GiB", or a share, such as mem="60%"; for what another device would have left, add '
            'costs="H100"'
        )
    expandable = kind.of_cuda and allocates_in_expandable_segments()
    free, share = free_memory(device), AUTO_MARGIN if expandable else BLOCKS_MARGIN
    return max(1, int(free - max(share * free, LEAST_MARGIN, FRAGMENTS * largest)))


def has_shrunk(planned: int, device: torch.device, largest: int) -> bool:
    """Tell whether mem="auto" now means fewer bytes than `planned`, since optimizer state or gradients were added.

    `largest` is the number of bytes of the step's largest tensor.
    """
    return free_bytes(device, largest) < SHRUNK * planned


def free_memory(device: torch.device) -> int:
    """Return the bytes that a device has free now, including those that torch's allocator keeps for reuse."""
    return kind_of(device).free(device)
