"""Whole graphs and smaller regions compiled by Inductor: budgets and times, beside `torch.compile` without a budget.

The first step tunes kernels, which may allocate more than the budget: rows have it apart. Of a step under the profiler,
rows have the seconds of all kernels and their number; where a step takes longer than its kernels, it waits for the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import fxremat
from benchmarks import meter
from benchmarks.models.on_gpus import GpuSize
from fxremat.settings import Inductor, Search

from .part import Column, Measure, Results, Row
from .steps import MB, Batch, made, over, peaks, percent, seconds

MODELS = ("gpt", "resnet amp")
BUDGETS = ("80%", "50%")

COLUMNS = (
    Column(name="compiled MB", width=13, text=lambda r: f"{r['stock_peak'] / MB:.1f}"),
    Column(name="budget", width=10, text=lambda r: f"{r['budget'] / MB:.1f}"),
    Column(name="allocated", width=11, text=lambda r: f"{percent(r['allocated'], r['predicted']):+.2f} %"),
    Column(name="over MiB", width=10, text=lambda r: f"{over(r['allocated'], r['budget']):.1f}"),
    Column(name="first", width=8, text=lambda r: f"{over(r['first'], r['budget']):.1f}"),
    Column(name="compiled ms", width=13, text=lambda r: f"{1e3 * r['stock_seconds']:.1f}"),
    Column(name="time", width=8, text=lambda r: f"{r['seconds'] / r['stock_seconds']:.3f}x"),
    Column(name="foreseen ms", width=13, text=lambda r: f"{1e3 * r['foreseen']:.1f}"),
    Column(name="took ms", width=9, text=lambda r: f"{1e3 * r['seconds']:.1f}"),
    Column(name="planned s", width=11, text=lambda r: f"{r['planning']:.0f}"),
    Column(name="kernels", text=lambda r: _kernels(r)),
    Column(name="regions", width=9, text=lambda r: str(r["regions"] or r["not_compiled"])),
    Column(name="cut", text=lambda r: r.get("cut", "by fxremat")),
)


def inductor(
    names: tuple[str, ...] = MODELS, size: GpuSize = "gpu", limit: float | None = None
) -> list[Row]:
    """Measure each model with backend="inductor" at each budget."""
    return Results.of("inductor", COLUMNS, size).run(dict(_cases(names, size)), limit)


def _cases(names: tuple[str, ...], size: GpuSize) -> Iterator[tuple[str, Measure]]:
    for name in names:
        for mem in BUDGETS:
            yield f"{name} at {mem}", partial(_measure, name, mem, size, True)
            yield f"{name} at {mem}, in regions", partial(_measure, name, mem, size, False)


def _measure(name: str, mem: str, size: GpuSize, whole: bool) -> Row:
    plain, batch = made(name, size)
    stock: Any = torch.compile(plain, dynamic=False)
    stock_peak = peaks(stock, batch).allocated
    model, _ = made(name, size)
    began = time.perf_counter()
    backend = Inductor(whole_graphs=whole)
    ours: Any = fxremat.compile(model, mem=mem, search=Search(progress=False), backend=backend, example_inputs=batch)
    planning = time.perf_counter() - began
    found, plan = peaks(ours, batch), ours.plan
    stock_seconds, own_seconds = seconds([stock, ours], batch)
    return {
        "stock_peak": stock_peak,
        "budget": plan.budget,
        "predicted": plan.predicted_peak,
        **vars(found),
        "stock_seconds": stock_seconds,
        "seconds": own_seconds,
        "foreseen": plan.predicted_time,
        "planning": planning,
        "regions": plan.compiled.regions if plan.compiled else 0,
        "not_compiled": plan.not_compiled,
        "cut": ("by torch" if plan.compiled.by_torch else "by fxremat") if plan.compiled else "",
        "kernels": {"torch.compile": _profiled(stock, batch), "fxremat": _profiled(ours, batch)},
    }


def _profiled(model: Any, batch: Batch) -> tuple[float, int]:
    """Return the seconds and the number of the kernels of one step."""
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        meter.training_step(model, batch)()
        torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    found = profile.key_averages()
    return sum(row.self_device_time_total for row in found) / 1e6, sum(row.count for row in found)


def _kernels(row: Row) -> str:
    """The kernels of a step, ours beside torch.compile's; "" in records that have none."""
    ways = row.get("kernels", {}).items()
    return ", ".join(f"{way}: {count} in {1e3 * seconds:.1f} ms" for way, (seconds, count) in ways)
