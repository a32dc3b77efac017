"""Puts what benchmarks/results holds of the solvers into docs/solvers.md, between its `<!-- name -->` marks.

python -m benchmarks.solver_page
"""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks.readme import RESULTS, ROOT

PAGE = ROOT / "docs" / "solvers.md"


def filled(text: str) -> str:
    """The page's text with its marked parts made from the records, where there are any."""
    for name, make in (("optimality", _optimality), ("solvers", _bounds)):
        record = RESULTS / f"{name}.json"
        part = make(json.loads(record.read_text(encoding="utf-8"))) if record.exists() else ""
        if part:
            pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            text = pattern.sub(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text)  # type: ignore[misc]
    return text


def _optimality(record: dict[str, Any]) -> str:
    """A row a solver: how often it missed the optimum, and by how much at worst."""
    instances = sum(row["instances"] for row in record.values())
    lines = [
        f"Against `exact` on {instances:,} random chains of 2 to 6 blocks, at budgets where something must be and",
        "can be recomputed:",
        "",
        "| solver | misses the optimum | worst time / optimum |",
        "|---|---|---|",
    ]
    for solver in next(iter(record.values()))["missed"]:
        missed = sum(row["missed"][solver] for row in record.values())
        worst = max(row["worst ratio"][solver] for row in record.values())
        lines.append(f"| `{solver}` | {missed:,} ({100 * missed / instances:.2f} %) | {worst:.2f} |")
    return "\n".join(lines)


def _bounds(record: dict[str, Any]) -> str:
    """A row a case: seconds, memory and their limits; nothing where they have not been measured."""
    if "bounds" not in record:
        return ""
    lines = ["| solver | blocks | slots | seconds | limit | MiB |", "|---|---|---|---|---|---|"]
    for row in record["bounds"]:
        solver, blocks, slots = row["case"].split()
        limit = "-" if row["limit"] is None else f"{row['limit']:g}"
        lines.append(
            f"| `{solver}` | {blocks.partition('=')[2]} | {slots.partition('=')[2]} | {row['seconds']:.2g} "
            f"| {limit}{'' if row['holds'] else ', **not held**'} | {row['resident_mib']} |"
        )
    conditions = record["conditions"]
    lines.append(f"\n{conditions['cpu']}, {conditions['cores']} cores, {conditions['date']}.")
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
