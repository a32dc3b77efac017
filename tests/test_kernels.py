"""Kernels that are compiled in processes of their own while a model is captured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxremat import kernels
from fxremat.jit import cache_marker

PLANNED = """
import torch
from numba.core.dispatcher import Dispatcher
from fxremat import kernels
import fxremat

for compile_part, _ in kernels.PARTS.values():
    compile_part()
entries = [kernel for _, part in kernels.PARTS.values() for kernel in part]
before = [list(kernel.signatures) for kernel in entries]
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)], torch.nn.Flatten(0))
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x):
        return self.model(x).tanh().sum()
fxremat.plan(Loss(), (torch.ones(64, 8),), mem="70%", costs="estimate")
assert all(before)
assert [list(kernel.signatures) for kernel in entries] == before
"""


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )


def test_what_is_compiled_early_is_what_planning_calls() -> None:
    """With arguments of other types, a kernel would be compiled again when it is called."""
    done = in_a_process("-c", PLANNED)
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_fails_or_cannot_start_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "cache_marker", lambda _: tmp_path / "missing")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no_python"))
    kernels.begin()
    assert kernels._compilers == []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    kernels.begin()
    assert len(kernels._compilers) == len(kernels.PARTS)
    kernels.ready()
    assert kernels._compilers == []


def test_only_one_rank_compiles_and_only_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []
    monkeypatch.setattr(kernels, "_compiler", started.append)
    monkeypatch.setattr(kernels, "_compilers", [])
    monkeypatch.setattr(kernels, "cache_marker", lambda _: tmp_path / "missing")
    monkeypatch.setenv("LOCAL_RANK", "1")
    kernels.begin()
    assert started == []
    monkeypatch.delenv("LOCAL_RANK")
    kernels.begin()
    assert started == list(kernels.PARTS)
    (tmp_path / "missing").touch()
    monkeypatch.setattr(kernels, "_compilers", [])
    kernels.begin()
    assert started == list(kernels.PARTS)


def test_where_kernels_are_not_compiled_at_all_no_compiler_starts() -> None:
    started = "from fxremat import kernels; kernels.begin(); assert kernels._compilers == []; kernels.ready()"
    done = in_a_process("-c", started, NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr


def test_the_marker_lies_beside_the_code_and_tells_kernels_apart() -> None:
    markers = [cache_marker(part) for _, part in kernels.PARTS.values()]
    assert len(set(markers)) == len(markers)
    assert cache_marker([]) is None


@pytest.mark.long
def test_a_fresh_install_compiles_nothing_in_the_process_that_plans(tmp_path: Path) -> None:
    """Both compilers leave their marker, and kernels that a plan of this process can load."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    for part in kernels.PARTS:
        done = in_a_process("-m", "fxremat.kernels", part, **environment)
        assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("compiled-*"))) == len(kernels.PARTS)
    counting = "from fxremat.jit import running_seconds, _compilations\n" + PLANNED
    done = in_a_process("-c", f"{counting}\nassert _compilations.seconds < 1, _compilations.seconds", **environment)
    assert done.returncode == 0, done.stderr
