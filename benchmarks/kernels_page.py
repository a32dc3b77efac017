"""The tables of docs/kernels.md, from the record of benchmarks/kernels.py; benchmarks/readme.py puts them there.

A cell is a model at a budget. Beside fxremat stands the fastest of torch's own ways, plain PyTorch included, whose
measured peak is within the same bytes, whatever its faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .alternatives.verdict import geometric_mean
from .kernels import COMPILED, EAGER, OURS, OURS_EAGER, TORCH, Record, Row, parse

WRONG = 0.1  # of the norm of all gradients: no rounding


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model at one budget of fxremat with backend="inductor"."""

    record: Record
    ours: Row
    eager: Row | None  # fxremat with PyTorch's kernels at the same budget, or in its own least memory
    best: Row | None  # None where none of torch's ways fits

    @property
    def holds(self) -> bool:
        """Tell whether fxremat has trained within the budget."""
        return fits(self.ours, self.ours.budget)

    @property
    def ratio(self) -> float | None:
        """fxremat's time over that of torch's fastest way; None where one of them has none."""
        return _ratio(self.ours, self.best) if self.holds else None

    @property
    def ratio_to_eager(self) -> float | None:
        """fxremat's time over that with PyTorch's kernels in the same bytes; None where one of them has none."""
        if not self.holds or self.eager is None or self.eager.budget != self.ours.budget:
            return None
        return _ratio(self.ours, self.eager)


def _ratio(one: Row, other: Row | None) -> float | None:
    if other is None or one.seconds is None or other.seconds is None:
        return None
    return one.seconds / other.seconds


def fits(row: Row, budget: int | None) -> bool:
    """Tell whether the way was timed, and its measured peak is within these bytes."""
    if row.peak is None or row.seconds is None or budget is None:
        return False
    return row.peak <= budget


def fastest_that_fits(record: Record, budget: int | None) -> Row | None:
    """The fastest of torch's own ways within these bytes; None where none fits."""
    fitting = [row for row in record.rows if row.family in TORCH and fits(row, budget)]
    return min(fitting, key=lambda row: row.seconds or 0.0, default=None)


def cells(records: Iterable[Record]) -> list[Cell]:
    """Every budget of every model, in their order; the least memory comes last."""
    return [_cell(record, row) for record in records for row in record.rows if row.family == OURS]


def _cell(record: Record, ours: Row) -> Cell:
    eager = next(
        (row for row in record.rows if (row.family, row.setting) == (OURS_EAGER, ours.setting)), None
    )
    return Cell(record=record, ours=ours, eager=eager, best=fastest_that_fits(record, ours.budget))


