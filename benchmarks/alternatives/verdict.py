"""Who wins: at every budget fxremat beside the best alternative, and what is wanted of it as claims that hold or not.

The best alternative at a budget is the fastest one whose measured peak is within it, whatever its faults. Of those that
took part in the rounds, where any did: the others were clearly beaten, and have rough times only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .rows import Measured, Ours, Point, Record

MOST_RATIO = 0.93  # geometric mean over the cells
LEAST_SPENT = 0.95  # of the budget
AS_FAST = 1.02  # a time that is within this factor of fxremat's fastest has no more to gain from memory
MOST_PLANNING = 60.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model at one budget."""

    record: Record
    ours: Ours
    best: Point | None  # None where no alternative fits
    best_measured: Measured | None

    @property
    def ratio(self) -> float | None:
        """fxremat's time over that of the best alternative; None where one of them has none."""
        if self.ours.measured is None or self.best_measured is None:
            return None
        return self.record.slowdown(self.ours.measured) / self.record.slowdown(self.best_measured)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something wanted, and what was found."""

    wanted: str
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'NO '} {self.wanted}: {self.found}"


def cells(records: Iterable[Record]) -> list[Cell]:
    """Every budget that is a share of plain's peak."""
    return [_cell(record, ours) for record in records for ours in record.ours if ours.percent is not None]


def _cell(record: Record, ours: Ours) -> Cell:
    fitting = [(point, got) for point, got in record.working if got.peak <= ours.mem]
    fitting = [pair for pair in fitting if pair[1].seconds is not None] or fitting
    point, got = min(fitting, key=lambda pair: record.slowdown(pair[1]), default=(None, None))
    return Cell(record=record, ours=ours, best=point, best_measured=got)


def least_alternative(record: Record) -> tuple[Point, Measured] | None:
    """The alternative of the least measured peak."""
    return min(record.working, key=lambda pair: pair[1].peak, default=None)


def least_ours(record: Record) -> Measured | None:
    """fxremat at its announced minimum."""
    return next((got for ours, got in record.running if ours.percent is None), None)


def geometric_mean(numbers: Sequence[float]) -> float:
    """Of at least one positive number.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return math.exp(math.fsum(map(math.log, numbers)) / len(numbers))


def claims(records: Sequence[Record]) -> list[Claim]:
    """The claims that are wanted of fxremat, in order of weight."""
    made: list[Callable[[Sequence[Record]], Claim]] = [
        _within_budget, _same_numbers, _faster_in_the_mean, _nowhere_slower, _least, _spent, _planning
    ]  # fmt: skip
    return [make(records) for make in made]


def _within_budget(records: Sequence[Record]) -> Claim:
    runs = [(record, ours, got) for record in records for ours, got in record.running]
    over = [f"{record.model} ({ours.name})" for record, ours, got in runs if got.peak > ours.mem]
    failed = [f"{record.model} ({ours.name})" for record in records for ours in record.ours if ours.failure]
    return Claim(
        wanted="fxremat's measured peak is within every budget",
        found=f"{len(over)} of {len(runs)} above{_listed(over)}, {len(failed)} failed{_listed(failed)}",
        holds=not over and not failed,
    )


def _same_numbers(records: Sequence[Record]) -> Claim:
    runs = [(record, ours, got) for record in records for ours, got in record.running]
    differ = [
        f"{record.model} ({ours.name})"
        for record, ours, got in runs
        if not got.loss == got.gradients == got.buffers == "equal"
    ]
    return Claim(
        wanted="fxremat's loss, gradients and buffers are plain PyTorch's bit for bit",
        found=f"{len(differ)} of {len(runs)} differ{_listed(differ)}",
        holds=not differ,
    )


def _faster_in_the_mean(records: Sequence[Record]) -> Claim:
    ratios = [cell.ratio for cell in cells(records) if cell.ratio is not None]
    mean = geometric_mean(ratios) if ratios else math.inf
    return Claim(
        wanted=f"in the geometric mean at most {MOST_RATIO} times the time of the best alternative",
        found=f"{mean:.3f} over {len(ratios)} cells" if ratios else "there are no cells",
        holds=mean <= MOST_RATIO,
    )


def _nowhere_slower(records: Sequence[Record]) -> Claim:
    every = cells(records)
    slower = [_at(cell) + f" {cell.ratio:.3f}" for cell in every if cell.ratio is not None and cell.ratio > 1]
    lost = [_at(cell) for cell in every if cell.best is not None and cell.ours.measured is None]
    won = sum(cell.best is None and cell.ours.measured is not None for cell in every)
    return Claim(
        wanted="at no budget slower than the best alternative, or without a plan where it has one",
        found=(
            f"slower in {len(slower)}{_listed(slower)}, without a plan in {len(lost)}{_listed(lost)}; "
            f"{won} budgets are met by fxremat alone"
        ),
        holds=not slower and not lost,
    )


def _least(records: Sequence[Record]) -> Claim:
    above = []
    for record in records:
        ours, other = least_ours(record), least_alternative(record)
        if ours is not None and other is not None and ours.peak > other[1].peak:
            above.append(
                f"{record.model} {record.share(ours.peak):.1f} % above {record.share(other[1].peak):.1f} %"
            )
    return Claim(
        wanted="fxremat's least peak is no more than that of any alternative",
        found=f"more in {len(above)} of {len(records)} models{_listed(above)}",
        holds=not above,
    )


def _spent(records: Sequence[Record]) -> Claim:
    runs = [(record, *run) for record in records for run in could_be_faster(record)]
    unspent = [
        f"{record.model} ({ours.name}) {got.peak / ours.mem:.1%}"
        for record, ours, got in runs
        if got.peak < LEAST_SPENT * ours.mem
    ]
    return Claim(
        wanted=f"at least {LEAST_SPENT:.0%} of the budget is used wherever fxremat could still be faster",
        found=f"less in {len(unspent)} of {len(runs)}{_listed(unspent)}",
        holds=not unspent,
    )


def could_be_faster(record: Record) -> list[tuple[Ours, Measured]]:
    """The runs of fxremat that are slower than its fastest."""
    fastest = min((record.slowdown(got) for _, got in record.running), default=math.inf)
    return [(ours, got) for ours, got in record.running if record.slowdown(got) > AS_FAST * fastest]


def _planning(records: Sequence[Record]) -> Claim:
    seconds = [
        (max([record.first_planning_seconds, *(ours.planning_seconds for ours in record.ours)]), record.model)
        for record in records
    ]
    most, model = max(seconds, default=(0.0, "no model"))
    return Claim(
        wanted=f"planning takes at most {MOST_PLANNING:g} s",
        found=f"at most {most:.1f} s ({model})",
        holds=most <= MOST_PLANNING,
    )


def _at(cell: Cell) -> str:
    return f"{cell.record.model} at {cell.ours.percent:g} %"


def _listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
