"""Measure how much memory one training step takes above what was there when it began.

On the CPU the truth is the allocator itself: torch.profiler reports every allocation and every release
with its size, kernel workspaces included, and the peak of their running sum is the answer. On CUDA the
allocator keeps its own peak. (The profiler knows nothing of memory from before it started, so on the CPU
releasing such memory during the step makes no room; on CUDA it does. A training step releases none.)
`storage_peak` is a second, independent CPU meter that watches the tensors instead; it does not see
workspaces and so never reads more than the first.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Step = Callable[[], object]


def training_step(model: nn.Module, batch: Sequence[Any]) -> Step:
    """One forward and backward of a model that returns its loss; the step returns the loss, detached."""

    def step() -> Tensor:
        loss = model(*batch)
        loss.backward()
        return loss.detach()

    return step


def step_from_none(model: nn.Module, batch: Sequence[Any]) -> Step:
    """The same with every `.grad` set to None first, for a stopwatch."""
    step = training_step(model, batch)

    def from_none() -> object:
        model.zero_grad(set_to_none=True)
        return step()

    return from_none


def peak_bytes(step: Step, device: torch.device | str = "cpu") -> int:
    """Bytes allocated on the device at the worst moment of `step()`, above the level at its start.

    Run the step once before, so that nothing is measured but the step; set every `.grad` to None.
    """
    device = torch.device(device)
    gc.collect()  # releases during the step would otherwise be counted as the step's own
    return _cuda_peak(step, device) if device.type == "cuda" else _cpu_peak(step)


def model_peak(model: nn.Module, batch: Sequence[Any], device: torch.device | str = "cpu") -> int:
    """`peak_bytes` of a training step of `model`, warmed up and with `.grad` None; leaves gradients None."""
    step = training_step(model, batch)
    for measured in (False, True):
        model.zero_grad(set_to_none=True)
        if measured:
            peak = peak_bytes(step, device)
        else:
            step()
    model.zero_grad(set_to_none=True)
    return peak


def _cuda_peak(step: Step, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    result = step()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - start


def _cpu_peak(step: Step) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        result = step()
    del result
    profiler: Any = recording.profiler
    events = _allocations(profiler.kineto_results.experimental_event_tree())
    return running_peak(_of_the_recording(sorted(events, key=lambda event: event[0])))


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Time, signed bytes and address of every block of host memory that was taken or given back."""
    for event in events:
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr
        yield from _allocations(event.children)


def _of_the_recording(events: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Time and signed bytes, without what is given back that was there before.

    torch does not tell of such blocks, but where an earlier recording saw another one at the same address.
    """
    sizes: dict[int, int] = {}
    for time_, size, address in events:
        if size > 0:
            sizes[address] = size
            yield time_, size
        elif address in sizes:
            yield time_, -sizes.pop(address)


def running_peak(events: Iterable[tuple[int, int]]) -> int:
    """The largest running sum of (time, signed bytes), in order of time; the sum starts at 0.

    >>> running_peak([(3, -4), (1, 4), (2, 6)])
    10
    """
    level = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):  # stable: equal times stay in order of report
        level += size
        peak = max(peak, level)
    return peak


def storage_peak(step: Step) -> int:
    """Peak bytes of the CPU storages that operators return during `step()`: a check on `peak_bytes`.

    Misses what an operator allocates and frees inside itself.
    """
    gc.collect()
    with _StorageCounter() as counter:
        result = step()
    del result
    return counter.peak


class _StorageCounter(TorchDispatchMode):
    """Counts each new storage once, from the operator that returns it until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.level = self.peak = 0
        self._seen: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled callables run compiled under this mode, and show it the operators of their graphs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _key(tensor) not in inputs | self._seen:
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        key, size = _key(tensor), tensor.untyped_storage().nbytes()
        self._seen.add(key)
        self.level += size
        self.peak = max(self.peak, self.level)
        weakref.finalize(tensor.untyped_storage(), self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.level -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def step_times(
    steps: Sequence[Step], repeats: int = 7, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """Least seconds of each step over `repeats` rounds; the order alternates from round to round.

    The clock is the CPU time of this process, so set one thread first; pass `cuda_clock` on a GPU. Each step
    runs once unmeasured before.
    """
    best = [float("inf")] * len(steps)
    for step in steps:
        step()
    for turn in range(repeats):
        order = range(len(steps)) if turn % 2 == 0 else reversed(range(len(steps)))
        for i in order:
            start = clock()
            steps[i]()
            best[i] = min(best[i], clock() - start)
    return best


def cuda_clock() -> float:
    """Wall-clock seconds once the GPU has nothing left to do."""
    torch.cuda.synchronize()
    return time.perf_counter()
