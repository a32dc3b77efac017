"""Puts benchmarks/results/libraries.json into docs/models.md, between its `<!-- libraries -->` marks.

python -m benchmarks.models_page
"""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.readme import RESULTS, ROOT

PAGE = ROOT / "docs" / "models.md"
RECORD = RESULTS / "libraries.json"


def filled(text: str) -> str:
    """The page's text with its table made from the record."""
    part = _table(json.loads(RECORD.read_text(encoding="utf-8")))
    pattern = re.compile(r"(<!-- libraries -->\n).*?(<!-- /libraries -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{part}\n{match[2]}", text)


def _table(record: dict[str, Any]) -> str:
    """A row a model: captured or not, the same numbers or not, and what the memory costs."""
    conditions, rows = record["conditions"], list(record["rows"].values())
    captured = [row for row in rows if row["refused"] is None]
    refused = [row for row in rows if row["refused"] is not None]
    same = [row for row in captured if not _different(row)]
    lines = [
        f"{len(captured)} of {len(rows)} are captured whole, and {len(same)} of those {len(captured)} train with",
        "the plain model's numbers bit for bit.",
        "",
        f"| model | class | plain peak | least | time at {conditions['percent']} % | same numbers | |",
        "|---|---|---|---|---|---|---|",
        *[line(row) for row in captured],
        "",
        *(["Not captured:", "", "| model | class | why | instead |", "|---|---|---|---|"] if refused else []),
        *[line(row) for row in refused],
        *([""] if refused else []),
        f"{conditions['cpu']}, one thread, torch {conditions['torch']},",
        f"transformers {conditions['transformers']}, {conditions['date']}.",
    ]
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    start = f"| {row['model']} | `{row['kind']}` |"
    if row["refused"] is not None:
        return f"{start} {_why(row['refused'])} | {row['note']} |"
    least, half = row["least"], row["half"]
    share = f"{100 * least['measured_peak'] / row['plain_peak']:.0f} %"
    time = "-" if half is None else f"{half['seconds'] / half['plain_seconds']:.2f}x"
    over = [which["mem"] for which in (least, half) if which and which["measured_peak"] > which["mem"]]
    note = row["note"] + (" **over the budget**" if over else "")
    different = _different(row)
    verdict = "yes" if not different else f"no: {len(different)}, {different[0]} first"
    return f"{start} {row['plain_peak'] / 1e6:.0f} MB | {share} | {time} | {verdict} | {note} |"


def _different(row: dict[str, Any]) -> list[str]:
    return [name for which in (row["least"], row["half"]) if which for name in which["different"]]


def _why(error: str) -> str:
    """The line and the reason out of the message of a CaptureError."""
    found = re.search(r"(\S+\.py:\d+) in \w+: (.*?)(?:  #.*?)? \(", error)
    return f"{found[1].rpartition('/')[2]}: `{found[2]}`" if found else error


def main() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
