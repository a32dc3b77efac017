"""Tells which modules have more bytes at the peak of a step than before, and which have fewer.

    growth = Growth.of({"layers.0": 90, "head": 40}, {"layers.0": 120, "head": 30}, model="Net")
    growth.changes       (layers.0, +30), (head, -10): those that grew come first, the largest change before the others

Each byte belongs to one module, so that the changes add up to that of the sum. Equal numbered siblings share a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fxremat.show.difference import Change, leaves, outermost, signed_bytes, subtracted
from fxremat.show.labels import printable
from fxremat.show.modules import Share, added, tree_of
from fxremat.show.table import Table, clipped
from fxremat.show.tree import all_rows

ROWS = 16  # maximum number of modules that are shown
_NAME = 64  # width of the column of module names


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The changes of the bytes that modules have at the peak, between two versions of a step."""

    before: int  # bytes of all modules
    after: int
    changes: tuple[Change, ...]  # of modules whose bytes differ; `share.saved` is the change of all of a row together
    only_before: tuple[str, ...]  # outermost modules that only the first version has
    only_after: tuple[str, ...]  # outermost modules that only the second version has

    @classmethod
    def of(cls, before: Mapping[str, int], after: Mapping[str, int], *, model: str) -> Growth:
        """Compare the bytes of each module's own ops, by its path; `model` is the name of the module with path ""."""
        trees = [tree_of({path: Share(saved=size) for path, size in sizes.items()}) for sizes in (before, after)]
        first, second = ({node.path for node in tree.walk()} for tree in trees)
        found = leaves(all_rows(subtracted(*trees), model, _changed))
        changes = [change for change in found if change.share.saved]
        return cls(
            before=sum(before.values()),
            after=sum(after.values()),
            changes=tuple(sorted(changes, key=lambda c: (c.share.saved < 0, -abs(c.share.saved)))),
            only_before=outermost(trees[0], second),
            only_after=outermost(trees[1], first),
        )

    @property
    def grown(self) -> tuple[Change, ...]:
        """The changes of modules that have more bytes than before, largest first."""
        return tuple(change for change in self.changes if change.share.saved > 0)

    @property
    def shrunk(self) -> tuple[Change, ...]:
        """The changes of modules that have fewer bytes than before, largest first."""
        return tuple(change for change in self.changes if change.share.saved < 0)

    @property
    def table(self) -> Table:
        """A row for each module that changed, and their sum; the last of many share a row."""
        grown, shrunk = self.grown, self.shrunk
        most = ROWS if not (grown and shrunk) else max(ROWS // 2, ROWS - min(len(grown), len(shrunk)))
        rows = [*_rows(grown, most, "that grew"), *_rows(shrunk, ROWS - len(grown[:most]), "that shrank")]
        if rows:
            rows.append(("all modules", "", signed_bytes(self.after - self.before)))
        return Table(
            heads=("module", "all of", "at the peak"),
            rows=tuple(rows),
            notes=tuple(self._notes(bool(rows))),
            left=frozenset([0]),
            strong=frozenset([len(rows) - 1]),
        )

    def _notes(self, any_change: bool) -> Iterator[str]:
        if not any_change:
            yield "every module has as many bytes at the peak as before"
        for label, names in (("gone", self.only_before), ("new", self.only_after)):
            if names:
                yield f"  {label}: {', '.join(map(printable, names))}"

    def __str__(self) -> str:
        return str(self.table)


def _changed(share: Share) -> tuple[float, ...]:
    return (share.saved,)


def _rows(changes: tuple[Change, ...], most: int, which: str) -> Iterator[tuple[str, str, str]]:
    shown, others = (changes, ()) if len(changes) <= most else (changes[: most - 1], changes[most - 1 :])
    for change in shown:
        count = f"{change.count} x" if change.count > 1 else ""
        yield clipped(printable(change.name), _NAME), count, signed_bytes(change.share.saved)
    if others:
        rest = added(change.share for change in others)
        yield f"{len(others)} others {which}", "", signed_bytes(rest.saved)
