"""Models that are several graphs, within budgets: beside one graph, and beside checkpointed blocks.

    python -m benchmarks.graphs

Times are least CPU seconds of one thread, of steps that alternate in one run, over those of plain PyTorch; budgets and
peaks are shares of plain PyTorch's peak. Writes benchmarks/results/graphs.json.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxremat
from benchmarks.meter import model_peak, peak_bytes, step_from_none, step_times
from benchmarks.models.gpt import GPT, Shape
from fxremat.search import paths

from . import report

RESULTS = Path(__file__).parent / "results" / "graphs.json"
SHAPE = Shape(layers=6, width=128, heads=4, vocabulary=1024, batch=8, tokens=128)
SHARES = (0.8, 0.5, 0.3)
WARM_UP = 4  # steps after which nothing is measured or planned any more


class BrokenGPT(GPT):
    """A GPT whose graph ends at a message after every block."""

    checkpointed = False

    def forward(self, tokens: Tensor, targets: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the loss of the next tokens; `padding` is not read."""
        x = self.embedded(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, None, use_reentrant=False) if self.checkpointed else block(x, None)
            print(end="")
        return self.loss(x, targets)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the hidden state before the first block."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.embedding(tokens) + self.position(positions))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss from the hidden state after the last block."""
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Branch(BrokenGPT):
    """Takes a branch by a value after every block."""

    def forward(self, tokens: Tensor, targets: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the loss of the next tokens; `padding` is not read."""
        x = self.embedded(tokens)
        for block in self.blocks:
            x = self.run(block, x)
            if x.detach().abs().max().item() > 1e6:
                x = x * 0.5
        return self.loss(x, targets)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """Return the output of a block, checkpointed or not."""
        result: Tensor = checkpoint(block, x, None, use_reentrant=False) if self.checkpointed else block(x, None)
        return result


class Dropped(Branch):
    """Leaves out blocks at random."""

    def forward(self, tokens: Tensor, targets: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the loss of the next tokens; `padding` is not read."""
        x = self.embedded(tokens)
        for block in self.blocks:
            if torch.rand([]) > 0.3:
                x = self.run(block, x)
        return self.loss(x, targets)


class Exits(Branch):
    """Leaves after the block that a value names."""

    def forward(self, tokens: Tensor, targets: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the loss of the next tokens; `padding` is not read."""
        x, last = self.embedded(tokens), len(self.blocks) - 2
        for number, block in enumerate(self.blocks):
            x = self.run(block, x)
            if number + int(x.detach().isfinite().all().item()) > last:
                break
        return self.loss(x, targets)


class Cells(nn.Module):
    """Two LSTM cells over time, with a check of values after each step."""

    checkpointed = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding, self.width = nn.Embedding(shape.vocabulary, shape.width), 2 * shape.width
        self.cells = nn.ModuleList(nn.LSTMCell(width, self.width) for width in (shape.width, self.width))
        self.head = nn.Linear(self.width, shape.vocabulary)

    def step(self, x: Tensor, target: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Return the loss of one moment and the states behind it."""
        made: list[Tensor] = []
        for cell, h, c in zip(self.cells, states[::2], states[1::2], strict=True):
            x, c = cell(x, (h, c))
            made += [x, c]
        return F.cross_entropy(self.head(x), target), *made

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the next tokens."""
        x = self.embedding(tokens)
        states = [x.new_zeros(len(x), self.width) for _ in range(4)]
        total = x.new_zeros(())
        for moment in range(x.shape[1]):
            given = x[:, moment], targets[:, moment], *states
            run = partial(checkpoint, self.step, use_reentrant=False) if self.checkpointed else self.step
            loss, *states = run(*given)
            total = total + loss
            if states[0].detach().abs().max().item() > 1e6:
                states = [state * 0.1 for state in states]
        return total / x.shape[1]


MODELS: dict[str, type[Any]] = {
    "messages": BrokenGPT,
    "branch by a value": Branch,
    "blocks left out": Dropped,
    "early exit": Exits,
    "LSTM cells": Cells,
}


def main() -> None:
    """Measure, print, and write the results."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.tokens + 1))
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    results = {
        "machine": report.machine(),
        "rows": [_printed(row) for row in _beside_one_graph(batch)],
        "as much memory": [_printed(_with_as_much_memory(name, batch)) for name in MODELS],
        "calls": _printed(_calls()),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    return row


def _beside_one_graph(batch: tuple[Tensor, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row for each budget: the broken GPT, the same as one graph, and with checkpointed blocks."""
    plain = BrokenGPT(SHAPE)
    everything = model_peak(plain, batch)
    kept = copy.deepcopy(plain)
    kept.checkpointed = True
    whole = GPT(SHAPE)
    whole.load_state_dict(plain.state_dict())
    for share in SHARES:
        mem = int(share * everything)
        broken = _warm(fxremat.compile(copy.deepcopy(plain), mem=mem), batch)
        one = _warm(fxremat.compile(copy.deepcopy(whole), mem=mem), batch)
        models: list[nn.Module] = [plain, broken, one, kept]
        seconds = step_times([step_from_none(model, batch) for model in models], repeats=9)
        yield {
            "budget": share,
            "peak": model_peak(broken, batch) / mem,
            "predicted": broken.plan.predicted_peak / model_peak(broken, batch),
            "least": broken.plan.minimum / everything,
            "time": seconds[1] / seconds[0],
            "one graph": seconds[2] / seconds[0],
            "checkpointed": seconds[3] / seconds[0],
            "checkpointed peak": model_peak(kept, batch) / everything,
        }


def _with_as_much_memory(name: str, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return a row for a model with the peak of its checkpointed twin as budget, or the least if that is more."""
    torch.manual_seed(0)
    plain = MODELS[name](SHAPE)
    kept = copy.deepcopy(plain)
    kept.checkpointed = True
    everything, checkpointed = _peak(plain, batch), _peak(kept, batch)
    try:
        ours = _warm(fxremat.compile(copy.deepcopy(plain), mem=checkpointed), batch)
    except fxremat.BudgetTooSmall as error:
        ours = _warm(fxremat.compile(copy.deepcopy(plain), mem=error.minimum), batch)
    steps = [partial(_seeded, step_from_none(model, batch)) for model in (plain, ours, kept)]
    seconds = step_times(steps, repeats=9)
    return {
        "model": name,
        "checkpointed peak": checkpointed / everything,
        "peak": _peak(ours, batch) / everything,
        "checkpointed": seconds[2] / seconds[0],
        "time": seconds[1] / seconds[0],
    }


def _calls() -> dict[str, Any]:
    """Return what a call costs beside its ops, in seconds, and the planning of thirty calls."""
    torch._dynamo.reset()
    shape = Shape(layers=28, width=16, heads=2, vocabulary=32, batch=2, tokens=8)
    text = torch.randint(shape.vocabulary, (shape.batch, shape.tokens + 1))
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    plain = BrokenGPT(shape)
    torch._dynamo.config.recompile_limit = 64  # at 8 PyTorch leaves further blocks to Python
    of_torch: Any = torch.compile(copy.deepcopy(plain), backend="aot_eager")
    ours = _warm(fxremat.compile(copy.deepcopy(plain), mem="100%"), batch)
    seconds = step_times([step_from_none(model, batch) for model in (plain, of_torch, ours)], repeats=30)
    calls = len(ours.plan.calls)
    plans = ours._fxremat.backend.coordinator.plans
    mem = int(0.9 * plans.mem)
    began = time.perf_counter()
    paths.plan(plans.root, mem)
    return {
        "calls": calls,
        "of AOTAutograd": (seconds[1] - seconds[0]) / calls,
        "of fxremat": (seconds[2] - seconds[1]) / calls,
        "planning": time.perf_counter() - began,
    }


def _seeded(step: Callable[[], object]) -> None:
    torch.manual_seed(1)
    step()


def _peak(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    step = partial(_seeded, step_from_none(model, batch))
    step()
    model.zero_grad(set_to_none=True)
    return peak_bytes(step)


def _warm(model: Any, batch: tuple[Tensor, ...]) -> Any:
    step = step_from_none(model, batch)
    for _ in range(WARM_UP):
        _seeded(step)
    return model


if __name__ == "__main__":
    main()
