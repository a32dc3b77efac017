"""The host tier: where tensors go that leave the device, and from where they come back.

    host = tier.offload(x)          the copy out begins; x must stay as it is
           tier.release(host)       the copy out has ended: the memory of x may go
    back = tier.prefetch(host, d)   memory on device d, and the copy back begins
           tier.wait(host)          the copy back has ended: back may be read

`host` is a CPU tensor of x's layout whose memory no allocator of torch has handed out, or a pinned one. It owns its
memory: autograd keeps it between forward and backward, and whatever happens there (an exception, a backward that never
comes, two forwards in a row) the memory goes back to the pool with it.

    PinnedTier   CUDA: pinned memory, one side stream a direction and device; torch's pinned allocator is the pool
    FileTier     everywhere: memory-mapped files without a name, one thread a direction

A lane runs the copies of one direction in order, and holds what a copy reads and writes until the copy is over: an
exception between `prefetch` and `wait` frees no memory that is still being written.
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
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from fxremat.errors import FxrematError
from fxremat.units import format_bytes

CHUNK = 1 << 20  # bytes that a throttled copy moves between two looks at the clock
MANY = 256  # copies of one direction that nobody has waited for yet
WINDOW = 1000  # a pool keeps the memory that the last one to two thousand tensors needed at a time


class HostTier(ABC):
    """A place for tensors beside the device. Graphs name tiers by `name`.

    A tier is a context manager, and `close` ends it: what is on the host stays readable, and nothing more is copied.
    """

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
        """In a forked child: take threads, locks and memory of its own; those of the parent are not there."""

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


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one for a while; a CPU needs nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def span_of(tensor: torch.Tensor) -> int:
    """Elements from the first to the last that a tensor shows: of a view, not all of its storage."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's layout takes, in memory of its own."""
    return span_of(tensor) * tensor.element_size()


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
        self._begin_anew()

    def _begin_anew(self) -> None:
        speeds = {"out": self.to_host, "in": self.from_host}
        self._pool = _Pool(self.folder)
        self._lanes = {way: _ThreadLane(way, speed) for way, speed in speeds.items()}

    def _end(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._pool.shrink(0)

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
        self._check_open()
        return self._pool.take(tensor)

    def store(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Begin to copy a tensor into a file."""
        self._check_owns(host)
        self._lanes["out"].copy(tensor, host, host.data_ptr(), self.copies)

    def release(self, host: torch.Tensor) -> None:
        """Wait for the copy out."""
        self._lanes["out"].finish(host.data_ptr())

    def prefetch(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Begin to copy back."""
        self._check_owns(host)
        back = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        self._lanes["in"].copy(host, back, host.data_ptr(), self.copies)
        return back

    def wait(self, host: torch.Tensor) -> None:
        """Wait for the copy back."""
        self._lanes["in"].finish(host.data_ptr())

    def synchronize(self) -> None:
        """Nothing to wait for: `release` has."""

    def _check_owns(self, host: torch.Tensor) -> None:
        """Refuse files of the parent of a forked process: it writes to them, and takes them for other tensors."""
        self._check_open()
        if not self._pool.owns(host):
            raise FxrematError(
                "this tensor was offloaded by another process, before a fork: run forward and backward in one process"
            )


def _file_tier(folder: Path | None, to_host: float | None, from_host: float | None) -> FileTier:
    return FileTier(folder, to_host=to_host, from_host=from_host)


class _Pool:
    """Memory-mapped files by size; each goes back when the last tensor that shows it is gone.

    Together they take no more than the tensors of the last steps did at a time: where a new file would make it more,
    those that have waited longest are let go.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.used = 0  # bytes that tensors show
        self._lock = threading.RLock()  # the collector may run finalizers, and they this code, at any place
        self._returned: deque[tuple[int, int, mmap.mmap]] = deque()  # by finalizers, which take no lock
        self._waiting: OrderedDict[int, tuple[int, mmap.mmap]] = OrderedDict()  # longest first, by number
        self._by_size: dict[int, list[int]] = {}  # numbers of those that wait
        self._number = count()
        self._idle = 0  # bytes of those that wait
        self._shown: set[int] = set()  # addresses of those that tensors show
        self._most = [0, 0]  # bytes used at a time, in the last window of takes and in this one
        self._taken = 0  # in this window

    @property
    def bytes(self) -> int:
        """Number of bytes of all files."""
        with self._lock:
            self._collect()
            return self.used + self._idle

    def owns(self, host: torch.Tensor) -> bool:
        """Whether a tensor shows one of the files."""
        return host.numel() == 0 or host.data_ptr() in self._shown

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of the same layout in a file."""
        size = span_bytes(like)
        if size == 0:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        with self._lock:
            self._collect()
            memory = self._reuse(size) or self._new(size)
            owner = (ctypes.c_char * size).from_buffer(memory)
            address = ctypes.addressof(owner)
            weakref.finalize(owner, self._returned.append, (size, address, memory)).atexit = False
            self._shown.add(address)
            self.used += size
            self._most[1] = max(self._most[1], self.used)
            self._turn_window()
        return torch.frombuffer(owner, dtype=like.dtype).as_strided(like.shape, like.stride())

    def shrink(self, most: int) -> None:
        """Let go of files that wait, until all take at most so many bytes or none waits."""
        with self._lock:
            self._collect()
            while self._waiting and self.used + self._idle > most:
                number, (size, _) = self._waiting.popitem(last=False)
                self._by_size[size].remove(number)
                self._idle -= size

    def _collect(self) -> None:
        """Let files wait that no tensor shows any more."""
        while self._returned:
            size, address, memory = self._returned.popleft()
            self._shown.discard(address)
            number = next(self._number)
            self._waiting[number] = size, memory
            self._by_size.setdefault(size, []).append(number)
            self.used -= size
            self._idle += size

    def _reuse(self, size: int) -> mmap.mmap | None:
        numbers = self._by_size.get(size)
        if not numbers:
            return None
        _, memory = self._waiting.pop(numbers.pop())
        self._idle -= size
        return memory

    def _turn_window(self) -> None:
        self._taken += 1
        if self._taken == WINDOW:
            self._most, self._taken = [self._most[1], self.used], 0
            self.shrink(max(self._most))

    def _new(self, size: int) -> mmap.mmap:
        self.shrink(max(0, max(*self._most, self.used + size) - size))
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:  # has no name, or loses it at once
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(
                        file.fileno(), 0, size
                    )  # a full disk is known now, not by a SIGBUS later
                else:
                    file.truncate(size)
                return mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise FxrematError(
                f"no room for {format_bytes(size)} more beside the {format_bytes(self.bytes)} offloaded in "
                f"{self.folder or tempfile.gettempdir()} ({error.strerror}): give a folder on a larger disk, "
                "fxremat.FileTier(folder), or limit what is offloaded, host_mem=..."
            ) from error


class _ThreadLane:
    """One direction: copies run one after the other on a thread of their own, which holds both tensors meanwhile."""

    def __init__(self, way: str, speed: float | None) -> None:
        self.way, self.speed = way, speed
        self._under_way: dict[int, Future[None]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.RLock()

    def copy(self, source: torch.Tensor, target: torch.Tensor, key: int, notes: list[Copied] | None) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"fxremat-{self.way}")
            if len(self._under_way) >= MANY:  # those of steps that failed, most of them: nobody will ask
                self._under_way = {k: f for k, f in self._under_way.items() if not _succeeded(f)}
            self._under_way[key] = self._thread.submit(self._copy, source, target, notes)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, notes: list[Copied] | None) -> None:
        start = time.time_ns()
        _copy(source, target.data, self.speed)  # .data: autograd does not see a change of what it saved
        if notes is not None:
            notes.append(Copied(self.way, start, time.time_ns(), target.nbytes))

    def finish(self, key: int) -> None:
        """Wait for the latest copy of a key. Raises what went wrong with it."""
        with self._lock:
            copying = self._under_way.pop(key, None)
        if copying is not None:
            copying.result()

    def close(self) -> None:
        """Wait for all copies, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def _succeeded(copying: Future[None]) -> bool:
    return copying.done() and copying.exception() is None


def _copy(source: torch.Tensor, target: torch.Tensor, speed: float | None) -> None:
    with torch.no_grad():
        if speed is None:
            target.copy_(source)
            return
        start, moved = time.perf_counter(), 0
        for old, new in _chunks(source, target):
            new.copy_(old)
            moved += old.nbytes
            time.sleep(max(0.0, start + moved / speed - time.perf_counter()))


def _chunks(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The memory of two tensors of one layout, piece by piece."""
    pieces = (
        t.as_strided((span_of(t),), (1,)).split(max(1, CHUNK // source.element_size()))
        for t in (source, target)
    )
    return zip(*pieces, strict=True)


class PinnedTier(HostTier):
    """Pinned host memory, copied by side streams of the CUDA device that the tensor is on, whichever is current.

    A tensor that leaves is held until `release`, which makes the compute stream wait for the copy's event: what the
    caching allocator gives that memory to next runs on the compute stream, so after the copy. A tensor that comes back
    is allocated on the compute stream, and the side stream waits for what ran there before, whatever used that memory
    last. So no `record_stream` is needed, and no block is kept from reuse longer than the plan says. Pinned memory is
    torch's, which keeps it for the next pinned tensor.
    """

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
        """Pinned memory has one speed a device."""
        return "pinned memory"

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in pinned memory."""
        self._check_open()
        return _pinned_like(tensor)

    def store(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Begin to copy a tensor into pinned memory."""
        self._lane("out", tensor.device).copy(tensor, host, host.data_ptr())

    def release(self, host: torch.Tensor) -> None:
        """Let the compute stream wait for the copy out."""
        self._finish("out", host)

    def prefetch(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Begin to copy back."""
        self._check_open()
        back = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        self._lane("in", back.device).copy(host, back, host.data_ptr())
        return back

    def wait(self, host: torch.Tensor) -> None:
        """Let the compute stream wait for the copy back."""
        self._finish("in", host)

    def synchronize(self) -> None:
        """Wait for the side streams that copy out: `release` makes the compute stream wait, not the thread."""
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
    """A copy that may still run, and the memory that it reads and writes."""

    key: int
    source: torch.Tensor
    target: torch.Tensor
    event: torch.cuda.Event  # has passed once the copy is over


class _StreamLane:
    """One direction of one CUDA device: copies run one after the other on a stream of their own.

    What is copied is held until somebody waits for the copy or, after an exception, until it is seen to be over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._under_way: dict[int, _Copying] = {}  # by number, in the order in which they end
        self._latest: dict[int, int] = {}  # key -> number
        self._number = count()
        self._lock = threading.RLock()

    def copy(self, source: torch.Tensor, target: torch.Tensor, key: int) -> None:
        self._let_go()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        event = torch.cuda.Event()
        try:
            with torch.cuda.stream(self.stream):
                target.data.copy_(source, non_blocking=True)  # .data: autograd may have saved it
                event.record(self.stream)
        except BaseException:
            self.stream.synchronize()  # the caller lets go of both
            raise
        with self._lock:
            self._latest[key] = number = next(self._number)
            self._under_way[number] = _Copying(key, source, target, event)

    def finish(self, key: int) -> None:
        """Let the device's compute stream wait for the latest copy of a key, if it is not known to be over."""
        with self._lock:
            number = self._latest.pop(key, None)
            copying = None if number is None else self._under_way.pop(number, None)
        if copying is not None:
            torch.cuda.current_stream(self.device).wait_event(copying.event)

    def synchronize(self) -> None:
        """Wait for all copies."""
        self.stream.synchronize()
        self._let_go()

    def _let_go(self) -> None:
        """Let go of what is copied by now, and nobody waited for."""
        with self._lock:
            for number, copying in list(self._under_way.items()):
                if not copying.event.query():
                    break
                del self._under_way[number]
                if self._latest.get(copying.key) == number:
                    del self._latest[copying.key]


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    try:
        with current(tensor.device):
            flat = torch.empty(span_of(tensor), dtype=tensor.dtype, pin_memory=True)
    except RuntimeError as error:
        raise FxrematError(
            f"the host has no {format_bytes(span_bytes(tensor))} of pinned memory left; limit what is offloaded with "
            "host_mem=..."
        ) from error
    return flat.as_strided(tensor.shape, tensor.stride())


_default: dict[str, HostTier] = {}


def default_tier(device: torch.device) -> HostTier:
    """Pinned memory for a CUDA device, else files; one for the whole process, and another once it is closed."""
    kind = "cuda" if device.type == "cuda" else "files"
    tier = _default.get(kind)
    if tier is None or tier.closed:
        tier = _default[kind] = PinnedTier() if kind == "cuda" else FileTier()
    return tier
