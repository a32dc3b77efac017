"""Puts what benchmarks/results holds into the README, between its `<!-- name -->` and `<!-- /name -->` marks.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BUDGETS = (100, 60, 45, 30, 25)


def filled(text: str) -> str:
    """The README's text with each marked part made from the record it names, where there is one."""
    for file, make in PARTS.items():
        name, record = file.partition(".")[0], RESULTS / file
        if record.exists():
            part = make(record.read_text())
            pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            text = pattern.sub(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text)  # type: ignore[misc]
    return text


def _quickstart(output: str) -> str:
    """The plan that examples/01_quickstart.py printed."""
    return f"```\n{output[output.index('fxremat plan') :].rstrip()}\n```"


def _training(record: str) -> str:
    """A row a model, a column a budget: time as a multiple of plain PyTorch's."""
    table: dict[str, Any] = json.loads(record)
    by_model: dict[str, dict[float, dict[str, Any]]] = {}
    for row in table["rows"]:
        by_model.setdefault(row["model"], {})[row["percent"]] = row
    lines = [
        "| model | plain peak | least | " + " | ".join(f"{percent} %" for percent in BUDGETS) + " |",
        "|---|---|---|" + "---|" * len(BUDGETS),
    ]
    for model, rows in by_model.items():
        plain = next(iter(rows.values()))["plain_peak"]
        least = [row["minimum"] for row in rows.values() if row["minimum"] is not None]
        cells = [_time(rows.get(percent)) for percent in BUDGETS]
        share = f"{100 * least[0] / plain:.0f} %" if least else f"below {min(rows):g} %"
        lines.append(f"| {model} | {plain / 1e6:.0f} MB | {share} | " + " | ".join(cells) + " |")
    conditions = table["conditions"]
    lines.append(f"\n{conditions['cpu']}, one thread, torch {conditions['torch']}, {conditions['date']}.")
    return "\n".join(lines)


def _time(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    got = row["measured"]
    return "-" if got is None else f"{got['seconds'] / got['plain_seconds']:.2f}x"


def _planning(record: str) -> str:
    first, again = (json.loads(record)["seconds"][name] for name in ("from nothing", "from the cache"))
    return f"Planning the 12-layer GPT takes {first:.0f} s from nothing and {again:.0f} s from the cache."


PARTS: dict[str, Callable[[str], str]] = {
    "quickstart.txt": _quickstart,
    "train_cpu.json": _training,
    "planning.json": _planning,
}


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))


if __name__ == "__main__":
    main()
