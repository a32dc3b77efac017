"""A CPU that plays a CUDA device whose copies are as late as its streams allow: for `PinnedTier` without a GPU.

    with late_copies() as device:
        model = fxremat.compile(..., offload=PinnedTier())
        with device.computing():
            model(x).backward()
    assert device.faults == []

`fxremat.host.pinned` sees streams and events that keep what they are given in queues. Inside of `computing`, ops are
those of the compute stream: each runs at once, after all that this stream was told to wait for. A copy runs when an op,
another stream or the host has to wait for it, or by chance before the next op; so what reads too soon, or overwrites
what was to be copied, computes other numbers. Outside of `computing`, ops are the host's, which waits for nothing but
`synchronize`.

What a GPU would do with memory cannot be seen in numbers, and is noted in `faults`:

* a copy that runs after its source or its target was let go. From the time on when the compute stream waits for a copy,
  both may go: what gets their memory next runs on that stream, so later;
* a copy whose stream has not waited for the last op that read or wrote there.

One thread, contiguous spans: a copy moves all bytes from the first to the last element of a tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxremat.host import pinned
from fxremat.host.tier import span_bytes


@contextlib.contextmanager
def late_copies(chance: float = 0.0, seed: int = 0) -> Iterator[Device]:
    """Give `fxremat.host.pinned` the streams of a pretended device, and ordinary memory as pinned memory.

    Args:
        chance: that a stream runs what it was given next before the next op, though nothing waits for it.
    """
    device = Device(chance, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "kind_of", lambda _: _Kind(device))
        yield device


class Device:
    """A compute stream, side streams, and what went wrong with their copies."""

    def __init__(self, chance: float, seed: int) -> None:
        self.compute = Stream(self)
        self.lanes: list[Stream] = []
        self.current = self.compute
        self.ops = 0  # issued so far
        self.touched: dict[int, int] = {}  # address of a storage -> number of the last op that read or wrote there
        self.copies = 0
        self.faults: list[str] = []
        self.chance = chance
        self._random = random.Random(seed)

    def computing(self) -> TorchDispatchMode:
        """Inside of this context, ops are the compute stream's."""
        return _Computing(self)

    def before_op(self) -> None:
        """Run what the compute stream waits for, and by chance some of the rest."""
        for lane in self.lanes:
            if self._random.random() < self.chance:
                lane.run_next()
        self.compute.run()

    def after_op(self, *values: Any) -> None:
        """Note which memory an op has used."""
        self.ops += 1
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                self.touched[value.untyped_storage().data_ptr()] = self.ops

    def finish(self) -> None:
        """Run all that is under way, though nobody waits for it."""
        for stream in (*self.lanes, self.compute):
            stream.run()


class Stream:
    """A queue of copies, of events that pass, and of events of other streams that are waited for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._current: list[tuple[Stream, TorchDispatchMode]] = []  # what to go back to, the innermost last
        self.queue: deque[_Copy | Event] = deque()
        self.seen = 0  # ops of the compute stream that come before what is given to this stream next

    def __enter__(self) -> None:
        self._current.append((self.device.current, _Copying(self)))
        self.device.current = self
        self._current[-1][1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self.device.current, mode = self._current.pop()
        mode.__exit__(*error)

    def record(self, event: Event) -> None:
        """The event passes when all has run that the stream was given so far."""
        if self is self.device.compute:
            self.seen = self.device.ops
        event.stream, event.passed, event.seen = self, False, self.seen
        self.queue.append(event)

    def wait_event(self, event: Event) -> None:
        """Run what comes next after the event has passed."""
        self.seen = max(self.seen, event.seen)
        self.queue.append(event)
        if self is self.device.compute:
            event.hold()

    def wait_stream(self, other: Stream) -> None:
        """Run what comes next after all that the other stream was given so far."""
        event = Event(self.device)
        event.record(other)
        self.wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy later."""
        self.device.copies += 1
        for tensor, what in ((source, "reads"), (target, "writes")):
            if self.device.touched.get(tensor.untyped_storage().data_ptr(), 0) > self.seen:
                self.device.faults.append(f"a copy {what} what an op may still use: it did not wait for that")
        self.queue.append(_Copy(target, source))

    def synchronize(self) -> None:
        """Let the host wait for all that the stream was given."""
        self.run()

    def run(self, until: Event | None = None) -> None:
        """Run what was given so far, or up to an event of this stream."""
        while self.queue and not (until and until.passed):
            self.run_next()

    def run_next(self) -> None:
        """Run one copy or event, if there is any."""
        if not self.queue:
            return
        match self.queue.popleft():
            case Event(stream=other) as event if other is self:
                event.passed = True
            case Event() as event:
                event.stream.run(event)
            case copy:
                self.device.faults += copy.run()


class Event:
    """The stand-in for `torch.Event`."""

    def __init__(self, device: Device) -> None:
        self.stream, self.passed, self.seen = device.compute, True, 0

    def record(self, stream: Stream) -> None:
        """Pass when all has run that the stream was given so far."""
        stream.record(self)

    def query(self) -> bool:
        """Tell whether it has passed."""
        return self.passed

    def hold(self) -> None:
        """Keep the memory of copies before this event: nobody gets it before the compute stream has waited."""
        for item in self.stream.queue:
            if item is self:
                break
            if isinstance(item, _Copy):
                item.hold()


class _Copy:
    """A copy between two tensors that it does not keep, as a GPU does not."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        assert (source.shape, source.stride(), source.dtype) == (target.shape, target.stride(), target.dtype)
        self.move = target.data_ptr(), source.data_ptr(), span_bytes(source)
        self.memory = [weakref.ref(tensor.untyped_storage()) for tensor in (source, target)]
        self.held: list[object] = []

    def hold(self) -> None:
        self.held = [storage() for storage in self.memory]

    def run(self) -> Iterator[str]:
        """Move the bytes where both ends are there. Yields what is not."""
        gone = [what for what, storage in zip(("reads", "writes"), self.memory) if storage() is None]
        if not gone:
            ctypes.memmove(*self.move)
        yield from (f"a copy {what} memory that was let go" for what in gone)


class _Computing(TorchDispatchMode):
    """Every op waits for what the compute stream waits for."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled callables run compiled under this mode, and show it the operators of their graphs."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or "empty" in func.name():  # runs nothing
            return func(*args, **(kwargs or {}))
        self.device.before_op()
        result = func(*args, **(kwargs or {}))
        self.device.after_op(args, kwargs, result)
        return result


class _Copying(TorchDispatchMode):
    """Copies that do not block are given to a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (args[2:] or (kwargs or {}).get("non_blocking")):
            self.stream.copy(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


class _Kind:
    """The part of `fxremat.device.Kind` that `fxremat.host.pinned` uses."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def stream(self, device: object) -> Stream:
        made = Stream(self._device)
        self._device.lanes.append(made)
        return made

    def event(self, device: object) -> Event:
        return Event(self._device)

    def current_stream(self, device: object) -> Stream:
        return self._device.current

    def pinned(self, elements: int, dtype: torch.dtype, device: object) -> Tensor:
        """Ordinary memory."""
        return torch.empty(elements, dtype=dtype)
