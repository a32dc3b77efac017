"""mem="auto" in a training loop on a device with little room, with an optimizer that keeps state and one that does not.

A block of bytes makes the device small: it leaves a share of what plain training takes, the optimizer's state and the
allocator's least reserve included. The state comes in the first `step()`, after the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import fxremat
from benchmarks.models.on_gpus import GpuSize
from fxremat.budget import LEAST_MARGIN, free_memory
from fxremat.settings import Search

from .part import Column, Measure, Results, Row, clean
from .steps import MB, made, peaks

SHARES = (90, 75, 60)  # percent of what plain training takes
STATE = {"SGD": 0, "AdamW": 2}  # of an optimizer, times the parameters' bytes
STEPS = 20

COLUMNS = (
    Column(name="room MB", width=9, text=lambda r: f"{r['room'] / MB:.0f}"),
    Column(name="result", width=38, text=lambda r: r["result"]),
    Column(name="budgets MB", width=28, text=lambda r: ", ".join(f"{b / MB:.0f}" for b in r["budgets"])),
    Column(name="reserved MB", width=13, text=lambda r: f"{r['reserved'] / MB:.0f}"),
    Column(name="retries", width=9, text=lambda r: str(r["retries"])),
)


def auto(
    shares: tuple[int, ...] = SHARES, steps: int = STEPS, size: GpuSize = "gpu", limit: float | None = None
) -> list[Row]:
    """Train with each optimizer in each share of the memory."""
    return Results.of("auto", COLUMNS, size).run(dict(_cases(shares, steps, size)), limit)


def _cases(shares: tuple[int, ...], steps: int, size: GpuSize) -> Iterator[tuple[str, Measure]]:
    for optimizer in STATE:
        for share in shares:
            yield f"{optimizer} in {share} %", partial(_measure, optimizer, share, steps, size)


def _measure(optimizer: str, share: int, steps: int, size: GpuSize) -> Row:
    model, batch = made("gpt odd", size)
    need = peaks(model, batch).allocated + STATE[optimizer] * sum(p.nbytes for p in model.parameters())
    clean()
    room = need * share // 100 + LEAST_MARGIN
    taken = torch.empty(free_memory(torch.device("cuda")) - room, dtype=torch.uint8, device="cuda")
    try:
        return {"room": room, **_trained(model, batch, optimizer, steps)}
    finally:
        del taken


def _trained(model: nn.Module, batch: Any, optimizer: str, steps: int) -> Row:
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4)
    compiled: Any = fxremat.compile(model, mem="auto", search=Search(progress=False))
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    budgets: list[int] = []
    result = f"trained {steps} steps"
    for step in range(steps):
        try:
            stepper.zero_grad()
            compiled(*batch).backward()
            stepper.step()
        except (torch.OutOfMemoryError, fxremat.BudgetTooSmall) as error:
            result = f"{type(error).__name__} in step {step}"
            break
        if compiled.plan.budget not in budgets:
            budgets.append(compiled.plan.budget)
    stats = torch.cuda.memory_stats()
    return {
        "result": result,
        "budgets": budgets,
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"] - retries,
    }
