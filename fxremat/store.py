"""Caches results on disk between processes, in an SQLite file with a table for each kind of content.

    store = Store(folder() / "some-device.sqlite")
    store.put("costs", {key: content})
    store.all("costs"), store.get("searches", key)

The folder is $FXREMAT_CACHE, else fxremat in $XDG_CACHE_HOME or ~/.cache. A store never makes a plan fail: what cannot
be read counts as absent, a file that is no store is replaced, and what cannot be written is not kept.

SQLite does what a hand-made format would have to: processes that write at the same time lose no rows, a killed process
or a full disk leaves the old rows and no litter, and a foreign file of any size is told by its first bytes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    import sqlite3

PATIENCE = 1.0  # seconds to wait while another process writes
MOST_FILE = 1 << 28  # maximum bytes of a file that is read; a larger file is replaced
MOST_ROW = 1 << 16  # maximum bytes of a row that `all` reads
# SQLite error codes that make a file be replaced: ERROR (e.g. other columns), CORRUPT and NOTADB
NOT_A_STORE = (1, 11, 26)


def folder() -> Path:
    """Return the folder that contains the cache files."""
    if given := os.environ.get("FXREMAT_CACHE"):
        return Path(given)
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "fxremat"
    home = Path(os.path.expanduser("~"))
    # without a home folder, the path is one that cannot be written to
    return (home if home.is_absolute() else Path(os.devnull)) / ".cache" / "fxremat"


@dataclass(frozen=True)
class Store:
    """A persistent mapping from text keys to bytes, in several tables of an SQLite file."""

    path: Path

    def all(self, table: str) -> dict[str, bytes]:
        """Return {key: content} of a table, without rows of more than `MOST_ROW` bytes; {} if the table does not exist.
        """
        with contextlib.suppress(OSError, *_sqlite_errors()), self._reading() as file:
            select = f"SELECT key, content FROM {table} WHERE typeof(key) = 'text' AND typeof(content) = 'blob'"
            return dict(file.execute(f"{select} AND length(content) <= {MOST_ROW}"))
        return {}

    def get(self, table: str, key: str) -> bytes | None:
        """Return the content of the row with this key and update its time of last use; None if there is no such row."""
        content: object = None
        with contextlib.suppress(OSError, *_sqlite_errors()), self._reading() as file:
            content, *_ = file.execute(f"SELECT content FROM {table} WHERE key = ?", (key,)).fetchone() or (None,)
        if not isinstance(content, bytes):
            return None
        with contextlib.suppress(OSError, *_sqlite_errors()), _writing(self.path) as file:
            file.execute(f"UPDATE {table} SET used = ? WHERE key = ?", (time.time(), key))
        return content

    def put(self, table: str, rows: Mapping[str, bytes], most: int | None = None) -> bool:
        """Write rows, and return whether that succeeded within `PATIENCE` seconds.

        Args:
            most: maximum number of rows in the table; the least recently used ones are deleted. None: no limit.
        """
        with contextlib.suppress(OSError, *_sqlite_errors()):
            self._write(table, rows, most)
            return True
        return False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Open the file for reading. Raises `OSError` if it does not exist or is too large, and SQLite's errors."""
        import sqlite3

        if not 0 < self.path.stat().st_size <= MOST_FILE or not self.path.is_file():
            raise FileNotFoundError(self.path)
        address = f"file:{quote(os.fsencode(self.path.absolute()))}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=PATIENCE)) as file:
            file.text_factory = lambda text: text.decode(errors="replace")
            yield file

    def _write(self, table: str, rows: Mapping[str, bytes], most: int | None) -> None:
        """Add rows to the file; replace the file if it is not a valid store."""
        import sqlite3

        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_file():
            return
        if self.path.exists() and self.path.stat().st_size > MOST_FILE:
            self._remove()
        try:
            _insert(self.path, table, rows, most)
        except sqlite3.DatabaseError as error:
            code: Any = getattr(error, "sqlite_errorcode", 0)
            if code & 0xFF not in NOT_A_STORE:
                raise
            self._remove()
            _insert(self.path, table, rows, most)

    def _remove(self) -> None:
        for file in (self.path, self.path.with_name(f"{self.path.name}-journal")):
            file.unlink(missing_ok=True)


def _sqlite_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that SQLite may raise; `ImportError` if Python was built without it."""
    try:
        import sqlite3
    except ImportError:
        return (ImportError,)
    return (sqlite3.Error,)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file for writing, in one transaction."""
    import sqlite3

    # creates the file with the user's umask; SQLite's own new files are not writable for the group
    path.open("a").close()
    with closing(sqlite3.connect(path, timeout=PATIENCE)) as file, file:
        yield file


def _insert(path: Path, table: str, rows: Mapping[str, bytes], most: int | None) -> None:
    columns = "key TEXT PRIMARY KEY, content BLOB NOT NULL, used REAL NOT NULL"
    with _writing(path) as file:
        file.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        used = time.time()
        file.executemany(
            f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", [(key, content, used) for key, content in rows.items()]
        )
        if most is not None:
            latest = f"SELECT key FROM {table} ORDER BY used DESC LIMIT {most}"
            file.execute(f"DELETE FROM {table} WHERE key NOT IN ({latest})")
