"""Puts what benchmarks/results holds into the README, between its `<!-- name -->` and `<!-- /name -->` marks.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import (
    atlas,
    combinations,
    combinations_of_ranks,
    compression,
    fits,
    kernel_starts,
    kernels_page,
    offload,
    slices_page,
    traffic,
)
from .alternatives import rows, verdict
from .first_hour import page as gpu_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BUDGETS = (80, 60, 50, 40, 30, 25)


def filled(text: str) -> str:
    """A page's text with each marked part made from the record it names, where there is one."""
    parts = [(file.partition(".")[0], file, make) for file, make in PARTS.items()]
    for name, file, make in (*parts, *MORE):
        record = RESULTS / file
        if record.exists():
            part = make(record.read_text())
            pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            text = pattern.sub(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text)  # type: ignore[misc]
    return text


def _quickstart(output: str) -> str:
    """The plan that examples/01_quickstart.py printed."""
    return f"```\n{output[output.index('fxremat plan') :].rstrip()}\n```"


def _alternatives(record: str) -> str:
    """A row a model: the least memory, and at each budget the time over that of the fastest alternative."""
    records = [rows.parse(entry) for entry in json.loads(record)]
    lines = [
        "| model | plain peak | floor | least | alternatives' | "
        + " | ".join(f"{percent} %" for percent in BUDGETS)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(BUDGETS),
    ]
    for entry in records:
        cells = {cell.ours.percent: cell for cell in verdict.cells([entry])}
        sizes = [entry.floor, *_least(entry)]
        shares = ["-" if size is None else f"{entry.share(size):.0f} %" for size in sizes]
        times = [_cell(cells.get(percent)) for percent in BUDGETS]
        lines.append(f"| {entry.model} | {entry.plain.peak / 1e6:.0f} MB | {' | '.join([*shares, *times])} |")
    held = [str(claim.found) for claim in verdict.claims(records) if "geometric mean" in claim.wanted]
    dates = sorted({entry["conditions"]["date"] for entry in json.loads(record)})
    mean = f"Geometric mean: {held[0]}; measured on {' and '.join(dates)}, by the planner of then."
    return "\n".join([*lines, "", mean])


def _least(entry: rows.Record) -> tuple[int | None, int | None]:
    ours, theirs = verdict.least_ours(entry), verdict.least_alternative(entry)
    return (ours.peak if ours else None), (theirs[1].peak if theirs else None)


def _cell(cell: verdict.Cell | None) -> str:
    if cell is None or cell.ours.measured is None:
        return "-"
    return "alone" if cell.ratio is None else f"{cell.ratio:.2f}"


def _planning(record: str) -> str:
    found = json.loads(record)["found"]

    def seconds(name: str) -> str:
        return f"{found[name]['clock']:.1f} s"

    deep, llama = found["200 blocks"], found["Llama of 32 layers"]
    return (
        f"Planning the 12-layer GPT takes {seconds('fresh install')} on a fresh install, {seconds('from nothing')} "
        f"once kernels are compiled, {seconds('from the cost cache')} with known costs, {seconds('another budget')} "
        f"for another budget of that plan (`plan.within`) and {seconds('a new length')} for a new length "
        f"({found['of one capture']['clock']:.2f} s where one capture serves all lengths). A ResNet of 200 blocks "
        f"({deep['ops']} ops) takes {deep['clock']:.0f} s and {deep['bytes'] / 2**30:.1f} GiB, the sizes of "
        f"Llama 3.1 8B without data ({llama['ops']} ops) {llama['clock']:.0f} s."
    )


def _shapes(record: str) -> str:
    """A row a model: what its sizes cost."""
    found = json.loads(record)
    head = "| model | first step | all captures | a new size | at most | from nothing | step |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, row in found["kinds"].items():
        seconds = f"{row['first']:.1f} s | {row['captures']:.1f} s | {row['median']:.3f} s | {row['slowest']:.3f} s"
        lines.append(f"| {name} | {seconds} | {row['from_nothing']:.0f} of 12 | {row['step']:.2f} |")
    date, planning = found["conditions"]["date"], found["training"]["planning"]
    said = (
        "Seconds of the processor, in one thread; *step* is the time of a step over that of one captured for its size "
        f"alone. 30 steps of a small GPT-2 through `transformers.Trainer`, each of a length of its own, take "
        f"{planning:.1f} s more than without fxremat, captures included. Measured on {date}."
    )
    return "\n".join([*lines, "", said])


