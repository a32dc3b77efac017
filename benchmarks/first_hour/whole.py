"""Whole graphs that Inductor compiles: cut by fxremat's partition function, by torch's, and as `torch.compile` does.

Budgets are percents of what `torch.compile` allocates. Torch's way is its best `activation_memory_budget` that fits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor

from benchmarks.models.on_gpus import GpuSize
from fxremat.passes import InductorPartitioner

from .part import Column, Measure, Results, Row, clean
from .steps import MB, Batch, made, peaks, percent, seconds

MODELS = ("gpt odd", "resnet amp", "gpt")
SHARES = (60, 45)
RATIOS = (0.7, 0.5, 0.3, 0.0)

COLUMNS = (
    Column(name="budget", width=10, text=lambda r: f"{r['budget'] / MB:.1f}"),
    Column(name="allocated", width=11, text=lambda r: f"{percent(r['allocated'], r['budget']):+.1f} %"),
    Column(name="plain ms", width=10, text=lambda r: f"{1e3 * r['plain_seconds']:.1f}"),
    Column(name="took ms", width=9, text=lambda r: f"{1e3 * r['seconds']:.1f}"),
    Column(name="over plain", width=12, text=lambda r: f"{r['seconds'] / r['plain_seconds']:.3f}x"),
    Column(name="compiled s", width=12, text=lambda r: f"{r['compiling']:.0f}"),
    Column(name="how", text=lambda r: r["how"]),
)


def whole(names: tuple[str, ...] = MODELS, size: GpuSize = "gpu", limit: float | None = None) -> list[Row]:
    """Measure each model, as `torch.compile` cuts it and within each budget by each partition."""
    return Results.of("whole", COLUMNS, size).run(dict(_cases(names, size)), limit)


def _cases(names: tuple[str, ...], size: GpuSize) -> Iterator[tuple[str, Measure]]:
    for name in names:
        yield f"{name}: torch.compile", partial(_stock, name, size)
        for share in SHARES:
            yield f"{name} at {share}%: fxremat", partial(_fitted, name, size, share)
        yield f"{name}: torch's ratios", partial(_ratios, name, size)


@cache
def _stock_bytes(name: str, size: GpuSize) -> int:
    model, batch = made(name, size)
    found = peaks(torch.compile(model, dynamic=False), batch).allocated  # type: ignore[arg-type]
    del model
    clean()
    return found


def _stock(name: str, size: GpuSize) -> Row:
    plain, batch = made(name, size)
    return {**_compiled(plain, batch, _stock_bytes(name, size)), "how": "as torch.compile cuts"}


def _ratios(name: str, size: GpuSize) -> Row:
    """Every ratio's bytes and seconds; the row is the last one's, and `how` has all."""
    plain, batch = made(name, size)
    texts = []
    row: Row = {}
    for ratio in RATIOS:
        with functorch.patch(activation_memory_budget=ratio):
            row = _compiled(plain, batch, _stock_bytes(name, size))
        texts.append(f"{ratio}: {row['allocated'] / MB:.1f} MB in {1e3 * row['seconds']:.1f} ms")
        clean()
    return {**row, "how": "; ".join(texts)}


def _fitted(name: str, size: GpuSize, share: int) -> Row:
    plain, batch = made(name, size)
    budget = _stock_bytes(name, size) * share // 100
    within = InductorPartitioner(budget)
    with inductor.patch(custom_partitioner_fn=within):
        model, _ = made(name, size)
        ours: Any = torch.compile(model, dynamic=False)
        began = time.perf_counter()

        def step() -> None:
            model.zero_grad(set_to_none=True)
            ours(*batch).backward()

        within.fit(step)
        compiling = time.perf_counter() - began
        planned = within.plans[-1]
        row = _measured(plain, ours, batch, budget)
    how = f"planned for {planned.budget / MB:.1f}, foreseen {planned.predicted_peak / MB:.1f} MB"
    return {**row, "compiling": compiling, "how": how}


def _compiled(plain: nn.Module, batch: Batch, budget: int) -> Row:
    began = time.perf_counter()
    ours: Any = torch.compile(plain, dynamic=False)
    ours(*batch).backward()
    torch.cuda.synchronize()
    taken = time.perf_counter() - began
    return {**_measured(plain, ours, batch, budget), "compiling": taken}


def _measured(plain: nn.Module, ours: Any, batch: Batch, budget: int) -> Row:
    found = peaks(ours, batch)
    plain_seconds, own = seconds([plain, ours], batch)
    return {"budget": budget, **vars(found), "plain_seconds": plain_seconds, "seconds": own}
