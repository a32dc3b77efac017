"""A pool of unnamed memory-mapped files, which are reused for tensors of the same size."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from collections import OrderedDict, deque
from itertools import count
from pathlib import Path

import torch

from fxremat.errors import FxrematError
from fxremat.host.tier import span_bytes
from fxremat.units import format_bytes

# number of requests in a window; the pool keeps the largest bytes in use within the last one or two windows
WINDOW = 1000


class FilePool:
    """Memory-mapped files that return to the pool when the tensor stored in them is gone.

    The pool keeps no more bytes than the tensors of the latest steps occupied at a time: if a new file would
    exceed that, the files that have been unused longest are freed.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.used = 0  # bytes of files that store a tensor
        self._lock = threading.RLock()  # reentrant, since garbage collection may run finalizers at any point
        # files whose tensor is gone; finalizers append to it without taking the lock
        self._returned: deque[tuple[int, int, mmap.mmap]] = deque()
        # number -> unused file, longest unused first
        self._waiting: OrderedDict[int, tuple[int, mmap.mmap]] = OrderedDict()
        self._by_size: dict[int, list[int]] = {}  # size -> numbers of the unused files
        self._number = count()
        self._idle = 0  # bytes of the unused files
        self._shown: set[int] = set()  # addresses of the files that store a tensor
        self._most = [0, 0]  # largest bytes in use at a time, in the last window of requests and in the current one
        self._taken = 0  # number of requests in the current window

    @property
    def bytes(self) -> int:
        """Total bytes of all files, whether in use or not."""
        with self._lock:
            self._collect()
            return self.used + self._idle

    def owns(self, host: torch.Tensor) -> bool:
        """Tell whether a tensor is stored in one of this pool's files."""
        return host.numel() == 0 or host.data_ptr() in self._shown

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a new tensor, stored in a file, with the layout of `like`. Raises `FxrematError` if the disk is full.
        """
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
        """Free unused files until all files together have at most `most` bytes, or none is unused."""
        with self._lock:
            self._collect()
            while self._waiting and self.used + self._idle > most:
                number, (size, _) = self._waiting.popitem(last=False)
                self._by_size[size].remove(number)
                self._idle -= size

    def _collect(self) -> None:
        """Add files whose tensors are gone to the unused ones."""
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
            # the temporary file has no name, or loses it immediately
            with tempfile.TemporaryFile(dir=self.folder) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(
                        file.fileno(), 0, size
                    )  # allocates the disk space now, so that a full disk raises an error here instead of SIGBUS later
                else:
                    file.truncate(size)
                return mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise FxrematError(
                f"no room for {format_bytes(size)} more beside the {format_bytes(self.bytes)} offloaded in "
                f"{self.folder or tempfile.gettempdir()} ({error.strerror}): give a folder on a larger disk, "
                "fxremat.FileTier(folder), or limit what is offloaded, Offload(limit=...)"
            ) from error
