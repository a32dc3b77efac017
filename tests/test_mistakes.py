"""The tests notice mistakes: every one of `tests/mistakes.py`, applied to a copy of the sources, fails its test.

The copy without a mistake passes that test: what fails for another reason notices nothing.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mistakes import MISTAKES, Mistake
from tests.mutants import NOT_COPIED

ROOT = Path(__file__).parents[1]


def test_the_mistakes_can_be_made():
    for mistake in MISTAKES:
        assert (ROOT / "fxremat" / mistake.file).read_text().count(mistake.right) == 1, mistake
        assert mistake.right != mistake.wrong
        file, *name = mistake.test.partition("[")[0].split("::")
        assert all(f"def {part}(" in (ROOT / "tests" / file).read_text() for part in name), mistake


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of the repository, with what was compiled of it; times of files are kept, so that it stays valid."""
    folder = tmp_path_factory.mktemp("repository") / "copy"
    return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.file}: {mistake.wrong}")
def test_a_mistake_is_noticed(mistake: Mistake, copy: Path):
    status, said = _unchanged(copy, mistake.test)
    assert status == 0, said
    file = copy / "fxremat" / mistake.file
    right, stat = file.read_text(), file.stat()
    file.write_text(right.replace(mistake.right, mistake.wrong))
    try:
        status, said = _run(copy, mistake.test)
    finally:
        file.write_text(right)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert status == 1, said  # 1: a test failed; others: nothing was tested


@cache
def _unchanged(copy: Path, test: str) -> tuple[int, str]:
    return _run(copy, test)


def _run(copy: Path, test: str) -> tuple[int, str]:
    """The exit status of a test, marked `long` or not, and the end of what it printed."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{test}"]
    for marked in ([], ["-m", "long"]):
        ran = subprocess.run([*command, *marked], cwd=copy, capture_output=True, text=True, check=False)
        if ran.returncode != pytest.ExitCode.NO_TESTS_COLLECTED:
            break
    return ran.returncode, ran.stdout[-2000:]
