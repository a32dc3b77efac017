"""The table of benchmarks.train on a CUDA device, in wall-clock time, with models that keep it busy.

    python -m benchmarks.gpu --models gpt,resnet --budgets 100,60,40

Smaller models would be bound by the time in which Python issues kernels: `--size full` has those of benchmarks.train.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import models, report
from .compare import compare
from .models import on_gpus


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--models", default=",".join(models.MAIN), help=f"of {', '.join(on_gpus.NAMES)}")
    made.add_argument("--size", choices=("gpu", "full", "small"), default="gpu")
    made.add_argument("--budgets", default="100,80,60,45,40,30,25", help="percent of plain PyTorch's peak")
    made.add_argument("--steps", type=int, default=15)
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "train_gpu.json")
    return made


def main() -> None:
    arguments = parser().parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.gpu: torch sees no CUDA device here; benchmarks.train measures on the CPU"
        )
    get = on_gpus.get if arguments.size == "gpu" else models.get
    how = {"clock": "wall time, synchronized, least of", "steps": arguments.steps, "size": arguments.size}
    conditions = {**report.machine(), **how}
    percents = [float(percent) for percent in arguments.budgets.split(",")]
    print(report.HEADER)
    rows = []
    for name in arguments.models.split(","):
        for row in compare(get(name, arguments.size), percents, arguments.steps, device="cuda"):
            print(report.line(row), flush=True)
            rows.append(row)
            report.write(arguments.out, rows, conditions)  # a run that is cut off keeps what it has


if __name__ == "__main__":
    main()
