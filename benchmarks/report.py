"""Rows as a table for people and as JSON for the record, with the machine they were measured on."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .answers import Answer
from .compare import Measured, Row

HEADER = (
    f"{'model':<16}{'budget':>7}{'MB':>8}{'peak':>8}{'predicted':>11}{'time':>8}{'predicted':>11}"
    f"{'planning':>10}  same numbers"
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A promise: at this budget a step takes at most this many times as long as a plain one."""

    model: str
    percent: float
    most: float

    def verdict(self, rows: Iterable[Row]) -> str:
        name = f"{self.model} at {self.percent:g} %: at most {self.most:.2f}x"
        for row in rows:
            if (row.model, row.percent) == (self.model, self.percent):
                if row.measured is None:
                    return f"{name}: NOT HELD, the least budget is {row.minimum} bytes"
                held = "held" if row.measured.slowdown <= self.most else "NOT HELD"
                return f"{name}: {held}, {row.measured.slowdown:.3f}x"
        return f"{name}: not measured"


def line(row: Row) -> str:
    """Peaks in percent of plain PyTorch's, times as multiples of its step."""
    start = f"{row.model:<16}{row.percent:>5g} %{row.mem / 1e6:>8.1f}"
    got = row.measured
    if got is None:
        assert row.minimum is not None
        return f"{start}  too small: the least is {row.minimum / 1e6:.1f} MB ({_share(row, row.minimum)})"
    over = " OVER THE BUDGET" if got.measured_peak > row.mem else ""
    return (
        f"{start}{_share(row, got.measured_peak):>8}{_share(row, got.predicted_peak):>11}"
        f"{got.slowdown:>7.3f}x{got.predicted_slowdown:>10.3f}x{got.planning_seconds:>8.1f} s"
        f"  {got.numbers}{over}"
    )


def _share(row: Row, size: int) -> str:
    return f"{100 * size / row.plain_peak:.1f} %"


def write(path: Path, rows: list[Row], conditions: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"conditions": conditions, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_rows(text: str) -> list[Row]:
    """The rows of `json.dumps([asdict(row), ...])`."""
    return [_row(fields) for fields in json.loads(text)]


def _row(fields: dict[str, Any]) -> Row:
    got = fields.pop("measured")
    measured = None if got is None else Measured(**{**got, "numbers": Answer(got["numbers"])})
    return Row(**fields, measured=measured)


def machine() -> dict[str, Any]:
    """The date, the versions, the processors and the load, which a reader needs to judge the times."""
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for text in info.read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor()
