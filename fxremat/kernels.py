"""Compiles the numba kernels that a first plan needs, in separate processes, while the model is captured.

    begin()     when a model is passed to fxremat: starts the compilers, unless these kernels are cached already
    ready()     before kernels are called: waits for them

A compiler calls the kernels on a chain of three blocks and a tape of two executions, with arguments of the types that
planning has; the result is passed on by numba's cache on disk. If no cache can be written, or no process be started,
kernels are compiled where they are called, as all others are.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fxremat.chains.chain import Block, Chain
from fxremat.jit import cache_marker
from fxremat.search.improve import FAR
from fxremat.search.replay import Tape, blank_pages, copy_pages, replay, replay_again, spend
from fxremat.solvers import input_drop, rows

AT_MOST = 300  # maximum seconds to wait for a compiler process
NOWHERE = (
    "the kernels of the %s are compiled again in every process, which takes some seconds: no folder for them can be "
    "written to; FXREMAT_CACHE names one"
)
log = logging.getLogger(__name__)

_compilers: list[subprocess.Popen[bytes]] = []


def begin() -> None:
    """Start processes that compile the kernels which are not cached on disk yet, and return at once.

    If several ranks run on one machine, only the first (LOCAL_RANK 0) does this.
    """
    if _compilers or os.environ.get("LOCAL_RANK", "0") != "0" or not _python():
        return
    for part, (_, kernels) in PARTS.items():
        with contextlib.suppress(OSError):
            marker = cache_marker(kernels)
            if marker is None:
                log.info(NOWHERE, part)
            elif not marker.exists():
                _compilers.append(_compiler(part))


def ready() -> None:
    """Wait for the compiler processes that `begin` started.

    Kernels can be called afterwards even if the processes failed.
    """
    while _compilers:
        compiler = _compilers.pop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if status := compiler.wait(AT_MOST):
                log.debug("a compiler of kernels ended with status %d", status)
        atexit.unregister(compiler.kill)


def _python() -> str | None:
    """Return the path of the Python interpreter.

    None in a frozen application, where `sys.executable` is the application.
    """
    return None if getattr(sys, "frozen", False) else sys.executable


def _compiler(part: str) -> subprocess.Popen[bytes]:
    where = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), where]))
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = [_python() or "python", "-P", "-m", "fxremat.kernels", part]  # -P: do not import from the current folder
    compiler = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **quiet)
    atexit.register(compiler.kill)
    return compiler


def compile_solver() -> None:
    """Compile the solver for chains, by calling it on a small chain."""
    block = Block(forward_time=1.0, backward_time=2.0, output_bytes=2, saved_bytes=4, grad_bytes=2)
    table = input_drop.build(Chain(blocks=(block,) * 3, input_bytes=0), 12, 12)
    table.schedule(table.least)


def compile_search() -> None:
    """Compile the kernels that simulate and improve schedules, by calling them on a small example."""
    one, two = np.array([0, 1, 1], np.int64), np.array([0, 0, 1], np.int64)
    tape = Tape(
        optional=np.array([1, 0], np.uint8),
        read_from=two,
        reads=np.zeros(1, np.int64),
        write_from=one,
        writes=np.zeros(1, np.int64),
        sizes=np.ones(1, np.int64),
        extra=np.zeros(2, np.int64),
        seconds=np.ones(2),
        seeds=1,
    )
    choice, pages, spare = np.ones(2, np.uint8), blank_pages(tape), blank_pages(tape)
    replay(tape, choice, pages, 0)
    copy_pages(pages, spare, 0, 1)
    replay_again(tape, choice, pages, spare, 1, 0, FAR)
    spend(tape, choice, pages, spare, np.zeros(1, np.int64), 0)


PARTS: Mapping[str, tuple[Callable[[], None], tuple[Any, ...]]] = MappingProxyType(
    {
        "solver": (compile_solver, (rows._places, input_drop.bounds, input_drop.fill_tiles, input_drop.trace)),
        "search": (compile_search, (replay, replay_again, copy_pages, spend)),
    }
)
"""Name of a group of kernels -> (function that compiles them, the kernels that Python code calls)."""


if __name__ == "__main__":
    compile_part, kernels = PARTS[sys.argv[1]]
    compile_part()
    if marker := cache_marker(kernels):
        marker.touch()
