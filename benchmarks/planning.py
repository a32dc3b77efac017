"""How long planning the 12-layer GPT takes: from nothing, and again with the measured costs on disk.

    python -m benchmarks.planning

Each time in a fresh process with all cores; before the first, the caches of costs and of compiled solver
kernels are empty.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import models, report

MOST = {"from nothing": 40.0, "from the cache": 15.0}  # seconds, on two cores
RESULTS = Path(__file__).parent / "results" / "planning.json"


def main() -> None:
    if sys.argv[1:] == ["--worker"]:
        print(_planning_seconds())
        return
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ, "FXREMAT_CACHE": f"{caches}/costs", "NUMBA_CACHE_DIR": f"{caches}/kernels"
        }  # fmt: skip
        seconds = {name: _in_a_process(environment) for name in MOST}
    for name, most in MOST.items():
        held = "held" if seconds[name] <= most else "NOT HELD"
        print(f"planning gpt {name}: {seconds[name]:.1f} s; at most {most:g} s: {held}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"conditions": report.machine(), "seconds": seconds}, indent=1) + "\n")


def _in_a_process(environment: dict[str, str]) -> float:
    command = [sys.executable, "-m", "benchmarks.planning", "--worker"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment, check=True)
    return float(done.stdout.splitlines()[-1])


def _planning_seconds() -> float:
    """Wall-clock seconds from the model to a plan for it, imports left out."""
    import fxremat

    case = models.get("gpt")
    model, batch = case.model(), case.batch()
    start = time.perf_counter()
    fxremat.compile(model, mem="45%", example_inputs=batch, progress=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
