"""The memory of a step in which several graphs run: how much is alive at the borders of their calls, and between them.

    meter = meter_of(device)       begins with the step; levels are in bytes above that moment
    border = meter.border()        a moment; it knows its level, and the peak since the border before
    with meter.paused(): ...       what is allocated here belongs to no step (capture, measuring)
    meter.leave(outside)           the forward of the model is over
    meter.end()                    from here on the borders know their numbers

The counters of CUDA and its kin are read at once; their peak is reset at every border, as far as steps are measured. A
CPU has no counters: a profiler records the allocations of the step (`allocations_since`). It cannot be read inside the
backward; there a border is a mark among the allocations, and its numbers are known once the backward has returned.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch

from fxremat.device import Ability, kind_of
from fxremat.torch_private import AllocationRecord, is_profiled, watching_backward

MARKS = (3, 1, 3, 3, 1)  # bytes
MARK = [size for each in MARKS for size in (each, -each)]
"""A mark among the allocations: tensors of a few bytes, each freed at once, in an order that no model has.

One more tensor, of `Recorded.number` bytes, tells whose mark it is.
"""
FIRST, MOST = 5, 64  # the numbers of meters: from `FIRST` on, `MOST` of them in turn


class Border:
    """A moment of a step; the numbers are None until they are known."""

    def __init__(self) -> None:
        self.level: int | None = None  # bytes
        self.peak: int | None = None  # bytes, the most since the border before; None if that is not known


class Meter(ABC):
    """A meter of one step, from its begin on."""

    @abstractmethod
    def border(self, *, in_backward: bool = False) -> Border:
        """Return a border at this moment."""

    @abstractmethod
    def level(self) -> int | None:
        """Return the bytes that are alive now; None if that is not known here."""

    def leave(self, outside: int) -> None:  # noqa: B027 - most meters have nothing to do
        """Note that the forward of the model is over.

        Args:
            outside: bytes that are assumed to be allocated until the backward begins, where they are not counted.
        """

    def forget(self) -> None:  # noqa: B027 - most meters have nothing to do
        """Note that nothing of the step is left, and that its backward will never run."""

    @abstractmethod
    def end(self) -> None:
        """End the step; what is not known now will not be."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is allocated in this context; the peak up to the next border is then not known."""
        yield


class Unmeasured(Meter):
    """A meter that knows nothing: of steps on a CPU that are not recorded, and of devices without statistics."""

    def border(self, *, in_backward: bool = False) -> Border:
        """Return a border without numbers."""
        return Border()

    def level(self) -> None:
        """Return None."""

    def end(self) -> None:
        """Do nothing."""


class Counted(Meter):
    """A meter that reads the counters of a device's allocator.

    Args:
        peaks: whether peaks are measured too, for which the counter of peaks is reset at each border.
    """

    def __init__(self, device: torch.device, *, peaks: bool) -> None:
        self._kind, self._device, self._peaks = kind_of(device), device, peaks
        self._base = self._kind.allocated(device)
        self._exact = peaks
        self._forget()

    def level(self) -> int:
        """Return the bytes that are alive now."""
        return self._kind.allocated(self._device) - self._base

    def border(self, *, in_backward: bool = False) -> Border:
        """Return a border, with its numbers."""
        border = Border()
        border.level = self.level()
        if self._exact:
            border.peak = max(border.level, self._kind.most_allocated(self._device) - self._base)
        self._exact = self._peaks
        self._forget()
        return border

    def end(self) -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is allocated in this context."""
        before = self._kind.allocated(self._device)
        try:
            yield
        finally:
            self._base += self._kind.allocated(self._device) - before
            self._exact = False
            self._forget()

    def _forget(self) -> None:
        if self._peaks:
            self._kind.forget_most(self._device)


class SharedRecord:
    """A record of a backward, which all steps that wait for theirs on this thread may read."""

    _of_thread: ClassVar[dict[int, SharedRecord]] = {}

    def __init__(self) -> None:
        self._record = AllocationRecord()
        self._changes: list[int] | None = None
        self._of_thread[threading.get_ident()] = self

    @classmethod
    def now(cls) -> SharedRecord | None:
        """Return the record of the backward that begins on this thread; None if a profiler of the user's runs."""
        known = cls._of_thread.get(threading.get_ident())
        if known is not None:
            return known
        return None if is_profiled() else cls()

    def stop(self) -> list[int]:
        """Stop recording, unless another step has done so; return the changes of the backward in bytes, in order."""
        if self._changes is None:
            self._changes = self._record.stop()
            del self._of_thread[threading.get_ident()]
        return self._changes


