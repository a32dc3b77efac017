"""The choice of everyday tests keeps what is fast, every line, and the fastest test of each function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.everyday import DATA, Measured, chosen, read

TESTS = {
    "tests/a.py::fast": Measured(0.5, frozenset({1})),
    "tests/a.py::slow[1]": Measured(4.0, frozenset({1, 2, 3})),
    "tests/a.py::slow[2]": Measured(3.0, frozenset({1, 2, 3})),
    "tests/a.py::slower": Measured(5.0, frozenset({2, 4})),
    "tests/a.py::covered": Measured(2.0, frozenset({1, 2})),
    "tests/test_readme.py::blocks": Measured(9.0, frozenset()),
}
NEEDED = {"tests/a.py::fast", "tests/a.py::slow[2]", "tests/a.py::slower", "tests/test_readme.py::blocks"}


def test_lines_are_executed_in_the_least_seconds() -> None:
    assert chosen(TESTS, fast=1.0, share=0.0) == NEEDED


def test_functions_without_a_test_are_added_up_to_a_share() -> None:
    assert chosen(TESTS, fast=1.0, share=0.8) == NEEDED
    assert chosen(TESTS, fast=1.0, share=0.9) == NEEDED | {"tests/a.py::covered"}
    assert chosen(TESTS, fast=1.0, share=1.0) == NEEDED | {"tests/a.py::covered"}


def test_what_workers_record_is_read(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "tests.everyday", "tests/test_units.py"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, env=inherited | {DATA: str(tmp_path)}, check=True, capture_output=True)
    found = read(tmp_path)
    assert len(found) > 10
    assert all(name.startswith("tests/test_units.py::") and test.seconds > 0 for name, test in found.items())
    assert max(len(test.lines) for test in found.values()) > 5
    (record,) = tmp_path.glob("*.json")
    assert json.loads(record.read_text()).keys() == found.keys()