def tables(text: str) -> str:
    """All that is on record, as Markdown."""
    records = parse(text)
    every = cells(records)
    parts = [
        table(
            [
                "model", "budget", "fxremat, Inductor", "fxremat, eager", "torch's fastest that fits", "which",
                "ours/theirs", "predicted peak", "measured peak",
            ],
            map(_cell_line, every),
        ),
        LEGEND,
        "Geometric means of fxremat's time with Inductor:",
        table(["model", "over torch's fastest that fits", "over fxremat, eager"], _means(records, every)),
        "Seconds of the clock until the first step is over:",
        table(
            [
                "model", "torch.compile, cold", "fxremat, cold", "fxremat, second budget", "of which compiling",
                "regions, distinct",
            ],
            map(_compiling, records),
        ),
        NUMBERS,
        table(
            [
                "model", "torch.compile to eager", "fxremat, Inductor, to torch.compile",
                "fxremat, Inductor, to eager", "same bits",
            ],
            map(_numbers, records),
        ),
        *("\n".join(_every_way(record)) for record in records),
        _conditions(records),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


LEGEND = (
    "Times are over a step of eager PyTorch, peaks and budgets in percent of its measured peak. *none*: none of "
    "torch's own ways fits; -: there is no plan, or nothing was measured. In the last row of a model, each of the two "
    "plans of fxremat is in the least memory that it can be planned for. †: gradients are more than a tenth off "
    "those of torch.compile without a budget."
)

NUMBERS = (
    "The largest relative difference of a gradient, and whether two steps from the same seed give the same bits. Where "
    "a model has dropout, torch.compile draws other masks than eager PyTorch; fxremat draws eager's on a CPU:"
)


def summary(text: str) -> str:
    """A line for the README: how the times compare, over all models and budgets."""
    records = parse(text)
    every, dates = cells(records), sorted(record.conditions["date"] for record in records)
    return (
        f"geometric means of times on a CPU with one thread are {mean(cell.ratio for cell in every)} over torch's "
        f"fastest way that fits, and {mean(cell.ratio_to_eager for cell in every)} over fxremat's own plans op by op; "
        f"measured from {dates[0]} to {dates[-1]}."
    )


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Empty where there are no lines."""
    body = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *body]) if body else ""


# Cells of the tables; "-" where there is nothing to say.


def share(record: Record, size: int | None) -> str:
    """Percent of eager's measured peak."""
    whole = record.row(EAGER).peak
    return "-" if size is None or not whole else f"{100 * size / whole:.1f} %"


def time(record: Record, row: Row | None) -> str:
    """Over that of eager."""
    ratio = None if row is None else _ratio(row, record.row(EAGER))
    return "-" if ratio is None else f"{ratio:.3f}"


def seconds(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f} s"


def number(found: float | None) -> str:
    return "-" if found is None else f"{found:.1e}"


def mean(ratios: Iterable[float | None]) -> str:
    """The geometric mean of the ratios there are, and how many these are."""
    found = [ratio for ratio in ratios if ratio is not None]
    if not found:
        return "-"
    return f"{geometric_mean(found):.3f} ({len(found)} {'budget' if len(found) == 1 else 'budgets'})"


def _cell_line(cell: Cell) -> list[str]:
    record, ours = cell.record, cell.ours
    least = ours.percent is None
    eager = time(record, cell.eager)
    if least and cell.eager is not None and cell.eager.peak is not None:
        eager += f" in {share(record, cell.eager.budget)}"
    return [
        record.model,
        f"least, {share(record, ours.budget)}" if least else f"{ours.percent:g} %",
        time(record, ours),
        eager,
        time(record, cell.best) if cell.best else "none",
        _name(cell.best),
        _verdict(cell),
        share(record, ours.predicted_peak),
        share(record, ours.peak),
    ]


def _name(row: Row | None) -> str:
    """The way, marked where it computes something else than torch.compile does without a budget."""
    if row is None:
        return ""
    wrong = row.family != EAGER and (row.all_to_compiled or 0.0) > WRONG
    return f"`{row.name}`{' †' if wrong else ''}"


def _verdict(cell: Cell) -> str:
    """The ratio, bold where torch is ahead, or why there is none."""
    if cell.ours.peak is None:
        return "-"
    if not cell.holds:
        return "**over the budget**"
    if cell.ratio is None:
        return "alone"
    return f"{cell.ratio:.2f}" if cell.ratio <= 1 else f"**{cell.ratio:.2f}**"


def _means(records: Sequence[Record], every: Sequence[Cell]) -> Iterator[list[str]]:
    groups = [(record.model, [cell for cell in every if cell.record is record]) for record in records]
    if len(groups) > 1:
        groups.append(("all", list(every)))
    for name, mine in groups:
        yield [name, mean(cell.ratio for cell in mine), mean(cell.ratio_to_eager for cell in mine)]


def _compiling(record: Record) -> list[str]:
    nothing = Row(family=OURS)
    calls = {row.place: row for row in record.rows if row.family == OURS}
    first, second = calls.get(1, nothing), calls.get(2, nothing)
    return [
        record.model,
        seconds(_compiled(record).first_seconds),
        seconds(first.first_seconds),
        seconds(second.first_seconds),
        seconds(second.compiling_seconds),
        _regions(second) or "-",
    ]


def _compiled(record: Record) -> Row:
    """The row of torch.compile without a budget; an empty one where there is none."""
    return next((row for row in record.rows if row.family == COMPILED), Row(family=COMPILED))


def _regions(row: Row) -> str:
    return "" if row.regions is None else f"{row.regions}, {row.distinct}"


def _numbers(record: Record) -> list[str]:
    ours = [row for row in record.rows if row.family == OURS and row.peak is not None]
    same = "yes" if all(row.same_bits for row in ours) else "**no**"
    return [
        record.model,
        number(_compiled(record).worst_to_eager),
        number(_largest(row.worst_to_compiled for row in ours)),
        number(_largest(row.worst_to_eager for row in ours)),
        same if ours else "-",
    ]


def _largest(found: Iterable[float | None]) -> float | None:
    return max((one for one in found if one is not None), default=None)


def _every_way(record: Record) -> Iterator[str]:
    """A line a way, failures included."""
    eager = record.row(EAGER)
    took = f"{(eager.peak or 0) / 1e6:.1f} MB and {(eager.seconds or 0.0) * 1e3:.0f} ms"
    yield f"<details><summary>{record.model}: every way; eager PyTorch takes {took}</summary>\n"
    lines, failed = [], []
    for row in record.rows:
        if row.peak is None:
            failed.append(f"`{row.name}` failed: {(row.error or '').replace('|', '/')}\n")
            continue
        numbers = (number(row.worst_to_eager), number(row.worst_to_compiled))
        lines.append([
            f"`{row.name}`", share(record, row.peak), time(record, row), *numbers, seconds(row.first_seconds),
            _regions(row),
        ])  # fmt: skip
    head = ["", "peak", "time", "to eager", "to torch.compile", "first step after", "regions, distinct"]
    yield table(head, lines)
    yield ""
    yield from failed
    yield "</details>"


def _conditions(records: Sequence[Record]) -> str:
    """A table of all that a reader needs to judge the times."""
    head = ["model", "date", "processor", "torch", "threads", "rounds", "load", "minutes"]
    lines = []
    for record in records:
        about = record.conditions
        lines.append([
            record.model, str(about["date"]), f"{about['cpu']}, {about['cores']} cores", str(about["torch"]),
            str(about["threads"]), str(about["rounds"]), f"{about['load_before']} to {about['load_after']}",
            str(about["minutes"]),
        ])  # fmt: skip
    return table(head, lines)
