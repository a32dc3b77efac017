"""Weight offloading on paper beside Table 1 of the paper, and how long planning takes: docs/weights.md.

    python -m benchmarks.weights

The paper does not say its memory limit or its activations; ours are assumptions, named on the page.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.weight_reference.cycle import Cycle, one_by_one
from benchmarks.weight_reference.step_bound import lower_bound
from benchmarks.weight_reference.weight_plan import plan

from . import report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "weights.json"
PAGE = ROOT / "docs" / "weights.md"
TABLE = ROOT / "tests" / "data" / "weights.json"
BANDWIDTH = 12.0  # MiB per ms
WEIGHTS = {"GPT-2": 432.0, "Bert": 160.0}  # MiB a layer: 12 * 3072^2 * 4 bytes; and what L2L's increments say
EXTRA = {"GPT-2": 2, "Bert": 0}  # of the depth, that are no blocks
ACTIVATIONS = {"GPT-2": 80.0 / 64, "Bert": 40.0 / 64}  # MiB a layer for each sample
MEMORY = 12000.0  # MiB
LAYERS, MOST = 128, 10.0  # seconds

HEAD = """# Weight offloading: what the planner finds, beside the paper

Written by `python -m benchmarks.weights`, {date}, {cpu}. The paper is Beaumont, Eyraud-Dubois, Shilova, Zhao,
*Weight Offloading Strategies for Training Large DNN Models* (2022); its Table 1 gives milliseconds of a step on a V100
at 12 GB/s each way. It names neither its memory limit nor its activations. Ours: uniform layers with the paper's total
time, of which a quarter is forward; {gpt:.0f} MiB a layer of GPT-2 (12 x 3072^2 x 4 bytes), {bert:.0f} MiB a layer of
Bert (from the paper's L2L times); {act[0]:g} and {act[1]:g} MiB of activations a layer and sample; {memory:.0f} MiB of
memory. So the columns, times beyond those of all ops, say how much is exposed, not who wins on the same instances.

*Greedy* is Algorithm 1 with our clock, *with margin* chooses for less memory than there is, to make room for copies;
*bound* is the linear relaxation of the mixed integer program. Planning {layers} uneven layers, over a link so slow that
no choice hides all copies, takes {seconds:.1f} s (at most {most:g} s is wanted).

| net | depth | batch | all ops | paper: ILP | greedy | L2L | ours: bound | greedy | with margin | L2L |
|---|---|---|---|---|---|---|---|---|---|---|"""


def rows() -> Iterator[dict[str, Any]]:
    """A row for each of the paper's: times beyond those of all ops, in ms."""
    (table,) = (entry for entry in json.loads(TABLE.read_text()) if entry["kind"] == "table1")
    for paper in table["rows"]:
        blocks = paper["depth"] - EXTRA[paper["net"]]
        each = paper["sum_u"] / blocks
        cycle = Cycle.of_layers(
            [each / 4] * blocks,
            [each * 3 / 4] * blocks,
            [WEIGHTS[paper["net"]]] * blocks,
            [ACTIVATIONS[paper["net"]] * paper["batch"]] * (blocks + 1),
            MEMORY,
            BANDWIDTH,
        )
        yield {
            **paper,
            "bound": lower_bound(cycle) - cycle.seconds,
            "ours": plan(cycle, margins=(0.0,)).time - cycle.seconds,
            "margin": plan(cycle).time - cycle.seconds,
            "ours_l2l": one_by_one(cycle) - cycle.seconds,
        }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    paper = [row[name] - row["sum_u"] for name in ("ilp", "greedy", "l2l")]
    ours = [row[name] for name in ("bound", "ours", "margin", "ours_l2l")]
    cells = [
        row["net"],
        row["depth"],
        row["batch"],
        row["sum_u"],
        *(f"+{value:.0f}" for value in (*paper, *ours)),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def planning_seconds() -> float:
    """Seconds of planning for uneven layers over a slow link, where every choice is tried."""
    sizes = [432.0 + 13.0 * (k % 7) for k in range(LAYERS)]
    cycle = Cycle.of_layers(
        [38.0] * LAYERS, [114.0] * LAYERS, sizes, [20.0] * (LAYERS + 1), MEMORY, BANDWIDTH
    )
    start = time.perf_counter()
    plan(cycle)
    return time.perf_counter() - start


def main() -> None:
    record = {"conditions": report.machine(), "rows": list(rows()), "seconds": planning_seconds()}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    conditions = record["conditions"]
    assert isinstance(conditions, dict)
    head = HEAD.format(
        date=conditions["date"],
        cpu=conditions["cpu"],
        gpt=WEIGHTS["GPT-2"],
        bert=WEIGHTS["Bert"],
        act=tuple(ACTIVATIONS.values()),
        memory=MEMORY,
        layers=LAYERS,
        seconds=record["seconds"],
        most=MOST,
    )
    text = "\n".join([head, *map(line, record["rows"])]) + "\n"  # type: ignore[call-overload]
    PAGE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
