"""The interface for storage on the host, to which tensors are copied from the device, and from which they come back.

    host = tier.offload(x)          begins the copy to the host; x must stay unchanged
           tier.release(host)       that copy has ended: the memory of x may be freed
    back = tier.prefetch(host, d)   allocates memory on device d, and begins the copy back
           tier.wait(host)          that copy has ended: back may be read

`host` is a CPU tensor with the layout of x, whose memory does not come from torch's CPU allocator. It owns its
memory: autograd keeps the tensor between forward and backward, and whatever happens (an exception, a backward
that never runs, two forwards in a row), the memory returns to the pool when the tensor is gone.

    PinnedTier   for accelerators: pinned memory, pooled by torch, and a side stream for each direction and device
    FileTier     for any device: memory-mapped files without a name, and a thread for each direction

The copies of one direction run in order, and their sources and targets are kept alive until they have ended: an
exception between `prefetch` and `wait` frees no memory that is still being written.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from itertools import count
from typing import Self

import torch

from fxremat.errors import FxrematError


class HostTier(ABC):
    """Storage for tensors outside of the device. Generated graphs refer to it by `name`.

    A tier is a context manager, and `close` ends it: tensors on the host stay readable, but nothing more can be
    copied.
    """

    in_powers = False  # True if each tensor occupies a power of two bytes on the host

    def __init__(self) -> None:
        self.name = f"{type(self).__name__}-{next(_numbers)}"
        self.closed = False
        _tiers[self.name] = self

    @abstractmethod
    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized host tensor with this tensor's layout. Raises `FxrematError` if no memory is left."""

    @abstractmethod
    def store(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Begin to copy a tensor into `host`, which `host_like` returned; `release` waits for the copy."""

    def offload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the host, and return its copy. Raises `FxrematError` if the host has no room."""
        host = self.host_like(tensor)
        self.store(tensor, host)
        return host

    @abstractmethod
    def release(self, host: torch.Tensor) -> None:
        """Wait until the copy to `host` has ended, so that the tensor's memory on the device may be freed.

        On a device with streams, the compute stream may wait instead of the caller. Raises the copy's error, if
        it failed.
        """

    @abstractmethod
    def prefetch(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Allocate a tensor on the device, begin to copy `host` into it, and return it; `wait` waits for the copy."""

    @abstractmethod
    def wait(self, host: torch.Tensor) -> None:
        """Wait until the tensor that `prefetch` returned may be read. Raises the error of the copy, if it failed."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all released tensors have arrived on the host, before code on the host reads them."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Text that identifies how fast copies are: tiers with equal texts are equally fast."""

    def close(self) -> None:
        """Wait for unfinished copies, and free threads and unused memory. Closing again does nothing."""
        if not self.closed:
            self.closed = True
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _end(self) -> None:
        """Wait for copies, and free threads and unused memory; called by the first `close`."""

    @abstractmethod
    def _begin_anew(self) -> None:
        """Create new threads, locks and memory in a forked child, since it does not inherit those of its parent."""

    def _check_open(self) -> None:
        if self.closed:
            raise FxrematError(
                f"the host tier {self.name} is closed; compile the model again, with an open tier or offload=True"
            )


_numbers = count()
_tiers: weakref.WeakValueDictionary[str, HostTier] = weakref.WeakValueDictionary()


def tier_named(name: str) -> HostTier:
    """Return the host tier with this name. Raises `FxrematError` if it does not exist any more."""
    tier = _tiers.get(name)
    if tier is None:
        raise FxrematError(f"the host tier {name} is gone; keep the module that fxremat.compile returned")
    return tier


def _forked() -> None:
    """In a forked child process, reset all tiers; no other thread can change `_tiers` there."""
    for reference in _tiers.valuerefs():
        if (tier := reference()) is not None:
            tier._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def span_of(tensor: torch.Tensor) -> int:
    """Return the number of elements in memory from a tensor's first to its last, including gaps."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy of a tensor in the same layout, including gaps between elements."""
    return span_of(tensor) * tensor.element_size()