def _reserved(record: str) -> str:
    """A row a model and a budget: the bytes that were reserved, beside those that the plan had predicted."""
    found = json.loads(record)
    lines = [
        "| model | segments | `count` | `mem` | allocated | predicted reserved | measured | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        mem = row["mem"] if not row["mem"].isdigit() else f"{int(row['mem']) / 1e6:,.1f} MB"
        sizes = [f"{row[key] / 1e6:,.1f} MB" for key in ("allocated", "predicted", "later")]
        segments = "expandable" if row["expandable"] else "of fixed sizes"
        off = f"{row['predicted'] / row['later'] - 1:+.2%}"
        lines.append(f"| {' | '.join([row['model'], segments, row['count'], mem, *sizes, off])} |")
    return "\n".join([*lines, "", f"torch {found['torch']}, measured on {found['date']}."])


def _fsdp(record: str) -> str:
    """A row a variant: seconds and bytes of a step, and what a plan had said."""
    found = json.loads(record)
    lines = [
        "| | step | predicted | link | hidden | peak | budget | between steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in found["rows"] if row["error"] is None):
        predicted, hidden, budget = row["predicted_seconds"], row["hidden"], row["budget"]
        cells = (
            row["variant"],
            f"{row['step_seconds'] * 1e3:.0f} ms",
            f"{predicted * 1e3:.0f} ms" if predicted else "",
            f"{row['link_seconds'] * 1e3:.0f} ms",
            f"{hidden:.0%}" if hidden is not None else "",
            f"{row['peak_bytes'] / 2**20:.1f} MiB",
            f"{budget / 2**20:.1f} MiB" if budget else "",
            f"{row['resident_bytes'] / 2**20:.1f} MiB",
        )
        lines.append(f"| {' | '.join(cells)} |")
    about = found["conditions"]
    said = (
        f"{about['processes']} processes of one thread, a link of {about['bytes_per_second'] / 1e6:.0f} MB/s; the "
        f"seconds are the least of several steps in turns. Measured on {about['date']}."
    )
    return "\n".join([*lines, "", said])


def _replanning(record: str) -> str:
    """A row a number of layers and a length: seconds, and the times of the plans over those from nothing."""
    found = json.loads(record)["rows"]
    shares = sorted({row["share"] for row in found})
    head = " | ".join(f"time at {share:.0%}" for share in shares)
    lines = [f"| layers | length | judged | from nothing | {head} |", f"|---|---|---|---|{'---|' * len(shares)}"]
    for key in dict.fromkeys((row["layers"], row["length"]) for row in found):
        rows_ = [row for row in found if (row["layers"], row["length"]) == key]
        nothing = sum(row["from_nothing"] for row in rows_) / len(rows_)
        ratios = " | ".join(f"{row['ratio']:.4f}" for row in sorted(rows_, key=lambda row: row["share"]))
        lines.append(f"| {key[0]} | {key[1]} | {rows_[0]['judged'] * 1e3:.0f} ms | {nothing:.1f} s | {ratios} |")
    mean = math.exp(sum(math.log(row["ratio"]) for row in found) / len(found))
    searched = max(row["searched"] for row in found)
    said = (
        f"Known at 128; budgets in percent of keeping everything. The geometric mean is {mean:.4f}, the longest search "
        f"after judging took {searched:.1f} s."
    )
    return "\n".join([*lines, "", said])


def _offload(record: str) -> str:
    """A sentence a model: what a step takes near the least memory of recomputing, without and with offloading."""
    rows = [offload.Row(**row) for row in json.loads(record)["rows"]]
    sentences = []
    for name in dict.fromkeys(row.model for row in rows):
        near = {
            row.way: row for row in rows if row.model == name and row.percent is None and row.speed is None
        }
        alone, both = near["recompute"], near["both"]
        sentences.append(
            f"* {name} in {alone.mem / alone.plain_peak:.0%} of plain PyTorch's peak: {alone.slowdown:.2f}x of a plain "
            f"step by recomputing alone, {both.slowdown:.2f}x with offloading (to files, on a CPU)."
        )
    date = json.loads(record)["conditions"]["date"]
    more = f"Measured on {date}; [docs/offload.md](docs/offload.md) has more budgets, and slower host tiers."
    return "\n".join([*sentences, "", more])


DOCS = ("gpu", "shapes", "distributed", "slices", "kernels", "combinations", "fits", "atlas", "compression")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in DOCS))
PARTS: dict[str, Callable[[str], str]] = {
    "quickstart.txt": _quickstart,
    "alternatives.json": _alternatives,
    "planning.json": _planning,
    "replanning.json": _replanning,
    "shapes.json": _shapes,
    "fsdp.json": _fsdp,
    "reserved.json": _reserved,
    "slices.json": slices_page.tables,
    "kernels.json": kernels_page.tables,
    "kernel_starts.json": kernel_starts.tables,
    "offload.json": _offload,
    "combinations.json": combinations.page,
    "combinations_of_ranks.json": combinations_of_ranks.page,
    "fits.json": fits.page,
    "traffic.json": traffic.table,
    "compression.json": compression.page,
    **{f"gpu_first_hour/{name}.json": partial(gpu_page.table, name) for name in gpu_page.COLUMNS},
}
MORE: tuple[tuple[str, str, Callable[[str], str]], ...] = (  # parts of a name of their own
    ("kernels-mean", "kernels.json", kernels_page.summary),
    ("atlas-published", "atlas.json", atlas.published),
    *((f"atlas-{train}", "atlas.json", partial(atlas.page, train=train)) for train in atlas.TRAININGS),
)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
