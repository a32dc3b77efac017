"""Ranks that agree through the store of the job, while others fail, are killed, hang, or do something else."""

from __future__ import annotations

import doctest
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fxremat import agreement, heartbeat
from fxremat.agreement import Agreement
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.heartbeat import Heartbeat, status
from fxremat.torch_private import store_of_job
from tests.ranks import Outcome, run_ranks


def _soon() -> None:
    """Silence is noticed after two seconds."""
    heartbeat.SILENT, heartbeat.BEAT = 2.0, 0.2


def _error(function: Callable[[], Any]) -> tuple[type, str, float]:
    """Type, text and seconds of the error that the function raises."""
    began = time.monotonic()
    with pytest.raises(Exception) as caught:
        function()
    return caught.type, str(caught.value), time.monotonic() - began


def _raise(error: BaseException) -> None:
    raise error


def _end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _keys_at_rest(store: Any) -> int:
    """Count the keys while no rank is in a call; the last to leave one deletes its keys."""
    dist.barrier()
    time.sleep(0.3)
    count: int = store.num_keys()
    dist.barrier()
    return count


# --- what is promised of every method, in one job of three ranks ------------------------------------------------------


def _every_method(rank: int, world: int) -> dict[str, Any]:
    _soon()
    seen: dict[str, Any] = {}
    store = store_of_job()
    one = Agreement("all", range(world))
    one.gathered(None)
    keys = _keys_at_rest(store)
    seen["gathered"] = one.gathered({"rank": rank})
    seen["maximum"] = one.maximum([float(rank), -float(rank)])
    seen["different counts"] = _error(lambda: one.maximum([1.0] * (1 + rank)))[1]
    seen["together"] = one.together("measuring", lambda: rank)
    failing = [ValueError("no op\nsecond line"), BudgetTooSmall(minimum=9, budget=5)]
    for number, error in enumerate(failing):
        seen[f"together {number}"] = _error(
            lambda error=error: one.together("measuring", lambda: _raise(error) if rank == 1 else None)
        )[:2]
        seen[f"first {number}"] = _error(
            lambda error=error: one.from_first("planning", lambda: _raise(error))
        )[:2]
    seen["first"] = one.from_first("planning", lambda: ("plan of", rank))
    seen["unpicklable"] = _error(lambda: one.from_first("planning", lambda: threading.Lock()))[1]
    large = one.from_first("planning", lambda: bytes(5_000_000) + b"end")
    seen["large"] = len(large), large[-3:]
    seen["all large"] = [len(value) for value in one.gathered(bytes(2_000_000 + rank))]
    first_of_two = Agreement("all", (2, 1)).from_first("planning", lambda: rank) if rank else None
    seen["first of two"] = first_of_two
    seen["alone"] = Agreement("alone", (rank,)).gathered(rank)
    one.gathered(None)
    seen["keys"] = _keys_at_rest(store) - keys
    two = Agreement("failing", range(world))
    if rank == 1:
        two.fail(BudgetTooSmall(minimum=9, budget=5))
    else:
        seen["failed"] = _error(lambda: two.gathered(rank))
        seen["failed later"] = _error(lambda: two.from_first("planning", lambda: 1))
    dist.barrier()
    return seen


