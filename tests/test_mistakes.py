"""The tests notice mistakes: every one of `tests/mistakes.py`, applied to a copy of the sources, fails its test."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mistakes import MISTAKES, Mistake

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.file}: {mistake.wrong}")
def test_a_mistake_can_be_made(mistake: Mistake):
    assert (ROOT / "fxremat" / mistake.file).read_text().count(mistake.right) == 1
    assert mistake.right != mistake.wrong
    assert (ROOT / "tests" / mistake.test.split("::")[0]).exists()


def test_there_are_enough_mistakes_in_many_places():
    assert len(MISTAKES) >= 20
    assert len({mistake.file for mistake in MISTAKES}) >= 8


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.file}: {mistake.wrong}")
def test_a_mistake_is_noticed(mistake: Mistake, tmp_path: Path):
    for name in ("fxremat", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "fxremat" / mistake.file
    file.write_text(file.read_text().replace(mistake.right, mistake.wrong))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{mistake.test}"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout[-2000:]  # 1: a test failed; others: nothing was tested
