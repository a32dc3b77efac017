"""Measure what planning for devices that are not here costs: two devices compared, and the largest batch found.

    python -m benchmarks.what_if
    python -m benchmarks.what_if --checkout ../before --label before      beside another checkout

A GPT of 12 layers on the meta device, with estimated costs, through the command line: each case in a process of its
own, with nothing cached but compiled kernels. Seconds are of the processor, the import of torch included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from . import report

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "what_if.json"
MODEL = """
import torch
from benchmarks.models.gpt import GPT, Shape

def gpt(batch: int = 4, layers: int = 12):
    with torch.device("meta"):
        model = GPT(Shape(layers=layers, width=768, heads=12, vocabulary=32000, batch=batch, tokens=1024), dropout=0.0)
        tokens = torch.zeros(batch, 1024, dtype=torch.long)
    return model.train(), (tokens, tokens)

def small():
    return gpt(2, 1)
"""
COMMON = ("--estimate", "--effort", "0")
CASES = {
    "two devices": ("model:gpt", "--mem", "90%", "--device", "H100,A100"),
    "largest batch": ("model:gpt", "--mem", "40GiB", "--device", "H100", "--largest", "batch"),
    "largest batch on two devices": ("model:gpt", "--mem", "40GiB", "--device", "H100,A100", "--largest", "batch"),
}


def main() -> None:
    """Measure, print and keep every case of a checkout; rows of other checkouts stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--label", default="now")
    asked = parser.parse_args()
    _run(asked.checkout, ("model:small", "--mem", "90%", "--device", "H100"))  # compiles what kernels are missing
    rows = []
    for case, arguments in CASES.items():
        seconds, answer = _run(asked.checkout, arguments)
        print(f"{asked.label}: {case}: {seconds:.1f} s\n{answer}", flush=True)
        row = {"checkout": asked.label, "case": case, "seconds": round(seconds, 1)}
        rows.append(row | {"answer": answer.splitlines()})
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    kept = [row for row in kept if row["checkout"] != asked.label]
    RESULTS.write_text(json.dumps({"conditions": report.machine(), "rows": kept + rows}, indent=1) + "\n")


def _run(checkout: Path, arguments: tuple[str, ...]) -> tuple[float, str]:
    """Seconds of the processor that a plan takes, and what is printed."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.py").write_text(MODEL)
        paths = os.pathsep.join([str(checkout.resolve()), folder])
        environment = os.environ | {"PYTHONPATH": paths, "FXREMAT_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "fxremat", "plan", *arguments, *COMMON],
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


if __name__ == "__main__":
    main()
