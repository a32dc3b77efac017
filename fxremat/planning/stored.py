"""Search results on disk, so that later processes need not search again.

They are in the same store as measured costs; the `AT_MOST` most recently used ones are kept. A result that
cannot be read counts as absent, and one that cannot be written is dropped: neither makes planning fail. Results
are found only by the version of this package's code that wrote them. Unpickling creates instances only of the
classes in `PARTS` and of those that the caller names, whatever the file contains.
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
AT_MOST = 256  # number of results kept
FAST = 1  # zlib's level of compression
PACKAGE = Path(__file__).parents[1]

PARTS = (  # classes that a stored frontier may contain
    *(Frontier, Candidate, FromSchedule, FromJoin, Refined, Order, Layout, BlockLayout, JoinTimeline),
    *(Schedule, Forward, Keep, Backward, Drop, Offload, Prefetch, Value, JoinSchedule, On, Loss, frozenset),
)
T = TypeVar("T")


def read(device: torch.device, key: str, kind: type[T], *parts: type) -> T | None:
    """Return the result that was stored under a key for a device; None if there is none, or it cannot be read.

    Args:
        kind: the class of the result.
        parts: further classes that the result may contain, besides `PARTS`.
    """
    content = store_of(device).get(TABLE, _digest(key))
    if content is None:
        return None
    try:
        result = _Reader(zlib.decompress(content), (kind, *parts, *PARTS)).load()
    except Exception:  # the file may contain anything
        return None
    return result if isinstance(result, kind) else None


def write(device: torch.device, key: str, result: object) -> None:
    """Store a search result under a key for a device; the result must not refer to a graph."""
    content = zlib.compress(pickle.dumps(result, protocol=5), FAST)
    store_of(device).put(TABLE, {_digest(key): content}, most=AT_MOST)


def _digest(key: str) -> str:
    return hashlib.sha256(f"{_code()} {key}".encode()).hexdigest()


@functools.cache
def _code() -> str:
    """Return a digest of this package's source code; stored plans of other versions of the code are not read."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _Reader(pickle.Unpickler):
    """An unpickler that creates instances of the allowed classes only."""

    def __init__(self, content: bytes, allowed: Iterable[type]) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = {(part.__module__, part.__qualname__): part for part in allowed}

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of this name if it is allowed; raise `UnpicklingError` otherwise."""
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of what is read") from None
