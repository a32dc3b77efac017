"""Results of searches in the store, so that a later process does not search again for what is known.

They lie beside the measured costs; the `AT_MOST` that were used last stay. Like costs they never make a plan fail: what
cannot be read counts as absent, what cannot be written is not kept. A result is found again by the code of this version
alone, and is read into programs and what its reader names alone, whatever it says.
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
AT_MOST = 64  # results
FAST = 1  # of zlib's levels
PACKAGE = Path(__file__).parents[1]

PARTS = (  # of a frontier
    *(Frontier, Candidate, FromSchedule, FromJoin, Refined, Order, Layout, BlockLayout, JoinTimeline),
    *(Schedule, Forward, Keep, Backward, Drop, Offload, Prefetch, Value, JoinSchedule, On, Loss, frozenset),
)
T = TypeVar("T")


def read(device: torch.device, key: str, kind: type[T], *parts: type) -> T | None:
    """Return what was written under a key for a device; None where nothing was, or it cannot be read.

    Args:
        kind: its class.
        parts: further classes that it consists of, beside those of programs.
    """
    content = store_of(device).get(TABLE, _digest(key))
    if content is None:
        return None
    try:
        result = _Reader(zlib.decompress(content), (kind, *parts, *PARTS)).load()
    except Exception:  # whatever is in it
        return None
    return result if isinstance(result, kind) else None


def write(device: torch.device, key: str, result: object) -> None:
    """Keep the result of a search, which refers to no graph."""
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
