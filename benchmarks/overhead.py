"""Time a call of a compiled module beside its kernels: a toy step, eager, through aot_eager, and compiled.

    python -m benchmarks.overhead          writes benchmarks/results/overhead.json, and prints the ratios

All three run side by side in one process, in turns, and the least of several rounds counts. The toy has so little to
compute that nearly all is overhead; fxremat keeps everything (mem="100%"), as aot_eager does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import fxremat
from fxremat.settings import Search

RESULT = Path(__file__).parent / "results" / "overhead.json"
ROUNDS, STEPS = 30, 50


class Toy(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def steps() -> dict[str, Callable[[], object]]:
    """One training step of each way, warmed up."""
    x = torch.randn(16, 8)
    plain = Toy()
    captured = torch.compile(Toy(), backend="aot_eager", fullgraph=True, dynamic=False)
    planned = fxremat.compile(Toy(), "100%", example_inputs=x, search=Search(progress=False))

    def step(model: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def run() -> object:
            loss = model(x)
            loss.backward()
            return loss

        return run

    ways = {"eager": step(plain), "aot_eager": step(captured), "fxremat": step(planned)}
    for run in ways.values():
        for _ in range(STEPS):
            run()
    return ways


def measured() -> dict[str, float]:
    """Microseconds of a step of each way: the least of the rounds."""
    ways = steps()
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = time.process_time()
            for _ in range(STEPS):
                run()
            least[name] = min(least[name], (time.process_time() - start) / STEPS * 1e6)
    return least


def main() -> None:
    """Measure, keep and print."""
    torch.set_num_threads(1)
    found = measured()
    found["fxremat / aot_eager"] = found["fxremat"] / found["aot_eager"]
    RESULT.write_text(json.dumps({"torch": torch.__version__, **found}, indent=1) + "\n")
    for name, value in found.items():
        print(f"{name:20s} {value:.3f}" if "/" in name else f"{name:20s} {value:.0f} us")


if __name__ == "__main__":
    main()
