"""Compare what torch's caching allocator counts while a planned step runs with what the plan predicts.

    requested     bytes that tensors and workspaces ask for: what the memory model of fxremat is about
    allocated     bytes of the blocks that they get: torch.cuda.max_memory_allocated
    first         the same in the first step, which makes what later ones find

All are peaks above what there was when the step began.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import fxremat
from benchmarks import meter
from fxremat.settings import Search
from fxremat.torch_private import allocates_in_expandable_segments
from tests.pretended_cuda.models import Case


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model within a budget; all sizes in bytes."""

    model: str
    mem: str
    expandable: bool  # segments of the allocator
    budget: int
    predicted: int
    requested: int
    allocated: int
    first: int
    reserved: int

    @property
    def over(self) -> int:
        """Bytes above the budget, in the worst step; 0 where it was kept."""
        return max(0, self.allocated - self.budget, self.first - self.budget)

    @property
    def deviation(self) -> float:
        """Requested bytes beside the prediction: -0.006 where it was 0.6 % too high."""
        return self.requested / self.predicted - 1


def rows(case: Case, budgets: tuple[str, ...], **options: Any) -> Iterator[Row]:
    """A row for each budget that the model fits in, in order; "least" is the smallest one."""
    for mem in budgets:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        model, batch = case.made()
        try:
            yield _row(case, mem, _compiled(model, batch, mem, options), batch)
        except fxremat.BudgetTooSmall:
            continue


def _compiled(model: Any, batch: Any, mem: str, options: dict[str, Any]) -> Any:
    options = {"example_inputs": batch, "search": Search(seconds=0.0), **options}
    if mem != "least":
        return fxremat.compile(model, mem=mem, **options)
    try:
        return fxremat.compile(model, mem=1, **options)
    except fxremat.BudgetTooSmall as error:
        return fxremat.compile(model, mem=error.minimum, **options)


def _row(case: Case, mem: str, compiled: Any, batch: Any) -> Row:
    step = meter.training_step(compiled, batch)
    torch.cuda.reset_peak_memory_stats()
    first, _ = _peaks(step)
    compiled.zero_grad(set_to_none=True)
    allocated, requested = _peaks(step)
    plan = compiled.plan
    return Row(
        model=case.name,
        mem=mem,
        expandable=allocates_in_expandable_segments(),
        budget=plan.budget,
        predicted=plan.predicted_peak,
        requested=requested,
        allocated=allocated,
        first=first,
        reserved=torch.cuda.max_memory_reserved(),
    )


def _peaks(step: meter.Step) -> tuple[int, int]:
    """Bytes allocated and bytes requested at the worst moments of a step, above those at its beginning."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    result = step()
    del result
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    kinds = ("allocated_bytes.all", "requested_bytes.all")
    allocated, requested = (after[f"{kind}.peak"] - before[f"{kind}.current"] for kind in kinds)
    return allocated, requested
