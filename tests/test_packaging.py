"""An editable install is a path, which type checkers follow, and has the console script; an sdist has the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_an_editable_install_is_a_path(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "fxremat", copy / "fxremat", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "pytest_fxremat.py"):
        shutil.copy(ROOT / name, copy)
    code = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (path,) = [name for name in names if name.endswith(".pth")]
        assert Path(files.read(path).decode().strip()) == copy
        (entries,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "fxremat = fxremat.__main__:entry" in files.read(entries).decode()
        assert "[pytest11]\npytest_fxremat = pytest_fxremat" in files.read(entries).decode()
    assert not [name for name in names if name.endswith(".py")]


FOLDERS = ("benchmarks", "docs", "examples", "fxremat", "tests")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.nbi", "*.nbc", "screenshots", "*.egg-info")


def test_an_sdist_has_all_that_its_tests_need(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    copy = tmp_path / "copy"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=LEFT_OUT)
    for file in ROOT.iterdir():
        if file.is_file() and file.suffix in ("", ".in", ".md", ".py", ".toml", ".txt", ".yml") and file.name != ".git":
            shutil.copy(file, copy)
    there = {str(file.relative_to(copy)) for file in copy.rglob("*") if file.is_file()}
    expected = {"Makefile", "tests/conftest.py", "tests/data/remat.json", "docs/what-if.md", "mkdocs.yml"}
    assert {*expected, "pytest_fxremat.py"} < there
    (copy / "tests" / "__pycache__").mkdir()
    (copy / "tests" / "__pycache__" / "left.pyc").touch()
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        packed = {member.name.partition("/")[2] for member in files.getmembers() if member.isfile()}
    assert there - packed == set()
    assert [name for name in packed if "__pycache__" in name] == []
