"""The table of docs/alternatives.md that shows what graph passes make of the same graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BUDGETS = (80, 60, 50, 40, 30)  # percent of the peak of keeping everything


def policy_table(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: a row for each model and pass, a column for each budget."""
    yield "| model | pass | " + " | ".join(f"{percent} %" for percent in BUDGETS) + " | least reached | seconds |"
    yield "|---" * (len(BUDGETS) + 4) + "|"
    for record in records:
        for label, points in record["points"].items():
            cells = [_cell(point) for point in points]
            least = min((point["peak"] for point in points if point["peak"] is not None), default=None)
            longest = max(point["seconds"] for point in points)
            shown = "-" if least is None else f"{least:.0%}"
            yield f"| {record['model']} | {label} | {' | '.join(cells)} | {shown} | {longest:.1f} |"


def _cell(point: Mapping[str, Any]) -> str:
    if point["time"] is None:
        return "-"
    beside = "" if point["at_its_time"] is None else f" ({point['peak']:.0%}, {point['at_its_time']:.0%})"
    return f"{point['time']:.3f}{beside}"