def _check_every_method(seen: list[dict[str, Any]]) -> None:
    too_small = str(BudgetTooSmall(minimum=9, budget=5))
    for rank, one in enumerate(seen):
        assert one["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert one["maximum"] == [2.0, 0.0]
        assert "1 on rank 0, 2 on rank 1, 3 on rank 2" in one["different counts"]
        assert one["together"] == rank
        told = "rank 1 failed while measuring: "
        assert one["together 0"] == (
            (ValueError, "no op\nsecond line") if rank == 1 else (FxrematError, told + "ValueError: no op")
        )
        assert one["together 1"] == (
            (BudgetTooSmall, too_small) if rank == 1 else (FxrematError, told + too_small)
        )
        assert one["first 0"] == (
            (ValueError, "no op\nsecond line") if rank == 0
            else (FxrematError, "rank 0 failed while planning: ValueError: no op")
        )  # fmt: skip
        assert one["first 1"] == (BudgetTooSmall, too_small)
        assert one["first"] == ("plan of", 0)
        assert "cannot pickle" in one["unpicklable"]
        assert one["large"] == (5_000_003, b"end")
        assert one["all large"] == [2_000_000, 2_000_001, 2_000_002]
        assert one["first of two"] == (2 if rank else None)
        assert one["alone"] == [rank]
        assert one["keys"] == 0
        if rank != 1:
            kind, text, seconds = one["failed"]
            assert (kind, text) == (BudgetTooSmall, too_small)
            assert seconds < 1
            assert one["failed later"][:2] == (BudgetTooSmall, too_small)


@pytest.mark.parametrize("store", ["tcp", pytest.param("file", marks=pytest.mark.long)])
def test_every_method(store: str, tmp_path: Path) -> None:
    _check_every_method(run_ranks(_every_method, 3, tmp_path, store=store))


# --- ranks that end, hang, or are elsewhere ---------------------------------------------------------------------------


def _one_is_killed(rank: int, world: int, killed: int) -> Any:
    _soon()
    one = Agreement("all", range(world))
    one.gathered(rank)
    time.sleep(0.5)  # the others have read it
    if rank == killed:
        _end_now()
    return _error(lambda: one.from_first("planning", int) if killed == 0 else one.gathered(rank))


def _others(outcomes: list[Outcome], without: int) -> list[tuple[type, str, float]]:
    assert outcomes[without].code == -signal.SIGKILL
    others = [one for rank, one in enumerate(outcomes) if rank != without]
    assert [(one.error, one.code) for one in others] == [("", 0)] * len(others), others
    return [one.value for one in others]


@pytest.mark.long
@pytest.mark.parametrize("store", ["tcp", pytest.param("file", marks=pytest.mark.long)])
def test_a_killed_rank_is_named(store: str, tmp_path: Path) -> None:
    for kind, text, seconds in _others(
        run_ranks(_one_is_killed, 2 if store == "tcp" else 3, tmp_path, 1, store=store, errors=True), 1
    ):
        assert kind is FxrematError
        assert text == "rank 1 has ended or hangs: it was last heard from 2 s ago, while planning together"
        assert seconds < 8


@pytest.mark.long
def test_the_rank_that_holds_the_store_is_killed(tmp_path: Path) -> None:
    for kind, text, seconds in _others(
        run_ranks(_one_is_killed, 3, tmp_path, 0, store="tcp", errors=True), 0
    ):
        assert kind is FxrematError
        assert text.startswith("rank 0, or what else holds the store of the job, has ended or hangs (")
        assert text.endswith(", while planning")
        assert "\n" not in text
        assert seconds < 8


@pytest.mark.long
def test_the_first_rank_is_killed_while_it_plans(tmp_path: Path) -> None:
    for kind, text, _ in _others(run_ranks(_one_is_killed, 3, tmp_path, 0, errors=True), 0):
        assert kind is FxrematError
        assert text == "rank 0 has ended or hangs: it was last heard from 2 s ago, while planning"


def _stopped_store(rank: int, world: int, folder: Path) -> Any:
    """Rank 0, which holds the store, is stopped (as by a debugger) until rank 1 has noticed."""
    _soon()
    one = Agreement("all", range(world))
    pids = one.gathered(os.getpid())
    if rank == 0:
        while not (folder / "noticed").exists():
            time.sleep(0.05)
        return None
    time.sleep(0.3)
    os.kill(pids[0], signal.SIGSTOP)
    try:
        return _error(lambda: one.gathered(rank))
    finally:
        os.kill(pids[0], signal.SIGCONT)
        (folder / "noticed").touch()


@pytest.mark.long
def test_a_store_that_does_not_answer_is_noticed(tmp_path: Path) -> None:
    _, (kind, text, seconds) = run_ranks(_stopped_store, 2, tmp_path, tmp_path, store="tcp")
    assert kind is FxrematError
    assert "it has not answered for 2 s" in text
    assert seconds < 8


def _elsewhere(rank: int, world: int) -> Any:
    """Rank 1 is inside of a step; later both wait for each other in different agreements."""
    _soon()
    first, second = Agreement("first", range(world)), Agreement("second", range(world))
    first.gathered(rank)
    status.step = 3
    if rank == 1:
        status.inside = True
        time.sleep(4)
        status.inside = False
        inside = _error(lambda: first.gathered(rank))
    else:
        inside = _error(lambda: first.gathered(rank))
    return inside, _error(lambda: (second if rank else Agreement("third", range(world))).gathered(rank))


@pytest.mark.long
def test_a_rank_that_trains_on_and_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    for inside, crossed in run_ranks(_elsewhere, 2, tmp_path):
        assert inside[0] is crossed[0] is FxrematError
        assert inside[1].startswith(
            "rank 1 trains on with an earlier plan while rank 0 has to plan for new shapes"
        )
        assert "every rank has to plan the same models in the same order" in crossed[1]
        assert max(inside[2], crossed[2]) < 8


# --- the judgement itself, without processes --------------------------------------------------------------------------


def _beat(number: int, **fields: Any) -> Heartbeat:
    return Heartbeat(**{"number": number, "step": 0, "inside": False, "call": "", "waits_for": (), **fields})


def _looks(beats: list[Heartbeat | None], *, step: int = 0, patience: float = 1800.0) -> str:
    """Return what is raised, and after how many looks at rank 1 two seconds apart; "" where nothing is."""
    lookout = agreement._Lookout(agreement._Call("here", what="planning"), 0, step, patience)
    for number, beat in enumerate(beats):
        try:
            lookout.look(2.0, {1: beat})
        except FxrematError as error:
            return f"{number}: {error}"
    return ""


def test_who_can_still_come() -> None:
    steps = range(20)
    assert (
        _looks([_beat(0)] * 20)
        == "8: rank 1 has ended or hangs: it was last heard from 16 s ago, while planning"
    )
    assert _looks([_beat(0), *[None] * 20]).startswith("8: rank 1 has ended or hangs")
    assert _looks([_beat(n) for n in steps]) == ""
    assert _looks([None] * 20) == ""
    assert _looks([None] * 20, patience=11) == "5: rank 1 has not come within 11 s, while planning"
    assert _looks([_beat(n) for n in steps], patience=11).startswith("5: rank 1 has not come")
    assert _looks([_beat(n, call="here") for n in steps], patience=11) == ""
    inside = [_beat(n, inside=True, step=7) for n in steps]
    assert _looks(inside, step=7).startswith("8: rank 1 trains on with an earlier plan")
    assert _looks(inside, step=8) == ""
    assert _looks([*inside[:8], _beat(8), *inside[9:12]]) == ""
    crossed = [_beat(n, call="there", waits_for=(2, 0)) for n in steps]
    assert _looks(crossed).startswith("8: rank 1 waits for rank 0 in there while that one waits in here")
    assert _looks([_beat(n, call="here", waits_for=(0,)) for n in steps]) == ""
    assert _looks([_beat(n, call="there", waits_for=(2,)) for n in steps]) == ""


def test_docstrings() -> None:
    for module in (agreement, heartbeat):
        failed, tried = doctest.testmod(module)
        assert (failed, tried > 0) == (0, True)


# --- processes end ----------------------------------------------------------------------------------------------------


def _ends(rank: int, world: int, ended: str) -> int:
    heartbeat.BEAT = 0.001  # the thread is in the store's code most of the time
    heartbeat.watch()
    heartbeat.watch()
    one = Agreement("all", range(world))
    total = sum(one.gathered(rank))
    if ended == "stopped":
        heartbeat.stop()
        heartbeat.stop()
    if ended == "destroyed":
        dist.barrier()
        dist.destroy_process_group()
        assert "process group was destroyed" in _error(lambda: one.gathered(rank))[1]
        heartbeat.watch()
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("fxremat")]) <= 1
    return total


@pytest.mark.long
@pytest.mark.parametrize("destroy", [True, False])
@pytest.mark.parametrize("ended", ["", "stopped", "destroyed"])
@pytest.mark.parametrize("store", ["tcp", "file"])
def test_processes_end_cleanly(store: str, ended: str, destroy: bool, tmp_path: Path) -> None:
    for one in run_ranks(_ends, 2, tmp_path, ended, store=store, destroy=destroy, errors=True):
        assert (one.value, one.error, one.code) == (1, "", 0)
        assert "terminate" not in one.stderr


def _again(rank: int, world: int, folder: Path) -> list[int]:
    """Process groups one after the other, at the same file."""
    sums = []
    dist.destroy_process_group()
    for number in range(3):
        dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world)
        sums.append(sum(Agreement("all", range(world)).gathered(rank + number)))
        dist.barrier()
        dist.destroy_process_group()
        while (folder / "again").exists():
            time.sleep(0.01)
        time.sleep(0.5)
    return sums


@pytest.mark.long
def test_a_new_process_group_may_use_the_same_file(tmp_path: Path) -> None:
    assert run_ranks(_again, 2, tmp_path, tmp_path, limit=30) == [[1, 3, 5], [1, 3, 5]]
