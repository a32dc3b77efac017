"""The helper that runs a function on the ranks of a job, and what it says when one fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

pytestmark = pytest.mark.long


def _sum(rank: int, world: int, number: int) -> tuple[torch.Tensor, int]:
    total = torch.tensor([float(number + rank)])
    dist.all_reduce(total)
    return total, torch.get_num_threads()


def _one_fails(rank: int, world: int) -> str:
    if rank == 1:
        raise ValueError("no weights")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def _others_hang(rank: int, world: int) -> None:
    if rank == 0:
        time.sleep(300)
    raise ValueError("no weights")


@pytest.mark.parametrize("store", ["file", pytest.param("tcp", marks=pytest.mark.long)])
def test_every_rank_returns_its_value(store: str, tmp_path: Path) -> None:
    expected = torch.tensor([11.0])
    for total, threads in run_ranks(_sum, 2, tmp_path, 5, store=store):
        assert torch.equal(total, expected)
        assert threads == 1


def test_the_first_failure_is_raised_and_no_process_is_left(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)^rank 1:.*in _others_hang.*ValueError: no weights"):
        run_ranks(_others_hang, 2, tmp_path)
    assert time.monotonic() - began < 60


@pytest.mark.long
def test_errors_are_values_where_they_are_expected(tmp_path: Path) -> None:
    fine, failed, killed = run_ranks(_one_fails, 3, tmp_path, errors=True)
    assert (fine.value, fine.error, fine.code) == ("fine", "", 0)
    assert "ValueError: no weights" in failed.error
    assert failed.code == 1
    assert (killed.value, killed.code) == (None, -signal.SIGKILL)
    assert killed.error


@pytest.mark.long
def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    hanging, _ = run_ranks(_others_hang, 2, tmp_path, errors=True, limit=5)
    assert "in _others_hang" in hanging.error
    assert hanging.code == 1
