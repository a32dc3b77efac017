"""Answers of a solver to a network, a budget and a link: the points of the figures with transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache

from benchmarks.papers.chains import as_in_the_papers, read
from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import Accounting, simulate
from fxremat.errors import BudgetTooSmall, InvalidSchedule
from fxremat.progress import progress
from fxremat.solvers import SOLVERS, TABLES, keep_all, persistent, solve
from fxremat.solvers.offload import pofo
from fxremat.solvers.registry import POFO_SLOTS, Problem, capped

GB = 1e9
WORKERS = 2


def _auto(problem: Problem) -> list[Schedule]:
    """The schedule that `solve` answers, in whole accounting."""
    schedule = solve(
        problem.chain, problem.mem, platform=problem.platform, slots=problem.slots, effort=problem.effort
    )
    return [schedule]


def _pofo(problem: Problem) -> list[Schedule]:
    """As published: one table of 50 slots, sizes rounded up."""
    return [pofo.build(problem.chain, problem.mem, problem.platform, POFO_SLOTS).schedule]


PROPOSERS: dict[str, Callable[[Problem], list[Schedule]]] = {
    name: solver.propose for name, solver in SOLVERS.items()
} | {
    "pofo": _pofo,
    "rematerialization": SOLVERS["persistent"].propose,
    "autocapper (thesis)": lambda problem: capped(TABLES["persistent"], problem),
    "ours, without POFO": SOLVERS["local_search"].propose,
    "ours": _auto,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point: a network, how much memory from the least (0) to enough (1), a link, a solver."""

    network: str
    alpha: float
    speed: float  # bytes a second, both ways
    solver: str
    slots: int = 500
    effort: float = 10.0  # seconds

    @property
    def chain(self) -> Chain:
        """As the papers see it."""
        return _chain(self.network)

    @property
    def memory(self) -> tuple[int, int]:
        """The least memory of checkpointing, and that of keeping everything."""
        return _memory(self.network)

    @property
    def mem(self) -> int:
        """alpha of the way from one to the other (thesis, 4.4.1)."""
        low, high = self.memory
        return int((1 - self.alpha) * low + self.alpha * high)


@cache
def _chain(network: str) -> Chain:
    return as_in_the_papers(read(network))


@cache
def _memory(network: str) -> tuple[int, int]:
    chain = _chain(network)
    most = simulate(chain, keep_all.schedules(chain)[0]).peak
    return persistent.build(chain, most, 1).least, most


@dataclass(frozen=True, kw_only=True)
class Point:
    """Times as multiples of those with all the memory; None where the solver finds nothing."""

    whole: float | None
    fluid: float | None
    sent: float  # share of all activations that goes to the host


def run(case: Case) -> Point:
    """Ask the solver, and judge all that it proposes in both accountings; the transfers are those of the best whole."""
    chain, mem = case.chain, case.mem
    platform = Platform(memory=mem, to_host=case.speed, from_host=case.speed, duplex="half")
    problem = Problem(
        chain=chain,
        mem=mem,
        platform=platform,
        slots=case.slots,
        judge=lambda schedule: simulate(chain, schedule, platform),
        effort=case.effort,
    )
    try:
        proposed = PROPOSERS[case.solver](problem)
    except BudgetTooSmall:
        return Point(whole=None, fluid=None, sent=0.0)

    def best(accounting: Accounting) -> tuple[float | None, int]:
        times = []
        for schedule in proposed:
            try:
                timeline = simulate(chain, schedule, platform, accounting=accounting)
            except InvalidSchedule:
                continue
            times.append((timeline.time / chain.least_time, timeline.sent))
        return min(times, default=(None, 0))

    activations = sum(block.saved_bytes for block in chain.blocks)
    (whole, sent), (fluid, _) = best("whole"), best("fluid")
    return Point(whole=whole, fluid=fluid, sent=sent / activations)


def run_all(cases: Iterable[Case], what: str) -> dict[Case, Point]:
    """Every case, on two processes."""
    wanted = list(dict.fromkeys(cases))
    with ProcessPoolExecutor(WORKERS) as pool:
        return dict(zip(wanted, progress(pool.map(run, wanted), what), strict=True))
