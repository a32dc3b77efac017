"""A table of the alternative plans: memory and time of each, and a lower bound on the time within that memory.

    print(plan.frontier)        at most twelve rows, always with the first, the last and the chosen plan
    for peak, time in plan.frontier: ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fxremat.planned_step import PlannedStep
from fxremat.show.table import Table
from fxremat.show.text import whatever_is
from fxremat.units import format_bytes, format_ratio, format_seconds

ROWS = 12  # maximum number of rows that are printed
_CHOSEN = "<- this plan"
Point = tuple[int, float]


@dataclass(frozen=True, kw_only=True)
class OfferedPlan:
    """A row of the table: one alternative plan."""

    peak: int  # peak bytes
    time: float  # seconds of one forward and backward
    # seconds that every plan with this peak needs at least; None: unknown, since the plan slices other ops
    bound: float | None
    chosen: bool  # True for the plan whose alternatives are printed


class FrontierTable(tuple[Point, ...]):
    """A tuple of (peak in bytes, time in seconds) of the alternative plans, fastest first; prints as a table."""

    plan: PlannedStep

    @classmethod
    def of(cls, plan: PlannedStep) -> FrontierTable:
        """Return the table of a plan's alternatives; lower bounds are computed when it is printed."""
        table = cls((candidate.peak, candidate.time) for candidate in plan.alternatives.candidates)
        table.plan = plan
        return table

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a plain tuple of pairs."""
        return tuple, (tuple(self),)

    @property
    def rows(self) -> tuple[OfferedPlan, ...]:
        """The rows of the table, with the chosen plan, even if it is not one of the alternatives.

        The first access solves a linear program for each row, which takes a second or two on large models.
        """
        known: tuple[OfferedPlan, ...] | None = self.__dict__.get("_rows")
        if known is None:
            known = self.__dict__["_rows"] = tuple(self._row(point) for point in self._shown())
        return known

    def _row(self, point: Point) -> OfferedPlan:
        bound = replace(self.plan, budget=point[0]).lower_bound if point in self._of_the_same_ops else None
        return OfferedPlan(peak=point[0], time=point[1], bound=bound, chosen=point == self._chosen)

    @property
    def _of_the_same_ops(self) -> set[Point]:
        """(peak, time) of the alternatives that have the same graph as the plan, since they slice the same ops."""
        joint, candidates = self.plan.graph, self.plan.alternatives.candidates
        return {self._chosen, *((one.peak, one.time) for one in candidates if one.layout.graph is joint)}

    @property
    def _chosen(self) -> Point:
        return self.plan.predicted_peak, self.plan.predicted_time

    def _shown(self) -> list[Point]:
        """Return (peak, time) of the plans that the table shows, including the chosen one, fastest first."""
        points = set(self) if self.plan.weights else {*self, self._chosen}
        return thinned(sorted(points, key=lambda point: (point[1], -point[0])), ROWS, self._chosen)

    def _table(self) -> Table:
        whole = self.plan.alternatives.keep_all
        rows = self.rows
        cells = tuple(
            (
                format_bytes(row.peak),
                format_ratio(row.peak, whole.peak, ".1%"),
                format_seconds(row.time),
                f"{format_ratio(row.time, whole.time, '.2f')}x",
                "" if row.bound is None else format_seconds(row.bound),
                _CHOSEN if row.chosen else "",
            )
            for row in rows
        )
        count = "1 plan" if len(self) == 1 else f"{len(self)} plans"
        return Table(
            title=(f"{count} for {self.plan.device} ({self.plan.timed} times), fastest first",),
            heads=("peak", "of keep-all", "time", "of keep-all", "lower bound", ""),
            rows=cells,
            notes=tuple(self._notes(len(set(self) - {(row.peak, row.time) for row in rows}))),
            left=frozenset([5]),
            strong=frozenset(place for place, row in enumerate(rows) if row.chosen),
        )

    def _notes(self, left_out: int) -> Iterator[str]:
        yield f"  lower bound: {whatever_is(self.plan)}, a step within that peak takes no less"
        if left_out:
            yield f"  {left_out} of them, in between, are not shown; list(plan.frontier) has all"
        if self.plan.weights:
            peak, time = self._chosen
            taken = f"{format_bytes(peak)}, {format_seconds(time)}"
            yield f"  of activations alone: with its weights, this plan has {taken}"

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()


def thinned(points: Sequence[Point], most: int, always: Point) -> list[Point]:
    """Return at most `most` points that are spread evenly over their peaks.

    The first, the last, and the point `always` are kept.

    Args:
        points: (peak, time) by decreasing peak.
        always: a point that is kept if it is among the points.
    """
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1} | ({points.index(always)} if always in points else set())
    while len(kept) < most:
        gaps = [(points[a][0] - points[b][0], a, b) for a, b in pairwise(sorted(kept)) if b > a + 1]
        if not gaps:
            break
        _, first, last = max(gaps)
        middle = (points[first][0] + points[last][0]) / 2
        kept.add(min(range(first + 1, last), key=lambda place: abs(points[place][0] - middle)))
    return [points[place] for place in sorted(kept)]
