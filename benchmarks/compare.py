"""One model, plain PyTorch beside fxremat at several budgets, in one process.

Budgets are percentages of plain PyTorch's measured peak, handed to fxremat as bytes. Each row is a training
step from gradients of None: its peak, its time, and whether loss, gradients, buffers and random state are
the plain ones (`benchmarks.answers`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import fxremat
from fxremat.settings import Search

from . import meter
from .answers import Answer, answer, outcome
from .models import Case


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Memory, times and numbers of a step that fxremat planned for one budget."""

    measured_peak: int
    predicted_peak: int
    seconds: float  # of a step
    plain_seconds: float  # of a plain step, measured by turns with the above
    predicted_slowdown: float  # predicted time over predicted time when everything is kept
    planning_seconds: float  # from the first call to the end of that step
    numbers: Answer  # whether they are plain PyTorch's

    @property
    def slowdown(self) -> float:
        return self.seconds / self.plain_seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    model: str
    percent: float
    mem: int
    plain_peak: int
    minimum: int | None = None  # stated where `mem` is below it
    measured: Measured | None = None  # None where it is


def compare(case: Case, percents: Sequence[float], steps: int, device: str = "cpu") -> list[Row]:
    """A row for each percentage, in the given order. On CPU set the number of threads to 1 first."""
    batch = tuple(t.to(device) for t in case.batch())
    plain = case.model(device=device)
    plain_peak = meter.model_peak(plain, batch, device)
    return [
        _row(case, percent, int(plain_peak * percent / 100), plain_peak, steps, device)
        for percent in percents
    ]


def _row(case: Case, percent: float, mem: int, plain_peak: int, steps: int, device: str) -> Row:
    torch._dynamo.reset()
    gc.collect()
    batch = tuple(t.to(device) for t in case.batch())
    plain = case.model(device=device)
    ours = fxremat.compile(case.model(device=device), mem=mem, search=Search(progress=False))
    try:
        start = time.perf_counter()
        got = outcome(ours, batch)
        planning = time.perf_counter() - start
    except fxremat.BudgetTooSmall as error:
        return Row(model=case.name, percent=percent, mem=mem, plain_peak=plain_peak, minimum=error.minimum)
    same = answer(got, outcome(plain, batch), lambda: outcome(plain, batch))
    del got
    clock = meter.cuda_clock if device == "cuda" else time.process_time
    plain_seconds, seconds = meter.step_times(
        [meter.step_from_none(plain, batch), meter.step_from_none(ours, batch)], repeats=steps, clock=clock
    )
    plain.zero_grad()
    assert ours.plan is not None
    measured = Measured(
        measured_peak=meter.model_peak(ours, batch, device),
        predicted_peak=ours.plan.predicted_peak,
        seconds=seconds,
        plain_seconds=plain_seconds,
        predicted_slowdown=ours.plan.predicted_time / ours.plan.keep_all_time,
        planning_seconds=planning,
        numbers=same,
    )
    return Row(model=case.name, percent=percent, mem=mem, plain_peak=plain_peak, measured=measured)
