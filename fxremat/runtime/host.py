"""The host tier: where tensors go that leave the device, and from where they come back.

    host = tier.offload(x)          the copy out begins; x must stay as it is
           tier.release(host)       the copy out has ended: the memory of x may go
    back = tier.prefetch(host, d)   memory on device d, and the copy back begins
           tier.wait(host)          the copy back has ended: back may be read

`host` is a CPU tensor of x's layout whose memory no allocator of torch has handed out, or a pinned one. It owns its
memory: autograd keeps it between forward and backward, and whatever happens there (an exception, a backward that never
comes, two forwards in a row) the memory goes back to the pool with it.

    PinnedTier   CUDA: pinned memory, one side stream a direction, events; torch's pinned allocator is the pool
    FileTier     everywhere: memory-mapped files without a name, one thread a direction
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxremat.errors import FxrematError
from fxremat.units import format_bytes

CHUNK = 1 << 20  # bytes that a throttled copy moves between two looks at the clock


class HostTier(ABC):
    """A place for tensors beside the device. Graphs name tiers by `name`."""

    def __init__(self) -> None:
        self.name = f"{type(self).__name__}-{next(_numbers)}"
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


_numbers = count()
_tiers: weakref.WeakValueDictionary[str, HostTier] = weakref.WeakValueDictionary()


def tier_named(name: str) -> HostTier:
    """The living tier of a name. Raises `FxrematError`."""
    tier = _tiers.get(name)
    if tier is None:
        raise FxrematError(f"the host tier {name} is gone; keep the module that fxremat.compile returned")
    return tier


class Copied(NamedTuple):
    """A copy that is over."""

    way: str  # "out" or "in"
    start: int  # nanoseconds since the epoch
    end: int
    bytes: int


class FileTier(HostTier):
    """Host memory as memory-mapped files that have no name: no crash leaves any behind.

    Args:
        folder: where their disk is. None: the system's folder for temporary files.
        to_host, from_host: bytes per second that the copies are slowed down to. None: as fast as they go.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        to_host: float | None = None,
        from_host: float | None = None,
    ) -> None:
        super().__init__()
        for name, speed in (("to_host", to_host), ("from_host", from_host)):
            if speed is not None and not speed > 0:
                raise FxrematError(
                    f"{name} is {speed!r}; it is a number of bytes per second above 0, or None"
                )
        self.folder = None if folder is None else Path(folder)
        self.to_host, self.from_host = to_host, from_host
        self.copies: list[Copied] | None = None  # set it to a list to have every copy written down there
        self._pool = _Pool(self.folder)
        self._lanes = {way: _Lane(way, speed) for way, speed in (("out", to_host), ("in", from_host))}

    @property
    def description(self) -> str:
        """Folder and speeds."""
        return f"files in {self.folder or tempfile.gettempdir()} at {self.to_host}, {self.from_host} bytes/s"

    @property
    def bytes(self) -> int:
        """All that its files take, those in use and those that wait for the next step."""
        return self._pool.bytes

    def __reduce__(self) -> Any:
        return _file_tier, (self.folder, self.to_host, self.from_host)

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in a file."""
        return self._pool.take(tensor)

    def store(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Begin to copy a tensor into a file."""
        self._lanes["out"].copy(tensor, host, host.data_ptr(), self.copies)

    def release(self, host: torch.Tensor) -> None:
        """Wait for the copy out."""
        self._lanes["out"].finish(host.data_ptr())

    def prefetch(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Begin to copy back."""
        back = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        self._lanes["in"].copy(host, back, host.data_ptr(), self.copies)
        return back

    def wait(self, host: torch.Tensor) -> None:
        """Wait for the copy back."""
        self._lanes["in"].finish(host.data_ptr())

    def synchronize(self) -> None:
        """Nothing to wait for: `release` has."""


def _file_tier(folder: Path | None, to_host: float | None, from_host: float | None) -> FileTier:
    return FileTier(folder, to_host=to_host, from_host=from_host)


class _Pool:
    """Memory-mapped files by size; each goes back when the last tensor that shows it is gone."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.bytes = 0
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the same layout in a file."""
        size = like.untyped_storage().nbytes()
        with self._lock:
            waiting = self._free[size]
            memory = waiting.pop() if waiting else None
        memory = memory or self._new(size)
        owner = (ctypes.c_char * size).from_buffer(memory)
        weakref.finalize(owner, self._give, size, memory).atexit = False
        flat = torch.frombuffer(owner, dtype=like.dtype)
        return flat.as_strided(like.shape, like.stride(), like.storage_offset())

    def _give(self, size: int, memory: mmap.mmap) -> None:
        with self._lock:
            self._free[size].append(memory)

    def _new(self, size: int) -> mmap.mmap:
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:  # has no name, or loses it at once
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(
                        file.fileno(), 0, size
                    )  # a full disk is known now, not by a SIGBUS later
                else:
                    file.truncate(size)
                memory = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise FxrematError(
                f"no room for {format_bytes(size)} more beside the {format_bytes(self.bytes)} offloaded in "
                f"{self.folder or tempfile.gettempdir()} ({error.strerror}): give a folder on a larger disk, "
                "fxremat.FileTier(folder), or limit what is offloaded, host_mem=..."
            ) from error
        with self._lock:
            self.bytes += size
        return memory


class _Lane:
    """One direction: copies run one after the other on a thread of their own."""

    def __init__(self, way: str, speed: float | None) -> None:
        self.way, self.speed = way, speed
        self._under_way: dict[int, Future[None]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def copy(self, source: torch.Tensor, target: torch.Tensor, key: int, notes: list[Copied] | None) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"fxremat-{self.way}")
            self._under_way[key] = self._thread.submit(self._copy, source, target, notes)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, notes: list[Copied] | None) -> None:
        start = time.time_ns()
        _copy(source, target.data, self.speed)  # .data: autograd does not see a change of what it saved
        if notes is not None:
            notes.append(Copied(self.way, start, time.time_ns(), target.nbytes))

    def finish(self, key: int) -> None:
        with self._lock:
            copying = self._under_way.pop(key, None)
        if copying is not None:
            copying.result()


def _copy(source: torch.Tensor, target: torch.Tensor, speed: float | None) -> None:
    with torch.no_grad():
        if speed is None:
            target.copy_(source)
            return
        start, moved = time.perf_counter(), 0
        size = source.numel() * source.element_size()
        for old, new in _chunks(source, target):
            new.copy_(old)
            moved += old.numel() * old.element_size()
            time.sleep(max(0.0, start + min(moved, size) / speed - time.perf_counter()))


def _chunks(source: torch.Tensor, target: torch.Tensor) -> Any:
    """The memory of two tensors of one layout, piece by piece."""
    count = source.untyped_storage().nbytes() // source.element_size()
    pieces = (
        t.as_strided((count,), (1,), 0).split(max(1, CHUNK // source.element_size()))
        for t in (source, target)
    )
    return zip(*pieces, strict=True)


class PinnedTier(HostTier):
    """Pinned host memory, copied by side streams of the CUDA device.

    A tensor that leaves is held by the graph until `release`, which makes the compute stream wait for the copy's event:
    what the caching allocator gives that memory to next runs on the compute stream, so after the copy. A tensor that
    comes back is allocated on the compute stream, and the side stream waits for what ran there before, whatever used
    that memory last. So no `record_stream` is needed, and no block is kept from reuse longer than the plan says. Pinned
    memory is torch's: its allocator reuses a block once the copies that it has seen are over.
    """

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}
        self._events: dict[tuple[str, int], torch.cuda.Event] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return PinnedTier, ()

    @property
    def description(self) -> str:
        """Pinned memory has one speed a device."""
        return "pinned memory"

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in pinned memory."""
        return _pinned_like(tensor)

    def store(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Begin to copy a tensor into pinned memory."""
        self._copy("out", tensor, host, tensor.device, host.data_ptr())

    def release(self, host: torch.Tensor) -> None:
        """Let the compute stream wait for the copy out."""
        self._finish("out", host)

    def prefetch(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Begin to copy back."""
        back = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        self._copy("in", host, back, device, host.data_ptr())
        return back

    def wait(self, host: torch.Tensor) -> None:
        """Let the compute stream wait for the copy back."""
        self._finish("in", host)

    def synchronize(self) -> None:
        """Wait for the side streams that copy out: `release` makes the compute stream wait, not the thread."""
        with self._lock:
            streams = [stream for (way, _), stream in self._streams.items() if way == "out"]
        for stream in streams:
            stream.synchronize()

    def _copy(
        self, way: str, source: torch.Tensor, target: torch.Tensor, device: torch.device, key: int
    ) -> None:
        with self._lock:
            stream = self._streams.get((way, device))
            if stream is None:
                stream = self._streams[way, device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.data.copy_(source, non_blocking=True)  # .data: autograd may have saved it
            event = torch.cuda.Event()
            event.record(stream)
        self._events[way, key] = event

    def _finish(self, way: str, host: torch.Tensor) -> None:
        event = self._events.pop((way, host.data_ptr()), None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes()
    try:
        flat = torch.empty(size // tensor.element_size(), dtype=tensor.dtype, pin_memory=True)
    except RuntimeError as error:
        raise FxrematError(
            f"the host has no {format_bytes(size)} of pinned memory left; limit what is offloaded with host_mem=..."
        ) from error
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


_default: dict[str, HostTier] = {}


def default_tier(device: torch.device) -> HostTier:
    """Pinned memory for a CUDA device, else files; one for the whole process."""
    kind = "cuda" if device.type == "cuda" else "files"
    with contextlib.suppress(KeyError):
        return _default[kind]
    return _default.setdefault(kind, PinnedTier() if kind == "cuda" else FileTier())
