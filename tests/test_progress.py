"""Bars have one switch and one prefix; the log has a line when planning begins and one when it ends."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import __main__ as command_line
from fxremat import progress as module
from fxremat.chains.chain import Block, Chain
from fxremat.errors import BudgetTooSmall
from fxremat.progress import bars, planning, progress, telling
from fxremat.solvers import TABLES

CHAIN = Chain(
    blocks=(Block(forward_time=1.0, backward_time=2.0, output_bytes=4, saved_bytes=9),) * 4, input_bytes=4
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of every bar that is made."""
    made: list[dict[str, Any]] = []

    def tqdm(steps: Iterable[Any], **settings: Any) -> Any:
        made.append(settings)
        return original(steps, **{**settings, "disable": True})

    original = module.tqdm
    monkeypatch.setattr(module, "tqdm", tqdm)
    return made


def test_one_switch_for_all_bars(made: list[dict[str, Any]]) -> None:
    TABLES["input_drop"](CHAIN, 30, 30)
    with bars(shown=False):
        TABLES["input_drop"](CHAIN, 30, 30)
        TABLES["floating"](CHAIN, 30, 30)
        with bars(shown=True):
            assert list(progress([1, 2], "inner")) == [1, 2]
    list(progress([1], "after"))
    assert [settings["disable"] for settings in made] == [None, True, True, True, None]  # None: on a terminal
    assert all(settings["desc"].startswith("fxremat: ") for settings in made)


def test_the_switch_is_back_after_an_error(made: list[dict[str, Any]]) -> None:
    with pytest.raises(ZeroDivisionError), bars(shown=False):
        raise ZeroDivisionError
    list(progress([1], "after"))
    assert made[0]["disable"] is None


def test_a_line_at_the_start_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxremat")
    with planning("1460 ops within 4.0 GiB") as planned:
        planned("peak 3.9 GiB")
    begin, end = caplog.records
    assert (begin.name, begin.levelname, begin.getMessage()) == (
        "fxremat",
        "INFO",
        "planning 1460 ops within 4.0 GiB",
    )
    assert re.fullmatch(r"planned in \d+\.\d s: peak 3\.9 GiB", end.getMessage())


def test_a_failure_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxremat")
    with pytest.raises(BudgetTooSmall), planning("a model"):
        raise BudgetTooSmall(365, 50)
    end = caplog.records[-1].getMessage()
    assert re.fullmatch(r"no plan after \d+\.\d s: BudgetTooSmall: no schedule fits in 50 bytes; .* 365 bytes", end)


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_line_every_ten_seconds_says_what_is_under_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.EVERY == 10
    monkeypatch.setattr(module, "EVERY", 0.02)
    caplog.set_level(logging.INFO, "fxremat")
    threads = threading.active_count()
    with telling("capturing GPT"):
        wait_for(lambda: any(line.startswith("capturing GPT; 0 s so far") for line in caplog.messages))
        with planning("12 ops within 100%"):
            wait_for(lambda: any(line.startswith("planning 12 ops within 100%; ") for line in caplog.messages))
            for _ in progress(range(3), "measuring ops", total=3):
                wait_for(lambda: any(line.startswith("measuring ops, 1 of 3; ") for line in caplog.messages))
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    said = len(caplog.messages)
    time.sleep(0.1)
    assert len(caplog.messages) == said


