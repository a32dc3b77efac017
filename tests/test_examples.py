"""The examples run as they are shipped, and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "promised"),
    [
        pytest.param("01_quickstart.py", "the two curves are identical", marks=pytest.mark.long),
        pytest.param(
            "02_read_a_plan.py", "the backward graph where something is computed again", marks=pytest.mark.long
        ),
        pytest.param("03_offload.py", "ops, copies and memory over time", marks=pytest.mark.long),
        pytest.param("04_offload_weights.py", "the two curves are identical", marks=pytest.mark.long),
        pytest.param("06_sharded.py", "the losses are identical", marks=pytest.mark.long),
        pytest.param("07_pass_aot.py", "the gradients are identical", marks=pytest.mark.long),
        pytest.param("08_pass_inductor.py", "the gradients differ by", marks=pytest.mark.long),
        pytest.param("09_full_step.py", "loss and gradients are identical", marks=pytest.mark.long),
        pytest.param("05_pipeline.py", "losses and gradients are identical", marks=pytest.mark.long),
    ],
)
def test_an_example_runs(name: str, promised: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert promised in done.stdout
    assert "fxremat plan" in done.stdout
