"""What searches have found on disk, a file for each, so that a later process does not search for what is known.

They stand beside the measured costs, in a folder of their own; the latest `AT_MOST` stay. Like costs they never make a
plan fail: what cannot be read counts as absent, what cannot be written is not kept. A file is found again by the code
of this version alone, and is read into programs and what its reader names alone, whatever it says.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from fxremat.chains.join_schedule import JoinSchedule, Loss, On
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Offload, Prefetch, Schedule, Value
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.cost.cache import cache_folder
from fxremat.plan_file import write_whole
from fxremat.search.candidate import Candidate, FromJoin, FromSchedule, Frontier, Refined
from fxremat.step.layout import BlockLayout, Layout
from fxremat.step.program import Order

FOLDER = "found"
AT_MOST = 64  # files
MOST_FILE = 1 << 26  # bytes of a file that is read
FAST = 1  # of zlib's levels
PACKAGE = Path(__file__).parents[1]

PARTS = (  # of a frontier
    *(Frontier, Candidate, FromSchedule, FromJoin, Refined, Order, Layout, BlockLayout, JoinTimeline),
    *(Schedule, Forward, Keep, Backward, Drop, Offload, Prefetch, Value, JoinSchedule, On, Loss, frozenset),
)
T = TypeVar("T")


def read(key: str, kind: type[T], *parts: type) -> T | None:
    """What was written under a key; None where nothing was, or it cannot be read.

    Args:
        kind: its class.
        parts: further classes that it consists of, beside those of programs.
    """
    path = _path(key)
    try:
        if not path.is_file() or path.stat().st_size > MOST_FILE:
            return None
        found = _Reader(zlib.decompress(path.read_bytes()), (kind, *parts, *PARTS)).load()
        os.utime(path)
    except Exception:  # whatever is in it
        return None
    return found if isinstance(found, kind) else None


def write(key: str, found: object) -> None:
    """Keep what was found, which refers to no graph; of many files the oldest go."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, zlib.compress(pickle.dumps(found, protocol=5), FAST))
        _remove_oldest(path.parent)


def _path(key: str) -> Path:
    digest = hashlib.sha256(f"{_code()} {key}".encode()).hexdigest()
    return cache_folder() / FOLDER / digest[:32]


@functools.cache
def _code() -> str:
    """A digest of the code of this package: another version may find other programs, or have other classes."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _remove_oldest(folder: Path) -> None:
    """Remove what was neither written nor read for longest; another process may do the same."""
    files = sorted(((file.stat().st_mtime, file.path) for file in os.scandir(folder)), reverse=True)
    for _, path in files[AT_MOST:]:
        Path(path).unlink(missing_ok=True)


class _Reader(pickle.Unpickler):
    """Reads values of a few classes, and calls nothing else."""

    def __init__(self, content: bytes, allowed: Iterable[type]) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = {(part.__module__, part.__qualname__): part for part in allowed}

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name. Raises `UnpicklingError` for any other."""
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of what is read") from None
