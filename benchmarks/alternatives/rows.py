"""Measurements of each model, and their JSON: a record a model, so that models may come one at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .. import models

NAMES = tuple(name for name in models.ALL if name != "gpt_padded")

Kind = Literal["equal", "close", "wrong"]
"""Beside plain PyTorch's: equal bit for bit, within rounding, or neither (see `measure.compared`)."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One training step, from gradients of None."""

    peak: int  # bytes, by the allocator
    storages: int  # bytes, by the second meter, which sees no workspaces
    rough: float  # seconds, of two steps
    seconds: float | None  # least of all rounds; None where it was left out of them
    loss: Kind
    gradients: Kind
    buffers: Kind
    gradient_error: float  # norm of the difference over norm of plain's


@dataclass(frozen=True, kw_only=True)
class Point:
    """An alternative with one of its settings."""

    family: str
    setting: str
    measured: Measured | None  # None where it failed
    failure: str = ""

    @property
    def name(self) -> str:
        """Both together."""
        return f"{self.family}: {self.setting}"


@dataclass(frozen=True, kw_only=True)
class Ours:
    """fxremat at one budget."""

    percent: float | None  # of plain's peak; None: the announced minimum
    mem: int
    minimum: int  # the least budget, as announced
    measured: Measured | None  # None where `mem` is below the minimum, or it failed
    predicted_peak: int = 0
    planning_seconds: float = 0.0
    failure: str = ""

    @property
    def name(self) -> str:
        """Its budget."""
        return "fxremat: least" if self.percent is None else f"fxremat: {self.percent:g} %"


@dataclass(frozen=True, kw_only=True)
class Record:
    """All of one model."""

    model: str
    conditions: Mapping[str, Any]
    plain: Measured
    floor: int | None  # bytes that no schedule of the same ops gets below; None where fxremat made no plan
    rounding: float  # gradient_error of plain PyTorch after a change of its parameters in the last bit
    first_planning_seconds: float  # of fxremat with nothing measured before
    points: Sequence[Point]
    ours: Sequence[Ours]

    def share(self, size: int) -> float:
        """Percent of plain PyTorch's measured peak."""
        return 100 * size / self.plain.peak

    def slowdown(self, measured: Measured) -> float:
        """Seconds over plain PyTorch's: from the rounds where it took part in them, else the rough time."""
        plain = self.plain.rough if self.plain.seconds is None else self.plain.seconds
        return (measured.rough if measured.seconds is None else measured.seconds) / plain

    @property
    def working(self) -> list[tuple[Point, Measured]]:
        """The alternatives that did not fail."""
        return [(point, point.measured) for point in self.points if point.measured is not None]

    @property
    def running(self) -> list[tuple[Ours, Measured]]:
        """The budgets at which fxremat trained."""
        return [(ours, ours.measured) for ours in self.ours if ours.measured is not None]


def read(path: Path) -> list[Record]:
    """The records of a file, in the order of the models; none where there is no file."""
    if not path.exists():
        return []
    records = [parse(fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    return sorted(records, key=lambda record: NAMES.index(record.model))


def add(path: Path, record: Record) -> None:
    """Put a record into a file, in place of an older one of the same model; all at once."""
    others = [other for other in read(path) if other.model != record.model]
    records = sorted([*others, record], key=lambda one: NAMES.index(one.model))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text(records) + "\n", encoding="utf-8")
    os.replace(fresh, path)


def text(records: Iterable[Record]) -> str:
    """JSON that `parse` reads back, record by record."""
    return json.dumps([asdict(record) for record in records], indent=1)


def parse(fields: Mapping[str, Any]) -> Record:
    """The record of these fields."""
    return Record(
        **{
            **fields,
            "plain": Measured(**fields["plain"]),
            "points": [Point(**_with_measured(point)) for point in fields["points"]],
            "ours": [Ours(**_with_measured(ours)) for ours in fields["ours"]],
        }
    )


def _with_measured(fields: Mapping[str, Any]) -> dict[str, Any]:
    got = fields["measured"]
    return {**fields, "measured": None if got is None else Measured(**got)}
