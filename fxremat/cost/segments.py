"""Expandable segments of CUDA's caching allocator, with which it allocates little more than tensors need.

    default         a block may exceed a tensor of more than 1 MiB by up to 1 MiB; a tenth to a third more than that is
                    reserved on the device
    expandable      a block has the size of its tensor, rounded up to 512 bytes; a few percent more are reserved
"""

from __future__ import annotations

import logging
import os

import torch

from fxremat.device import kind_of
from fxremat.torch_private import allocate_in_expandable_segments, allocates_in_expandable_segments

log = logging.getLogger(__name__)
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # environment variables with the allocator's settings


def expand_segments(device: torch.device) -> None:
    """Turn on expandable segments for the entire process, and log that, unless the user has configured the allocator.

    Do nothing if the device is not a CUDA device, if an environment variable configures the allocator, if
    another allocator than PyTorch's own is active, or if the device's driver cannot map memory.
    """
    kind = kind_of(device)
    if not (kind.of_cuda and kind.is_available()) or any(os.environ.get(name) for name in VARIABLES):
        return
    if torch.cuda.get_allocator_backend() != "native" or allocates_in_expandable_segments():
        return
    if allocate_in_expandable_segments():
        log.info(
            "expandable segments of PyTorch's CUDA allocator are on from here, for the whole process; "
            "PYTORCH_ALLOC_CONF=expandable_segments:False keeps them off, and budgets then leave room for its blocks"
        )
