"""Programs taken over from one sequence length to others, beside planning those from nothing.

    python -m benchmarks.replanning

GPTs of 4 and 12 layers, with estimated costs, are planned for batches of 8 x 128 tokens in half of their memory; then
the known programs are judged for other lengths, and their frontier is searched up to the budget. Seconds are of the
processor, in one thread; ratios are of predicted times. No memory is allocated for what is planned.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from fxremat.cost.devices import Device
from fxremat.cost.estimate import estimate
from fxremat.graphs.captured import Captured
from fxremat.search.refine import EFFORT, Ladder
from fxremat.search.replan import replanned
from fxremat.search.survey import survey
from fxremat.step.costs import Costs

from . import report
from .capture import capture
from .models.gpt import GPT, Shape

LAYERS, KNOWN, LENGTHS = (4, 12), 128, (64, 96, 112, 160, 200, 250)
SHARES = (0.35, 0.5, 0.75)  # of what keeping everything takes
RESULTS = Path(__file__).parent / "results" / "replanning.json"
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One length and budget."""

    layers: int
    length: int
    share: float  # of keeping everything there
    judged: float  # seconds of judging the known programs
    searched: float  # seconds of the search up to the budget after that
    from_nothing: float  # seconds of a survey and a search
    ratio: float  # time of the plan over that of the plan from nothing


def main() -> None:
    """Measure, print and keep every row."""
    torch.set_num_threads(1)
    rows = [row for layers in LAYERS for row in _rows(layers)]
    for row in rows:
        print(
            f"{row.layers:2} layers, length {row.length:3}, {row.share:.0%}: judged in {row.judged * 1e3:.0f} ms, "
            f"searched in {row.searched * 1e3:.0f} ms, from nothing {row.from_nothing:.1f} s; "
            f"{row.ratio:.4f} of its time"
        )
    record = {"conditions": report.machine(), "rows": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def _rows(layers: int) -> Iterator[Row]:
    known = _from_nothing(*_joint(layers, KNOWN), 0.5)
    for length in LENGTHS:
        joint, costs = _joint(layers, length)
        judged, taken_over = _timed(partial(replanned, known, joint, costs))
        assert taken_over, "sizes are within twice the known ones"
        for share in SHARES:
            seconds, alone = _timed(partial(_from_nothing, joint, costs, share))
            budget = int(share * alone.given.keep_all.peak)
            searched, found = _timed(partial(taken_over.to, budget, costs, effort=EFFORT))
            best = alone.frontier(budget).within(budget).time
            yield Row(
                layers=layers,
                length=length,
                share=share,
                judged=judged,
                searched=searched,
                from_nothing=seconds,
                ratio=found.frontier(budget).within(budget).time / best,
            )


def _joint(layers: int, length: int) -> tuple[Captured, Costs]:
    torch.manual_seed(0)
    shape = Shape(layers=layers, width=64, heads=4, vocabulary=256, batch=8, tokens=max(LENGTHS))
    text = torch.randint(256, (8, length + 1))
    joint = capture(
        GPT(shape, dropout=0.1).train(), text[:, :-1].contiguous(), text[:, 1:].contiguous()
    )
    return joint, estimate(joint, Device.named("cpu"))


def _from_nothing(joint: Captured, costs: Costs, share: float) -> Ladder:
    ladder = Ladder(given=survey(joint, costs))
    return ladder.to(int(share * ladder.given.keep_all.peak), costs, effort=EFFORT)


def _timed(work: Callable[[], _Made]) -> tuple[float, _Made]:
    begin = time.process_time()
    made = work()
    return time.process_time() - begin, made


if __name__ == "__main__":
    main()
