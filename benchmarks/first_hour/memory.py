"""Predicted peaks beside those of the allocator, and foreseen times beside real ones, at the sizes of users' models.

    requested   bytes that were asked for: as predicted
    allocated   with what the caching allocator does not split off: within the budget
    reserved    what was taken from the driver, over what is allocated
    first       the first step of a process whose costs are known allocates no more than the budget either
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from benchmarks.models.on_gpus import GpuSize

from .part import Column, Measure, Results, Row
from .steps import LEAST, MB, MIB, compiled, made, over, peaks, percent, seconds

MODELS = ("gpt", "gpt odd", "resnet amp", "resnet")
BUDGETS = ("100%", "60%", LEAST)

COLUMNS = (
    Column(name="plain MB", width=10, text=lambda r: f"{r['plain_peak'] / MB:.1f}"),
    Column(name="predicted", width=11, text=lambda r: f"{r['predicted'] / MB:.1f}"),
    Column(name="requested", width=11, text=lambda r: f"{percent(r['requested'], r['predicted']):+.3f} %"),
    Column(name="allocated", width=11, text=lambda r: f"{percent(r['allocated'], r['predicted']):+.2f} %"),
    Column(name="over MiB", width=10, text=lambda r: f"{over(r['allocated'], r['budget']):.1f}"),
    Column(name="first", width=7, text=lambda r: f"{over(r['first'], r['budget']):.1f}"),
    Column(
        name="reserved", width=10, text=lambda r: f"{percent(r['reserved'], r['held'] + r['allocated']):+.1f} %"
    ),
    Column(name="plain ms", width=10, text=lambda r: f"{1e3 * r['plain_seconds']:.1f}"),
    Column(name="time", width=8, text=lambda r: f"{r['seconds'] / r['plain_seconds']:.3f}x"),
    Column(name="foreseen", width=10, text=lambda r: f"{r['foreseen'] / r['keep_all']:.3f}x"),
    Column(name="in ms", width=8, text=lambda r: f"{1e3 * r['foreseen']:.1f}"),
    Column(name="planned s", width=11, text=lambda r: f"{r['planning']:.1f}"),
)

FIRST_COLUMNS = (
    Column(name="budget MB", width=11, text=lambda r: f"{r['budget'] / MB:.1f}"),
    Column(name="first step, MiB to the budget", width=31, text=lambda r: _to(r, "first")),
    Column(name="third step", width=12, text=lambda r: _to(r, "allocated")),
)


def memory(
    names: tuple[str, ...] = MODELS,
    budgets: tuple[str, ...] = BUDGETS,
    size: GpuSize = "gpu",
    limit: float | None = None,
) -> list[Row]:
    """Measure each model at each budget."""
    return Results.of("memory", COLUMNS, size).run(dict(_cases(names, budgets, size)), limit)


def first(size: GpuSize = "gpu", limit: float | None = None) -> list[Row]:
    """Measure the first step of this process; run `memory` before, in another one, which measures the costs."""
    return Results.of("first", FIRST_COLUMNS, size).run({"gpt at 60%": partial(_first, size)}, limit)


def _cases(names: tuple[str, ...], budgets: tuple[str, ...], size: GpuSize) -> Iterator[tuple[str, Measure]]:
    for name in names:
        for mem in budgets:
            yield f"{name} at {mem}", partial(_measure, name, mem, size)


def _measure(name: str, mem: str, size: GpuSize) -> Row:
    plain, batch = made(name, size)
    before = peaks(plain, batch)
    model, _ = made(name, size)
    began = time.perf_counter()
    ours = compiled(model, batch, mem)
    planning = time.perf_counter() - began
    found = peaks(ours, batch)
    plain_seconds, own_seconds = seconds([plain, ours], batch)
    return {
        "plain_peak": before.allocated,
        "budget": ours.plan.budget,
        "predicted": ours.plan.predicted_peak,
        **vars(found),
        "seconds": own_seconds,
        "plain_seconds": plain_seconds,
        "foreseen": ours.plan.predicted_time,
        "keep_all": ours.plan.keep_all_time,
        "planning": planning,
    }


def _first(size: GpuSize) -> Row:
    model, batch = made("gpt", size)
    ours = compiled(model, batch, "60%")
    return {"budget": ours.plan.budget, **vars(peaks(ours, batch))}


def _to(row: Row, step: str) -> str:
    return f"{(row[step] - row['budget']) / MIB:+.1f}"
