"""fxremat beside everything else that trades time for memory: `python -m benchmarks.alternatives`.

    python -m benchmarks.alternatives --models gpt,resnet --budgets 60,30
    python -m benchmarks.alternatives --page                                 no runs, only the page

Each model runs in a process of its own with one thread, with no costs measured before; its record joins those in
benchmarks/results/alternatives.json as soon as it is done. From all of them docs/alternatives.md and its picture are
made (beside the record, where `--out` names another). A model takes about ten minutes, all of them an hour and a half.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from .. import models
from . import page, rows
from .measure import measure
from .strategies import FAMILIES

BUDGETS = "80,60,50,40,30,25"
ROUNDS = 4
OUT = page.RESULTS


def main() -> None:
    arguments = _parse()
    if arguments.worker:
        _work(arguments)
        return
    wanted = [] if arguments.page else _split(arguments.models)
    failed = [name for name in wanted if not _in_a_process(name, arguments)]
    records = rows.read(arguments.out)
    page.write(records, arguments.out)
    print(page.summary(records))
    if failed:
        raise SystemExit(f"benchmarks.alternatives: the processes for {', '.join(failed)} failed")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(rows.NAMES), help="default: all nine")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="small goes with --out")
    parser.add_argument("--strategies", default=",".join(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--budgets", default=BUDGETS, help="percent of plain PyTorch's measured peak")
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help="of which the least time counts; those ahead get twice as many more",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="the record, of one size")
    parser.add_argument("--page", action="store_true", help="measure nothing, write page and picture")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.size == "small" and arguments.out == OUT:
        parser.error("--size small needs --out: the record is that of the full sizes")
    for asked, known in ((arguments.models, rows.NAMES), (arguments.strategies, tuple(FAMILIES))):
        for name in set(_split(asked)) - set(known):
            parser.error(f"no {name!r}; there are {', '.join(known)}")
    return arguments


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _in_a_process(name: str, arguments: argparse.Namespace) -> bool:
    """Measures a model; True where its record has been added."""
    print(name, file=sys.stderr, flush=True)
    command = [
        *(sys.executable, "-m", "benchmarks.alternatives", "--worker", "--models", name),
        *("--size", arguments.size, "--strategies", arguments.strategies, "--budgets", arguments.budgets),
        *("--rounds", str(arguments.rounds), "--out", str(arguments.out.resolve())),
    ]
    with tempfile.TemporaryDirectory() as costs:
        environment = {**os.environ, "FXREMAT_CACHE": costs}
        done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment)
    return done.returncode == 0


def _work(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    percents = [float(percent) for percent in _split(arguments.budgets)]
    case = models.get(arguments.models, arguments.size)
    rows.add(arguments.out, measure(case, _split(arguments.strategies), percents, arguments.rounds))


if __name__ == "__main__":
    main()