def test_the_command_line_shows_these_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY", 0.02)
    monkeypatch.setitem(command_line._COMMANDS, "devices", lambda _: time.sleep(0.5) or "done")
    assert command_line.main(["devices"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "done\n"
    assert len(printed.err.splitlines()) > 3
    assert all(re.fullmatch(r"fxremat: devices; \d s so far", line) for line in printed.err.splitlines())
    assert module.ticks.handlers == []


@pytest.mark.parametrize(("asked", "lines"), [("", 0), ("logging.basicConfig(level=logging.INFO)", 2)])
def test_nothing_is_printed_unless_asked_for(asked: str, lines: int) -> None:
    code = f"import logging; from fxremat.progress import planning; {asked}\nwith planning('a model'): pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr.count("\n")) == ("", lines)


def test_the_log_names_the_sizes_and_the_third_of_them_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Parameters and buffers are no inputs; plans that are only looked at are not warned of."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Flatten(0))
    compiled = fxremat.compile(Total(model), mem="100%", costs="estimate", dynamic=False)

    def many() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    with caplog.at_level("INFO", logger="fxremat"):
        for rows in (5, 6):
            compiled(torch.ones(rows, 4)).backward()
        compiled.train(False).train()
        assert [line for line in caplog.messages if line.startswith("planning")] == [
            f"planning {len(compiled.plan.graph.ops)} ops within 100% for inputs of {rows}x4" for rows in (5, 6)
        ]
        assert many() == []
        compiled(torch.ones(7, 4)).backward()
        (said,) = many()
        assert re.search(r"for 3 combinations of input sizes one by one, the last in \d+\.\d s", said)
        assert "dynamic=True" in said
        compiled(torch.ones(8, 4)).backward()
        for rows in (5, 6, 7, 8):
            fxremat.plan(Total(model), (torch.ones(rows, 4),), mem="100%", costs="estimate")
    assert many() == [said]


class Recurrent(nn.Module):
    """Runs a layer for each column of its input, so that other lengths have other ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for column in range(1, x.shape[1]):
            state = self.layer(state + x[:, column]).tanh()
        return state.sum()


@pytest.mark.parametrize("dynamic", [None, True])
def test_of_ops_that_depend_on_sizes_no_capture_for_all_is_promised(
    dynamic: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = fxremat.compile(Recurrent(), mem="100%", costs="estimate", dynamic=dynamic)
    for length in (5, 6, 7, 8):
        compiled(torch.ones(3, length, 4)).backward()
    (said,) = (each for each in caplog.messages if "input sizes one by one" in each)
    assert "the model runs other ops for other sizes" in said
    assert "dynamic=True" not in said


class Adding(nn.Module):
    """Adds up to two more inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, more: Tensor | None = None, most: Tensor | None = None) -> Tensor:
        for other in (more, most):
            x = self.layer(x) if other is None else self.layer(x + other)
        return x.sum()


def test_inputs_that_are_left_out_are_no_other_sizes(caplog: pytest.LogCaptureFixture) -> None:
    compiled, x = fxremat.compile(Adding(), mem="100%", costs="estimate"), torch.ones(5, 4)
    for given in ({}, {"more": x}, {"most": x}, {"more": x, "most": x}):
        compiled(x, **given).backward()
    assert len(compiled.fxremat.plans) == 4
    assert "combinations of input sizes" not in caplog.text


def test_the_log_has_a_line_for_every_size_of_one_capture(caplog: pytest.LogCaptureFixture) -> None:
    compiled = fxremat.compile(Total(nn.Linear(4, 4)), mem="100%", costs="estimate", dynamic=True)
    with caplog.at_level("INFO", logger="fxremat"):
        for rows in (8, 6, 8, 16):
            compiled(torch.ones(rows, 4)).backward()
    count = len(compiled.plan.graph.ops)
    lines = [line for line in caplog.messages if line.startswith("plann")]
    assert lines[::2] == [
        f"planning {count} ops within 100% of what x[0] = {largest} takes for inputs of {rows}x4{known}"
        for rows, largest, known in ((8, 8, ""), (6, 8, " from known programs"), (16, 16, " from known programs"))
    ]
    assert all(line.startswith("planned in 0.") and "peak" in line for line in lines[1::2])


class Total(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("logging.getLogger('fxremat.x').warning('loud'); logging.getLogger('fxremat.x').info('quiet')", "loud\n"),
        ("fxremat.logs.is_logged('passes'); logging.getLogger('fxremat.passes').info('asked for')", "asked for\n"),
    ],
    ids=["warning", "topic"],
)
def test_warnings_and_topics_are_printed_where_logging_is_not_set_up(code: str, told: str) -> None:
    code = f"import logging, fxremat.logs, fxremat.progress; {code}"
    environment = {**os.environ, "FXREMAT_LOG": "passes"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == told
