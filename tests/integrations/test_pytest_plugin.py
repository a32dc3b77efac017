"""The plugin of pytest: what passes, what fails and what it says, the record, and that it costs others nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo
import torch._inductor  # runs of pytest inside of this process forget what they import, and torch bears that only once

import fxremat.integrations.training_steps  # noqa: F401
import pytest_fxremat
from benchmarks import meter

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
MODEL = """
import pytest
import torch
from torch import nn

torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, width), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean()

def train(model, rows=256, steps=2):
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(rows, 64)).backward()
"""
ONE = "train(Net())"


def peak_of_one(depth: int = 3) -> int:
    """Measured bytes of the peak of a step of `ONE`."""
    names: dict[str, Any] = {}
    exec(MODEL, names)
    return meter.model_peak(names["Net"](depth=depth), (torch.ones(256, 64),))


def run_alone(pytester: pytest.Pytester, tests: str, *arguments: str) -> pytest.RunResult:
    """Run tests in a process of their own, in which nothing is imported."""
    pytester.makepyfile(test_it=tests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        return pytester.runpytest_subprocess("-p", "pytest_fxremat", "-p", "no:hypothesispytest", *arguments)


def run(pytester: pytest.Pytester, tests: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=MODEL + tests)
    return pytester.runpytest("-p", "pytest_fxremat", "-p", "no:benchmark", "-p", "no:cacheprovider", *arguments)


def said(result: pytest.RunResult) -> str:
    return result.stdout.str()


def limited(limit: object, body: str = ONE, name: str = "test_step") -> str:
    return f"\n@pytest.mark.limit_step_memory({limit!r})\ndef {name}():\n    {body}\n"


def test_a_step_may_take_its_limit_and_no_byte_more(pytester: pytest.Pytester) -> None:
    peak = peak_of_one()
    tests = limited(peak, name="test_at") + limited(peak - 1, name="test_above") + limited("1GiB", name="test_far")
    result = run(pytester, tests)
    result.assert_outcomes(passed=2, failed=1)
    text = said(result)
    assert f"limit_step_memory: a training step takes {peak / 1024:.1f} KiB ({peak} bytes), 1 B more than" in text
    assert "step 1 of 2 on cpu, in " in text
    assert re.search(r"^ +layers\.0-1 +2 x +64\.0 KiB +- +64\.0 KiB$", text, re.MULTILINE)
    assert "Traceback" not in text
    assert "pytest_fxremat.py:" not in text


def test_the_highest_step_counts_and_not_what_the_test_has_besides(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.fixture
def model():
    return torch.ones(10_000_000), Net()

@pytest.mark.limit_step_memory("1MiB")
def test_what_a_fixture_made(model):
    kept = torch.ones(10_000_000)
    optimizer = torch.optim.AdamW(model[1].parameters())
    train(model[1])
    optimizer.step()

@pytest.mark.limit_step_memory("1MiB")
@pytest.mark.parametrize("rows", [16, 64, 4096])
def test_of_many_sizes(rows):
    train(Net(), rows=rows)

@pytest.mark.limit_step_memory("1MiB")
def test_third_step():
    model = Net()
    for rows in (16, 16, 4096, 16):
        train(model, rows=rows, steps=1)

@pytest.mark.limit_step_memory("1MiB")
class TestMany:
    def test_one(self):
        train(Net())

    @pytest.mark.limit_step_memory("1KiB")
    def test_other(self):
        train(Net())
"""
    result = run(pytester, tests, "-rA")
    result.assert_outcomes(passed=4, failed=3)
    lines = ["PASSED *what_a_fixture*", "PASSED *[[]64]*", "FAILED *[[]4096]*", "FAILED *test_other*", "step 3 of 4*"]
    result.stdout.fnmatch_lines_random(lines)


