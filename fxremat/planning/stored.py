"""Results of searches on disk, so that a later process does not search again for what is known.

They are in the same store as the measured costs; the `AT_MOST` that were used last are kept. Like costs they never make
a plan fail: a result that cannot be read counts as absent, one that cannot be written is not kept. Only the same
version of this package's code finds a result again. Reading makes instances of the classes in `PARTS`, and of those
that the reader names, and of no others, whatever the file says.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from fxremat.chains.join_schedule import JoinSchedule, Loss, On
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Offload, Prefetch, Schedule, Value
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.cost.cache import store_of
from fxremat.search.candidate import Candidate, FromJoin, FromSchedule, Frontier, Refined
from fxremat.step.layout import BlockLayout, Layout
from fxremat.step.program import Order

TABLE = "searches"
AT_MOST = 64  # results that are kept
FAST = 1  # zlib's level of compression
PACKAGE = Path(__file__).parents[1]

PARTS = (  # classes that a frontier consists of
    *(Frontier, Candidate, FromSchedule, FromJoin, Refined, Order, Layout, BlockLayout, JoinTimeline),
    *(Schedule, Forward, Keep, Backward, Drop, Offload, Prefetch, Value, JoinSchedule, On, Loss, frozenset),
)
T = TypeVar("T")


def read(device: torch.device, key: str, kind: type[T], *parts: type) -> T | None:
    """Return the result that was written under a key for a device; None if none was, or it cannot be read.

    Args:
        kind: the class of the result.
        parts: further classes that the result consists of, besides `PARTS`.
    """
    content = store_of(device).get(TABLE, _digest(key))
    if content is None:
        return None
    try:
        result = _Reader(zlib.decompress(content), (kind, *parts, *PARTS)).load()
    except Exception:  # the file may hold anything
        return None
    return result if isinstance(result, kind) else None


def write(device: torch.device, key: str, result: object) -> None:
    """Store the result of a search under a key for a device; the result must not refer to a graph."""
    content = zlib.compress(pickle.dumps(result, protocol=5), FAST)
    store_of(device).put(TABLE, {_digest(key): content}, most=AT_MOST)


def _digest(key: str) -> str:
    return hashlib.sha256(f"{_code()} {key}".encode()).hexdigest()


@functools.cache
def _code() -> str:
    """Digest the code of this package: another version may find other programs, or have other classes."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _Reader(pickle.Unpickler):
    """An unpickler for values of a few classes, which calls nothing else."""

    def __init__(self, content: bytes, allowed: Iterable[type]) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = {(part.__module__, part.__qualname__): part for part in allowed}

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a name, if it is allowed. Raises `UnpicklingError` for any other."""
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of what is read") from None
