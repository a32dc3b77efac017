"""Measured costs, stored on disk for later processes: one SQLite file for each environment (`cost.environment`).

A row has a key, and a blob of 8-byte floating-point numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from fxremat.cost.environment import environment, name_of
from fxremat.step.costs import OpCost
from fxremat.store import Store, folder

TABLE = "costs"
DOUBLE = 8  # bytes of a float64


def store_of(device: torch.device) -> Store:
    """Return the store on disk for this device under the current torch version and settings."""
    return Store(folder() / f"{name_of(environment(device))}.sqlite")


class CostCache:
    """A mapping from text to lists of numbers, read from disk when it is created, and written by `save`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = {key: numbers for key, row in Store(path).all(TABLE).items() if (numbers := _numbers(row))}
        self._new: dict[str, list[float]] = {}
        self._unsaved: set[str] = set()

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        """Return the cache of costs for this device under the current torch version and settings."""
        return cls(store_of(device).path)

    def op(self, key: str) -> OpCost | None:
        """Return the cost stored under a key; None if there is none, or the numbers cannot be a cost."""
        if numbers := self._new.get(key):
            return _cost(numbers)
        numbers = self._known.get(key)
        return _cost(numbers) if numbers and _is_plausible(numbers) else None

    def keep_op(self, key: str, cost: OpCost) -> None:
        """Store a cost under a key, to be written to disk by `save`."""
        self.keep(key, [cost.seconds, cost.workspace, *cost.outputs])

    def numbers(self, key: str, count: int | None = None) -> list[float] | None:
        """Return the numbers stored under a key; None if there are none, or not all of them are finite and above 0.

        Args:
            count: return None unless there are exactly this many numbers; None: any number is accepted.
        """
        found = self._new.get(key) or self._known.get(key)
        if not found or not all(math.isfinite(number) and number > 0 for number in found):
            return None
        return found if count in (None, len(found)) else None

    def keep(self, key: str, numbers: Sequence[float]) -> None:
        """Store numbers under a key, to be written to disk by `save`."""
        self._new[key] = [float(number) for number in numbers]
        self._unsaved.add(key)

    def save(self) -> None:
        """Write new entries to disk; if another process has locked the file, the next `save` tries again."""
        rows = {key: _packed(self._new[key]) for key in self._unsaved}
        if rows and Store(self.path).put(TABLE, rows):
            self._unsaved.clear()


def _cost(numbers: Sequence[float]) -> OpCost:
    return OpCost(numbers[0], int(numbers[1]), tuple(int(size) for size in numbers[2:]))


def _is_plausible(numbers: Sequence[float]) -> bool:
    """Tell whether numbers can be the cost of an op: seconds above 0, then whole numbers of bytes."""
    seconds, *sizes = numbers
    whole = all(math.isfinite(size) and size >= 0 and size == int(size) for size in sizes)
    return bool(sizes) and whole and math.isfinite(seconds) and seconds > 0


def _packed(numbers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def _numbers(row: bytes) -> list[float]:
    """Return the numbers of a row; [] if its length is not a multiple of 8 bytes."""
    return [] if len(row) % DOUBLE else list(struct.unpack(f"<{len(row) // DOUBLE}d", row))
