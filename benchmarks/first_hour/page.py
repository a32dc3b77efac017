"""The records of the first hour as tables of Markdown, with the columns that a terminal shows."""

from __future__ import annotations

import json
from collections.abc import Sequence

from . import auto, by_hand, estimates, facts, fitted, inductor, memory, numbers, offload
from .part import Column, Row

COLUMNS: dict[str, Sequence[Column]] = {
    "facts": facts.COLUMNS,
    "memory": memory.COLUMNS,
    "by_hand": by_hand.COLUMNS,
    "numbers": numbers.COLUMNS,
    "offload": offload.COLUMNS,
    "inductor": inductor.COLUMNS,
    "auto": auto.COLUMNS,
    "estimates": estimates.COLUMNS,
    "fitted": fitted.COLUMNS,
}


def table(name: str, record: str) -> str:
    """Return the table of a part's record; a row that has no numbers says why."""
    found, columns = json.loads(record), COLUMNS[name]
    about = found["conditions"]
    lines = [f"| | {' | '.join(column.name for column in columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {case} | {' | '.join(_cells(row, columns))} |" for case, row in found["rows"].items()]
    cases: dict[str, list[str]] = {}
    for case, row in found["rows"].items():
        cases.setdefault(row.get("date", about["date"]), []).append(case)
    dates = sorted(cases)
    some = "".join(f"; {', '.join(cases[date])} on {date}" for date in dates[1:])
    lines += ["", f"{about['gpu']}, torch {about['torch']}, measured on {dates[0]}{some}."]
    return "\n".join(lines)


def _cells(row: Row, columns: Sequence[Column]) -> list[str]:
    if "failed" in row or "least" in row:
        why = row.get("failed") or f"the least budget is {row['least'] / 1e6:.1f} MB"
        return [why, *[""] * (len(columns) - 1)]
    return [column.text(row) for column in columns]
