"""Choose the tests that `make test` runs: few seconds of them, which execute all lines that all of them execute.

    python -m tests.everyday [--fast 1] [--share 0.5]       takes half an hour; adds lines to tests/long.txt

Tests faster than `--fast` seconds stay. Of the others those are added that execute most lines which no test before
does, for their seconds, until no line is left (greedy set cover). Then come the fastest tests of functions of which
none was taken, up to the share `--share` of all seconds. All others are long, from then on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

from tests.mutants import Watch

ROOT = Path(__file__).parents[1]
LONG = ROOT / "tests" / "long.txt"
DATA = "FXREMAT_EVERYDAY"  # names the folder of the records, in the environment of the workers
ALWAYS = (
    *("tests/test_readme.py", "tests/test_architecture.py", "tests/test_end_to_end.py"),
    *("tests/test_random_models.py", "tests/test_random_shapes.py", "tests/slices/test_random.py"),
)
"""Files of tests that stay, as they are about what users are promised, or about the architecture."""
LISTED = tuple(name for file in ("quick", "kernels") for name in (ROOT / "tests" / f"{file}.txt").read_text().split())


@dataclass(frozen=True)
class Measured:
    """The seconds of a test, and the lines of the package that it executes, as numbers."""

    seconds: float
    lines: frozenset[int]


def chosen(tests: Mapping[str, Measured], fast: float, share: float) -> set[str]:
    """Return the tests to run every day. O(slow tests squared * lines).

    Args:
        fast: seconds below which a test stays.
        share: fraction of all seconds up to which tests of other functions are added.
    """
    found = {name for name, test in tests.items() if test.seconds < fast or name.startswith((*ALWAYS, *LISTED))}
    left = {name: set(test.lines) for name, test in tests.items() if name not in found}
    covered = {line for name in found for line in tests[name].lines}
    while True:
        left = {name: new for name, lines in left.items() if (new := lines - covered)}
        if not left:
            break
        best = max(left, key=lambda name: len(left[name]) / tests[name].seconds)
        found.add(best)
        covered |= left[best]
    functions = {name.partition("[")[0] for name in found}
    seconds = sum(tests[name].seconds for name in found)
    most = share * sum(test.seconds for test in tests.values())
    for name in sorted(tests.keys() - found, key=lambda name: tests[name].seconds):
        function = name.partition("[")[0]
        if function not in functions and seconds + tests[name].seconds <= most:
            found.add(name)
            functions.add(function)
            seconds += tests[name].seconds
    return found


class Recorder(Watch):
    """A plugin of pytest that records seconds, and with coverage.py the lines of each test of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}.json"
        super().__init__(
            coverage.Coverage(
                data_file=str(self._file.with_suffix(".coverage")), source=[str(ROOT / "fxremat")], config_file=False
            )
        )
        self.coverage.start()

    def pytest_unconfigure(self) -> None:
        """Write the records."""
        self.coverage.stop()
        self.coverage.save()
        self._file.write_text(json.dumps(self.passed))


def pytest_configure(config: pytest.Config) -> None:
    """Record the tests of a worker of pytest-xdist; this module is its plugin."""
    if DATA in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.register(Recorder(Path(os.environ[DATA])))


def read(folder: Path) -> dict[str, Measured]:
    """Read the records of all workers."""
    seconds, lines, numbers = dict[str, float](), dict[str, set[int]](), dict[tuple[str, int], int]()
    for file in folder.glob("*.json"):
        seconds |= json.loads(file.read_text())
        data = coverage.CoverageData(str(file.with_suffix(".coverage")))
        data.read()
        for path in data.measured_files():
            for line, tests in data.contexts_by_lineno(path).items():
                for test in tests:
                    lines.setdefault(test, set()).add(numbers.setdefault((path, line), len(numbers)))
    return {name: Measured(each, frozenset(lines.get(name, ()))) for name, each in seconds.items()}


def main() -> int:
    """Measure the everyday tests, and add those to tests/long.txt that are not chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", type=float, default=1.0)
    parser.add_argument("--share", type=float, default=0.5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "tests.everyday"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {DATA: folder}, check=False)
        tests = read(Path(folder))
    everyday = chosen(tests, given.fast, given.share)
    LONG.write_text("\n".join(sorted({*LONG.read_text().splitlines(), *tests.keys() - everyday})) + "\n")
    seconds = [sum(tests[name].seconds for name in names) for names in (everyday, tests)]
    print(f"{len(everyday)} of {len(tests)} tests stay, with {seconds[0]:.0f} of {seconds[1]:.0f} seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
