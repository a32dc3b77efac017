"""Host storage for offloaded tensors in unnamed memory-mapped files, with one copying thread for each direction."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxremat.device import Ability, kind_of
from fxremat.errors import FxrematError
from fxremat.host.pool import FilePool
from fxremat.host.tier import HostTier, span_of

CHUNK = 1 << 20  # bytes copied between two checks of the time, if the speed is limited


class Copied(NamedTuple):
    """A copy that has ended."""

    way: str  # "out" (to the host) or "in"
    start: int  # start of the copy in nanoseconds since the epoch
    end: int
    bytes: int


class FileTier(HostTier):
    """Host storage in memory-mapped files without a name, which disappear even after a crash.

    Args:
        folder: a folder on the disk to use. None: the system's folder for temporary files.
        to_host, from_host: bytes per second to which copies are slowed down. None: no limit.
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
        if self.folder is not None and not self.folder.is_dir():
            raise FxrematError(f"FileTier: there is no folder {str(folder)!r}")
        self.to_host, self.from_host = to_host, from_host
        self.copies: list[Copied] | None = None  # if set to a list, every copy is appended to it
        self._begin_anew()

    def _begin_anew(self) -> None:
        speeds = {"out": self.to_host, "in": self.from_host}
        self._pool = FilePool(self.folder)
        self._lanes = {way: _ThreadLane(way, speed) for way, speed in speeds.items()}

    def _end(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._pool.shrink(0)

    @property
    def description(self) -> str:
        """Text with the folder and the speed limits; tiers with equal texts are equally fast."""
        return f"files in {self.folder or tempfile.gettempdir()} at {self.to_host}, {self.from_host} bytes/s"

    @property
    def bytes(self) -> int:
        """Total bytes of all files, whether in use or kept for later tensors."""
        return self._pool.bytes

    def __reduce__(self) -> Any:
        return _file_tier, (self.folder, self.to_host, self.from_host)

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor with the same layout, stored in a file."""
        self._check_open()
        return self._pool.take(tensor)

    def store(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Begin to copy a tensor into `host`, which is stored in a file."""
        self._check_owns(host)
        self._lanes["out"].copy(tensor, host, host.data_ptr(), self.copies)

    def release(self, host: torch.Tensor) -> None:
        """Wait until a tensor has been copied into its file. Raises the error of the copy, if it failed."""
        self._lanes["out"].finish(host.data_ptr())

    def prefetch(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Allocate memory on the device, begin to copy a tensor from its file into it, and return it."""
        self._check_owns(host)
        back = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        self._lanes["in"].copy(host, back, host.data_ptr(), self.copies)
        return back

    def wait(self, host: torch.Tensor) -> None:
        """Wait until a tensor has been copied back from its file. Raises the error of the copy, if it failed."""
        self._lanes["in"].finish(host.data_ptr())

    def synchronize(self) -> None:
        """Do nothing: `release` has waited already."""

    def _check_owns(self, host: torch.Tensor) -> None:
        """Raise `FxrematError` for a file that belongs to the parent of a forked process, which still uses it."""
        self._check_open()
        if not self._pool.owns(host):
            raise FxrematError(
                "this tensor was offloaded by another process, before a fork: run forward and backward in one process"
            )


def _file_tier(folder: Path | None, to_host: float | None, from_host: float | None) -> FileTier:
    return FileTier(folder, to_host=to_host, from_host=from_host)


class _Copying(NamedTuple):
    """A copy that may still be running, with the tensors that it reads and writes."""

    future: Future[None]
    tensors: tuple[torch.Tensor, torch.Tensor]


class _ThreadLane:
    """The thread that copies in one direction, to the files or from them.

    Copies run one after the other. Source and target are kept alive until the copy is waited for, or until another
    begins after its end. The thread frees no tensor, since profilers record only what is freed on the thread that they
    watch.
    """

    def __init__(self, way: str, speed: float | None) -> None:
        self.way, self.speed = way, speed
        self._under_way: dict[int, _Copying] = {}  # by address on the host
        self._thread: ThreadPoolExecutor | None = None
        self._lock = threading.RLock()

    def copy(self, source: torch.Tensor, target: torch.Tensor, key: int, notes: list[Copied] | None) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"fxremat-{self.way}")
            # copies of steps that failed are among them, for which nobody waits
            self._under_way = {k: c for k, c in self._under_way.items() if not _succeeded(c.future)}
            issued, tensors = _issued(source, target), [source, target]
            future = self._thread.submit(self._copy, tensors, notes, issued)
            self._under_way[key] = _Copying(future, (source, target))

    def _copy(self, tensors: list[torch.Tensor], notes: list[Copied] | None, issued: torch.Event | None) -> None:
        """Copy the first tensor into the second, and remove both from the list."""
        start, (source, target) = time.time_ns(), tensors
        tensors.clear()
        with _after(issued):
            # `.data` hides the change from autograd, which may have saved the tensor
            _copy(source, target.data, self.speed)
        if notes is not None:
            notes.append(Copied(self.way, start, time.time_ns(), target.nbytes))

    def finish(self, key: int) -> None:
        """Wait for the latest copy with this key, an address on the host. Raises the copy's error, if it failed."""
        with self._lock:
            copying = self._under_way.pop(key, None)
        if copying is not None:
            copying.future.result()

    def close(self) -> None:
        """Wait for all copies of this direction, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def _issued(*tensors: torch.Tensor) -> torch.Event | None:
    """Return an event for the end of all work submitted so far to the current stream.

    None if no tensor is on a device with streams; then that work has already been done.
    """
    for tensor in tensors:
        kind = kind_of(tensor.device)
        if kind.can(Ability.STREAMS):
            event = kind.event(tensor.device)
            event.record(kind.current_stream(tensor.device))
            return event
        kind.synchronize(tensor.device)
    return None


@contextlib.contextmanager
def _after(issued: torch.Event | None) -> Iterator[None]:
    """Within this context, run copies on a stream that waits for the event; at the end wait for that stream.

    Args:
        issued: the event; None: copy without a stream.
    """
    if issued is None:
        yield
        return
    stream = kind_of(issued.device).stream(issued.device)
    stream.wait_event(issued)
    with stream:
        yield
    stream.synchronize()


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
    """Yield pairs of corresponding pieces, of at most `CHUNK` bytes, of two tensors with the same layout."""
    pieces = (
        t.as_strided((span_of(t),), (1,)).split(max(1, CHUNK // source.element_size()))
        for t in (source, target)
    )
    return zip(*pieces, strict=True)
