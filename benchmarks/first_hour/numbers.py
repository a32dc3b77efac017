"""Bits: plain PyTorch once more, `aot_eager`, and fxremat at two budgets, each compared with plain PyTorch.

With cudnn.deterministic. Where plain PyTorch does not repeat itself, others cannot either: `benchmarks.answers`.
`aot_eager` runs the graph that is captured; what differs there alike differs by capturing, not by recomputing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.answers import answer, difference, outcome
from benchmarks.models.on_gpus import GpuSize

from .part import Column, Measure, Results, Row
from .steps import compiled, made

MODELS = ("gpt", "resnet", "resnet amp")
WAYS = ("plain again", "aot_eager", "100%", "60%")

COLUMNS = (
    Column(name="same numbers", width=26, text=lambda r: r["answer"]),
    Column(name="differences", text=lambda r: r["difference"]),
)


def numbers(
    names: tuple[str, ...] = MODELS, size: GpuSize = "gpu", limit: float | None = None
) -> list[Row]:
    """Compare each model in each way."""
    return Results.of("numbers", COLUMNS, size).run(dict(_cases(names, size)), limit)


def _cases(names: tuple[str, ...], size: GpuSize) -> Iterator[tuple[str, Measure]]:
    for name in names:
        for way in WAYS:
            yield f"{name}: {way}", partial(_measure, name, way, size)


def _measure(name: str, way: str, size: GpuSize) -> Row:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        return _compared(name, way, size)
    finally:
        torch.backends.cudnn.deterministic = before


def _compared(name: str, way: str, size: GpuSize) -> Row:
    plain, batch = made(name, size)
    expected = outcome(plain, batch)
    model, _ = made(name, size)
    found = outcome(_in_its_way(model, batch, way), batch)
    return {
        "answer": answer(found, expected, lambda: outcome(plain, batch)),
        "difference": str(difference(found, expected)),
    }


def _in_its_way(model: torch.nn.Module, batch: Any, way: str) -> Any:
    match way:
        case "plain again":
            return model
        case "aot_eager":
            return torch.compile(model, backend="aot_eager", dynamic=False)
    return compiled(model, batch, way)
