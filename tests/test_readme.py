"""The README's Python runs, its commands exist, and its figures are those of benchmarks/results."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import readme

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)

pytestmark = pytest.mark.usefixtures("torch_ready")


@contextlib.contextmanager
def job_of_one(folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_python_blocks_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `model`, `x`, `y` and `loader` standing for the reader's own, a new model for each block."""
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)  # which is where they write files

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    x = torch.randn(256, 64)
    names: dict[str, object] = {"torch": torch, "x": x, "y": x.sin(), "loader": [x, x + 1]}
    assert PYTHON
    for block in PYTHON:
        names["model"] = Model().layers if "loss_fn" in block else Model()
        with job_of_one(tmp_path) if "fully_shard" in block else contextlib.nullcontext():
            exec(compile(block + "\nmodel(x)" * ("fully_shard" in block), "README.md", "exec"), names)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE))))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_ci_runs_the_readmes_test_command() -> None:
    assert "exec make test\n" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in TEXT


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_figures_are_those_on_record() -> None:
    for page in readme.PAGES:
        assert readme.filled(page.read_text()) == page.read_text(), "run `python -m benchmarks.readme`"


def test_the_command_line_of_the_readme() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fxremat", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0
    for word in ("solve", "simulate", "plan"):
        assert word in done.stdout
