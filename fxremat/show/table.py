"""Formats a table as text of at most `WIDTH` columns, and as HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

WIDTH = 100  # columns of text
_GAP = 2  # columns between two cells
_STYLE = "text-align: right; padding: 2px 10px;"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table: heads, rows of cells, and lines of text above (`title`) and below (`notes`)."""

    title: tuple[str, ...] = ()
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    left: frozenset[int] = frozenset()  # indices of the columns that are left-aligned
    strong: frozenset[int] = frozenset()  # indices of the rows that are bold in HTML

    def __str__(self) -> str:
        lines = [*self.title, *(self._lines() if self.rows else ())]
        notes = (line for note in self.notes for line in textwrap.wrap(note, WIDTH, subsequent_indent=" " * _GAP))
        return "\n".join([*(clipped(line, WIDTH) for line in lines), *notes])

    def _lines(self) -> Iterator[str]:
        columns = zip(self.heads, *self.rows, strict=True)
        widths = [max(map(len, cells)) for cells in columns]
        for row in (self.heads, *self.rows):
            cells = (
                f"{cell:<{width}}" if place in self.left else f"{cell:>{width}}"
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            yield (" " * _GAP + (" " * _GAP).join(cells)).rstrip()

    def html(self) -> str:
        """Return the table as HTML, with all texts escaped."""
        parts = [f"<p>{'<br>'.join(map(escape, self.title))}</p>"] if self.title else []
        if self.rows:
            head = "".join(self._cell("th", place, cell) for place, cell in enumerate(self.heads))
            rows = "".join(self._row(number, row) for number, row in enumerate(self.rows))
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")
        if self.notes:
            parts.append(f"<p>{'<br>'.join(map(escape, self.notes))}</p>")
        return "\n".join(parts)

    def _row(self, number: int, row: tuple[str, ...]) -> str:
        strong = ' style="font-weight: bold"' if number in self.strong else ""
        return f"<tr{strong}>{''.join(self._cell('td', place, cell) for place, cell in enumerate(row))}</tr>"

    def _cell(self, tag: str, place: int, cell: str) -> str:
        style = _STYLE.replace("right", "left") if place in self.left else _STYLE
        return f'<{tag} style="{style}">{escape(cell)}</{tag}>'


def clipped(text: str, most: int) -> str:
    """Shorten a text to at most `most` characters, ending in two dots if something is cut off."""
    return text if len(text) <= most else f"{text[: most - 2]}.."
