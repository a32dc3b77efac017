"""Blocks that are checkpointed by hand with `torch.utils.checkpoint`, beside fxremat in the memory that this takes.

The peak of the checkpointed model is the budget that fxremat gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models.on_gpus import GpuSize

from .part import Column, Measure, Results, Row
from .steps import MB, compiled, made, over, peaks, seconds

MODELS = ("gpt", "gpt odd")

COLUMNS = (
    Column(name="plain MB", width=10, text=lambda r: f"{r['plain_peak'] / MB:.1f}"),
    Column(name="by hand", width=9, text=lambda r: f"{r['budget'] / MB:.1f}"),
    Column(name="over MiB", width=10, text=lambda r: f"{over(r['allocated'], r['budget']):.1f}"),
    Column(name="plain ms", width=10, text=lambda r: f"{1e3 * r['plain_seconds']:.1f}"),
    Column(name="by hand", width=9, text=lambda r: f"{r['by_hand_seconds'] / r['plain_seconds']:.3f}x"),
    Column(name="fxremat", width=9, text=lambda r: f"{r['seconds'] / r['plain_seconds']:.3f}x"),
    Column(name="foreseen", width=10, text=lambda r: f"{r['foreseen'] / r['keep_all']:.3f}x"),
)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        """Call the block."""
        return checkpoint(self.block, *args, use_reentrant=False)


def by_hand(names: tuple[str, ...] = MODELS, size: GpuSize = "gpu", limit: float | None = None) -> list[Row]:
    """Measure each model."""
    return Results.of("by_hand", COLUMNS, size).run(dict(_cases(names, size)), limit)


def _cases(names: tuple[str, ...], size: GpuSize) -> Iterator[tuple[str, Measure]]:
    for name in names:
        yield name, partial(_measure, name, size)


def _measure(name: str, size: GpuSize) -> Row:
    plain, batch = made(name, size)
    before = peaks(plain, batch)
    theirs, _ = made(name, size)
    blocks: Any = theirs.inner.blocks  # type: ignore[union-attr]
    for place, block in enumerate(blocks):
        blocks[place] = Checkpointed(block)
    budget = peaks(theirs, batch).allocated
    model, _ = made(name, size)
    ours = compiled(model, batch, budget)
    found = peaks(ours, batch)
    plain_seconds, by_hand_seconds, own_seconds = seconds([plain, theirs, ours], batch)
    return {
        "plain_peak": before.allocated,
        "budget": ours.plan.budget,
        **vars(found),
        "plain_seconds": plain_seconds,
        "by_hand_seconds": by_hand_seconds,
        "seconds": own_seconds,
        "foreseen": ours.plan.predicted_time,
        "keep_all": ours.plan.keep_all_time,
    }
