"""Measures how much memory is allocated during a step in which several graphs are called.

    meter = meter_of(device)       begins with the step; levels are in bytes above that moment
    border = meter.border()        a moment, with its level, and the peak since the border before
    with meter.paused(): ...       allocations here do not count for the step (capture, measuring)
    meter.leave(outside)           the forward of the model has ended
    meter.end()                    from here on all borders have their numbers

On CUDA and similar devices counters are read immediately; their peak is reset at every border if peaks are
measured. A CPU has no counters, so a profiler records the allocations of the step (`AllocationRecord`). It
cannot be read during the backward; there a border is marked by a special sequence of allocations, and gets its
numbers after the backward. Between forward and backward the program may start a profiler of its own: then the loss is
not measured, and what was assumed for it counts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch

from fxremat.device import Ability, kind_of
from fxremat.torch_private import (
    AllocationReader,
    backward_task,
    is_profiled_by_others,
    watching_backward,
)

MARKS = (3, 1, 3, 3, 1)  # bytes of the tensors whose allocations mark a border
MARK = [size for each in MARKS for size in (each, -each)]
"""The allocations that mark a border: tensors of a few bytes, each freed at once, in an order that no model has.

They are followed by one of `Recorded.number` bytes, which identifies the meter.
"""
MOST_WITHIN = 2  # a discriminator trains within a step of the generator, and is called once more in it
FIRST, MOST = 5, 64  # ids of meters count up from `FIRST`, and start again after `MOST` ids


class OtherModels:
    """Tells a model that measures its steps about the other compiled models of this process."""

    _made: ClassVar[int] = 0  # number of plans made so far
    _replaced: ClassVar[int] = 0  # number of those that took the place of another one
    _all: ClassVar[weakref.WeakSet[OtherModels]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._known, self._known_replaced = self._made, self._replaced
        self._all.add(self)
        self.own_step_waits: Callable[[], bool] = lambda: False  # tells whether the backward of a step may still come
        self._is_inside = False  # whether the last call was
        self._outer: weakref.ref[OtherModels] | None = None  # the one within whose step a call was last
        self.shares = False  # True if the model shares its budget with those within its steps: see `settle_inside`
        self.steps = 0  # number of steps that it has begun
        self._within = (0, 0)  # the number of a step of `_outer`, and of those of this model that were within it
        # plans the steps within those of another model; tells whether they may take more than before. Is given the
        # bytes by which they may, as a function, which returns None as long as that is not known
        self.settle: Callable[[Callable[[], int | None]], bool] = lambda _: False
        self.takes_least = False  # True once a model whose step this one is within had no room for more

    @property
    def exist(self) -> bool:
        """True if there may be others."""
        return len(self._all) > 1

    def have_new_plans(self) -> bool:
        """Tell whether others have new plans since this was last asked: they may take other memory then."""
        known, self._known = self._known, self._made
        return known != self._known

    def have_replaced_plans(self) -> bool:
        """Tell whether others have replaced plans since this was last asked: they take other memory at known sizes."""
        known, self._known_replaced = self._known_replaced, self._replaced
        return known != self._known_replaced

    def note_own(self, *, replaces: bool) -> None:
        """Note a new plan of this model itself, and whether it takes the place of another one."""
        OtherModels._made += 1
        self._known += 1
        OtherModels._replaced += replaces
        self._known_replaced += replaces

    def wait(self) -> bool:
        """Tell whether the step of another one waits for its backward, so that what begins now is a part of that step.
        """
        waiting = [other for other in tuple(self._all) if other is not self and other.own_step_waits()]
        if is_inside := bool(waiting):
            outer, (step, count) = min(waiting, key=lambda other: other._is_inside), self._within  # the one that began
            is_same = self._outer is not None and self._outer() is outer and step == outer.steps
            self._outer, self._within = weakref.ref(outer), (outer.steps, count + 1 if is_same else 1)
        self._is_inside = is_inside
        return is_inside

    @property
    def has_share(self) -> bool:
        """True if the model within whose steps this one runs gives it a share of its budget.

        It does as it begins its steps. One that waits for its backward while others train is not waited for.
        """
        outer = self._outer() if self._outer is not None else None
        return outer is not None and outer.shares and self._within[1] <= MOST_WITHIN

    def settle_inside(self, spare: Callable[[], int | None]) -> bool:
        """Let the models that run within this one's steps plan; tell whether any may take more than before.

        Args:
            spare: returns the bytes of the budget that are left beside the least of a step of this one, with what the
                others take in it now, of which each gets an equal share; None as long as they are not known.
        """
        inside = [other for other in tuple(self._all) if other._outer is not None and other._outer() is self]

        @functools.cache
        def share() -> int | None:
            return None if (left := spare()) is None else left // (len(inside) + 1)

        settled = [other.settle(share) for other in inside]
        return any(settled)

    def ask_for_room(self) -> bool:
        """Let the models that run within the steps of others take their least; tell whether any of them took more."""
        inside = (other for other in self._all if other is not self and other._outer is not None)
        asked = [other for other in inside if not other.takes_least]
        for other in asked:
            other.takes_least = True
        return bool(asked)


class Border:
    """A moment of a step at which memory is measured; the numbers are None until they are known."""

    def __init__(self) -> None:
        self.level: int | None = None  # bytes allocated at this moment
        self.peak: int | None = None  # largest bytes since the border before; None if not known
        self.change = 0  # bytes that the level rises behind this border, without an allocation that was recorded
        # those since the border before, if there are (see `Recorded.leave`), and how many came until the peak
        self.changes: Sequence[int] = ()
        self.until_peak = 0

    def alive(self, *, at_peak: bool = False) -> Counter[int]:
        """Count what was allocated since the border before and is alive now, or at the peak, by its size in bytes."""
        found = Counter[int]()
        for change in self.changes[: self.until_peak] if at_peak else self.changes:
            if change > 0:
                found[change] += 1
            elif found[-change]:
                found[-change] -= 1
        return +found


class Meter(ABC):
    """Measures the memory of one step, from its beginning on."""

    @abstractmethod
    def border(self, *, in_backward: bool = False) -> Border:
        """Return the present moment as a border: memory is measured between two borders."""

    @abstractmethod
    def level(self) -> int | None:
        """Return the bytes that are allocated now; None if that is not known."""

    def lower_base(self, size: int) -> None:  # noqa: B027 - most meters have nothing to do
        """Count memory from a level that is `size` bytes lower than the one at which the step began."""

    def leave(self, outside: int) -> None:  # noqa: B027 - most meters have nothing to do
        """Record that the forward of the model has ended.

        Args:
            outside: bytes assumed to be allocated until the backward begins, where they are not measured.
        """

    def reach(self, border: Border, outside: int, held: Callable[[], int]) -> None:  # noqa: B027 - as above
        """Record that the backward of a loss outside the model is over, at this border.

        Args:
            outside: what `leave` was given; it counts until here, unless the loss was measured.
            held: returns the bytes of the loss that stay.
        """

    def enter(self) -> None:  # noqa: B027 - most meters have nothing to do
        """Record that another forward of the model begins before the backward."""

    def forget(self) -> None:  # noqa: B027 - most meters have nothing to do
        """Record that nothing of the step is alive any more, so that its backward will never run."""

    @abstractmethod
    def end(self) -> None:
        """End the measurement of the step; numbers that are not known by now stay unknown."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context, do not count allocations; the peak up to the next border is then unknown."""
        yield


