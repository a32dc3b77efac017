"""Activations and weights in pinned memory: budgets, times, foreseen times.

The first step with weights on the host pins its memory, which takes time; rows have each step by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import fxremat
from benchmarks.models.on_gpus import GpuSize
from fxremat.settings import Offload, Search

from .part import Column, Measure, Results, Row
from .steps import MB, made, over, peaks, percent, seconds

BUDGETS = ("60%", "45%", "30%")
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "offloaded too": {"offload": True},
    "offloaded alone": {"offload": True, "solver": "keep_all"},
}
WEIGHTS = "weights on the host, 50%"
STEPS = 4

COLUMNS = (
    Column(name="budget MB", width=11, text=lambda r: f"{r['budget'] / MB:.1f}"),
    Column(name="over MiB", width=10, text=lambda r: f"{over(r['allocated'], r['budget']):.1f}"),
    Column(name="allocated", width=11, text=lambda r: f"{percent(r['allocated'], r['predicted']):+.2f} %"),
    Column(name="plain ms", width=10, text=lambda r: f"{1e3 * r['plain_seconds']:.1f}"),
    Column(name="time", width=8, text=lambda r: f"{r['seconds'] / r['plain_seconds']:.3f}x"),
    Column(name="foreseen", width=10, text=lambda r: f"{r['foreseen'] / r['keep_all']:.3f}x"),
    Column(name="GB/s out, in", width=14, text=lambda r: r["link"]),
    Column(name="first steps ms", text=lambda r: ", ".join(f"{1e3 * s:.0f}" for s in r["steps"])),
)


def offload(
    budgets: tuple[str, ...] = BUDGETS, size: GpuSize = "gpu", limit: float | None = None
) -> list[Row]:
    """Measure GPT at each budget in each way, then with its weights on the host."""
    cases = dict(_cases(budgets, size))
    cases[WEIGHTS] = partial(_weights, size)
    return Results.of("offload", COLUMNS, size).run(cases, limit)


def _cases(budgets: tuple[str, ...], size: GpuSize) -> Iterator[tuple[str, Measure]]:
    for mem in budgets:
        for way in WAYS:
            yield f"{mem} {way}", partial(_activations, mem, way, size)


def _activations(mem: str, way: str, size: GpuSize) -> Row:
    plain, batch = made("gpt", size)
    model, _ = made("gpt", size)
    ours: Any = fxremat.compile(model, mem=mem, search=Search(progress=False), example_inputs=batch, **WAYS[way])
    found = peaks(ours, batch)
    plain_seconds, own_seconds = seconds([plain, ours], batch)
    return {
        **_of_plan(ours.plan),
        **vars(found),
        "seconds": own_seconds,
        "plain_seconds": plain_seconds,
        "steps": [],
    }


def _weights(size: GpuSize) -> Row:
    """Parameters of a model that is on the CPU: they are sent to the GPU, updated there and sent back."""
    plain, batch = made("gpt", size)
    stepper = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    plain_seconds = min(_steps(plain, stepper, batch))
    stepper.state.clear()
    cpu = plain.cpu()
    optimizer = torch.optim.AdamW(cpu.parameters(), lr=1e-4)
    options: Any = {"search": Search(progress=False), "offload": Offload(weights=True), "optimizer": optimizer}
    ours: Any = fxremat.compile(cpu, mem="50%", example_inputs=batch, **options)
    held = torch.cuda.memory_allocated()  # with workspaces, which stay; parameters come in the first step
    torch.cuda.reset_peak_memory_stats()
    steps = _steps(ours, optimizer, batch)
    return {
        **_of_plan(ours.plan),
        "allocated": torch.cuda.max_memory_allocated() - held,
        "seconds": min(steps),
        "plain_seconds": plain_seconds,
        "steps": steps,
    }


def _steps(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> list[float]:
    """Wall-clock seconds of some steps of training."""
    found = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    optimizer.zero_grad()
    return found


def _of_plan(plan: Any) -> Row:
    link = plan.link
    return {
        "budget": plan.budget,
        "predicted": plan.predicted_peak,
        "foreseen": plan.predicted_time,
        "keep_all": plan.keep_all_time,
        "link": "" if link is None else f"{link.to_host / 1e9:.1f}, {link.from_host / 1e9:.1f}",
    }
