"""Computes the budget of mem="auto" in bytes: the free memory of a device, minus a margin."""

from __future__ import annotations

import torch

from fxremat.device import Ability, kind_of
from fxremat.errors import InvalidBudget
from fxremat.torch_private import allocates_in_expandable_segments

# fraction of the free memory that mem="auto" leaves unused if the allocator's segments are expandable
AUTO_MARGIN = 0.05
# the fraction if the allocator's segments are not expandable: it then reserves up to a third too much
BLOCKS_MARGIN = 0.2
# minimum bytes that mem="auto" leaves unused: two segments of large blocks of CUDA's allocator
LEAST_MARGIN = 40 * 2**20
# fraction of the free memory that is left unused if the bytes that the allocator reserves are predicted
REPLAYED_MARGIN = 0.03
# multiple of the largest tensor's bytes that may be free only in pieces which are too small for that tensor
FRAGMENTS = 1.5
# if less than this fraction of the bytes that were free at planning is free now, mem="auto" is planned again
SHRUNK = 0.97


def free_bytes(device: torch.device, largest: int) -> int:
    """Return the bytes that are free on a device now, with those PyTorch's allocator reserves, minus a margin.

    Args:
        largest: bytes of the step's largest tensor. Free pieces smaller than that may be of no use.

    Raises:
        InvalidBudget: PyTorch cannot tell how much memory of this device is free.
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


def bytes_to_reserve(device: torch.device, returnable: int) -> tuple[int, int]:
    """Return the bytes that PyTorch's allocator may still reserve on a device, minus a margin, and that margin.

    Args:
        returnable: bytes that the allocator could give back, which count as not reserved.
    """
    kind = kind_of(device)
    free = kind.free(device) - kind.cached(device) + returnable
    margin = int(min(free, max(REPLAYED_MARGIN * free, LEAST_MARGIN)))
    return max(1, free - margin), margin


def free_memory(device: torch.device) -> int:
    """Return the bytes that a device has free now, including those that torch's allocator keeps for reuse."""
    return kind_of(device).free(device)
