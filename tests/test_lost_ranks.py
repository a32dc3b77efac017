"""Nothing hangs: where one rank of a sharded model fails, is killed or gets other shapes, the others end in one line.

A rank that fails in planning is heard of, whether its process ends or lives on. One that lives on in the middle of a
step is not: the others are inside of a collective then, which only the timeout of the process group ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxremat
from fxremat import heartbeat
from fxremat.errors import FxrematError
from fxremat.settings import Search
from tests.ranks import Outcome, run_ranks

WIDTH = 16
SHORT = 2.0  # seconds of silence
AT_ONCE = 10.0  # seconds that a clear end takes at most, on a busy machine, where nothing has to be waited for
SOON = 30.0
BOOM = "the disk is full"


class Blocks(nn.Module):
    """Three blocks; `fails` is called in forward, whose error dynamo sees as the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError(BOOM)
        loss: Tensor = self.blocks(x).square().sum()
        return loss


def _compiled(kind: str) -> Any:
    heartbeat.SILENT, heartbeat.BEAT = SHORT, 0.2
    torch.manual_seed(0)
    model = Blocks()
    if kind == "tensor parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"blocks.0.0": ColwiseParallel(), "blocks.1.0": RowwiseParallel()})
    else:
        fxremat.fully_shard(model, replicate=kind == "replicated")
    return fxremat.compile(model, mem="100%", search=Search(seconds=0.0))


def _rows(count: int) -> Tensor:
    return torch.ones(count, WIDTH)


def _step(model: Any, rows: int = 4) -> None:
    model(_rows(rows)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None


def _steps(model: Any, rows: int) -> None:
    for _ in range(3):
        _step(model, rows)


def _fail(*_: Any, **__: Any) -> Any:
    raise ValueError(BOOM)


def _line(work: Callable[[], None]) -> tuple[float, str]:
    """Seconds that some work takes, and the line of the error that it ends with; "" where it ends well."""
    began, line = time.monotonic(), ""
    try:
        work()
    except FxrematError as error:
        line = str(error)
    except ValueError as error:
        line = f"ValueError: {error}"
    return time.monotonic() - began, line


# --- while planning: the rank that fails lives on ---------------------------------------------------------------------

QUICK = ("walking", "searching", "overlapping")  # the others are tried in the long tests
PLANNING = {  # where one rank fails, and which
    "measuring": ("fxremat.planning.facts.measure", 1),
    "walking": ("fxremat.cost.measure._measure", 1),
    "searching": ("fxremat.planning.surveys._searched", 0),
    "building": ("fxremat.search.refine.Ladder.frontier", 1),
    "timing": ("fxremat.planning.choosing.calibration", 1),
    "overlapping": ("fxremat.planning.choosing.with_overlap", 1),
}


def _while_planning(rank: int, world: int, kind: str, places: Sequence[str]) -> dict[str, tuple[float, str]]:
    found = {}
    model = _compiled(kind)
    found["shapes"] = _line(lambda: _step(model, 4 + rank))
    dist.barrier()
    model.fails = rank == 1
    found["capturing"] = _line(lambda: _step(model))
    dist.barrier()
    model.fails = False
    for place in places:
        name, who = PLANNING[place]
        model = _compiled(kind)
        with mock.patch(name, _fail) if rank == who else contextlib.nullcontext():
            found[place] = _line(lambda: _step(model))  # noqa: B023
        dist.barrier()
    for rows in (4, 6, 4):
        found[f"then {rows}"] = _line(lambda: _step(model, rows))  # noqa: B023
    found["plans"] = (0.0, str(len(model.fxremat.plans)))
    dist.barrier()
    found["later"] = _line(lambda: _steps(model, 4 + 5 * rank))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "store"),
    [
        ("sharded", "tcp"),
        pytest.param("sharded", "file", marks=pytest.mark.long),
        pytest.param("replicated", "file", marks=pytest.mark.long),
        pytest.param("tensor parallel", "tcp", marks=pytest.mark.long),
    ],
)
def test_what_fails_in_planning_is_heard_of(kind: str, store: str, tmp_path: Path) -> None:
    places = QUICK if (kind, store) == ("sharded", "tcp") else tuple(PLANNING)
    both = run_ranks(_while_planning, 2, tmp_path, kind, places, store=store)
    told = {"capturing": 1} | {place: PLANNING[place][1] for place in places}
    for rank, found in enumerate(both):
        for line in ("shapes", *told, "later"):
            assert found[line][1], line
            assert "\n" not in found[line][1]
            assert found[line][0] < AT_ONCE
        assert "rank 0 was called with 4x16, rank 1 was called with 5x16" in found["shapes"][1]
        for place, who in told.items():
            assert (BOOM if place != "capturing" else "raise ValueError(BOOM)") in found[place][1], place
            assert (f"rank {who}" in found[place][1]) == (rank != who), place
        assert [found[f"then {rows}"][1] for rows in (4, 6)] == ["", ""]
        assert found["plans"][1] == "2"
    assert "rank 0 trains on with an earlier plan while rank 1 has to plan" in both[1]["later"][1]
    assert "rank 0 cannot finish the" in both[0]["later"][1]


