"""An editable install is a plain path, which type checkers follow, and has the console script."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_an_editable_install_is_a_path(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "fxremat", copy / "fxremat", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
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
    assert not [name for name in names if name.endswith(".py")]
