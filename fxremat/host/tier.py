"""The host tier: where tensors go that leave the device, and from where they come back.

    host = tier.offload(x)          the copy out begins; x must stay as it is
           tier.release(host)       the copy out has ended: the memory of x may go
    back = tier.prefetch(host, d)   memory on device d, and the copy back begins
           tier.wait(host)          the copy back has ended: back may be read

`host` is a CPU tensor of x's layout whose memory no allocator of torch has handed out, or a pinned one. It owns its
memory: autograd keeps it between forward and backward, and whatever happens there (an exception, a backward that never
comes, two forwards in a row) the memory goes back to the pool with it.

    PinnedTier   accelerators: pinned memory, one side stream a direction and device; torch's allocator is the pool
    FileTier     everywhere: memory-mapped files without a name, one thread a direction

A lane runs the copies of one direction in order, and holds what a copy reads and writes until the copy is over: an
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
    """A place for tensors beside the device. Graphs name tiers by `name`.

    A tier is a context manager, and `close` ends it: what is on the host stays readable, and nothing more is copied.
    """

    in_powers = False  # of two bytes: what each tensor takes on the host

    def __init__(self) -> None:
        self.name = f"{type(self).__name__}-{next(_numbers)}"
        self.closed = False
        _tiers[self.name] = self

    @abstractmethod
    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory on the host for a tensor of this layout. Raises `FxrematError` where there is none."""

    @abstractmethod
    def store(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Begin to copy a tensor into memory of the host; `release` waits for it."""

    def offload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the host. Raises `FxrematError` where the host has no room."""
        host = self.host_like(tensor)
        self.store(tensor, host)
        return host

    @abstractmethod
    def release(self, host: torch.Tensor) -> None:
        """Return when the device's memory of what left may be freed. Raises what went wrong with the copy."""

    @abstractmethod
    def prefetch(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Take memory on the device and begin to copy back."""

    @abstractmethod
    def wait(self, host: torch.Tensor) -> None:
        """Return when what came back may be read. Raises what went wrong with the copy."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all that was released is on the host, for code that reads it there."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Equal for tiers of equal speed."""

    def close(self) -> None:
        """Wait for the copies under way and give back threads and unused memory. Closing again does nothing."""
        if not self.closed:
            self.closed = True
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _end(self) -> None:
        """What `close` does, once."""

    @abstractmethod
    def _begin_anew(self) -> None:
        """Take new threads, locks and memory in a forked child, which has none of its parent's."""

    def _check_open(self) -> None:
        if self.closed:
            raise FxrematError(
                f"the host tier {self.name} is closed; compile the model again, with an open tier or offload=True"
            )


_numbers = count()
_tiers: weakref.WeakValueDictionary[str, HostTier] = weakref.WeakValueDictionary()


def tier_named(name: str) -> HostTier:
    """The living tier of a name. Raises `FxrematError`."""
    tier = _tiers.get(name)
    if tier is None:
        raise FxrematError(f"the host tier {name} is gone; keep the module that fxremat.compile returned")
    return tier


def _forked() -> None:
    """Let the tiers of a forked child begin anew. A reference by name is read at once: no other thread changes it."""
    for reference in _tiers.valuerefs():
        if (tier := reference()) is not None:
            tier._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def span_of(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that a tensor shows: of a view, not all of its storage."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's layout takes, in memory of its own."""
    return span_of(tensor) * tensor.element_size()
