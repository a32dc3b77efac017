"""Modules are adapted to the pretended device as they are imported, in a process and in those that it starts."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fxremat.ops import parameters
from tests.pretended_cuda import attention
from tests.pretended_cuda.install import Environment
from tests.pretended_cuda.startup import ADAPT, AfterImport, watch_imports

pytestmark = pytest.mark.long

ASKS = """
import torch
from fxremat.ops.parameters import Weights
from tests.pretended_cuda import attention
weights = Weights.__new__(Weights)
weights.later = False
weights.check_unscaled([torch.tensor(0.5)])
print("adapted", len(attention._libraries))
"""
IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASKS!r}], check=True)"


def test_a_module_is_adapted_once_it_was_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapted.py").write_text("def asks(): return 'asked'\n")
    (tmp_path / "left_alone.py").write_text("from adapted import asks\n")
    monkeypatch.syspath_prepend(tmp_path)
    adapted: list[str] = []

    def adapt(module: ModuleType) -> None:
        adapted.append(module.asks())
        module.asks = lambda: "adapted"  # type: ignore[attr-defined]

    monkeypatch.setattr(sys, "meta_path", [AfterImport({"adapted": adapt, "no_such_module": adapt}), *sys.meta_path])
    try:
        module = importlib.import_module("left_alone")
        assert adapted == ["asked"]
        assert module.asks() == "adapted"
        assert "asked" in inspect.getsource(importlib.import_module("adapted"))
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_module")
    finally:
        for name in ("adapted", "left_alone"):
            sys.modules.pop(name, None)


def test_what_is_imported_already_cannot_be_adapted() -> None:
    before = list(sys.meta_path)
    with pytest.raises(RuntimeError, match=r"^fxremat\.ops\.parameters, torch was imported before"):
        watch_imports()
    assert sys.meta_path == before


def test_a_check_of_another_name_is_missed() -> None:
    assert callable(parameters.Weights.check_unscaled)
    renamed = ModuleType("renamed")
    renamed.Weights = type("Weights", (), {})  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="check_unscaled"):
        ADAPT["fxremat.ops.parameters"](renamed)


@pytest.mark.parametrize("program", [ASKS, IN_A_CHILD], ids=["itself", "child"])
def test_processes_with_the_environment_are_adapted(program: str, tmp_path: Path) -> None:
    variables = Environment(tmp_path).variables()
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "adapted 1\n"
    assert not attention._libraries  # in this process


def test_a_process_without_it_is_not(tmp_path: Path) -> None:
    variables = {**Environment(tmp_path).variables(), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", ASKS], env=variables, capture_output=True, text=True, check=False)
    assert "FxrematError: the gradient of the loss is 0.5, not 1" in done.stderr
