"""Kernels compile with and without a cache on disk, whatever is in it; nothing slow is imported too early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fxremat"
KERNELS = '''
import numpy as np

from fxremat.jit import jit


@jit
def twice(values: np.ndarray) -> np.ndarray:
    return 2 * values


if __name__ == "__main__":
    print(twice(np.arange(3)).tolist(), sum(twice.stats.cache_hits.values()))
'''


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernels" / "kernels.py"
    path.parent.mkdir()
    path.write_text(KERNELS)
    return path


def run(path: Path, **environment: str) -> str:
    """Run the script, and return what it prints: its answer, and how often the cache was read."""
    paths = {"PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": "", **paths, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
def test_a_second_process_reads_the_cache_and_a_damaged_one_is_compiled_again_and_replaced(kernels: Path) -> None:
    assert run(kernels) == "[0, 2, 4] 0"
    assert run(kernels) == "[0, 2, 4] 1"
    for suffix, damage in (("nbi", b"not a pickle"), ("nbi", b"truncated"), ("nbc", b"truncated")):
        (file,) = kernels.parent.glob(f"__pycache__/*.{suffix}")
        damaged = file.read_bytes()[: file.stat().st_size // 2] if damage == b"truncated" else damage
        file.write_bytes(damaged)
        assert run(kernels) == "[0, 2, 4] 0"
        assert [*kernels.parent.glob(f"__pycache__/*.{suffix}")] == [file]
        assert file.stat().st_size > len(damaged), "it is replaced"
    assert run(kernels) == "[0, 2, 4] 1"


def test_without_a_folder_to_write_to_there_is_no_cache(kernels: Path) -> None:
    """A file where the folder would be stands for a read-only file system: root may write to any folder."""
    (kernels.parent / "__pycache__").write_text("")
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "FXREMAT_CACHE"), str(kernels))
    assert run(kernels, **nowhere) == "[0, 2, 4] 0"
    assert run(kernels, **nowhere) == "[0, 2, 4] 0"


def test_fxremat_s_own_folder_holds_kernels_where_no_other_can(kernels: Path, tmp_path: Path) -> None:
    (kernels.parent / "__pycache__").write_text("")
    folders = {"HOME": str(kernels), "XDG_CACHE_HOME": str(kernels), "FXREMAT_CACHE": str(tmp_path / "cache")}
    assert run(kernels, **folders) == "[0, 2, 4] 0"
    assert run(kernels, **folders) == "[0, 2, 4] 1"
    assert [*(tmp_path / "cache" / "kernels").rglob("*.nbi")]


CALLER = """
import numpy as np

from fxremat.jit import jit
import called
from called import Record, twice


@jit
def work(values: np.ndarray, record: Record) -> np.ndarray:
    return twice(values) + record.first - called.again(0)


if __name__ == "__main__":
    print(work(np.arange(3), Record(1, 0)).tolist(), sum(work.stats.cache_hits.values()))
"""
CALLED = """
from typing import NamedTuple

from constants import TIMES
from fxremat.jit import jit


class Record(NamedTuple):
    first: int
    second: int


@jit
def twice(values):
    return TIMES * values


@jit
def again(value):
    return value
"""


EDITS = [  # one after the other: a file, what stands there, what takes its place, and the answer then
    ("called", "return TIMES * values", "return TIMES * values + 1", "[2, 4, 6]"),
    ("called", "return value\n", "return value - 1\n", "[3, 5, 7]"),
    ("called", "first: int\n    second: int", "second: int\n    first: int", "[2, 4, 6]"),
    ("constants", "2", "3", "[2, 5, 8]"),
]


@pytest.mark.long
def test_a_change_in_what_a_kernel_reads_is_compiled(tmp_path: Path) -> None:
    """Compiled code has the code of the kernels that it calls inside, their constants, and the order of fields."""
    for name, text in {"caller": CALLER, "called": CALLED, "constants": "TIMES = 2"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert run(tmp_path / "caller.py") == "[1, 3, 5] 0"
    for file, right, wrong, answer in EDITS:
        edited = tmp_path / f"{file}.py"
        assert edited.read_text().count(right) == 1
        edited.write_text(edited.read_text().replace(right, wrong))
        assert run(tmp_path / "caller.py") == f"{answer} 0"
    assert run(tmp_path / "caller.py") == f"{answer} 1"


def test_every_kernel_is_compiled_through_it() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if "njit" in path.read_text() and path.name != "jit.py"]
    assert others == []


IMPORTED = [  # one after the other: a statement, and what is not imported then
    ("import fxremat", {"torch", "numba", "scipy"}),
    ("fxremat.solve", {"torch", "scipy.optimize", "scipy.sparse"}),
    ("import fxremat.__main__", {"torch", "scipy.optimize"}),
    ("fxremat.compile", {"scipy.optimize"}),
]


def test_nothing_slow_is_imported_before_it_is_used() -> None:
    """All in one process: what an earlier statement imports, a later one is held to as well."""
    looks = [f"{each}; print({each!r}, *sorted({not_yet} & set(sys.modules)))" for each, not_yet in IMPORTED]
    code = "; ".join(["import sys", *looks])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [each for each, _ in IMPORTED]


def test_the_clock_of_solvers_stands_still_while_kernels_are_compiled() -> None:
    code = """
import time
from fxremat.jit import jit, running_seconds

@jit
def kernel(x):
    total = 0.0
    for i in range(x.size):
        total += x[i] ** 2 if x[i] > 0 else -x[i]
    return total

import numpy as np
before, wall = running_seconds(), time.monotonic()
kernel(np.ones(3))
took, ran = time.monotonic() - wall, running_seconds() - before
assert took > 0.05, took
assert ran < 0.5 * took, (ran, took)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
