"""Answers of `fxremat fits` for this card, beside a process that trains as they say: parts and totals.

Weights are random; the model, the optimizer and the budget are those of the code that the answer prints.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxremat
from benchmarks.models.on_gpus import GpuSize
from fxremat.cost.device_memory import CONTEXT
from fxremat.fitting.loaded import Loaded
from fxremat.settings import Search

from .estimates import card
from .part import Column, Measure, Results, Row
from .steps import MB, over, percent

CASES: dict[str, Mapping[str, Any]] = {
    "llama-3-8b": {"batch": 4, "length": 4096, "config": {"num_hidden_layers": 8}},
    "gpt2-xl": {"batch": 8, "length": 1024},
}
SMALL: dict[str, Mapping[str, Any]] = {
    "gpt2-xl": {"batch": 2, "length": 64, "config": {"n_layer": 6, "n_embd": 64, "n_head": 4, "vocab_size": 128}},
}
STEPS = 3

COLUMNS = (
    Column(name="total MB", width=10, text=lambda r: f"{r['used'] / MB:.0f}"),
    Column(name="answered", width=10, text=lambda r: f"{percent(r['total'], r['used']):+.2f} %"),
    Column(name="allocated", width=11, text=lambda r: f"{r['allocated'] / MB:.0f}"),
    Column(name="answered", width=10, text=lambda r: f"{percent(r['ledger'], r['allocated']):+.2f} %"),
    Column(name="reserve", width=9, text=lambda r: f"{percent(r['reserved'], r['allocated']):+.1f} %"),
    Column(name="context MB", width=12, text=lambda r: f"{r['context'] / MB:.0f}"),
    Column(name="over MiB", width=10, text=lambda r: f"{over(r['step_peak'], r['mem']):.1f}"),
    Column(name="step ms", width=9, text=lambda r: f"{1e3 * r['seconds']:.0f}"),
    Column(name="answered", width=10, text=lambda r: f"{1e3 * r['answered_seconds']:.0f}"),
    Column(name="took s", width=8, text=lambda r: f"{r['answering']:.0f}"),
)


def fitted(size: GpuSize = "gpu", limit: float | None = None) -> list[Row]:
    """Ask for each model, and train it."""
    chosen = CASES if size == "gpu" else SMALL
    cases: dict[str, Measure] = {name: partial(_measure, name, options) for name, options in chosen.items()}
    return Results.of("fitted", COLUMNS, size).run(cases, limit)


def _measure(name: str, options: Mapping[str, Any]) -> Row:
    began = time.perf_counter()
    answer = fxremat.fits(name, on=card(), **options)
    answering = time.perf_counter() - began
    if answer.way is None or answer.way.how:
        raise RuntimeError(answer.line)
    model, inputs = _with_data(answer.loaded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    compiled: Any = fxremat.compile(model, mem=answer.way.budget, search=Search(progress=False))
    _steps(compiled, optimizer, inputs, 1)  # plans
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    forward, whole = _steps(compiled, optimizer, inputs, STEPS)
    free, memory = torch.cuda.mem_get_info()
    reserved = torch.cuda.max_memory_reserved()
    return {
        "used": memory - free,
        "total": answer.ledger.total,
        "allocated": torch.cuda.max_memory_allocated(),
        "ledger": answer.ledger.allocated,
        "reserved": reserved,
        "context": memory - free - reserved,
        "assumed_context": CONTEXT,
        "held": held,
        "parts": dict(answer.ledger.rows),
        "moment": answer.ledger.moment,
        "mem": answer.way.budget,
        "step_peak": torch.cuda.max_memory_allocated() - held,
        "seconds": forward,
        "whole": whole,
        "answered_seconds": answer.way.candidate.time,
        "answering": answering,
    }


def _with_data(loaded: Loaded) -> tuple[nn.Module, Any]:
    """The model with random weights and inputs of zeros, on the card."""
    made: Any = loaded.model
    kind: Any = type(made)
    with torch.device("cuda"):
        model = kind._from_config(made.config, dtype=next(made.parameters()).dtype).train()
    inputs = pytree.tree_map_only(Tensor, lambda tensor: torch.zeros_like(tensor, device="cuda"), loaded.inputs)
    return model, inputs


def _steps(model: Any, optimizer: torch.optim.Optimizer, inputs: Any, count: int) -> tuple[float, float]:
    """Train. Returns the least seconds of forward and backward, and of a whole step."""
    forward, whole = [], []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(**inputs).loss.backward()
        torch.cuda.synchronize()
        forward.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    return min(forward), min(whole)
