"""Examples in docstrings do what they say: of every module that can be imported where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

EXAMPLES = """
import doctest, importlib, pkgutil, sys
sys.modules["torch"] = None  # as where it is not installed: importing it raises
import fxremat
for name in ("fxremat", *(found.name for found in pkgutil.walk_packages(fxremat.__path__, "fxremat."))):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if str(error.name).split(".")[0] != "torch" and not name.startswith("fxremat.integrations."):
            raise
    else:
        failed, tried = doctest.testmod(module)
        print("module", name, failed, tried)
"""


def test_examples_in_docstrings() -> None:
    done = subprocess.run([sys.executable, "-c", EXAMPLES], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("module ")]
    assert [name for name, failed, _ in rows if failed != "0"] == [], done.stdout
    tried = {name: int(count) for name, _, count in rows}
    assert tried["fxremat"] > 4
    for file in [path for room in ("chains", "solvers") for path in (ROOT / "fxremat" / room).rglob("*.py")]:
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert tried[name] >= file.read_text().count(">>> ") - file.read_text().count("+SKIP"), name
