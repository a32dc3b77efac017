"""What a solver makes of a network, a budget and a link: the points of the figures with transfers."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from benchmarks.papers.chains import as_in_the_papers, read
from fxremat.chain import Chain
from fxremat.errors import BudgetTooSmall, InvalidSchedule
from fxremat.platform import Platform
from fxremat.simulate import Accounting, simulate
from fxremat.solvers import SOLVERS, keep_all, persistent
from fxremat.solvers.progress import progress
from fxremat.solvers.registry import Problem

GB = 1e9
WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point: a network, how much memory from the least (0) to enough (1), a link, a solver."""

    network: str
    alpha: float
    speed: float  # bytes a second, both ways
    solver: str
    slots: int = 500
    effort: float = 10.0

    @property
    def chain(self) -> Chain:
        """As the papers see it."""
        return as_in_the_papers(read(self.network))

    @property
    def mem(self) -> int:
        """alpha of the way from the least memory of checkpointing to that of keeping everything (thesis 4.4.1)."""
        low, high = memory_range(self.chain)
        return int((1 - self.alpha) * low + self.alpha * high)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Times as multiples of those with all the memory; None where the solver finds nothing."""

    whole: float | None
    fluid: float | None
    sent: float  # share of all activations that goes to the host


def memory_range(chain: Chain) -> tuple[int, int]:
    """The least memory of any persistent schedule, and that of keeping everything."""
    most = simulate(chain, keep_all.schedules(chain)[0]).peak
    return persistent.build(chain, most, 1).least, most


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
        proposed = SOLVERS[case.solver].propose(problem)
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


def with_slots(case: Case, slots: int) -> Case:
    """The same in other steps of memory."""
    return replace(case, slots=slots)
