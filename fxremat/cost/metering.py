"""Seconds and peak bytes of a single call, by the clock, the device's events, and its allocator's own record."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fxremat.device import Ability, kind_of
from fxremat.graphs.accounting import rounded
from fxremat.graphs.nodes import storage_bytes
from fxremat.step.costs import OpCost
from fxremat.torch_private import allocations

SAMPLE_SECONDS = 0.04  # an op runs repeatedly for this long, at least LEAST_RUNS and at most MOST_RUNS times
LEAST_RUNS, MOST_RUNS = 3, 15


def seconds_of(
    call: Callable[[], Any],
    device: torch.device,
    *,
    prepare: Callable[[], Any] | None = None,
    fixed: bool = False,
) -> float:
    """Return the seconds of one call on the device.

    Args:
        prepare: called before each run; its time does not count.
        fixed: run the call a fixed number of times, so that all ranks run a collective equally often.
    """
    if kind_of(device).can(Ability.TIMING):
        return _seconds_by_events(call, device) if prepare is None else _seconds_beside(call, prepare, device)
    return _cpu_seconds(call, prepare, 0.0 if fixed else SAMPLE_SECONDS)


def _cpu_seconds(call: Callable[[], Any], prepare: Callable[[], Any] | None, sample: float) -> float:
    """Return the median seconds of a few runs after a warm-up run.

    Args:
        sample: seconds for which the call is repeated, at least LEAST_RUNS and at most MOST_RUNS times.
    """
    call()
    runs: list[float] = []
    end = time.perf_counter() + sample
    while len(runs) < LEAST_RUNS or (len(runs) < MOST_RUNS and time.perf_counter() < end):
        if prepare is not None:
            prepare()
        start = time.perf_counter()
        result = call()
        runs.append(time.perf_counter() - start)
        del result
    return statistics.median(runs)


def _seconds_by_events(call: Callable[[], Any], device: torch.device) -> float:
    """Return the average seconds of many calls in a row, whose kernel launches overlap with execution as in a step.

    It is the median over LEAST_RUNS batches of MOST_RUNS calls each, timed by events on the stream.
    """
    call()
    kind, runs = kind_of(device), list[float]()
    for _ in range(LEAST_RUNS):
        start, end = (kind.event(device, timed=True) for _ in range(2))
        start.record()
        for _ in range(MOST_RUNS):
            call()
        end.record()
        end.synchronize()
        runs.append(start.elapsed_time(end) / 1e3 / MOST_RUNS)
    return statistics.median(runs)


def _seconds_beside(call: Callable[[], Any], prepare: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, each preceded by `prepare`, whose own seconds are subtracted; at least 0.1 us."""

    def both() -> None:
        prepare()
        call()

    prepare()
    call()
    return max(1e-7, _seconds_by_events(both, device) - _seconds_by_events(prepare, device))


def note_allocations(call: Callable[[], Any], device: torch.device) -> None:
    """Run a call so that the profiler of allocations, if there is one, learns the sizes of what it allocates."""
    if (kind := kind_of(device)).recorded:
        allocations(call, on_host=not kind.accelerator)
    else:
        call()


def peak_of(call: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Run a call; return its peak in bytes above what was allocated at its start, and its result."""
    kind = kind_of(device)
    if not kind.recorded:
        return _peak_by_statistics(call, device)
    counted = kind.can(Ability.STATISTICS)
    before = kind.allocated(device) if counted else 0
    result, sizes = allocations(call, on_host=not kind.accelerator)
    peak = max(0, *itertools.accumulate(sizes, initial=0))
    if counted and sum(sizes) != kind.allocated(device) - before:
        del result  # the profiler has missed some allocations
        return _peak_by_statistics(call, device)
    return peak, result


def peaks_of(first: Callable[[], Any], second: Callable[[Any], object], device: torch.device) -> tuple[int, int]:
    """Run a call, and another on its result; return the peak of each, in bytes above what was allocated at the start.

    What the second frees of the first counts as free, as it would not if the second were recorded by itself.
    """
    kind = kind_of(device)
    if kind.recorded and not kind.can(Ability.STATISTICS):
        alone = allocations(first, on_host=not kind.accelerator)[1]  # its result is gone when it runs again
        _, both = allocations(lambda: second(first()), on_host=not kind.accelerator)
        levels, end = [*itertools.accumulate(both, initial=0)], len(alone)
        begins = end if both[:end] == alone else 0  # else it is not known where the second begins
        return max(itertools.accumulate(alone, initial=0)), max(levels[begins:])
    before = kind.allocated(device)
    peak, result = _peak_by_statistics(first, device)
    level = kind.allocated(device) - before
    return peak, level + _peak_by_statistics(partial(second, result), device)[0]


def _peak_by_statistics(call: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Return what `peak_of` returns, from the allocator's own peak statistic, which is reset."""
    kind = kind_of(device)
    kind.synchronize(device)
    before = kind.allocated(device)
    kind.forget_most(device)
    result = call()
    kind.synchronize(device)
    return kind.most_allocated(device) - before, result


def _output_bytes(result: Any) -> tuple[int, ...]:
    """Return the bytes of the storage of each output of an op; 0 for an output that is not a tensor."""
    items = result if isinstance(result, tuple | list) else [result]
    return tuple(storage_bytes(item) if isinstance(item, torch.Tensor) else 0 for item in items)


def cost_of_call(seconds: float, peak: int, result: Any, device: torch.device, *, new: bool) -> OpCost:
    """Return the cost of a call.

    Args:
        peak: largest bytes allocated during the call.
        new: True if its outputs are new memory, which is part of the peak and not workspace.
    """
    outputs = tuple(rounded(size, device) for size in _output_bytes(result))
    return OpCost(seconds, max(0, peak - (sum(outputs) if new else 0)), outputs)
