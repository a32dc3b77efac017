"""A plugin of pytest that limits the memory of the training steps in a test.

    @pytest.mark.limit_step_memory("2GiB")
    def test_training() -> None:
        model, batches = ...
        for batch in batches:
            model(batch).sum().backward()

The test fails where a training step in it, forward and backward, allocates more than that above what was allocated
when it began: the count of `mem` in `fxremat.compile`, so parameters, inputs and optimizer state are outside of it. The
model may be of plain PyTorch, compiled by torch.compile, or by fxremat; it may come from a fixture, since setting up
counts for nothing. All steps of the test are measured, and the highest counts; a test without a step fails. Each case
of a parametrized test is a test of its own.

What modules hold at the peak is part of the message. Peaks can be kept in a JSON file in the repository
(`--update-step-memory`), and the message then names the modules that grew since.

This is a module beside fxremat, since pytest imports it in every run: neither torch nor fxremat is imported before a
test with the mark runs, and without such a test no hook is registered that pytest calls for each test.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fxremat.integrations.training_steps import StepPeak

MARK = "limit_step_memory"
RECORD = "step-memory.json"  # the file of the record, if no other is named
FORMAT = 1
SECTION = "step memory"
PROFILED = "a profiler records steps of this test, and memory is measured with torch's own: leave the profiler out"
NO_STEP = (
    "no training step ran in this test. A step is a call of an nn.Module, with gradients, and its backward, in this "
    "process and thread; others go into `with training_step():`, a fixture"
)
_STEPS = pytest.StashKey[Any]()  # the `TrainingSteps` of a test that runs
_FOUND = pytest.StashKey[dict[str, Any]]()
_ATTRIBUTE = "fxremat_step_memory"  # of a report, which pytest-xdist sends to the process that writes the record


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the record."""
    group = parser.getgroup("fxremat", "memory of training steps (fxremat)")
    group.addoption(
        "--step-memory-record",
        metavar="PATH",
        help=f"record of earlier peaks of tests with the mark {MARK} (default: the ini option, or {RECORD})",
    )
    group.addoption(
        "--update-step-memory", action="store_true", help="write the peaks of the tests that pass to the record"
    )
    parser.addini("step_memory_record", f"record of the peaks of training steps, from the root (default: {RECORD})")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers",
        f'{MARK}(limit): fail if forward and backward of a training step allocate more, such as "2GiB" (fxremat)',
    )
    if config.getoption("update_step_memory") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(config), "fxremat-step-memory-record")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Register the hooks that measure, if any test has the mark."""
    if any(item.get_closest_marker(MARK) for item in session.items):
        session.config.pluginmanager.register(_Limits(session.config), "fxremat-step-memory")


@pytest.fixture
def training_step(request: pytest.FixtureRequest) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context that is one training step, for steps that are not calls of modules: `with training_step(): ...`.
    """

    @contextlib.contextmanager
    def step() -> Iterator[None]:
        steps = request.node.stash.get(_STEPS, None)
        if steps is None:
            yield
            return
        with steps.step():
            yield

    return step


class _Limits:
    """Measures the tests that have the mark, and lets those fail that exceed their limit."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = _path_of_record(config)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        mark = item.get_closest_marker(MARK)
        if mark is None:
            return (yield)
        limit = _limit_of(mark)
        from fxremat.integrations.training_steps import TrainingSteps

        with TrainingSteps() as steps:
            item.stash[_STEPS] = steps
            result = yield
        highest = steps.highest
        if highest is None or steps.profiled:
            pytest.fail(f"{MARK}: {PROFILED if steps.profiled else NO_STEP}", pytrace=False)
        modules = dict(sorted(highest.modules.items()))
        item.stash[_FOUND] = {"device": highest.device, "peak": highest.peak, "modules": modules}
        item.user_properties.append(("step_memory_peak", highest.peak))
        if highest.peak > limit:
            pytest.fail(_exceeded(highest, limit, steps.count, self.path, item.nodeid), pytrace=False)
        item.add_report_section("call", SECTION, f"{highest}\n")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" and report.passed and (found := item.stash.get(_FOUND, None)) is not None:
            setattr(report, _ATTRIBUTE, found)
        return report


def _limit_of(mark: pytest.Mark) -> int:
    """Return the limit of a mark in bytes; let the test fail where it has none."""
    from fxremat.errors import InvalidBudget
    from fxremat.units import parse_bytes

    given = [*mark.args, *mark.kwargs.values()]
    if len(given) != 1 or mark.kwargs.keys() - {"limit"}:
        pytest.fail(f'{MARK} takes one limit, as in @pytest.mark.{MARK}("2GiB")', pytrace=False)
    why = ""
    try:
        return parse_bytes(given[0])
    except InvalidBudget as error:
        why = str(error)
    pytest.fail(f"{MARK}: {why}", pytrace=False)


def _exceeded(highest: StepPeak, limit: int, count: int, path: Path, test: str) -> str:
    """Return the message of a test that exceeds its limit: by how much, where, and by which modules."""
    from fxremat.show.growth import Growth
    from fxremat.units import format_bytes

    over = highest.peak - limit
    takes = f"{MARK}: a training step takes {format_bytes(highest.peak)} ({highest.peak} bytes)"
    lines = [
        f"{takes}, {format_bytes(over)} more than the limit of {format_bytes(limit)}",
        f"step {highest.number} of {count} on {highest.device}, {highest.where}",
        "",
        str(highest.table),
    ]
    try:
        before = _read(path).get(test)
    except ValueError as error:
        return "\n".join([*lines, "", f"no record to compare with: {error}"])
    if before is not None:
        growth = Growth.of(before["modules"], highest.modules, model="the step")
        lines += ["", f"since {path.name}, with {format_bytes(before['peak'])} on {before['device']}:", str(growth)]
    return "\n".join(lines)


# --- the record -----------------------------------------------------------------------------------------------


class _Writer:
    """Writes the peaks of the tests that pass to the record, in the process that starts the others."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = _path_of_record(config)
        self.found: dict[str, dict[str, Any]] = {}
        self.said = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = getattr(report, _ATTRIBUTE, None)
        if found is not None:
            self.found[report.nodeid] = found

    def pytest_sessionfinish(self) -> None:
        if not self.found:
            self.said = f"no test with the mark {MARK} has passed: {self.path} is as it was"
            return
        try:
            steps = _read(self.path) | self.found
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        text = json.dumps({"format": FORMAT, "steps": dict(sorted(steps.items()))}, indent=1)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(self.path)  # at once, so that nobody reads half of it
        self.said = f"wrote the peaks of {len(self.found)} tests to {self.path}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.said:
            terminalreporter.write_line(f"{SECTION}: {self.said}")


def _path_of_record(config: pytest.Config) -> Path:
    """Return the path of the record: of the command line from where pytest was started, of the ini file from the root.
    """
    given = config.getoption("step_memory_record")
    if given is not None:
        return Path(config.invocation_params.dir, given)
    return Path(config.rootpath, config.getini("step_memory_record") or RECORD)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the peaks of a record by test; {} if there is no file. Raises `ValueError` where it holds no record."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    steps = data.get("steps") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if not isinstance(steps, dict) or not all(map(_is_peak, steps.values())):
        raise ValueError(f"{path} is no record of --update-step-memory: name another file, or delete it")
    return steps


def _is_peak(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("modules"), dict):
        return False
    sizes = [found.get("peak"), *found["modules"].values()]
    return isinstance(found.get("device"), str) and all(type(size) is int for size in sizes)
