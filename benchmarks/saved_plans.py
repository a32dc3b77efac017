"""Time the first step with a saved plan, beside that of torch.compile(backend="aot_eager").

    python -m benchmarks.saved_plans [NAME ...]

Each figure is the least of several first steps, each in a process of its own, one thread, imports left out: capture,
plan or its file, forward and backward. The two take turns. Gradients of both are compared bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fxremat
from fxremat.settings import Search

from . import models, report

RESULTS = Path(__file__).parent / "results" / "saved_plans.json"
NAMES = ("gpt", "resnet", "unet", "encoder_decoder")
ROUNDS = 3
MOST = 1.0  # seconds beyond torch's own capture


def main(names: list[str]) -> None:
    """Print a row for each model, and write all to the results."""
    found = {name: _row(name) for name in names or NAMES}
    for name, row in found.items():
        print(f"{name:18} {row['aot_eager']:6.2f} s  with a plan {row['saved']:6.2f} s  file {row['bytes']:,} bytes")
        assert row["equal"], f"{name}: other gradients"
        assert row["saved"] - row["aot_eager"] < MOST, f"{name}: more than {MOST} s beyond torch's own capture"
    if not names:
        RESULTS.write_text(json.dumps({"machine": report.machine(), "rows": found}, indent=1) + "\n")


def _row(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        _run("make", name, plan)
        runs = [{way: _run(way, name, plan) for way in ("aot_eager", "saved")} for _ in range(ROUNDS)]
        files = [torch.load(f"{plan}.{way}.pt") for way in ("aot_eager", "saved")]
        return {
            **{way: min(run[way] for run in runs) for way in ("aot_eager", "saved")},
            "bytes": plan.stat().st_size,
            "equal": all(map(torch.equal, *files)),
        }


def _run(way: str, name: str, plan: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.saved_plans", "--one", way, name, str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _one(way: str, name: str, plan: str) -> None:
    """Print the seconds of one first step."""
    torch.set_num_threads(1)
    case = models.get(name, "small")
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    start = time.perf_counter()
    if way == "make":
        fxremat.plan(model, batch, mem="60%", search=Search(progress=False)).save(plan)
    else:
        plain: Any = torch.compile(model, backend="aot_eager")
        step = plain if way == "aot_eager" else fxremat.compile(model, plan=plan, search=Search(progress=False))
        torch.manual_seed(1)
        step(*batch).backward()
        torch.save([p.grad for p in model.parameters() if p.grad is not None], f"{plan}.{way}.pt")
    print(time.perf_counter() - start)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(*sys.argv[2:])
    else:
        main(sys.argv[1:])
