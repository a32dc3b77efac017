"""Measure how long solvers take, in how much memory, and what their schedules cost: `python -m benchmarks.solvers`.

Uneven random chains; a small solve first compiles. Prints two tables, writes benchmarks/results/solvers.json and
puts the first into docs/solvers.md:

    bounds    each solver at full size, in a process of its own: the least seconds of several solves as
              `fxremat.solve` does them, the largest resident memory, and the limits of both
    quality   the two chain solvers of choice against keeping everything, at three budgets

    --quick         a tenth of the blocks, nothing is written
    --only NAME     this line of the bounds, nothing is written
"""

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import solver_page
from fxremat.chains.chain import Block, Chain, Option
from fxremat.chains.platform import Platform
from fxremat.chains.simulate import simulate
from fxremat.solvers import best, keep_all, persistent
from fxremat.solvers.references import joins
from fxremat.solvers.registry import SOLVERS

RESULTS = Path(__file__).parent / "results" / "solvers.json"
MOST_MIB = 2048
BUDGET = 0.3  # of the way from the least to the peak of keeping everything


@dataclass(frozen=True, kw_only=True)
class Case:
    """A solver at full size, and within how many seconds it must be done."""

    solver: str
    blocks: int
    slots: int
    limit: float | None  # seconds; None: only reported
    repeats: int = 3

    @property
    def name(self) -> str:
        """As the tables have it."""
        return f"{self.solver} n={self.blocks} slots={self.slots}"

    @property
    def small(self) -> "Case":
        """The same code on a tenth of the blocks: compiles."""
        return replace(self, blocks=max(5, self.blocks // 10), slots=min(self.slots, 50))


MULTI_CHAIN = "joins.multi_chain"  # of two branches
CASES = (
    Case(solver="persistent", blocks=340, slots=500, limit=2.0),
    Case(solver="input_drop", blocks=340, slots=500, limit=5.0),
    Case(solver="floating", blocks=30, slots=100, limit=10.0),
    Case(solver="floating_drop", blocks=30, slots=100, limit=None, repeats=1),
    Case(solver="offload_dp", blocks=340, slots=500, limit=10.0),
    Case(solver="pofo", blocks=50, slots=50, limit=5.0),
    Case(solver="pofo", blocks=340, slots=50, limit=120.0, repeats=1),
    Case(solver=MULTI_CHAIN, blocks=25, slots=20, limit=5.0),
)


def uneven(length: int, options: int = 0, seed: int = 1) -> Chain:
    """A chain of blocks of very different sizes and times, each with so many options besides 0."""
    draw = random.Random(seed)
    blocks = []
    for _ in range(length):
        output = draw.choice([1, 2, 4]) * 2**20 + draw.randrange(2**18)
        saved = int(output * draw.uniform(2, 9))
        forward = draw.uniform(1, 9)
        blocks.append(
            Block(
                forward_time=forward,
                backward_time=2 * forward,
                output_bytes=output,
                saved_bytes=saved,
                forward_scratch=draw.randrange(2**20),
                backward_scratch=draw.randrange(2**21),
                options=tuple(
                    Option(
                        saved_bytes=int(output + (saved - output) * 0.9 * (options - k) / (options + 1)),
                        backward_time=2 * forward + 0.9 * forward * k / options,
                    )
                    for k in range(1, options + 1)
                ),
            )
        )
    return Chain(blocks=tuple(blocks), input_bytes=2**20)


def link(chain: Chain) -> Platform:
    """All that the blocks save crosses while their forwards run twice: too slow to hide, too fast to ignore.

    So it is, about, for 12 GB/s and the networks of the papers.
    """
    saved = sum(block.saved_bytes for block in chain.blocks)
    speed = saved / (2 * sum(block.forward_time for block in chain.blocks))
    return Platform(to_host=speed, from_host=speed)


def run(case: Case) -> None:
    """Solve a case once; a chain at `BUDGET` of the way from its least memory to that of keeping everything."""
    if case.solver == MULTI_CHAIN:
        joins.multi_chain((case.blocks, case.blocks), case.slots)
        return
    chain = uneven(case.blocks)
    least = persistent.build(chain, 1, 1).least
    mem = least + int((simulate(chain, keep_all.schedules(chain)[0]).peak - least) * BUDGET)
    machine = link(chain) if SOLVERS[case.solver].transfers else None
    best(chain, mem, solver=case.solver, slots=case.slots, platform=machine)


def measure(case: Case) -> dict[str, Any]:
    """The least seconds of several solves, and the largest resident memory of this process."""
    run(case.small)
    seconds = []
    for _ in range(case.repeats):
        begin = time.perf_counter()
        run(case)
        seconds.append(time.perf_counter() - begin)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"seconds": round(min(seconds), 3), "resident_mib": memory}


def bound(case: Case, arguments: Sequence[str]) -> dict[str, Any]:
    """`measure` in a process of its own, beside the limits."""
    command = [sys.executable, "-m", "benchmarks.solvers", "--measure", case.name, *arguments]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    holds = (case.limit is None or found["seconds"] <= case.limit) and found["resident_mib"] <= MOST_MIB
    return {"case": case.name, **found, "limit": case.limit, "most_mib": MOST_MIB, "holds": holds}


def bounds(cases: Sequence[Case], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Every case, printed as it is measured."""
    print(f"{'case':36}  seconds  limit    MiB  limit  holds")
    rows = []
    for case in cases:
        rows.append(bound(case, arguments))
        print(
            "{case:36} {seconds:8} {limit!s:>6} {resident_mib:6} {most_mib:6}  {holds}".format(**rows[-1]),
            flush=True,
        )
    return rows


def quality(slots: int, lengths: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Solve chains of so many blocks and options with the solvers of choice, and print each result as it is found."""
    for solver in ("persistent", "input_drop"):
        best(uneven(20), 2**26, solver=solver, slots=50)  # compiles
    rows = []
    print("\nblocks options solver       budget  seconds  time/keep_all  peak/budget")
    for length, options in lengths:
        chain = uneven(length, options)
        plain = simulate(chain, keep_all.schedules(chain)[0])
        for share in (0.1, 0.3, 0.6):
            for solver in ("persistent", "input_drop"):
                mem = int(plain.peak * share)
                begin = time.perf_counter()
                found = best(chain, mem, solver=solver, slots=slots)
                seconds = time.perf_counter() - begin
                row = {
                    "blocks": length,
                    "options": options,
                    "solver": solver,
                    "budget": share,
                    "seconds": round(seconds, 3),
                    "time": round(found.time / plain.time, 4),
                    "peak": round(found.peak / mem, 4),
                }
                rows.append(row)
                print(
                    "{blocks:6} {options:7} {solver:12} {budget:6} {seconds:8} {time:14} {peak:12}".format(
                        **row
                    ),
                    flush=True,
                )
    return rows


def main() -> int:
    """Measure, print, write; 1 where a bound does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--slots", type=int, default=500, help="of the second table (default 500)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", metavar="NAME", help=", ".join(names))
    parser.add_argument("--measure", choices=names, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.measure:
        case = CASES[names.index(args.measure)]
        print(json.dumps(measure(case.small if args.quick else case)))
        return 0
    arguments = ["--quick"] if args.quick else []
    rows = bounds([case for case in CASES if (args.only or case.name) in case.name], arguments)
    if not args.only:
        lengths = [(50, 0)] if args.quick else [(50, 0), (50, 7), (100, 0), (100, 5), (340, 0)]
        made = quality(args.slots, lengths)
        if not args.quick:
            report = {"conditions": conditions(), "bounds": rows, "slots": args.slots, "rows": made}
            RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            solver_page.main()
    return 0 if all(row["holds"] for row in rows) else 1


def conditions() -> dict[str, Any]:
    """The machine and the date of this measurement, and how busy the machine was."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[2], 1),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