class Recorded(Meter):
    """A meter that records the allocations of this thread on the host, while the model's forward or a backward runs.

    Between these the thread belongs to the user, who may start a profiler there: the loss is not recorded.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = FIRST + next(self._numbers) % MOST
        self._level, self._top, self._exact = 0, 0, True
        self._record: AllocationRecord | SharedRecord | None = AllocationRecord()
        self._marks: list[Border] = []
        self._has_left = False  # the forward of the model is over
        self._unwatch = watching_backward(self._before_backward, self._after_backward)

    def level(self) -> int | None:
        """Return the bytes that are alive now, in the forward."""
        if self._marks:
            return None
        if self._record is not None:
            self._read()
        return self._level

    def border(self, *, in_backward: bool = False) -> Border:
        """Return a border; in the backward its numbers are known later."""
        border = Border()
        if self._record is None:
            return border
        if in_backward:
            self._marks.append(border)
            for size in (*MARKS, self.number):
                torch.empty(size, dtype=torch.uint8)
            return border
        self._read()
        self._note(border)
        return border

    def end(self) -> None:
        """Stop recording."""
        self._unwatch()
        if self._record is not None:
            self._read(go_on=False)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is allocated in this context."""
        if self._record is None:
            yield
            return
        self._read(go_on=False)
        try:
            yield
        finally:
            self._exact = False
            self._record = AllocationRecord()

    def _note(self, border: Border) -> None:
        border.level = self._level
        border.peak = self._top if self._exact else None
        self._top, self._exact = self._level, True

    def _read(self, *, go_on: bool = True) -> None:
        assert self._record is not None
        changes, marks, place = self._record.stop(), iter(self._marks), 0
        while place < len(changes):
            if changes[place : place + len(MARK)] == MARK:
                place += len(MARK) + 2
                if changes[place - 2] == self.number and (border := next(marks, None)) is not None:
                    self._note(border)
                continue
            self._level += changes[place]
            self._top = max(self._top, self._level)
            place += 1
        self._marks.clear()
        self._record = AllocationRecord() if go_on else None

    def leave(self, outside: int) -> None:
        """Stop recording until a backward begins; count `outside` bytes meanwhile."""
        if self._record is not None:
            self._read(go_on=False)
            self._has_left = True
            self._level += outside
            self._top = max(self._top, self._level)

    def forget(self) -> None:
        """Wait for no backward any more."""
        if self._has_left and self._record is None:
            self._unwatch()

    def _before_backward(self) -> None:
        if self._has_left and self._record is None:
            self._record = SharedRecord.now()

    def _after_backward(self) -> None:
        if self._has_left and self._record is not None:
            if self._marks:
                self.end()
            else:
                self._read(go_on=False)  # the backward of something else


def meter_of(device: torch.device, *, peaks: bool) -> Meter:
    """Return a meter for a step on a device that begins now.

    Args:
        peaks: whether all borders, and the peaks between them, are to be known once the step is over.
    """
    kind = kind_of(device)
    if kind.can(Ability.STATISTICS):
        return Counted(device, peaks=peaks)
    if peaks and kind.recorded and not is_profiled():
        return Recorded()
    return Unmeasured()
