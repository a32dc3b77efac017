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
        ("02_read_a_plan.py", "the backward graph where something is computed again"),
    ],
)
def test_an_example_runs(name: str, promised: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert promised in done.stdout
    assert "fxremat plan" in done.stdout
