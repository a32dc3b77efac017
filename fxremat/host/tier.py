"""The host tier: the place to which tensors are copied from the device, and from which they come back.

    host = tier.offload(x)          the copy out begins; x must stay unchanged
           tier.release(host)       the copy out has ended: the memory of x may be freed
    back = tier.prefetch(host, d)   memory on device d is allocated, and the copy back begins
           tier.wait(host)          the copy back has ended: back may be read

`host` is a CPU tensor of x's layout whose memory does not come from an allocator of torch, or a pinned one. It owns its
memory: autograd keeps the tensor between forward and backward, and whatever happens there (an exception, a backward
that never runs, two forwards in a row), its memory returns to the pool when the tensor is gone.

    PinnedTier   for accelerators: pinned memory, one side stream a direction and device; torch's allocator is the pool
    FileTier     for any device: memory-mapped files without a name, one thread a direction

The copies of one direction run in order, and their sources and targets are held until they have ended: an exception
between `prefetch` and `wait` frees no memory that is still being written.
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
    """A place for tensors outside of the device. Graphs name tiers by `name`.

    A tier is a context manager, and `close` ends it: tensors on the host stay readable, and no more are copied.
    """

    in_powers = False  # True: each tensor occupies a power of two bytes on the host

    def __init__(self) -> None:
        self.name = f"{type(self).__name__}-{next(_numbers)}"
        self.closed = False
        _tiers[self.name] = self

    @abstractmethod
    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory on the host for a tensor of this layout. Raises `FxrematError` if there is none left."""

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

        On a device with streams the compute stream may wait in place of the caller. Raises the error of the copy, if it
        failed.
        """

    @abstractmethod
    def prefetch(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Allocate a tensor on the device, begin to copy `host` into it, and return it; `wait` waits for the copy."""

    @abstractmethod
    def wait(self, host: torch.Tensor) -> None:
        """Wait until the tensor that `prefetch` returned may be read. Raises the error of the copy, if it failed."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all released tensors are on the host, before code that reads them there."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Text that is equal for tiers of equal speed."""

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
        """Wait for copies, and free threads and unused memory: what `close` does the first time."""

    @abstractmethod
    def _begin_anew(self) -> None:
        """Make new threads, locks and memory in a forked child, which has none of its parent's."""

    def _check_open(self) -> None:
        if self.closed:
            raise FxrematError(
                f"the host tier {self.name} is closed; compile the model again, with an open tier or offload=True"
            )


_numbers = count()
_tiers: weakref.WeakValueDictionary[str, HostTier] = weakref.WeakValueDictionary()


def tier_named(name: str) -> HostTier:
    """Return the tier of this name. Raises `FxrematError` if it is gone."""
    tier = _tiers.get(name)
    if tier is None:
        raise FxrematError(f"the host tier {name} is gone; keep the module that fxremat.compile returned")
    return tier


def _forked() -> None:
    """Give all tiers new threads, locks and memory, in a forked child, where no other thread changes `_tiers`."""
    for reference in _tiers.valuerefs():
        if (tier := reference()) is not None:
            tier._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def span_of(tensor: torch.Tensor) -> int:
    """Return the number of elements in memory from the first to the last of a tensor, gaps between them included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a copy of a tensor needs in the same layout, gaps between elements included."""
    return span_of(tensor) * tensor.element_size()
