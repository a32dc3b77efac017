"""Rematerialization: thesis Fig. 2.4 (how long the solvers take), and what 2.4.3 and 2.4.5 say of their answers."""

from __future__ import annotations

import math
import time

from benchmarks.papers.chains import FOLDER, as_in_the_papers, read
from benchmarks.papers.figure import Claim, Figure, Panel
from fxremat.chains.chain import Chain
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import TABLES, best, keep_all, periodic
from fxremat.solvers.table import Build

SLOTS = 500
BUDGETS = (0.2, 0.3, 0.5, 0.7)  # of what keeping everything takes
SHORT = 40  # blocks: the floating programs are asked up to here
LINES = {
    "persistent (Algorithm 3)": "persistent",
    "floating (Algorithm 1)": "floating",
    "input_drop": "input_drop",
}


def chains() -> list[Chain]:
    """All networks as the papers see them, the shortest first."""
    return sorted((as_in_the_papers(read(path.stem)) for path in FOLDER.glob("*.json")), key=len)


def solver_times() -> Figure:
    """Fig. 2.4: seconds over the length of the chain, at 30 % of the memory, compiled code."""
    for build in TABLES.values():
        build(read("resnet18_224x32"), 2**30, 20)  # compiles
    curves: dict[str, list[tuple[float, float]]] = {label: [] for label in LINES}
    same = total = 0
    for chain in {len(chain): chain for chain in chains()}.values():
        most = _most(chain)
        for label, name in LINES.items():
            if name != "floating" or len(chain) <= SHORT:
                seconds = _seconds(TABLES[name], chain, int(0.3 * most))
                curves[label].append((float(len(chain)), seconds))
    for chain in chains():
        if len(chain) <= SHORT:
            for share in BUDGETS:
                mem = int(share * _most(chain))
                persistent, floating = (
                    float(TABLES[name](chain, mem, 100).curve[-1]) for name in ("persistent", "floating")
                )
                same += persistent <= floating + 1e-12 if math.isfinite(floating) else math.isinf(persistent)
                total += 1
    longest, seconds = curves["persistent (Algorithm 3)"][-1]
    return Figure(
        name="thesis-2.4",
        title="How long the solvers take, 500 slots (thesis Fig. 2.4)",
        panels=[Panel(title="at 30 % of the memory", x="blocks", y="seconds", curves=curves)],
        claims=[
            Claim(
                claim="ResNet-1001 is solved by Algorithm 3 in seconds.",
                paper="< 20 s for 339 blocks",
                ours=f"{seconds:.1f} s for {longest:.0f} blocks",
                holds=seconds < 20,
            ),
            Claim(
                claim="On real networks floating finds nothing better than persistent.",
                paper="exactly the same in all cases",
                ours=f"the same in {same} of {total} cases up to {SHORT} blocks",
                holds=same == total,
            ),
        ],
    )


def _seconds(build: Build, chain: Chain, mem: int) -> float:
    start = time.perf_counter()
    build(chain, mem, SLOTS)
    return time.perf_counter() - start


def against_segments() -> Figure:
    """2.4.5: throughput at the memory where checkpoint_sequential does best, and over all the memory."""
    panels, gains, ours = [], [], []
    for chain in chains():
        plain = chain.least_time
        points = [simulate(chain, schedule) for schedule in periodic.schedules(chain)]
        fastest = min(points, key=lambda timeline: timeline.time)
        gains.append(fastest.time / best(chain, fastest.peak, solver="persistent").time)
        ours.append(fastest.time / best(chain, fastest.peak, solver="input_drop").time)
        if chain.name in ("resnet101_1000x8", "densenet169_500x16", "resnet1001_224x1"):
            most = _most(chain)
            curves = {"checkpoint_sequential": sorted((t.peak / most, t.time / plain) for t in points)}
            for solver in ("revolve", "persistent", "input_drop"):
                curves[solver] = _curve(chain, solver, most)
            panels.append(
                Panel(
                    title=chain.name, x="memory / all memory", y="time / time with all memory", curves=curves
                )
            )
    gain, more = (math.exp(math.fsum(map(math.log, xs)) / len(xs)) for xs in (gains, ours))
    return Figure(
        name="thesis-2.5",
        title="Rematerialization against checkpoint_sequential (as thesis Fig. 2.5 to 2.7, simulated)",
        panels=panels,
        claims=[
            Claim(
                claim="At the memory of the best checkpoint_sequential, ROTOR's throughput is higher.",
                paper="+12.8 % on average (measured)",
                ours=f"persistent +{gain - 1:.1%}, input_drop +{more - 1:.1%} (geometric means of {len(gains)} cases)",
                holds=gain > 1.08,
            )
        ],
    )


def _curve(chain: Chain, solver: str, most: int) -> list[tuple[float, float]]:
    found = []
    for share in (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        try:
            table = TABLES[solver](chain, int(share * most), 200)
            found.append((share, simulate(chain, table.schedule(int(share * most))).time / chain.least_time))
        except BudgetTooSmall:
            continue
    return found


def _most(chain: Chain) -> int:
    return simulate(chain, keep_all.schedules(chain)[0]).peak
