"""Host storage for offloaded tensors in pinned memory, for accelerators, with a stream for each direction and device.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import Any, NamedTuple

import torch

from fxremat.device import kind_of
from fxremat.errors import FxrematError
from fxremat.host.tier import HostTier, span_bytes, span_of
from fxremat.units import format_bytes


class PinnedTier(HostTier):
    """Pinned host memory, to and from which side streams of a device copy tensors.

    A tensor that is offloaded is kept alive until `release`, which makes the compute stream wait for the end of
    the copy. Whatever tensor the caching allocator places in its memory next is used on the compute stream, and
    therefore after the copy. A tensor that is copied back is allocated on the compute stream, and the side
    stream waits for what ran there before, which may have used that memory. So no `record_stream` is needed,
    and no block is kept from reuse longer than the plan says. Pinned memory comes from torch, which allocates a
    power of two bytes for each tensor, and caches it for the next.
    """

    in_powers = True

    def __init__(self) -> None:
        super().__init__()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._lanes: dict[tuple[str, torch.device], _StreamLane] = {}
        self._lock = threading.RLock()

    def _end(self) -> None:
        for lane in self._lanes_of("out", "in"):
            lane.synchronize()
        self._lanes.clear()

    def __reduce__(self) -> Any:
        return PinnedTier, ()

    @property
    def description(self) -> str:
        """A constant text, since pinned memory has one speed on each device; tiers with equal texts are equally fast.
        """
        return "pinned memory"

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with the same layout in pinned memory."""
        self._check_open()
        return _pinned_like(tensor)

    def store(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Begin to copy a tensor into `host`, which is in pinned memory."""
        self._lane("out", tensor.device).copy(tensor, host, host.data_ptr())

    def release(self, host: torch.Tensor) -> None:
        """Make the compute stream wait until a tensor has been copied to the host."""
        self._finish("out", host)

    def prefetch(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Allocate memory on the device, begin to copy a tensor from the host into it, and return it."""
        back = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        self._lane("in", back.device).copy(host, back, host.data_ptr())
        return back

    def wait(self, host: torch.Tensor) -> None:
        """Make the compute stream wait until a tensor has been copied back from the host."""
        self._finish("in", host)

    def synchronize(self) -> None:
        """Block until all copies to the host have ended.

        `release` only makes the compute stream wait for a copy.
        """
        for lane in self._lanes_of("out"):
            lane.synchronize()

    def _lane(self, way: str, device: torch.device) -> _StreamLane:
        self._check_open()
        with self._lock:
            if (way, device) not in self._lanes:
                self._lanes[way, device] = _StreamLane(device)
            return self._lanes[way, device]

    def _lanes_of(self, *ways: str) -> list[_StreamLane]:
        with self._lock:
            return [lane for (way, _), lane in self._lanes.items() if way in ways]

    def _finish(self, way: str, host: torch.Tensor) -> None:
        for lane in self._lanes_of(way):
            lane.finish(host.data_ptr())


class _Copying(NamedTuple):
    """A copy that may still be running, with the tensors that it reads and writes."""

    key: int
    source: torch.Tensor
    target: torch.Tensor
    event: torch.Event  # recorded at the end of the copy


class _StreamLane:
    """The stream that copies in one direction on one device.

    Copies run one after the other. Source and target are kept alive until the copy is waited for or, after an
    exception, until it has ended. `with stream` is used since it has little overhead in Python, and there are
    many copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kind = device, kind_of(device)
        self.stream = self._kind.stream(device)
        self._under_way: dict[int, _Copying] = {}  # number of a copy -> copy, in the order in which they end
        self._latest: dict[int, int] = {}  # address on the host -> number of its latest copy
        self._number = count()
        self._lock = threading.RLock()

    def copy(self, source: torch.Tensor, target: torch.Tensor, key: int) -> None:
        self._let_go()
        self.stream.wait_stream(self._kind.current_stream(self._device))
        event = self._kind.event(self._device)
        try:
            with self.stream:
                # `.data` hides the change from autograd, which may have saved the tensor
                target.data.copy_(source, non_blocking=True)
                event.record(self.stream)
        except BaseException:
            # the caller will drop its references to both tensors, so the copy must have ended
            self.stream.synchronize()
            raise
        with self._lock:
            self._latest[key] = number = next(self._number)
            self._under_way[number] = _Copying(key, source, target, event)

    def finish(self, key: int) -> None:
        """Make the device's compute stream wait for the latest copy with this key, if it may still be running."""
        with self._lock:
            number = self._latest.pop(key, None)
            copying = None if number is None else self._under_way.pop(number, None)
        if copying is not None:
            self._kind.current_stream(self._device).wait_event(copying.event)

    def synchronize(self) -> None:
        """Wait for all copies of this direction."""
        self.stream.synchronize()
        self._let_go()

    def _let_go(self) -> None:
        """Drop references to copies that have ended without being waited for."""
        with self._lock:
            for number, copying in list(self._under_way.items()):
                if not copying.event.query():
                    break
                del self._under_way[number]
                if self._latest.get(copying.key) == number:
                    del self._latest[copying.key]


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    try:
        flat = kind_of(tensor.device).pinned(span_of(tensor), tensor.dtype, tensor.device)
    except RuntimeError as error:
        # any other error is an assertion on the device, which the next call reports again
        if "memory" not in str(error):
            raise
        raise FxrematError(
            f"the host has no {format_bytes(span_bytes(tensor))} of pinned memory left; limit what is offloaded with "
            "Offload(limit=...)"
        ) from error
    return flat.as_strided(tensor.shape, tensor.stride())
