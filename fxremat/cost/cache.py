"""Measured costs on disk: an SQLite file for each environment (see `cost.environment`), a row for each key.

The folder is $FXREMAT_CACHE, else fxremat in $XDG_CACHE_HOME or ~/.cache. A cache never makes a plan fail: what cannot
be read counts as absent, a file that is no cache is replaced, and what cannot be written is not kept.

SQLite does what a hand-made format would have to do: processes that write at the same time lose no rows, a killed
process or a full disk leaves the old rows and no litter, and a foreign file of any size is recognized by its first
bytes. A row is a blob of doubles: it holds numbers of one shape, and nothing that has to be parsed.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import torch

from fxremat.cost.environment import environment, name_of
from fxremat.step.costs import OpCost

if TYPE_CHECKING:
    import sqlite3

PATIENCE = 1.0  # seconds to wait for another process that is writing
MOST_FILE = 1 << 26  # bytes of a file that is read; a larger one is replaced
MOST_ROW = 1 << 16  # bytes of a row that is read; longer ones are ignored
DOUBLE = 8  # bytes
NOT_A_CACHE = (1, 11, 26)  # SQLite's ERROR (other columns), CORRUPT and NOTADB


def cache_folder() -> Path:
    """Return the folder in which costs are stored."""
    if folder := os.environ.get("FXREMAT_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "fxremat"
    home = Path(os.path.expanduser("~"))
    return (home if home.is_absolute() else Path(os.devnull)) / ".cache" / "fxremat"  # no home: no cache


class CostCache:
    """A dictionary from text to numbers that outlives the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, list[float]] = {}  # from the file
        self._new: dict[str, list[float]] = {}
        self._unsaved: set[str] = set()
        with contextlib.suppress(OSError, *_sqlite_errors()):
            self._known = dict(_read(path))

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        """Return the cache of this device under the current torch and settings."""
        return cls(cache_folder() / f"{name_of(environment(device))}.sqlite")

    def op(self, key: str) -> OpCost | None:
        """Return the cost stored under a key; None if there is none, or if it holds numbers that no op can have."""
        if numbers := self._new.get(key):
            return _cost(numbers)
        numbers = self._known.get(key)
        return _cost(numbers) if numbers and _is_plausible(numbers) else None

    def keep_op(self, key: str, cost: OpCost) -> None:
        """Store a cost; `save` writes it to the file."""
        self.keep(key, [cost.seconds, cost.workspace, *cost.outputs])

    def numbers(self, key: str, count: int | None = None) -> list[float] | None:
        """Return the numbers stored under a key, all of them finite and above 0; None if there are no such numbers.

        Args:
            count: how many there must be.
        """
        found = self._new.get(key) or self._known.get(key)
        if not found or not all(math.isfinite(number) and number > 0 for number in found):
            return None
        return found if count in (None, len(found)) else None

    def keep(self, key: str, numbers: Sequence[float]) -> None:
        """Store numbers; `save` writes them to the file."""
        self._new[key] = [float(number) for number in numbers]
        self._unsaved.add(key)

    def save(self) -> None:
        """Write what is new, if that is possible within a moment; else the next `save` tries again."""
        rows = [(key, _packed(self._new[key])) for key in self._unsaved]
        if rows:
            with contextlib.suppress(OSError, *_sqlite_errors()):
                _write(self.path, rows)
                self._unsaved.clear()


def _cost(numbers: Sequence[float]) -> OpCost:
    return OpCost(numbers[0], int(numbers[1]), tuple(int(size) for size in numbers[2:]))


def _is_plausible(numbers: Sequence[float]) -> bool:
    """Tell whether the numbers are seconds above 0 and whole numbers of bytes, as those of an op are."""
    seconds, *sizes = numbers
    whole = all(math.isfinite(size) and size >= 0 and size == int(size) for size in sizes)
    return bool(sizes) and whole and math.isfinite(seconds) and seconds > 0


def _packed(numbers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def _sqlite_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of SQLite, and that of a Python that was built without it."""
    try:
        import sqlite3
    except ImportError:
        return (ImportError,)
    return (sqlite3.Error,)


def _read(path: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield the valid rows of a file. Raises `OSError` or what SQLite raises."""
    import sqlite3

    if not 0 < path.stat().st_size <= MOST_FILE or not path.is_file():
        return
    address = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, timeout=PATIENCE)) as file:
        file.text_factory = lambda text: text.decode(errors="replace")
        select = "SELECT key, numbers FROM costs WHERE typeof(key) = 'text' AND typeof(numbers) = 'blob'"
        for key, blob in file.execute(f"{select} AND length(numbers) BETWEEN {DOUBLE} AND {MOST_ROW}"):
            if len(blob) % DOUBLE == 0:
                yield key, list(struct.unpack(f"<{len(blob) // DOUBLE}d", blob))


def _write(path: Path, rows: Sequence[tuple[str, bytes]]) -> None:
    """Add rows to a file; replace a file that is no cache."""
    import sqlite3

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        return
    if path.exists() and path.stat().st_size > MOST_FILE:
        _remove(path)
    try:
        _insert(path, rows)
    except sqlite3.DatabaseError as error:
        code: Any = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF not in NOT_A_CACHE:
            raise
        _remove(path)
        _insert(path, rows)


def _remove(path: Path) -> None:
    for file in (path, path.with_name(f"{path.name}-journal")):
        file.unlink(missing_ok=True)


def _insert(path: Path, rows: Sequence[tuple[str, bytes]]) -> None:
    import sqlite3

    path.open("a").close()  # SQLite's own new files are not writable for a group, whatever the umask
    file: sqlite3.Connection
    with closing(sqlite3.connect(path, timeout=PATIENCE)) as file, file:
        file.execute("CREATE TABLE IF NOT EXISTS costs (key TEXT PRIMARY KEY, numbers BLOB NOT NULL)")
        file.executemany("INSERT OR REPLACE INTO costs VALUES (?, ?)", rows)
