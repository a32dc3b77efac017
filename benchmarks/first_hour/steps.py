"""Training steps of a CUDA device: what they allocate by every count of the caching allocator, and what they take."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from benchmarks.models import on_gpus
from benchmarks.models.on_gpus import GpuSize
from fxremat.settings import Search

MB, MIB = 1e6, 2**20
LEAST = "least"  # the least budget that works
Batch = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Bytes of a training step, above those at its start where nothing else is said."""

    first: int  # allocated by the process's first step
    allocated: int  # by a later one
    requested: int  # by the same, without what the allocator rounds up
    reserved: int  # from the driver, in all
    held: int  # allocated at the start of the step
    retries: int  # in all steps: the driver had no more, and what was cached was given back


def made(name: str, size: GpuSize) -> tuple[nn.Module, Batch]:
    """A model for GPUs and its batch, on the GPU."""
    case = on_gpus.get(name, size)
    return case.model(device="cuda"), tuple(t.cuda() for t in case.batch())


def compiled(model: nn.Module, batch: Batch, mem: str | int, **options: Any) -> Any:
    """The model within a budget, or within the least one that works where that is too small or asked for."""
    options = {"search": Search(progress=False), "example_inputs": batch, **options}
    try:
        return fxremat.compile(model, mem=1 if mem == LEAST else mem, **options)
    except fxremat.BudgetTooSmall as error:
        return fxremat.compile(model, mem=error.minimum, **options)


def peaks(model: nn.Module, batch: Batch, steps: int = 3) -> Peaks:
    """Bytes that the first and the last of some steps allocate."""
    torch.cuda.empty_cache()  # of what ran before
    allocated = []
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        gc.collect()
        start = _stats()
        torch.cuda.reset_peak_memory_stats()
        meter.training_step(model, batch)()
        end = _stats()
        allocated.append(end["allocated_bytes.all.peak"] - start["allocated_bytes.all.current"])
    model.zero_grad(set_to_none=True)
    return Peaks(
        first=allocated[0],
        allocated=allocated[-1],
        requested=end["requested_bytes.all.peak"] - start["requested_bytes.all.current"],
        reserved=end["reserved_bytes.all.peak"],
        held=start["allocated_bytes.all.current"],
        retries=end["num_alloc_retries"] - retries,
    )


def seconds(models: Sequence[nn.Module], batch: Batch, repeats: int = 8) -> list[float]:
    """Least wall-clock seconds of a step of each, by turns."""
    steps = [meter.step_from_none(model, batch) for model in models]
    found = meter.step_times(steps, repeats=repeats, clock=meter.cuda_clock)
    for model in models:
        model.zero_grad(set_to_none=True)
    return found


def over(size: int, budget: int) -> float:
    """Mebibytes above the budget, 0 below it."""
    return max(0, size - budget) / MIB


def percent(size: float, of: float) -> float:
    """Return how much larger, in percent.

    >>> percent(102, 100)
    2.0
    """
    return 100 * (size - of) / of


def _stats() -> dict[str, int]:
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()
