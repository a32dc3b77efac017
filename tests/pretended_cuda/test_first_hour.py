"""Every part of the first hour on a GPU runs on the pretended one, and writes its table and its JSON.

Numbers and times mean nothing there; cases, columns, bytes and budgets do.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_first_hour
from benchmarks.answers import Answer
from benchmarks.first_hour import auto, memory, numbers, offload, part, steps
from tests.pretended_cuda.install import ROOT, Environment
from tests.pretended_cuda.report import LOWEST

RELEASE = "2.11.0"
ENVIRONMENT = Environment(ROOT / f".venv-pretended-{RELEASE}")
WORKSPACE = 1 << 16  # of a convolution: 4 MiB would be most of what a small model needs
TOO_SMALL = ("30%", "resnet amp at")  # budgets that may be below the least that a small model needs
MISSING = f"there is no {ENVIRONMENT.folder.name}: `make test-long` and `make pretend-cuda` make it"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not ENVIRONMENT.built, reason=MISSING),
]


@dataclass(frozen=True, kw_only=True)
class Hour:
    """The programs' output, and the folder of their records."""

    output: str
    folder: Path

    def rows(self, name: str) -> dict[str, Any]:
        """The rows of a record, by case."""
        return dict(json.loads((self.folder / f"{name}.json").read_text())["rows"])

    def planned(self, name: str) -> dict[str, Any]:
        """The rows whose budget was not too small."""
        return {case: row for case, row in self.rows(name).items() if "least" not in row}

    def table(self, name: str) -> list[str]:
        """The lines of a part's table below its title."""
        _, _, after = self.output.partition(f"\n{name}: NVIDIA H100 80GB HBM3 (pretended), {RELEASE}")
        return after.partition("\n\n")[0].splitlines()[1:]


def _run(folder: Path, *arguments: str, **variables: str) -> str:
    """Run Python with these arguments on the pretended device; returns its output once all went well."""
    own = {"OUT": str(folder), "FXREMAT_CACHE": str(folder / "costs"), "PRETENDED_CUDNN_WORKSPACE": str(WORKSPACE)}
    kept = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    command = [str(ENVIRONMENT.python), "-m", "tests.pretended_cuda", "exec", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, **own, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Hour:
    """All parts, one after the other, as in docs/gpu.md but for the size."""
    ENVIRONMENT.build()
    folder = tmp_path_factory.mktemp("first-hour")
    options = ["--size", "small", "--limit", "3600"]
    return Hour(output=_run(folder, "-m", "benchmarks.gpu_first_hour", "all", *options), folder=folder)


@pytest.mark.parametrize("name", gpu_first_hour.PARTS)
def test_every_part_has_a_table_and_a_record(hour: Hour, name: str) -> None:
    module = importlib.import_module(f"benchmarks.first_hour.{'memory' if name == 'first' else name}")
    columns = module.FIRST_COLUMNS if name == "first" else module.COLUMNS
    rows = hour.rows(name)
    assert rows
    assert [case for case, row in rows.items() if "failed" in row] == []
    assert hour.table(name) == [part.header(columns), *(part.line(case, row, columns) for case, row in rows.items())]


def test_the_records_have_all_cases(hour: Hour) -> None:
    assert list(hour.rows("memory")) == [f"{name} at {mem}" for name in memory.MODELS for mem in memory.BUDGETS]
    assert list(hour.rows("numbers")) == [f"{name}: {way}" for name in numbers.MODELS for way in numbers.WAYS]
    assert list(hour.rows("auto")) == [f"{name} in {share} %" for name in auto.STATE for share in auto.SHARES]
    ways = [f"{mem} {way}" for mem in offload.BUDGETS for way in offload.WAYS]
    assert list(hour.rows("offload")) == [*ways, offload.WEIGHTS]


def test_bytes_are_those_of_the_plan(hour: Hour) -> None:
    for case, row in hour.rows("memory").items():
        assert LOWEST <= row["requested"] / row["predicted"] - 1 <= 0, case
    for name in ("memory", "first", "offload", "inductor"):
        for case, row in hour.planned(name).items():
            assert row["allocated"] <= row["budget"], (name, case)
            assert row.get("first", 0) <= row["budget"], (name, case)


def test_budgets_that_are_too_small_are_few(hour: Hour) -> None:
    for name in ("offload", "inductor"):
        missing = hour.rows(name).keys() - hour.planned(name).keys()
        assert [case for case in missing if not case.startswith(TOO_SMALL)] == []


def test_gpt_has_compiled_regions(hour: Hour) -> None:
    rows = hour.planned("inductor")
    assert rows["gpt at 80%"]["regions"]
    assert rows["gpt at 50%"]["regions"]


def test_training_goes_on_where_there_is_room(hour: Hour) -> None:
    rows = hour.rows("auto")
    assert {row["result"] for case, row in rows.items() if case.startswith("SGD")} == {f"trained {auto.STEPS} steps"}
    assert rows["AdamW in 90 %"]["result"] == f"trained {auto.STEPS} steps"
    assert not any(row["result"].startswith("OutOfMemoryError") for row in rows.values())


def test_each_comparison_of_numbers_has_one_of_three_answers(hour: Hour) -> None:
    assert {row["answer"] for row in hour.rows("numbers").values()} <= set(Answer)


def test_parts_in_python_with_expandable_segments(hour: Hour) -> None:
    program = "import benchmarks.gpu_first_hour as g; g.memory(('gpt odd',), ('60%',), size='small')"
    _run(hour.folder, "-c", program, PYTORCH_ALLOC_CONF="expandable_segments:True")
    (row,) = hour.rows("memory_expandable").values()
    assert row["allocated"] <= row["budget"]
    assert abs(steps.percent(row["allocated"], row["predicted"])) < 0.6


def test_the_table_of_budgets(hour: Hour) -> None:
    out = hour.folder / "train_gpu.json"
    options = ["--models", "gpt", "--budgets", "60", "--size", "small", "--steps", "2", "--out", str(out)]
    assert "gpt" in _run(hour.folder, "-m", "benchmarks.gpu", *options)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["measured"]["measured_peak"] <= row["mem"]