# --- in a step: the process that fails ends ---------------------------------------------------------------------------

ENDS = {"raises": lambda: _fail(), "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL)}
STEP = {  # what a rank calls in planning, and ends with; "" for what it does in the second step
    "overlapping": "fxremat.planning.choosing.with_overlap",
    "measuring": "fxremat.cost.measure._Visitor.__call__",
    "forward": "",
    "backward": "",
    "optimizer": "",
    "between": "",
}


def _in_a_step(rank: int, world: int, kind: str, place: str, how: str, lost: int) -> tuple[float, str]:
    model = _compiled(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    end = ENDS[how] if rank == lost else lambda: None

    def step() -> None:
        loss = model(_rows(4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if rank == lost:
        _let_end(model, optimizer, place, end)
    if not STEP[place]:
        step()
    began = time.monotonic()
    try:
        for _ in range(4):
            step()
            if place == "between":
                end()
    except FxrematError as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, ""


def _let_end(model: Any, optimizer: torch.optim.Optimizer, place: str, end: Callable[[], None]) -> None:
    if STEP[place]:
        mock.patch(STEP[place], side_effect=lambda *_, **__: end()).start()
    elif place == "optimizer":
        steps = itertools.count()
        optimizer.register_step_pre_hook(lambda *_: end() if next(steps) else None)
    elif place != "between":
        count = {"forward": 3, "backward": 4}[place]
        real, calls = heartbeat.inside_step, []

        @contextlib.contextmanager
        def inside(what: str) -> Any:
            with real(what):
                calls.append(what)
                if len(calls) == count:
                    end()
                yield

        mock.patch("fxremat.heartbeat.inside_step", inside).start()


def _check(outcomes: Sequence[Outcome], lost: int) -> None:
    other = outcomes[1 - lost]
    assert other.value is not None, other.error
    seconds, line = other.value
    assert line
    assert "\n" not in line
    assert seconds < SOON


def _cases() -> Iterator[Any]:
    for kind in ("sharded", "replicated", "tensor parallel"):
        for place, how, lost in itertools.product(STEP, ENDS, (0, 1)):
            if kind == "tensor parallel" and (place not in ("overlapping", "forward") or lost == 0):
                continue
            quick = kind == "sharded" and (place, how, lost) == ("backward", "is killed", 1)
            yield pytest.param(kind, place, how, lost, marks=() if quick else pytest.mark.long)


@pytest.mark.parametrize(("kind", "place", "how", "lost"), list(_cases()))
def test_a_process_that_ends_is_noticed(kind: str, place: str, how: str, lost: int, tmp_path: Path) -> None:
    store = "tcp" if lost == 0 and how == "is killed" else "file"  # a TCP store goes with the process of rank 0
    outcomes = run_ranks(_in_a_step, 2, tmp_path, kind, place, how, lost, store=store, destroy=False, errors=True)
    _check(outcomes, lost)
