"""How long planning takes, and how far from a lower bound its plans are.

The 12-layer GPT from nothing and again with costs on disk, and a very deep ResNet; then GPT and ResNet in half of their
memory: predicted time over the bound that no choice of what to recompute beats.

    python -m benchmarks.planning

Each time in a fresh process with all cores; before the first, the caches of costs and of compiled solver
kernels are empty. The ResNet has 200 bottleneck blocks, and its costs are measured for the first time too. The nine
models of `benchmarks.alternatives` are timed there.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from . import models, report
from .models import convnets
from .models.case import labelled_images

MOST = {"from nothing": 60.0, "from the cache": 40.0, "of 200 blocks": 180.0}  # seconds, on two cores
MOST_BYTES = 4 << 30
MOST_GAP = 1.15  # predicted time over the lower bound, in half of the memory
GAPS = ("gpt", "resnet")
DEEP = (3, 8, 186, 3)  # bottlenecks of each stage: 200, most of them where they are cheap
RESULTS = Path(__file__).parent / "results" / "planning.json"


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        name = sys.argv[2]
        print(json.dumps(_gap(name.removeprefix("gap ")) if name.startswith("gap ") else _planning(name)))
        return
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ, "FXREMAT_CACHE": f"{caches}/costs", "NUMBA_CACHE_DIR": f"{caches}/kernels"
        }  # fmt: skip
        found = {name: _in_a_process(name, environment) for name in MOST}
        gaps = {name: _in_a_process(f"gap {name}", environment)["gap"] for name in GAPS}
    for name, most in MOST.items():
        seconds, size = found[name]["seconds"], found[name]["bytes"]
        held = "held" if seconds <= most and size <= MOST_BYTES else "NOT HELD"
        print(
            f"planning {name} ({found[name]['ops']} ops): {seconds:.1f} s, at most {most:g} s; "
            f"{size / 2**30:.2f} GiB, at most {MOST_BYTES / 2**30:g} GiB: {held}"
        )
    for name, gap in gaps.items():
        held = "held" if gap <= MOST_GAP else "NOT HELD"
        print(f"{name} at 50 %: {gap:.3f} of the lower bound, at most {MOST_GAP:g}: {held}")
    RESULTS.parent.mkdir(exist_ok=True)
    record = {"conditions": report.machine(), "found": found, "gaps": gaps}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def _in_a_process(name: str, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.planning", "--worker", name]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _planning(name: str) -> dict[str, float]:
    """Wall-clock seconds from the model to a plan for it, imports left out, and the process's largest size."""
    import fxremat

    model, batch = _deep() if name == "of 200 blocks" else _gpt()
    start = time.perf_counter()
    compiled = fxremat.compile(
        model, mem="75%" if name == "of 200 blocks" else "45%", example_inputs=batch, progress=False
    )
    seconds = time.perf_counter() - start
    assert compiled.plan is not None
    ops = len(compiled.plan.program.layout.joint.ops)
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "bytes": size, "ops": ops}


def _gap(name: str) -> dict[str, float]:
    import fxremat

    case = models.get(name)
    plan = fxremat.plan(case.model(), case.batch(), mem="50%")
    return {"gap": plan.predicted_time / plan.lower_bound}


def _gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    case = models.get("gpt")
    return case.model(), case.batch()


def _deep() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return convnets.ResNet(DEEP, 8, 10).train(), labelled_images(4, 64)(torch.Generator().manual_seed(0))


if __name__ == "__main__":
    main()
