"""The tables of docs/slices.md, from the record of benchmarks/slices.py; benchmarks/readme.py puts them there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from . import heads
from .models.words import LANGUAGE
from .slices import MODELS, PERCENTS, PLAIN, REDUCE, Row

Rows = dict[str, Row]  # of one model, by way

TITLES = {
    "gpt_32k": "GPT, 32,768 words",
    "gpt_50k_tied": "GPT, 50,257 words, tied",
    "t5_32k": "like T5, 32,128 words, tied",
    "llama_128k": "like Llama, 128,256 words",
    "gpt_32k_bf16": "GPT, 32,768 words, bfloat16",
    "gpt_wide": "GPT, MLPs of 8 times the width",
    "resnet_gn": "ResNet with GroupNorm",
    "unet_gn": "UNet with GroupNorm",
}


def tables(record: str) -> str:
    """All that is on record, as Markdown."""
    read = json.loads(record)
    found: dict[str, Rows] = {name: {} for name in MODELS}
    for row in (Row(**fields) for fields in read["rows"]):
        found[row.model][row.way] = row
    full = {name: rows for name, rows in found.items() if rows and not half(name)}
    parts = [memory(full), numbers(full)]
    parts += [beside(name, rows) for name, rows in full.items() if name in LANGUAGE]
    parts += [precision(name, rows) for name, rows in found.items() if rows and half(name)]
    about = read["conditions"]
    dates = sorted({row.date for rows in found.values() for row in rows.values()})
    said = (
        f"One thread of {about['cpu']}, torch {about['torch']}; seconds of the processor, the least of "
        f"{about['steps']} steps, over those of a plain step by turns. Measured on {' and '.join(dates)}."
    )
    return "\n\n".join([*(part for part in parts if part), said])


def half(model: str) -> bool:
    return model.endswith("_bf16")


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Empty where there are no lines."""
    body = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *body]) if body else ""


def under(title: str, text: str) -> str:
    return f"### {title}\n\n{text}" if text else ""


# Cells; empty where nothing was measured.


def megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.1f} MB"


def time(row: Row | None) -> str:
    return "" if row is None or row.peak is None else f"{row.slowdown:.2f}"


def fits(row: Row | None) -> str:
    """The time, or that no plan has so little memory."""
    return "-" if row is not None and row.minimum is not None and row.peak is None else time(row)


def size_of(row: Row | None, of: Callable[[Row], int | None]) -> str:
    return "" if row is None else megabytes(of(row))


def parts(row: Row) -> str:
    """The number of parts of each region, in order; "none" without regions."""
    return ", ".join(str(region["parts"]) for region in row.regions) or "none"


# Tables.


def memory(found: dict[str, Rows]) -> str:
    """The least memory without and with slices, and the time at each budget."""
    head = ["model", "plain", "least, whole ops", "time", "least, slices", "of that", "time"]
    head += [f"slices at {percent} % of plain" for percent in PERCENTS]
    return under("Least memory", table(head, map(_memory, found, found.values())))


def _memory(name: str, rows: Rows) -> list[str]:
    whole, sliced = rows.get("fxremat, least"), rows.get("slices, least")
    share = ""
    if whole is not None and sliced is not None and whole.minimum and sliced.minimum:
        share = f"{sliced.minimum / whole.minimum:.0%}"
    return [
        TITLES[name],
        size_of(rows.get(PLAIN), lambda row: row.peak),
        size_of(whole, lambda row: row.minimum),
        time(whole),
        size_of(sliced, lambda row: row.minimum),
        share,
        time(sliced),
        *(fits(rows.get(f"slices {percent}%")) for percent in PERCENTS),
    ]


def numbers(found: dict[str, Rows]) -> str:
    """Peaks beside their predictions, and how far numbers are from plain PyTorch's."""
    head = ["model", "plan", "parts", "predicted peak", "measured peak", "time"]
    head += ["loss, ulps", "worst gradient", "equal gradients", "planning"]
    lines = (_numbers(name, row) for name, rows in found.items() for row in _plans(rows))
    return under("Predictions and numbers", table(head, lines))


def _numbers(name: str, row: Row) -> list[str]:
    return [
        TITLES[name],
        row.way,
        parts(row),
        megabytes(row.predicted_peak),
        megabytes(row.peak),
        time(row),
        f"{row.loss_ulps:.0f}",
        f"{row.worst_error:.1e}",
        f"{row.equal_gradients} of {row.gradients}",
        f"{row.planning_seconds:.1f} s",
    ]


def _plans(rows: Rows) -> Iterator[Row]:
    names = ["fxremat, all kept", "fxremat, least"]
    names += [f"slices {percent}%" for percent in PERCENTS] + ["slices, least"]
    return (rows[name] for name in names if name in rows and rows[name].peak is not None)


def beside(name: str, rows: Rows) -> str:
    """Other ways to do without all logits at once, and a plan in the memory that each takes."""
    head = ["way", "peak", "time", "worst gradient", "slices in that memory: peak", "time"]
    lines = [_beside(rows[way], rows.get(f"slices for {way}")) for way in (PLAIN, *heads.WAYS) if way in rows]
    return under(f"At equal memory: {TITLES[name]}", table(head, lines))


def _beside(row: Row, ours: Row | None) -> list[str]:
    if row.peak is None:
        return [row.way, row.error or "", "", "", "", ""]
    ours_peak = "-" if ours is not None and ours.peak is None else size_of(ours, lambda row: row.peak)
    return [row.way, megabytes(row.peak), time(row), f"{row.worst_error:.1e}", ours_peak, fits(ours)]


def precision(name: str, rows: Rows) -> str:
    """Errors against the same weights in fp32."""
    head = ["way", "peak", "time", "worst matrix against fp32", "head's gradient against fp32"]
    ways = [PLAIN, "fxremat, least"]
    ways += [f"slices {percent}%, sums {reduce}" for reduce in REDUCE for percent in PERCENTS]
    ways += [f"slices, least, sums {reduce}" for reduce in REDUCE] + list(heads.WAYS)
    lines = [_precision(rows[way]) for way in ways if way in rows and rows[way].true_error is not None]
    return under(TITLES[name], table(head, lines))


def _precision(row: Row) -> list[str]:
    return [
        row.way, megabytes(row.peak), time(row), f"{row.true_error:.1e}", f"{row.true_head_error:.1e}"
    ]  # fmt: skip
