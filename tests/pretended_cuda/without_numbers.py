"""tests/test_cuda.py on a device that computes nothing: all that it asks but numbers and times.

What remains: that nothing raises, peaks and budgets of the caching allocator, shapes, random state, and what is pinned
or freed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = Path(__file__).parents[1] / "test_cuda.py"
NUMBERS = {  # tests of which nothing is left without them
    "test_batch_norm_statistics_are_updated_once": "counts what a kernel adds up",
    "test_a_gpu_s_step_takes_less_than_its_ops_and_its_copies_one_after_the_other": "times a step",
    "test_files_are_copied_in_the_order_of_the_caller_s_stream": "looks at what was copied",
    "test_copies_of_a_gpu_that_is_not_the_current_one": "looks at what was copied",
    "test_memory_that_a_side_stream_writes_is_not_given_away_after_an_exception": "looks at what was copied",
}


class WithoutNumbers:
    """A plugin of pytest that lets numbers be equal, and counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        """Leave out the tests that are about numbers alone."""
        left_out = [item for item in items if getattr(item, "originalname", "") in NUMBERS]
        items[:] = [item for item in items if item not in left_out]
        self.outcomes["left out"] += len(left_out)
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcome of a test's call, or of what kept it from being called."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
            if report.failed:
                self.failed.append(f"{report.nodeid.rpartition('::')[2]}: {_last_line(report)}")

    @pytest.fixture(autouse=True)
    def _equal_numbers(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        module = request.module
        monkeypatch.setattr(module, "differences", lambda trace, plain: [])
        monkeypatch.setattr(module, "error", lambda ours, plain: 0.0)
        step = module.train_step
        monkeypatch.setattr(module, "train_step", lambda *arguments: 0.0 * (step(*arguments) is None))
        monkeypatch.setattr(pytest, "approx", lambda *_, **__: _Anything())
        monkeypatch.setattr(torch, "equal", lambda one, other: one.shape == other.shape)


class _Anything:
    """Equals everything."""

    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _last_line(report: pytest.TestReport) -> str:
    return report.longreprtext.strip().splitlines()[-1] if report.longreprtext else ""


def run() -> dict[str, Any]:
    """Run the tests in this process; returns how many passed, failed, were skipped or left out."""
    plugin = WithoutNumbers()
    pytest.main([str(FILE), "-q", "-p", "no:cacheprovider", "--tb=short"], plugins=[plugin])
    return {**plugin.outcomes, "failures": plugin.failed}
