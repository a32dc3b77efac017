"""The state of PyTorch's caching allocator on a device, from which a step's reserved bytes are predicted."""

from __future__ import annotations

from typing import Any

import torch

from fxremat.cost.devices import Device
from fxremat.device import kind_of
from fxremat.step.caching_allocator import Segment
from fxremat.step.reserved import AllocatorState
from fxremat.torch_private import allocates_in_expandable_segments

_FREE = "inactive"  # the state of a free block in `torch.cuda.memory_snapshot`
_SHARED = (0, 0)  # the pool of all blocks that are in no pool of a CUDA graph or of the user


def allocator_of(device: torch.device) -> AllocatorState | None:
    """Return the present state of a device's allocator; None if it is not the caching allocator of a CUDA device.

    That of the current stream: blocks of other streams and of private pools cannot be used by a step. Of an expandable
    range the beginning is not known: it counts from the first page with memory.
    """
    kind = kind_of(device)
    if not (kind.of_cuda and kind.is_available()) or torch.cuda.get_allocator_backend() != "native":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index).cuda_stream
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    mine = [each for each in found if (each["device"], each["stream"]) == (index, stream)]
    return AllocatorState(
        expandable=allocates_in_expandable_segments(),
        segments=tuple(_segment(each) for each in mine if tuple(each["segment_pool_id"]) == _SHARED),
    )


def assumed_allocator(device: Device) -> AllocatorState | None:
    """Return what is assumed of a described device: expandable segments, none of them free; None unless it is CUDA."""
    return AllocatorState(expandable=True) if device.cuda else None


def _segment(found: dict[str, Any]) -> Segment:
    """Read a segment as `torch.cuda.memory_snapshot` lists it (torch 2.11, 2.14)."""
    return Segment(
        address=found["address"],
        small=found["segment_type"] == "small",
        expandable=bool(found.get("is_expandable")),
        blocks=tuple((block["size"], block["state"] == _FREE) for block in found["blocks"]),
    )
