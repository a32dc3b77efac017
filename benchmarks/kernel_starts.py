"""Time the first step of compiled kernels: torch.compile, and fxremat with backend="inductor".

    python -m benchmarks.kernel_starts --models gpt,unet --budgets 60,50,40
    python -m benchmarks.readme                            puts what is on record into docs/kernels.md

Each start is a process of its own, with one thread: seconds of the clock from compiling until its first step is over,
and all that is imported for it, behind one eager step of a tiny model. What is known at a start:

    nothing          empty caches of costs, of what was searched for, and of kernels
    the same         the caches of the start before, of the same budget
    other budgets    the caches of starts of the budgets before
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxremat
from fxremat.settings import Search

from . import models, report

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "kernel_starts.json"
MODELS, BUDGETS = "gpt,unet,mixer", "60,50,40"
NOTHING, SAME, OTHERS = "nothing", "the same", "other budgets"
CACHES = {"FXREMAT_CACHE": "costs", "TORCHINDUCTOR_CACHE_DIR": "kernels"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The seconds of one start, and what was known at it."""

    model: str
    percent: float | None  # of what plain PyTorch keeps; None: torch.compile
    known: str
    seconds: float


def main() -> None:
    """Measure, print and keep every start."""
    arguments = _parse()
    if arguments.start:
        print(_seconds(*arguments.start))
        return
    rows = []
    for model in arguments.models.split(","):
        for row in _rows(model, [float(percent) for percent in arguments.budgets.split(",")]):
            print(line(row), flush=True)
            rows.append(row)
    record = {"conditions": report.machine(), "rows": [asdict(row) for row in rows]}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=MODELS, help=f"of {', '.join(models.ALL)}; default: {MODELS}")
    parser.add_argument("--budgets", default=BUDGETS, help="percent of what plain PyTorch keeps")
    parser.add_argument("--out", type=Path, default=OUT, help="the record")
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _rows(model: str, percents: Iterable[float]) -> Iterator[Row]:
    """The starts of one model, each in the caches that those before have filled."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for known in (NOTHING, SAME):
            yield _row(model, None, known, f"{folder}/torch")
        for place, percent in enumerate(percents):
            for known in (OTHERS if place else NOTHING, SAME):
                yield _row(model, percent, known, f"{folder}/fxremat")


def _row(model: str, percent: float | None, known: str, folder: str) -> Row:
    caches = {name: f"{folder}/{kind}" for name, kind in CACHES.items()}
    for path in caches.values():
        os.makedirs(path, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.kernel_starts", "--start", model, str(percent or "")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True
    )
    return Row(model=model, percent=percent, known=known, seconds=float(done.stdout.split()[-1]))


def _seconds(name: str, percent: str) -> float:
    """Seconds until the first step of this process is over."""
    torch.set_num_threads(1)
    nn.Linear(8, 1)(torch.ones(4, 8)).sum().backward()
    case = models.get(name)
    model, batch = case.model(), case.batch()
    began = time.perf_counter()
    compiled: Any
    if percent:
        compiled = fxremat.compile(model, mem=f"{float(percent)}%", search=Search(progress=False), backend="inductor")
    else:
        compiled = torch.compile(model)
    compiled(*batch).backward()
    return time.perf_counter() - began


def line(row: Row) -> str:
    """A start in words."""
    way = "torch.compile" if row.percent is None else f"fxremat, {row.percent:g} %"
    return f"{row.model:12} {way:14} knowing {row.known:14} {row.seconds:6.1f} s"


def tables(record: str) -> str:
    """A row for each model and way, with the share of a cold torch.compile, as Markdown."""
    found = json.loads(record)
    rows = [Row(**row) for row in found["rows"]]
    seconds = {(row.model, row.percent, row.known): row.seconds for row in rows}
    lines = ["| model | | knowing nothing | knowing other budgets | knowing the same |", "|---|---|---|---|---|"]
    for model, percent in dict.fromkeys((row.model, row.percent) for row in rows):
        cold = seconds[model, None, NOTHING]
        cells = [
            "" if taken is None else f"{taken:.1f} s ({taken / cold:.2f})"
            for taken in (seconds.get((model, percent, known)) for known in (NOTHING, OTHERS, SAME))
        ]
        lines.append(f"| {model} | {'torch.compile' if percent is None else f'{percent:g} %'} | {' | '.join(cells)} |")
    about = found["conditions"]
    said = f"In brackets over a cold torch.compile. Measured on {about['date']}, torch {about['torch']}, one thread."
    return "\n".join([*lines, "", said])


if __name__ == "__main__":
    main()
