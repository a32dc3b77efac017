"""A part of the first hour: named cases, each a row of one table and of one JSON, which says what is done already.

    results = Results.of("memory", COLUMNS)
    results.run({"gpt at 60%": measure, ...}, limit=500)

A case that the JSON has, from the same GPU, releases and allocator, is printed from there and not run again. A case
that raises is a row too, which says what it raised, and is run again the next time. No case begins after `limit`
seconds.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fxremat
from benchmarks import report

FOLDER = Path(__file__).parents[1] / "results" / "gpu_first_hour"
SAME = ("gpu", "torch", "cudnn", "allocator", "size")  # conditions whose rows go together

Row = dict[str, Any]
Measure = Callable[[], Row]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A field of a row as it is printed: at the right end of `width` columns, or, if that is 0, after two blanks."""

    name: str
    text: Callable[[Row], str]
    width: int = 0

    def put(self, text: str) -> str:
        """The text in its place."""
        return f"{text:>{self.width}}" if self.width else f"  {text}"


class Unfinished(Exception):
    """Cases are left that no time was left for."""

    def __init__(self, left: Sequence[str]) -> None:
        super().__init__(f"no time left for: {', '.join(left)}; the same call goes on with them")
        self.left = left


def header(columns: Sequence[Column], width: int = 26) -> str:
    """The first line of a table; the first column has the names of cases."""
    return "".join([f"{'':<{width}}", *(column.put(column.name) for column in columns)])


def line(case: str, row: Row, columns: Sequence[Column], width: int = 26) -> str:
    """A line of a table: the row's fields, or why its case has none."""
    if "failed" in row:
        return f"{case:<{width}}  FAILED: {row['failed']}"
    if "least" in row:
        return f"{case:<{width}}  too small: the least budget is {row['least'] / 1e6:.1f} MB"
    return "".join([f"{case:<{width}}", *(column.put(column.text(row)) for column in columns)])


def conditions(size: str) -> dict[str, Any]:
    """Return what a reader needs to judge the rows, and what rows must have in common to stand in one table."""
    return {
        **report.machine(),
        "cudnn": torch.backends.cudnn.version(),
        "allocator": allocator(),
        "size": size,
    }


def allocator() -> str:
    """The setting of the caching allocator; empty by default."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def place_of(name: str) -> Path:
    """The JSON of a part: in $OUT, or among the benchmarks' results; with expandable segments it is another one."""
    suffix = "_expandable" if "expandable_segments:True" in allocator() else ""
    out = os.environ.get("OUT")
    return (Path(out) if out else FOLDER) / f"{name}{suffix}.json"


@dataclass
class Results:
    """The rows of a part, by case, on disk after each."""

    path: Path
    columns: Sequence[Column]
    conditions: dict[str, Any]
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, columns: Sequence[Column], size: str = "gpu") -> Results:
        """The rows that were measured under these conditions, if there are any."""
        results = cls(path=place_of(name), columns=columns, conditions=conditions(size))
        results.rows = known(results.path, results.conditions)
        return results

    def run(self, cases: Mapping[str, Measure], limit: float | None = None) -> list[Row]:
        """Measure and print what is not known.

        Raises:
            Unfinished: where the time was up before the last case began, once all others are printed.
        """
        began = time.monotonic()
        print(f"\n{self.path.stem}: {', '.join(str(self.conditions[name]) for name in ('gpu', 'torch', 'date'))}")
        print(header(self.columns), flush=True)
        left = []
        for case, measure in cases.items():
            note = ""
            if self.has(case):
                note = "  (known)"
            elif limit is not None and time.monotonic() - began >= limit:
                left.append(case)
                continue
            else:
                self.rows[case] = {**measured(measure), "date": self.conditions["date"]}
                self.write()
            print(line(case, self.rows[case], self.columns) + note, flush=True)
        if left:
            raise Unfinished(left)
        return [self.rows[case] for case in cases]

    def has(self, case: str) -> bool:
        """Tell whether the case was measured, and did not fail."""
        return case in self.rows and "failed" not in self.rows[case]

    def write(self) -> None:
        """Write all rows to the file of the part, with the conditions of their measurement."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {"conditions": self.conditions, "rows": self.rows}
        self.path.write_text(json.dumps(record, indent=1, default=str) + "\n")


def known(path: Path, now: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of a file that was written under the same conditions."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    alike = all(record["conditions"].get(name) == now.get(name) for name in SAME)
    date = record["conditions"]["date"]
    return {case: {"date": date, **row} for case, row in record["rows"].items()} if alike else {}


def measured(measure: Measure) -> Row:
    """The row of a case, with its seconds: of a budget that is too small the least, of another error what it says."""
    began = time.monotonic()
    clean()
    try:
        row = measure()
    except fxremat.BudgetTooSmall as error:
        row = {"least": error.minimum}
    except Exception as error:
        traceback.print_exc()
        row = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    clean()
    return {**row, "took": time.monotonic() - began}


def clean() -> None:
    """Forget compiled graphs, and give unused memory back."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
