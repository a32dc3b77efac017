"""Measured costs on disk, one JSON file a device, torch version and thread count.

The folder is $FXREMAT_CACHE, else fxremat in $XDG_CACHE_HOME or ~/.cache. A file that cannot be read counts as empty,
one that cannot be written is not written: a cache never makes a plan fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Self

import torch

from fxremat._torch import device_name
from fxremat.cost.table import OpCost


def cache_folder() -> Path:
    """Where costs are kept."""
    if folder := os.environ.get("FXREMAT_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxremat"


class CostCache:
    """A dictionary from text to numbers that outlives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, list[float]] = {}
        self._new: dict[str, list[float]] = {}
        with contextlib.suppress(OSError, ValueError):
            loaded = json.loads(path.read_text())
            self._known = {str(key): [float(x) for x in numbers] for key, numbers in loaded.items()}

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        """The cache of this device under this torch, with this many threads."""
        text = f"{device_name(device)}-torch{torch.__version__}-{torch.get_num_threads()}threads"
        return cls(cache_folder() / (re.sub(r"[^A-Za-z0-9.+-]+", "_", text) + ".json"))

    def op(self, key: str) -> OpCost | None:
        """The cost kept under a key."""
        numbers = self.numbers(key)
        if not numbers or len(numbers) < 2:
            return None
        return OpCost(numbers[0], int(numbers[1]), tuple(int(size) for size in numbers[2:]))

    def keep_op(self, key: str, cost: OpCost) -> None:
        """Keep a cost; `save` writes it."""
        self.keep(key, [cost.seconds, cost.workspace, *cost.outputs])

    def numbers(self, key: str) -> list[float] | None:
        """The numbers kept under a key."""
        return self._new.get(key) or self._known.get(key)

    def keep(self, key: str, numbers: list[float]) -> None:
        """Keep numbers; `save` writes them."""
        self._new[key] = numbers

    def save(self) -> None:
        """Write what is new, merged with what other processes wrote meanwhile; atomic."""
        if not self._new:
            return
        merged = type(self)(self.path)._known | self._new
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(merged, file)
            os.replace(file.name, self.path)
        self._known, self._new = merged, {}
