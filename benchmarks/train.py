"""Time and memory of training on the CPU: fxremat at several budgets beside plain PyTorch.

    python -m benchmarks.train --models gpt,resnet --budgets 100,45,30

Each model runs in a process of its own with one thread; the two kinds of step take turns, and the least
process CPU time of `--steps` rounds counts. Budgets are percentages of plain PyTorch's measured peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from . import models, report
from .compare import Row, compare
from .report import Bound

BUDGETS = "100,80,60,45,40,30,25,11"

BOUNDS = (
    *(Bound(model=name, percent=100, most=1.05) for name in ("gpt", "resnet", "mixer")),
    Bound(model="gpt", percent=45, most=1.09),
    Bound(model="mixer", percent=45, most=1.08),
    Bound(model="gpt", percent=30, most=1.18),
    Bound(model="mixer", percent=30, most=1.13),
    Bound(model="deep_chain", percent=30, most=1.28),
    Bound(model="deep_chain", percent=11, most=1.90),
)


def main() -> None:
    arguments = _parse()
    if arguments.worker:
        _work(arguments)
        return
    conditions = {
        **report.machine(),
        "threads": 1,
        "clock": "process CPU time, least of",
        "steps": arguments.steps,
    }
    print(report.HEADER)
    rows = []
    for name in arguments.models.split(","):
        for row in _in_a_process(name, arguments):
            print(report.line(row), flush=True)
            rows.append(row)
    report.write(arguments.out, rows, conditions)
    print()
    for bound in BOUNDS:
        if any(row.model == bound.model for row in rows):
            print(bound.verdict(rows))
    print(f"\n{arguments.out} holds the figures")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(models.MAIN), help=f"of {', '.join(models.ALL)}")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--budgets", default=BUDGETS, help="percent of plain PyTorch's peak")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "train_cpu.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(name: str, arguments: argparse.Namespace) -> list[Row]:
    command = [
        *(sys.executable, "-m", "benchmarks.train", "--worker", "--models", name, "--size", arguments.size),
        *("--budgets", arguments.budgets, "--steps", str(arguments.steps)),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    if done.returncode != 0:
        raise SystemExit(f"benchmarks.train: the process for {name} failed")
    return report.read_rows(done.stdout.splitlines()[-1])


def _work(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    case = models.get(arguments.models, arguments.size)
    percents = [float(percent) for percent in arguments.budgets.split(",")]
    print(json.dumps([asdict(row) for row in compare(case, percents, arguments.steps)]))


if __name__ == "__main__":
    main()
