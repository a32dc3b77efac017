"""The lists of quick, early and long tests name tests that exist; the quick ones reach into every folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def listed(name: str) -> list[str]:
    return (ROOT / "tests" / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("name", ["quick", "kernels", "long"])
def test_listed_tests_exist(name: str) -> None:
    for test in listed(name):
        file, *function = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text()
        assert all(f"def {part}(" in text for part in function), test


@pytest.mark.long
@pytest.mark.parametrize("name", ["quick", "kernels"])
def test_listed_tests_are_collected(name: str) -> None:
    """Find those, too, whose parameters have changed: pytest runs none of a list in which one is missing."""
    collect = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--collect-only", f"@tests/{name}.txt"]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_quick_tests_and_those_that_compile_kernels_are_not_long() -> None:
    early = {*listed("quick"), *listed("kernels")}
    assert not [test for test in listed("long") if test in early or test.partition("[")[0] in {*listed("kernels")}]


def test_the_quick_tests_reach_into_every_folder() -> None:
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "fxremat").rglob("*.py")}
    texts = [(ROOT / file).read_text() for file in {test.split("::")[0] for test in listed("quick")}]
    read = set()
    for text in texts:
        for module, names in re.findall(r"from (fxremat[\w.]*) import ([\w, ]+)", text):
            read |= {module, *(f"{module}.{name.strip()}" for name in names.split(","))}
    assert {folder for folder in folders if not any(name.startswith(folder) for name in read)} == set()
