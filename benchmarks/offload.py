"""Recomputing, offloading, and both, at equal measured peaks: on a host tier at full speed and on slowed-down ones.

    python -m benchmarks.offload                 writes results/offload.json and docs/offload.md
    python -m benchmarks.offload --page          the page again, from the record

Each model in a process of its own, one thread for its ops; seconds are wall-clock, since copies have threads of their
own, the least of rounds in which all runs of a model take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fxremat
from fxremat.runtime.module import Rematerialized
from fxremat.settings import Search

from . import meter, models, report

MODELS = ("deep_chain", "unet")
WAYS = ("recompute", "offload", "both")
PERCENTS = (80.0, 45.0, 20.0)
SPEEDS = (None, 4e8, 1e8)  # bytes per second, each way
NEAR = 1.05  # of the least that recomputing alone can reach: the budget where it hurts most
FASTER, DEAR = (
    1.25,
    1.5,
)  # wanted there: so many times faster, where recomputing costs so many times the plain step
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "offload.json"
PAGE = ROOT / "docs" / "offload.md"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train one model in one budget."""

    model: str
    way: str
    speed: float | None  # of the host tier, bytes per second; None: as fast as it goes, or no tier
    percent: float | None  # of the plain peak; None: a little above recomputing's least
    mem: int
    plain_peak: int
    plain_seconds: float
    peak: int
    predicted_seconds: float
    keep_all_seconds: float  # predicted
    seconds: float
    sent: int  # bytes
    hidden: tuple[float, float]  # share of the copies out, and of those back

    @property
    def slowdown(self) -> float:
        """Over plain PyTorch, measured."""
        return self.seconds / self.plain_seconds

    @property
    def foreseen(self) -> float:
        """Over keeping everything, predicted."""
        return self.predicted_seconds / self.keep_all_seconds


def measure(name: str, rounds: int) -> list[Row]:
    """Every row of one model."""
    torch.set_num_threads(1)
    case = models.get(name)
    batch = case.batch()
    plain = meter.training_step(case.model(), batch)
    plain_peak = meter.peak_bytes(plain)
    least = _least(case)
    rows: list[dict[str, Any]] = []
    steps = [meter.step_from_none(case.model(), batch)]
    for percent in (None, *PERCENTS):
        mem = int(NEAR * least) if percent is None else int(plain_peak * percent / 100)
        for way, speed in [("recompute", None), *((way, speed) for way in WAYS[1:] for speed in SPEEDS)]:
            model = _compiled(case, mem, way, speed)
            if model is None:
                continue
            step = meter.training_step(model, batch)
            step()
            model.zero_grad(set_to_none=True)
            plan = model.plan
            assert plan is not None
            swapped = plan.chosen.transfers
            rows.append(
                {
                    "model": name, "way": way, "speed": speed, "percent": percent, "mem": mem,
                    "plain_peak": plain_peak, "peak": meter.peak_bytes(step),
                    "predicted_seconds": plan.predicted_time, "keep_all_seconds": plan.keep_all_time,
                    "sent": swapped.bytes if swapped else 0, "hidden": swapped.hidden if swapped else (1.0, 1.0),
                }
            )  # fmt: skip
            model.zero_grad(set_to_none=True)
            steps.append(meter.step_from_none(model, batch))
            print(
                f"  {name} {way} {speed} {percent}: {rows[-1]['peak'] / 1e6:.1f} MB",
                file=sys.stderr,
                flush=True,
            )
    plain_seconds, *seconds = meter.step_times(steps, repeats=rounds, clock=time.perf_counter)
    return [Row(**row, seconds=s, plain_seconds=plain_seconds) for row, s in zip(rows, seconds, strict=True)]


def _least(case: models.Case) -> int:
    try:
        fxremat.compile(case.model(), mem=1, example_inputs=case.batch(), search=Search(progress=False))
    except fxremat.BudgetTooSmall as error:
        return error.minimum
    raise AssertionError("a training step fitted in one byte")


def _compiled(case: models.Case, mem: int, way: str, speed: float | None) -> Rematerialized | None:
    options: dict[str, Any] = {"mem": mem, "example_inputs": case.batch(), "search": Search(progress=False)}
    if way != "recompute":
        options["offload"] = fxremat.FileTier(to_host=speed, from_host=speed)
    if way == "offload":
        options["solver"] = "keep_all"
    try:
        return fxremat.compile(case.model(), **options)
    except fxremat.BudgetTooSmall:
        return None


def page(record: dict[str, Any]) -> str:
    """The record as a page."""
    rows = [Row(**row) for row in record["rows"]]
    return "\n".join([HEAD.format(**record["conditions"]), *_claims(rows), "", *_tables(rows)]) + "\n"


