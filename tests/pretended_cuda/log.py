"""The log of the pretended runtime, and what Python adds to it.

    log.start()
    log.read(x), log.write(y)     on the current stream of the tensor's device; by the thread for pinned memory
    log.post("name")              what this thread has done so far ...
    log.join("name")              ... happened before what another one does after this
    entries, names = log.stop()
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from fxremat.host.pool import FilePool

ENTRY = np.dtype(
    [
        ("kind", "i4"),
        ("thread", "i4"),
        ("device", "i4"),
        ("stream", "i4"),
        ("first", "i8"),
        ("second", "i8"),
        ("bytes", "i8"),
        ("detail", "i8"),
    ]
)


class Kind(IntEnum):
    """The kind of an entry; the first eight are the runtime's (native/libcudart/pretended.h)."""

    LAUNCH = 1
    COPY = 2  # first: target, second: source
    SET = 3
    RECORD = 4  # first: event
    WAIT = 5
    SYNC_STREAM = 6
    SYNC_EVENT = 7
    SYNC_DEVICE = 8
    READ = 9  # of `bytes` at `first` on a stream; detail: number of the name of what reads
    WRITE = 10
    HOST_READ = 11  # by the thread
    HOST_WRITE = 12
    POST = 13  # detail: number of a name
    JOIN = 14


SEGMENT = 2 << 20  # bytes of the caching allocator's smallest segment
TARGET_PAGEABLE, SOURCE_PAGEABLE = 1, 2  # bits of a copy's detail


class Log:
    """The log of this process: entries of the pretended runtime, and those that Python adds."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    @functools.cached_property
    def _runtime(self) -> ctypes.CDLL:
        torch.cuda.init()
        runtime = ctypes.CDLL("libcudart.so.13")
        runtime.pretended_count.restype = ctypes.c_int64
        runtime.pretended_mark.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 4]
        return runtime

    def start(self, *, late: bool = True) -> None:
        """Begin anew.

        Args:
            late: whether an event passes only where somebody waits for it, as where the device is far behind.
        """
        self._runtime.pretended_log(0)
        self._take()
        self._runtime.pretended_late(int(late))
        self._runtime.pretended_log(1)

    def stop(self) -> tuple[np.ndarray, list[str]]:
        """All entries since the start, and the names that their details number."""
        self._runtime.pretended_log(0)
        self._runtime.pretended_late(0)
        return self._take(), self.names

    def _take(self) -> np.ndarray:
        made = np.zeros(self._runtime.pretended_count(), ENTRY)
        self._runtime.pretended_take(ctypes.c_void_p(made.ctypes.data))
        return made

    def read(self, tensor: torch.Tensor, name: str) -> None:
        """Mark that an op or, where the tensor is in pinned memory, this thread reads a tensor."""
        self._access(tensor, name, Kind.READ, Kind.HOST_READ)

    def write(self, tensor: torch.Tensor, name: str) -> None:
        """Mark a write in the same way."""
        self._access(tensor, name, Kind.WRITE, Kind.HOST_WRITE)

    def _access(self, tensor: torch.Tensor, name: str, of_stream: Kind, of_thread: Kind) -> None:
        if not has_memory(tensor):
            return
        if tensor.is_cuda:
            with torch.cuda.device(tensor.device):  # the null stream is that of the current device
                stream = torch.cuda.current_stream().cuda_stream
                self._mark(of_stream, name, stream, tensor.data_ptr(), span(tensor))
        elif tensor.is_pinned():
            self._mark(of_thread, name, 0, tensor.data_ptr(), span(tensor))

    def allocated(self, address: int) -> None:
        """Mark a write to new memory of the current stream: the caching allocator may have taken it from others.

        It tells no size, so the mark is on the first granule alone. What the thread did that gave memory of this
        segment back happened before.
        """
        self.join(f"segment {address // SEGMENT}")
        self._mark(Kind.WRITE, "an allocation", torch.cuda.current_stream().cuda_stream, address, 1)

    def freed(self, address: int) -> None:
        """Mark that a thread gives a block back: who gets it goes on after that, whatever streams do."""
        self.let_go(address)
        self.post(f"segment {address // SEGMENT}")

    def hold_until_now(self, values: Any) -> None:
        """Mark that this thread has held tensors until now: whoever gives their memory back does so afterwards."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and has_memory(tensor):
                self.post(f"holders of {tensor.untyped_storage().data_ptr():#x}")

    def let_go(self, address: int) -> None:
        """Mark that nobody holds the memory at an address any more."""
        self.join(f"holders of {address:#x}")

    def post(self, name: str) -> None:
        """Mark that what this thread has done happened before what follows a `join` of this name."""
        self._mark(Kind.POST, name)

    def join(self, name: str) -> None:
        """Mark that all happened that was before the `post`s of this name."""
        self._mark(Kind.JOIN, name)

    def _mark(self, kind: Kind, name: str, stream: int = 0, address: int = 0, size: int = 0) -> None:
        self._runtime.pretended_mark(kind, stream, address, size, self._number(name))

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


log = Log()


def has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a strided one with elements and memory."""
    return (
        tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0
    )


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def note_allocations() -> None:
    """Let the caching allocator tell the log of every block that it hands out or gets back, from now on."""
    import torch.cuda._gpu_trace as trace

    torch._C._activate_gpu_trace()
    trace.register_callback_for_memory_allocation(log.allocated)
    trace.register_callback_for_memory_deallocation(log.freed)


@contextlib.contextmanager
def note_pools() -> Iterator[None]:
    """Note what thread pools order, and pools of files.

    What is submitted follows the submission, and a result follows what was submitted. Memory of its arguments is given
    back when it has ended or later, and a file that is taken again was given back before.
    """
    submit, result, make = ThreadPoolExecutor.submit, Future.result, FilePool.__init__
    numbers = iter(range(1 << 62))

    def submitted(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = f"work {next(numbers)}"
        log.post(name)

        def run() -> Any:
            log.join(name)
            try:
                return function(*args, **kwargs)
            finally:
                log.hold_until_now(args)
                log.post(f"result of {name}")

        future: Any = submit(self, run)
        future.work = name
        return future

    def waited_for(self: Any, timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        finally:
            if hasattr(self, "work"):
                log.join(f"result of {self.work}")

    def made(self: Any, folder: Path | None) -> None:
        make(self, folder)
        self._returned = _ReturnedFiles()

    pool: Any = ThreadPoolExecutor
    future_class: Any = Future
    files: Any = FilePool
    pool.submit, future_class.result, files.__init__ = submitted, waited_for, made
    try:
        yield
    finally:
        pool.submit, future_class.result, files.__init__ = submit, result, make


class _ReturnedFiles(deque[tuple[int, int, mmap.mmap]]):
    """The queue of files that no tensor shows any more, as `FilePool._returned`; it notes who gave and who takes."""

    def append(self, returned: tuple[int, int, mmap.mmap]) -> None:
        log.let_go(returned[1])
        log.post(f"file at {returned[1]}")
        super().append(returned)

    def popleft(self) -> tuple[int, int, mmap.mmap]:
        returned = super().popleft()
        log.join(f"file at {returned[1]}")
        return returned
