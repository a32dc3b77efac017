"""A function on every rank of a gloo job: processes of their own, one thread each, that cannot hang the tests.

    def both(rank: int, world: int, number: int) -> int:        # at the top of a test file, to be found by its name
        ...
    assert run_ranks(both, 2, tmp_path, 5) == [5, 6]
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, overload

ROOT = Path(__file__).resolve().parents[1]
GRACE = 3.0  # seconds that the other ranks have to end by themselves after one has failed


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one rank: what its function returned, or how it failed."""

    value: Any  # what the function returned; None where it did not return
    error: str  # the traceback, or what a killed process wrote to stderr; "" where the function returned
    code: int  # the process's exit code; negative: the signal that killed it
    seconds: float  # from the start of the job to the return or the error
    stderr: str


@overload
def run_ranks(
    function: Callable[..., Any], world: int, tmp_path: Path, *args: Any, limit: float = 120, store: str = "file",
    destroy: bool = True, errors: Literal[False] = False,
) -> list[Any]: ...  # fmt: skip
@overload
def run_ranks(
    function: Callable[..., Any], world: int, tmp_path: Path, *args: Any, limit: float = 120, store: str = "file",
    destroy: bool = True, errors: Literal[True],
) -> list[Outcome]: ...  # fmt: skip
def run_ranks(
    function: Callable[..., Any], world: int, tmp_path: Path, *args: Any, limit: float = 120, store: str = "file",
    destroy: bool = True, errors: bool = False,
) -> list[Any]:  # fmt: skip
    """Run `function(rank, world, *args)` on every rank of a job and return what each returned.

    `store` is "file" or "tcp"; with `destroy=False` the processes end without `destroy_process_group`. A process that
    runs for longer than `limit` seconds prints the traceback of every thread and ends.

    Raises AssertionError with the traceback of the rank that failed first; the others are killed soon after. With
    `errors=True` nothing is raised, every rank goes on for as long as it likes, and the list is of `Outcome`.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=tmp_path))
    address = f"file://{folder}/store" if store == "file" else f"tcp://127.0.0.1:{_free_port()}"
    (folder / "job").write_bytes(pickle.dumps((function, world, args, address, limit, destroy, time.time())))
    began = time.time()
    running = [_start(folder, rank) for rank in range(world)]
    try:
        _watch(running, folder, time.monotonic() + limit + GRACE, wait_for_all=errors)
    finally:
        for one in running:
            one.kill()
            one.wait()
    outcomes = [_outcome(folder, rank, one.returncode, began) for rank, one in enumerate(running)]
    if errors:
        return outcomes
    failed = [(one.seconds, rank) for rank, one in enumerate(outcomes) if one.error or one.code]
    if failed:
        rank = min(failed)[1]
        raise AssertionError(f"rank {rank}:\n{outcomes[rank].error or outcomes[rank].stderr}")
    return [outcome.value for outcome in outcomes]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with open(folder / f"{rank}.stderr", "wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(folder), str(rank)],
            cwd=ROOT, env=environment, stdout=stderr, stderr=stderr,
        )  # fmt: skip


def _watch(running: list[subprocess.Popen[bytes]], folder: Path, until: float, *, wait_for_all: bool) -> None:
    """Wait until all processes have ended, or one has failed and the others have had their time."""
    while {one.poll() for one in running} & {None} and time.monotonic() < until:
        for rank, one in enumerate(running):
            if one.returncode is not None and not (folder / f"{rank}.ended").exists():
                (folder / f"{rank}.ended").touch()
                if one.returncode and not wait_for_all:
                    until = min(until, time.monotonic() + GRACE)
        time.sleep(0.02)


def _outcome(folder: Path, rank: int, code: int, began: float) -> Outcome:
    stderr = (folder / f"{rank}.stderr").read_text(errors="replace")
    if (folder / f"{rank}.result").exists():
        value, error, ended = pickle.loads((folder / f"{rank}.result").read_bytes())
    else:
        value, error, ended = None, stderr or f"ended with exit code {code}", time.time()
    return Outcome(value=value, error=error, code=code, seconds=ended - began, stderr=stderr)


# --- one rank --------------------------------------------------------------------------------------------------------


def _rank(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    function, world, args, address, limit, destroy, began = pickle.loads((folder / "job").read_bytes())
    faulthandler.dump_traceback_later(max(1.0, began + limit - time.time()), exit=True)
    torch.set_num_threads(1)
    value, error, code = None, "", 0
    try:
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=limit)
        )
        value = function(rank, world, *args)
    except BaseException:
        error, code = traceback.format_exc(), 1
    unfinished = folder / f"{rank}.unfinished"
    unfinished.write_bytes(pickle.dumps((value, error, time.time())))
    unfinished.rename(folder / f"{rank}.result")
    if address.startswith("tcp") and rank == 0:  # whose process has the store
        _wait_for_the_others(folder, world)
    if destroy and dist.is_initialized():
        with contextlib.suppress(Exception):  # where a peer was killed
            dist.destroy_process_group()
    sys.exit(code)


def _wait_for_the_others(folder: Path, world: int) -> None:
    for rank in range(1, world):
        while not ((folder / f"{rank}.result").exists() or (folder / f"{rank}.ended").exists()):
            time.sleep(0.02)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]))
