"""Measure in the first hour with a CUDA device, part by part: a table and a JSON each, within minutes.

    python -m benchmarks.gpu_first_hour facts        what torch does here: kernels, workspaces, blocks, links
    python -m benchmarks.gpu_first_hour memory       predicted peaks and times beside real ones
    python -m benchmarks.gpu_first_hour first        the first step of a process whose costs are known (after `memory`)
    python -m benchmarks.gpu_first_hour numbers      bits: plain PyTorch again, aot_eager and fxremat
    python -m benchmarks.gpu_first_hour auto         mem="auto" in training loops on a device made small
    python -m benchmarks.gpu_first_hour offload      activations and weights in pinned memory
    python -m benchmarks.gpu_first_hour inductor     compiled regions beside torch.compile
    python -m benchmarks.gpu_first_hour whole        whole graphs by Inductor, cut by fxremat and by torch
    python -m benchmarks.gpu_first_hour by_hand      checkpointed blocks beside fxremat in the same memory
    python -m benchmarks.gpu_first_hour estimates    what is estimated of this card without it, beside what it does
    python -m benchmarks.gpu_first_hour fitted       answers of `fxremat fits` beside processes that train so
    python -m benchmarks.gpu_first_hour all          all of them, in this order; `memory first` are two of them

JSON is written to the folder $OUT, or to benchmarks/results/gpu_first_hour, with GPU, releases and date. What a JSON
has from the same GPU, releases and allocator is not measured again, and no case begins after `--limit` seconds (540):
where a call may take ten minutes, repeat it until it says no more that something is left.

In Python: `import benchmarks.gpu_first_hour as hour; hour.memory(("gpt odd",), ("60%",))`.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from benchmarks.first_hour.auto import auto
from benchmarks.first_hour.by_hand import by_hand
from benchmarks.first_hour.estimates import estimates
from benchmarks.first_hour.facts import facts
from benchmarks.first_hour.fitted import fitted
from benchmarks.first_hour.inductor import inductor
from benchmarks.first_hour.memory import first, memory
from benchmarks.first_hour.numbers import numbers
from benchmarks.first_hour.offload import offload
from benchmarks.first_hour.part import Row, Unfinished
from benchmarks.first_hour.whole import whole

ROOT = Path(__file__).parents[1]
LIMIT = 540.0
UNFINISHED = 3  # exit status: a part has cases left

PARTS: dict[str, Callable[..., list[Row]]] = {
    "facts": facts,
    "memory": memory,
    "first": first,
    "numbers": numbers,
    "auto": auto,
    "offload": offload,
    "inductor": inductor,
    "whole": whole,
    "by_hand": by_hand,
    "estimates": estimates,
    "fitted": fitted,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts, each in a process of its own: a first step is one, and what one allocates is no other's."""
    asked = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_first_hour: torch sees no CUDA device here")
    names = parts_of(asked.parts)
    if len(names) == 1:
        return run(names[0], asked.size, asked.limit)
    end, worst = time.monotonic() + asked.limit, 0
    for name in names:
        status = _in_a_process(name, asked.size, max(0.0, end - time.monotonic()))
        worst = max(worst, abs(status))  # negative: a signal ended it
    return worst


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("parts", nargs="*", default=["facts"], metavar="part", help=f"all, or of {', '.join(PARTS)}")
    made.add_argument("--limit", type=float, default=LIMIT, help="seconds after which no case begins")
    made.add_argument("--size", choices=("gpu", "small"), default="gpu", help="small: to try the program")
    return made


def parts_of(asked: Sequence[str]) -> list[str]:
    """The parts that are asked for, each once, in the order of `PARTS`. Raises SystemExit for unknown ones."""
    if unknown := sorted(set(asked) - {*PARTS, "all"}):
        raise SystemExit(f"no part {', '.join(unknown)}; there are all, {', '.join(PARTS)}")
    return [name for name in PARTS if name in asked or "all" in asked]


def run(name: str, size: str, limit: float) -> int:
    """Run one part in this process. Returns the exit status: 1 where a case failed, 3 where cases are left."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo.metrics_context").disabled = True  # torch 2.11 cannot log fxremat's settings
    try:
        rows = PARTS[name](size=size, limit=limit)
    except Unfinished as left:
        print(left)
        return UNFINISHED
    return int(any("failed" in row for row in rows))


def _in_a_process(name: str, size: str, limit: float) -> int:
    command = [sys.executable, "-m", "benchmarks.gpu_first_hour", name, "--size", size, "--limit", f"{limit:.0f}"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