class Unmeasured(Meter):
    """A meter without measurements, for steps on a CPU that are not recorded, and for devices without statistics."""

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
        peaks: True: measure peaks too, for which the peak counter is reset at each border.
    """

    def __init__(self, device: torch.device, *, peaks: bool) -> None:
        self._kind, self._device, self._peaks = kind_of(device), device, peaks
        self._base = self._kind.allocated(device)
        self._exact = peaks
        self._forget()

    def level(self) -> int:
        """Return the bytes that are allocated now."""
        return self._kind.allocated(self._device) - self._base

    def lower_base(self, size: int) -> None:
        """Count memory from a level that is `size` bytes lower than the one at which the step began."""
        self._base -= size

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
        """Within this context, do not count allocations."""
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


class Recorded(Meter):
    """A meter that records this thread's CPU allocations while the model's forward, its loss and a backward run.

    Several models may be measured at the same time: they read one record.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number, self._thread = FIRST + next(self._numbers) % MOST, threading.get_ident()
        self._level, self._top, self._exact = 0, 0, True
        self._is_lost = False  # True once something other than a loss was not recorded
        self._reader: AllocationReader | None = AllocationReader()
        self._marks: list[Border] = []
        self._in_backward = False  # True while the backward of the step, or of another computation behind it, runs
        self._is_over = False  # True once the measurement has ended in a backward, where the record cannot stop
        self._outside = 0  # bytes that are assumed for losses, and are counted if a part of their record is lost
        self.measures_loss = True  # False once that has happened
        self._changes, self._until_top = list[int](), 0  # since the last border, and how many came until the top
        self._notes_changes = False  # True between the model's forward and the next border
        self._unwatch = watching_backward(self._before_backward, self._after_backward)

    @property
    def is_here(self) -> bool:
        """True if this is the thread whose allocations are recorded."""
        return self._thread == threading.get_ident()

    def level(self) -> int | None:
        """Return the bytes that are allocated now; None within the backward, and where something was not recorded."""
        if self._reader is None or self._in_backward or self._marks:
            return None
        self._read()
        return None if self._is_lost else self._level

    def lower_base(self, size: int) -> None:
        """Count memory from a level that is `size` bytes lower than the one at which the step began."""
        self._level += size
        self._top += size

    def border(self, *, in_backward: bool = False) -> Border:
        """Return a border; within the backward it gets its numbers later."""
        border = Border()
        if self._reader is None:
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
        """Stop recording; within a backward, once that is over."""
        if self._in_backward and backward_task() >= 0:
            self._is_over = True
            return
        self._read()
        self._stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context, do not count allocations."""
        if self._reader is None:
            yield
            return
        self._read()
        with self._reader.paused():
            yield
        self._exact = False

    def _note(self, border: Border) -> None:
        border.level = None if self._is_lost else self._level
        border.peak = self._top if self._exact and not self._is_lost else None
        border.changes, border.until_peak = self._changes, self._until_top
        self._level += border.change
        self._top, self._exact = self._level, True
        self._changes, self._until_top, self._notes_changes = [], 0, False

    def _stop(self) -> None:
        """Record no more."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._unwatch()
            reader.end()

    def _read(self) -> None:
        """Count what was allocated since this was last called, and give borders within a backward their numbers."""
        if self._reader is None:
            return
        changes, has_missed = self._reader.read()
        marks, place = iter(self._marks), 0
        while place < len(changes):
            if changes[place : place + len(MARK)] == MARK:
                place += len(MARK) + 2
                if changes[place - 2] == self.number and (border := next(marks, None)) is not None:
                    self._note(border)
                continue
            self._count(changes[place])
            place += 1
        self._marks.clear()
        if not has_missed:
            return
        if self._reader.waits:  # of several losses, those that were measured count too: rather too much
            self.measures_loss = False
            self._count(self._outside)
            self._outside = 0
        else:
            self._is_lost = True

    def _count(self, change: int) -> None:
        self._level += change
        if self._notes_changes:
            self._changes.append(change)
        if self._level > self._top:
            self._top, self._until_top = self._level, len(self._changes)

    def leave(self, outside: int) -> None:
        """Record the loss, unless the program starts a profiler: then `outside` bytes count for it."""
        if self._reader is not None:
            self._read()
            self._reader.waits = self._notes_changes = True
            self._outside += outside

    def reach(self, border: Border, outside: int, held: Callable[[], int]) -> None:
        """Count what stays of a loss behind this border, instead of `outside`, if the loss was not measured."""
        if not self.measures_loss:
            border.change = held() - outside

    def enter(self) -> None:
        """Record again, until the model's forward ends; what is counted for a loss in between still counts."""
        if self._reader is not None:
            self._read()
            self._reader.waits = False
            self._is_lost |= not self._reader.resume()

    def forget(self) -> None:
        """Stop waiting for the step's backward."""
        if self._reader is not None and self._reader.waits and not self._in_backward:
            self._stop()

    def _before_backward(self) -> None:
        if self._reader is None or not self._reader.waits:
            return
        self._read()
        if self._reader.resume():
            self._in_backward = True
        else:
            self._stop()

    def _after_backward(self) -> None:
        if not self._in_backward:
            return
        ended = self._is_over or bool(self._marks)
        self._read()
        self._in_backward = False
        if ended:  # if not, this was the backward of another computation
            self._stop()


def recorder_of(device: torch.device) -> Recorded | None:
    """Return a meter for a step that begins now, on a device without counters; None if it cannot be recorded.

    A profiler of the user may run on this thread, or a backward, within which a record can be neither read nor ended.
    """
    kind = kind_of(device)
    if kind.can(Ability.STATISTICS) or not kind.recorded or backward_task() >= 0:
        return None
    return None if is_profiled_by_others() else Recorded()


def meter_of(device: torch.device, *, peaks: bool) -> Meter:
    """Return a meter for a step on a device that begins now.

    Args:
        peaks: True: all borders, and the peaks between them, have to be known after the step.
    """
    if kind_of(device).can(Ability.STATISTICS):
        return Counted(device, peaks=peaks)
    return (recorder_of(device) if peaks else None) or Unmeasured()