HEAD = """# Offloading: what it costs, beside recomputing and with it

Written by `python -m benchmarks.offload`, {date}, on {cpu} with {cores} cores, torch {torch}. Budgets are in percent of
plain PyTorch's peak; *near* is {near} times the least that recomputing alone can reach. Times are wall-clock, over a
plain step; in brackets what the plan foresaw, over keeping everything. The host tier is files in the system's folder
for temporary files; where a speed is given, its copies are slowed down to that many bytes a second each way.
"""


def _claims(rows: Sequence[Row]) -> Iterator[str]:
    yield "| wanted | found |"
    yield "|---|---|"
    over = [row for row in rows if row.peak > row.mem]
    yield f"| the measured peak is within every budget | {len(over)} of {len(rows)} above |"
    for name in dict.fromkeys(row.model for row in rows):
        near = {(row.way, row.speed): row for row in rows if row.model == name and row.percent is None}
        alone, both = near["recompute", None], near["both", None]
        wanted = (
            f"at least {FASTER}x"
            if alone.slowdown >= DEAR
            else f"no less (recomputing costs less than {DEAR}x)"
        )
        yield (
            f"| {name} near recomputing's least ({alone.mem / alone.plain_peak:.0%} of plain): both are faster than "
            f"recomputing alone by {wanted} | {alone.seconds / both.seconds:.2f}x ({alone.slowdown:.2f}x and "
            f"{both.slowdown:.2f}x of a plain step), foreseen {alone.predicted_seconds / both.predicted_seconds:.2f}x |"
        )
    slowed = [row for row in rows if row.speed is not None]
    off = sorted(abs(row.predicted_seconds / row.seconds - 1) for row in slowed)
    within = sum(error <= 0.15 for error in off)
    yield f"| on slowed-down tiers, predicted time is within 15 % of measured | {within} of {len(off)}, median {off[len(off) // 2]:.1%}, largest {off[-1]:.1%} |"  # noqa: E501
    agreed, pairs = _order(rows)
    yield f"| the order of the three ways is as foreseen, where they are more than 5 % apart | {agreed} of {pairs} pairs |"  # noqa: E501


def _order(rows: Sequence[Row]) -> tuple[int, int]:
    """Pairs of ways at one budget and speed that the clock foresaw in the right order, of those clearly apart."""
    groups: dict[tuple[str, float | None, float], dict[str, Row]] = {}
    for row in rows:
        for speed in [s for s in SPEEDS if s is not None] if row.way == "recompute" else [row.speed]:
            if speed is not None:
                groups.setdefault((row.model, row.percent, speed), {})[row.way] = row
    agreed = pairs = 0
    for group in groups.values():
        ways = list(group.values())
        for place, one in enumerate(ways):
            for other in ways[place + 1 :]:
                if abs(one.predicted_seconds / other.predicted_seconds - 1) > 0.05:
                    pairs += 1
                    agreed += (one.predicted_seconds < other.predicted_seconds) == (
                        one.seconds < other.seconds
                    )
    return agreed, pairs


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    for name in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == name]
        columns = [("recompute", None), *((way, speed) for way in WAYS[1:] for speed in SPEEDS)]
        yield f"## {name}: {mine[0].plain_peak / 1e6:.0f} MB"
        yield ""
        yield "| budget | " + " | ".join(_column(*column) for column in columns) + " |"
        yield "|---" * (len(columns) + 1) + "|"
        for percent in dict.fromkeys(row.percent for row in mine):
            at = {(row.way, row.speed): row for row in mine if row.percent == percent}
            share = next(iter(at.values())).mem / mine[0].plain_peak
            cells = [_cell(at.get(column)) for column in columns]
            yield f"| {'near: ' if percent is None else ''}{share:.0%} | {' | '.join(cells)} |"
        yield ""


def _column(way: str, speed: float | None) -> str:
    return way if speed is None else f"{way}, {speed / 1e6:.0f} MB/s"


def _cell(row: Row | None) -> str:
    return "-" if row is None else f"{row.slowdown:.2f} ({row.foreseen:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--page", action="store_true", help="write the page from the record, and measure nothing"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps([asdict(row) for row in measure(arguments.worker, arguments.rounds)]))
        return
    if not arguments.page:
        found: list[dict[str, Any]] = []
        for name in arguments.models.split(","):
            command = ["-m", "benchmarks.offload", "--worker", name, "--rounds", str(arguments.rounds)]
            with tempfile.TemporaryDirectory() as cache:  # costs measured now, not on some other day
                done = subprocess.run(
                    [sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT,
                    env={**os.environ, "FXREMAT_CACHE": cache},
                )  # fmt: skip
            found += json.loads(done.stdout.splitlines()[-1])
        conditions = {**report.machine(), "rounds": arguments.rounds, "near": NEAR}
        RESULTS.write_text(json.dumps({"conditions": conditions, "rows": found}, indent=1) + "\n")
    text = page(json.loads(RESULTS.read_text()))
    PAGE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