@pytest.mark.parametrize(
    ("mark", "body", "message"),
    [
        ('("2GiB")', "pass", "no training step ran in this test"),
        ('("2GiB")', "Net()(torch.ones(1, 64))", "no training step ran in this test"),
        ("", ONE, 'limit_step_memory takes one limit, as in @pytest.mark.limit_step_memory("2GiB")'),
        ('("2GiB", "3GiB")', ONE, "limit_step_memory takes one limit"),
        ('(mem="2GiB")', ONE, "limit_step_memory takes one limit"),
        ('("2 Go")', ONE, "limit_step_memory: '2 Go' is not a number of bytes above 0; write \"4GiB\""),
        ("(0.5)", ONE, "limit_step_memory: 0.5 is not a number of bytes"),
        ('("2GiB")', "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]): " + ONE,
         "a profiler records steps of this test"),
        ('("2GiB")', f"{ONE}\n    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]): {ONE}",
         "a profiler records steps of this test"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_fails_with_a_line(
    pytester: pytest.Pytester, mark: str, body: str, message: str
) -> None:
    result = run(pytester, f"\n@pytest.mark.limit_step_memory{mark}\ndef test_step():\n    {body}\n")
    result.assert_outcomes(failed=1)
    assert message in said(result)
    assert "During handling" not in said(result)


def test_failures_and_skips_of_the_test_itself_come_first(pytester: pytest.Pytester) -> None:
    tests = limited("1GiB", f"{ONE}; assert 1 == 2", "test_fails") + limited(1, "pytest.skip('later')", "test_skips")
    tests += "\n@pytest.mark.xfail(strict=True)" + limited(1, ONE, "test_expected")
    result = run(pytester, tests)
    result.assert_outcomes(failed=1, skipped=1, xfailed=1)
    assert "assert 1 == 2" in said(result)
    assert "limit_step_memory:" not in said(result)


def test_a_step_may_be_said(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.mark.limit_step_memory("300KiB")
@pytest.mark.parametrize("rows", [64, 4096])
def test_function(training_step, rows):
    weight = torch.ones(64, 64, requires_grad=True)
    with training_step():
        (torch.ones(rows, 64) @ weight).sum().backward()

def test_without_the_mark(training_step):
    with training_step():
        pass
"""
    result = run(pytester, tests)
    result.assert_outcomes(passed=2, failed=1)
    assert "FAILED test_it.py::test_function[4096]" in said(result)


@pytest.mark.long
def test_models_of_fxremat_and_of_torch_compile(pytester: pytest.Pytester) -> None:
    tests = f"""
import fxremat

@pytest.mark.limit_step_memory({peak_of_one(depth=12) * 4 // 5})
@pytest.mark.parametrize("how", ["plain", "fxremat"])
def test_step(how):
    search = fxremat.Search(seconds=0)
    model = Net(depth=12)
    train(model if how == "plain" else fxremat.compile(model, mem="75%", search=search))

@pytest.mark.limit_step_memory("1MiB")
def test_compiled():
    train(torch.compile(Net()))
"""
    result = run_alone(pytester, MODEL + tests)
    result.assert_outcomes(passed=2, failed=1)
    assert "FAILED test_it.py::test_step[plain]" in said(result)


# --- the record -----------------------------------------------------------------------------------------------


def test_the_record_tells_what_grew(pytester: pytest.Pytester) -> None:
    record = pytester.path / "step-memory.json"
    result = run(pytester, limited("1MiB") + limited(1, name="test_fails") + "\ndef test_plain(): pass\n")
    assert not record.exists()
    result = run(pytester, limited("1MiB") + limited(1, name="test_fails"), "--update-step-memory")
    result.assert_outcomes(passed=1, failed=1)
    assert f"step memory: wrote the peaks of 1 tests to {record}" in said(result)
    written = json.loads(record.read_text())
    assert list(written["steps"]) == ["test_it.py::test_step"]  # those that pass
    entry = written["steps"]["test_it.py::test_step"]
    assert entry["peak"] == sum(entry["modules"].values()) == peak_of_one()
    before = record.read_text()
    result = run(pytester, limited("1MiB", "train(Net(depth=5), rows=2048)"))
    result.assert_outcomes(failed=1)
    text = said(result)
    assert f"since step-memory.json, with {peak_of_one() / 1024:.1f} KiB on cpu:" in text
    assert re.search(r"^  Net\.layers\.4\.1 +\+1\.0 MiB$", text, re.MULTILINE)
    assert re.search(r"^  all modules +\+", text, re.MULTILINE)
    assert "new: Net.layers.3, Net.layers.4" in text
    assert record.read_text() == before


def test_other_tests_of_a_record_stay_and_its_place_can_be_said(pytester: pytest.Pytester) -> None:
    (pytester.path / "inner").mkdir()
    pytester.makeini("[pytest]\nstep_memory_record = inner/peaks.json\n")
    run(pytester, limited("1MiB") + limited("1MiB", name="test_other"), "--update-step-memory")
    peaks = pytester.path / "inner" / "peaks.json"
    assert len(json.loads(peaks.read_text())["steps"]) == 2
    run(pytester, limited("4MiB", "train(Net(), rows=512)"), "--update-step-memory")
    steps = json.loads(peaks.read_text())["steps"]
    assert steps["test_it.py::test_step"]["peak"] > steps["test_it.py::test_other"]["peak"] == peak_of_one()
    run(pytester, limited("1MiB"), "--update-step-memory", "--step-memory-record", "here.json")
    assert list(json.loads((pytester.path / "here.json").read_text())["steps"]) == ["test_it.py::test_step"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 1, "steps": {"a": {}}}', '{"format": 2, "steps": {}}'])
def test_a_file_that_is_no_record_is_left_alone(pytester: pytest.Pytester, text: str) -> None:
    record = pytester.path / "step-memory.json"
    record.write_text(text)
    result = run(pytester, limited(1))
    result.assert_outcomes(failed=1)
    assert f"no record to compare with: {record} " in said(result)
    result = run(pytester, limited("1MiB"), "--update-step-memory")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"{record} " in said(result) + result.stderr.str()
    assert record.read_text() == text


def test_updating_without_a_step_says_so(pytester: pytest.Pytester) -> None:
    result = run(pytester, "\ndef test_plain(): pass\n", "--update-step-memory")
    result.assert_outcomes(passed=1)
    assert "step memory: no test with the mark limit_step_memory has passed: " in said(result)
    assert not (pytester.path / "step-memory.json").exists()


@pytest.mark.long
def test_workers_of_xdist_send_their_peaks(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    tests = "".join(limited("1MiB", name=f"test_{number}") for number in range(3))
    tests = MODEL + tests + limited(1, name="test_fails")
    result = run_alone(pytester, tests, "-n", "2", "--update-step-memory")
    result.assert_outcomes(passed=3, failed=1)
    assert len(json.loads((pytester.path / "step-memory.json").read_text())["steps"]) == 3
    assert "Net" in said(result)


def test_junit_has_the_peak(pytester: pytest.Pytester) -> None:
    run(pytester, limited("1MiB"), "--junitxml=out.xml")
    assert f'<property name="step_memory_peak" value="{peak_of_one()}"' in (pytester.path / "out.xml").read_text()


# --- other runs -----------------------------------------------------------------------------------------------


def test_runs_without_the_mark_import_nothing_and_call_no_hook(pytester: pytest.Pytester) -> None:
    tests = """
import sys

def test_nothing_is_imported(request):
    assert [name for name in sys.modules if name.split(".")[0] in ("torch", "fxremat", "numpy")] == []
    assert request.config.pluginmanager.get_plugin("fxremat-step-memory") is None
"""
    result = run_alone(pytester, tests)
    result.assert_outcomes(passed=1)


def test_a_marked_test_that_is_not_run_imports_nothing(pytester: pytest.Pytester) -> None:
    tests = """
import sys
import pytest

@pytest.mark.limit_step_memory("1GiB")
@pytest.mark.skip
def test_skipped(): pass

def test_nothing_is_imported():
    assert [name for name in sys.modules if name.split(".")[0] in ("torch", "fxremat", "numpy")] == []
"""
    result = run_alone(pytester, tests)
    result.assert_outcomes(passed=1, skipped=1)


def test_the_mark_is_declared_and_the_options_are_explained(pytester: pytest.Pytester) -> None:
    result = run(pytester, limited("1GiB"), "--strict-markers", "--markers")
    assert "@pytest.mark.limit_step_memory(limit): fail if forward and backward of a training step" in said(result)
    text = " ".join(said(run(pytester, "", "--help")).split())
    assert "--step-memory-record=PATH record of earlier peaks" in text
    assert "--update-step-memory write the peaks of the tests that pass to the record" in text


def test_the_entry_point_is_the_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (entry,) = project["project"]["entry-points"]["pytest11"].items()
    assert entry == ("pytest_fxremat", pytest_fxremat.__name__)  # the same name, so that `-p` loads no second one
    assert project["tool"]["setuptools"]["py-modules"] == ["pytest_fxremat"]
    code = "import pytest_fxremat, sys; print([m for m in ('torch', 'numpy', 'fxremat') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_guide_shows_what_pytest_prints(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "guides" / "test-memory.md").read_text()
    shown = re.findall(r"<!-- pytest -->\n```text\n(.*?)```", page, re.DOTALL)
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    training = "".join(block for block in blocks if "fxremat.profile" not in block)
    pytester.makepyfile(test_training=training)
    arguments = ["-p", "pytest_fxremat", "-p", "no:cacheprovider"]
    first = pytester.runpytest(*arguments, "--update-step-memory")
    first.assert_outcomes(passed=2, failed=1)
    pytester.makepyfile(test_training=training.replace("train(Net())", "train(Net(width=1024))"))
    second = pytester.runpytest(*arguments, "test_training.py::test_training")
    second.assert_outcomes(failed=1)
    for text, result in zip(shown, (first, second), strict=True):
        # without numbers: the workspaces of kernels are of this CPU
        words = [re.sub(r"\d[\d.]*", "#", part).split() for part in (text, said(result))]
        assert " ".join(words[0]) in " ".join(words[1])
