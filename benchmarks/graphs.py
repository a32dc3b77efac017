"""A GPT that is broken after every block, within budgets: beside the same GPT as one graph, and checkpointed blocks.

    python -m benchmarks.graphs

Times are least CPU seconds of one thread, of steps that alternate in one run, over those of plain PyTorch; budgets and
peaks are shares of plain PyTorch's peak. Writes benchmarks/results/graphs.json.
"""

from __future__ import annotations

import copy
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxremat
from benchmarks.meter import model_peak, step_from_none, step_times
from benchmarks.models.gpt import GPT, Shape

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


def main() -> None:
    """Measure, print, and write the results."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = BrokenGPT(SHAPE)
    text = torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.tokens + 1))
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    everything = model_peak(plain, batch)
    kept = copy.deepcopy(plain)
    kept.checkpointed = True
    whole = GPT(SHAPE)
    whole.load_state_dict(plain.state_dict())
    rows = []
    for share in SHARES:
        mem = int(share * everything)
        broken = _warm(fxremat.compile(copy.deepcopy(plain), mem=mem), batch)
        one = _warm(fxremat.compile(copy.deepcopy(whole), mem=mem), batch)
        began = time.perf_counter()
        plans = broken._fxremat.backend.coordinator.plans
        plans.forget()
        plans.renew()
        planning = time.perf_counter() - began
        models: list[nn.Module] = [plain, broken, one, kept]
        seconds = step_times([step_from_none(model, batch) for model in models], repeats=9)
        row = {
            "budget": share,
            "peak": model_peak(broken, batch) / mem,
            "predicted": broken.plan.predicted_peak / model_peak(broken, batch),
            "least": broken.plan.minimum / everything,
            "time": seconds[1] / seconds[0],
            "one graph": seconds[2] / seconds[0],
            "checkpointed": seconds[3] / seconds[0],
            "checkpointed peak": model_peak(kept, batch) / everything,
            "planning": planning,
        }
        rows.append(row)
        print({name: round(value, 4) for name, value in row.items()}, flush=True)
    RESULTS.write_text(json.dumps({"machine": report.machine(), "rows": rows}, indent=1) + "\n")


def _warm(model: Any, batch: tuple[Tensor, ...]) -> Any:
    step = partial(step_from_none(model, batch))
    for _ in range(WARM_UP):
        step()
    return model


if __name__ == "__main__":
    main()
