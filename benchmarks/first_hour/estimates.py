"""Estimates of this card that are made without it, beside its own peaks and times, and budgets taken from them.

The estimate captures a model on the meta device as on a machine without a GPU; then the model trains within the
estimated budget, with a plan of measured costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

import fxremat
from benchmarks.models import on_gpus
from benchmarks.models.on_gpus import GpuSize
from fxremat.cost.devices import Device
from fxremat.settings import Search

from .part import Column, Measure, Results, Row
from .steps import MB, compiled, made, over, peaks, percent, seconds

MODELS = ("gpt", "gpt odd", "resnet amp", "resnet")
MEM = "60%"

COLUMNS = (
    Column(name="plain MB", width=10, text=lambda r: f"{r['plain_peak'] / MB:.1f}"),
    Column(name="estimated", width=11, text=lambda r: f"{percent(r['estimated_peak'], r['plain_peak']):+.2f} %"),
    Column(name="plain ms", width=10, text=lambda r: f"{1e3 * r['plain_seconds']:.1f}"),
    Column(name="estimated", width=11, text=lambda r: f"{percent(r['keep_all'], r['plain_seconds']):+.0f} %"),
    Column(name="budget MB", width=11, text=lambda r: f"{r['budget'] / MB:.1f}"),
    Column(name="over MiB", width=10, text=lambda r: f"{over(r['allocated'], r['budget']):.1f}"),
    Column(name="time", width=8, text=lambda r: f"{r['seconds'] / r['plain_seconds']:.3f}x"),
    Column(name="estimated", width=11, text=lambda r: f"{r['foreseen'] / r['keep_all']:.3f}x"),
    Column(name="took s", width=8, text=lambda r: f"{r['estimating']:.1f}"),
)


def estimates(names: tuple[str, ...] = MODELS, size: GpuSize = "gpu", limit: float | None = None) -> list[Row]:
    """Estimate and measure each model."""
    return Results.of("estimates", COLUMNS, size).run(dict(_cases(names, size)), limit)


def card() -> Device:
    """The description of this card. Raises `FxrematError` where it is not known."""
    return Device.named(torch.cuda.get_device_name().removesuffix(" (pretended)"))


def _cases(names: tuple[str, ...], size: GpuSize) -> Iterator[tuple[str, Measure]]:
    for name in names:
        yield f"{name} at {MEM}", partial(_measure, name, size)


def _measure(name: str, size: GpuSize) -> Row:
    case = on_gpus.get(name, size)
    began = time.perf_counter()
    everything = _estimated(case.model(device="meta"), case.batch(), "100%")
    plan = _estimated(case.model(device="meta"), case.batch(), MEM)
    estimating = time.perf_counter() - began
    plain, batch = made(name, size)
    before = peaks(plain, batch)
    model, _ = made(name, size)
    ours = compiled(model, batch, plan.budget)
    found = peaks(ours, batch)
    plain_seconds, own_seconds = seconds([plain, ours], batch)
    return {
        "plain_peak": before.allocated,
        "estimated_peak": everything.predicted_peak,
        "budget": ours.plan.budget,
        **vars(found),
        "plain_seconds": plain_seconds,
        "seconds": own_seconds,
        "keep_all": everything.keep_all_time,
        "foreseen": plan.predicted_time,
        "estimating": estimating,
    }


def _estimated(model: torch.nn.Module, batch: tuple[torch.Tensor, ...], mem: str) -> fxremat.Plan:
    plan = fxremat.plan(model, batch, mem=mem, costs=card(), search=Search(progress=False))
    assert isinstance(plan, fxremat.Plan)
    return plan
