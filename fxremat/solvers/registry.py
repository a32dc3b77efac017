"""The solvers by name: how each is called, estimates of their seconds, and which ones "auto" chooses from.

A solver gets a `Problem` and proposes schedules. Its `judge` is `simulate` for that machine and budget, for the solvers
that improve a schedule step by step; a schedule that does not fit raises `InvalidSchedule` there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

from fxremat.chains.chain import Chain, Join
from fxremat.chains.join_schedule import JoinSchedule, Loss, On
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Backward, Forward, Keep, Op, Schedule
from fxremat.chains.simulate import Timeline, simulate
from fxremat.chains.simulate_join import JoinTimeline, simulate_join
from fxremat.errors import BudgetTooSmall, InvalidSchedule
from fxremat.solvers import (
    binomial,
    exact,
    floating_drop,
    input_drop,
    joins,
    keep_all,
    periodic,
    persistent,
)
from fxremat.solvers.offload import autocapper, local_search, pofo
from fxremat.solvers.table import Build, grain

DEFAULT = "input_drop"  # the default chain solver, from whose schedules other solvers start
_ROUNDS = 4  # number of bisections of the budget that tables are built for
_QUICK = 5e9  # a table that takes more additions is built only once
_SPEED = 1e9  # approximate additions that a solver does in a second, to estimate how long it runs
_MOST_TRIES = 3000  # maximum steps of a local search; more find little
_STEP = 25e-6  # approximate seconds of one step of the local search, per op of the schedule


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A chain, a machine, and the limits on memory and effort."""

    chain: Chain
    mem: int  # budget in bytes
    platform: Platform  # the machine, with a memory of `mem` bytes
    slots: int  # number of memory levels in a table
    judge: Callable[[Schedule], Timeline]  # simulates a schedule; raises `InvalidSchedule` if it does not fit
    effort: float  # seconds for solvers that can run for any time

    @property
    def room(self) -> int:
        """The bytes of `mem`, but at least 1, since sizes are divided by it."""
        return max(1, self.mem)

    def fits(self, schedule: Schedule) -> bool:
        """Tell whether `schedule` runs within `mem` bytes."""
        try:
            return self.judge(schedule).peak <= self.mem
        except InvalidSchedule:
            return False


@dataclass(frozen=True, kw_only=True)
class Solver:
    """A solver: the function that proposes schedules, and an estimate of its seconds."""

    propose: Callable[[Problem], list[Schedule]]  # raises `BudgetTooSmall` if nothing fits
    seconds: Callable[[Problem], float]  # estimated seconds of `propose`; infinite if the solver does not apply
    transfers: bool = False  # True if the solver needs a link to the host
    patient: bool = False  # True if the solver uses all the effort (seconds) it is given


def _listed(schedules: Callable[[Chain], list[Schedule]]) -> Solver:
    return Solver(
        propose=lambda problem: schedules(problem.chain),
        seconds=lambda problem: 1e-5 * len(problem.chain) ** 1.5,
    )


def _tabled(build: Build, work: Callable[[Chain, int], float]) -> Solver:
    return Solver(
        propose=lambda problem: by_table(build, problem),
        seconds=lambda problem: _rounds(problem) * work(problem.chain, problem.slots) / _SPEED,
    )


def _cubic(chain: Chain, slots: int) -> float:
    """Estimate the number of additions of a dynamic program of O(slots n^3)."""
    return slots * len(chain) * float(sum(len(block.choices) for block in chain.blocks)) ** 2 / 6


def _rounds(problem: Problem) -> int:
    return 1 + (_ROUNDS if _cubic(problem.chain, problem.slots) * 6 <= _QUICK else 0)


def by_table(build: Build, problem: Problem) -> list[Schedule]:
    """Return the fastest schedule that this kind of table can have if it fits; else schedules read off a table."""
    chain = problem.chain
    fastest = every_checkpoint(chain) if build is TABLES["revolve"] else keep_all.schedules(chain)[0]
    return [fastest] if problem.fits(fastest) else _read_off(build, problem)


def every_checkpoint(chain: Chain) -> Schedule:
    """Return the fastest schedule of the solver revolve: all block inputs are kept, and all blocks but the last rerun.
    """
    ops: list[Op] = [Forward(number, Keep.CHECKPOINT) for number in range(1, len(chain))]
    for number in range(len(chain), 0, -1):
        option = keep_all.fastest(chain.blocks[number - 1])
        ops += [Forward(number, Keep.ALL, option), Backward(number)]
    return Schedule(tuple(ops))


def _read_off(build: Build, problem: Problem) -> list[Schedule]:
    """Return schedules read off a table, or off several tables if rounding to slots made sizes too large."""
    chain, mem, slots = problem.chain, problem.mem, problem.slots
    unit = grain(chain)
    if mem // unit <= slots:  # every size is a whole number of slots: nothing is rounded
        steps = max(1, mem // unit)
        return [build(chain, steps * unit, steps).schedule(mem)]
    found = [build(chain, mem, slots).schedule(mem)]
    sound, hopeful = 1.0, 1.0 + len(chain) / slots
    for _ in range(_rounds(problem) - 1):
        nominal = (sound + hopeful) / 2
        table = build(chain, int(mem * nominal), slots)
        found.append(table.schedule(mem, full=mem))
        if problem.judge(found[-1]).time <= (chain.least_time + table.curve[-1]) * (1 + 1e-9):
            sound = nominal  # the schedule is as fast as the table says, even though its slots are too large
        else:
            hopeful = nominal
    return found


def _reference(module: str) -> Any:
    """Import a module of published solvers when one of them is used."""
    return import_module(f"fxremat.solvers.references.{module}")


LISTS: Mapping[str, Callable[[Chain], list[Schedule]]] = MappingProxyType(
    {"keep_all": keep_all.schedules, "periodic": periodic.schedules, "binomial": binomial.schedules}
)
TABLES: Mapping[str, Build] = MappingProxyType(
    {
        "revolve": lambda chain, mem, slots: _reference("revolve").build(chain, mem, slots),
        "persistent": persistent.build,
        "floating": lambda chain, mem, slots: _reference("floating").build(chain, mem, slots),
        "input_drop": input_drop.build,
        "floating_drop": floating_drop.build,
    }
)
# estimates of the additions for these tables; all others take `_cubic`
_WORK = {"floating": floating_drop.work, "floating_drop": floating_drop.work}
POFO_SLOTS = 50  # maximum slots of the solver pofo, whose table has two dimensions more than the others


def capped(build: Build, problem: Problem) -> list[Schedule]:
    """Return the schedules of a dynamic program, as they are and with activations offloaded by autocapper."""
    chain = problem.chain
    most = max(1, simulate(chain, keep_all.schedules(chain)[0]).peak)
    table = build(chain, most, problem.slots)
    found = [] if problem.mem < table.least else by_table(build, problem)
    return found + autocapper.schedules(
        chain, problem.room, least=table.least, enough=most, solve=table.schedule
    )


def _offloaded(problem: Problem, schedules: Callable[[], list[Schedule]]) -> list[Schedule]:
    """Return the schedules of a solver that only offloads; without a link to the host, the one without recomputation.
    """
    return schedules() if problem.platform.linked else keep_all.schedules(problem.chain)


def search(problem: Problem, start: Schedule) -> Schedule:
    """Run the local search from a schedule that fits.

    The number of steps is what `effort` allows on a typical machine.
    """
    tries = min(int(problem.effort / _STEP / max(1, len(start.ops))), _MOST_TRIES)
    return local_search.improve(problem.chain, start, problem.mem, problem.judge, tries=tries)


def _searched(problem: Problem) -> list[Schedule]:
    """Return the schedules of autocapper, and the result of a local search from the fastest one that fits."""
    proposed = capped(TABLES[DEFAULT], problem)
    fitting = [schedule for schedule in proposed if problem.fits(schedule)]
    if fitting:
        proposed.append(search(problem, min(fitting, key=lambda schedule: problem.judge(schedule).time)))
    return proposed


_OTHERS = {
    "checkmate": Solver(
        propose=lambda problem: _reference("checkmate").schedules(problem.chain, problem.room),
        seconds=lambda problem: 0.01 * 1.8 ** min(100, len(problem.chain)),
    ),
    "exact": Solver(
        propose=lambda problem: exact.schedules(problem.chain, problem.room),
        seconds=lambda problem: 1e-6 * 4.0 ** min(100, sum(len(b.choices) for b in problem.chain.blocks)),
    ),
    "offload_greedy": Solver(
        propose=lambda problem: _offloaded(
            problem, lambda: _reference("offload.greedy").schedules(problem.chain, problem.room)
        ),
        seconds=lambda problem: 1e-4 * len(problem.chain),
        transfers=True,
    ),
    "vdnn": Solver(
        propose=lambda problem: _offloaded(
            problem, lambda: _reference("offload.vdnn").schedules(problem.chain, problem.room)
        ),
        seconds=lambda problem: 1e-5 * len(problem.chain) ** 2,
        transfers=True,
    ),
    "offload_dp": Solver(
        propose=lambda problem: _offloaded(
            problem,
            lambda: _reference("offload.offload_dp").schedules(
                problem.chain, problem.room, problem.platform, problem.slots
            ),
        ),
        seconds=lambda problem: 3e-3 * len(problem.chain),
        transfers=True,
    ),
    "pofo": Solver(
        propose=lambda problem: pofo.schedules(
            problem.chain, problem.room, problem.platform, min(problem.slots, POFO_SLOTS)
        ),
        seconds=lambda problem: 6 * pofo.seconds(problem.chain, min(problem.slots, POFO_SLOTS)),
        transfers=True,
    ),
    "opportunist": Solver(
        propose=lambda problem: _reference("offload.opportunist").schedules(
            problem.chain, problem.room, problem.platform, min(problem.slots, 100)
        ),
        seconds=lambda problem: (
            20 * 100 / max(1, problem.slots) * _cubic(problem.chain, problem.slots) / _SPEED
        ),
        transfers=True,
    ),
    "autocapper": Solver(
        propose=lambda problem: capped(TABLES[DEFAULT], problem),
        seconds=lambda problem: 1e-3 * len(problem.chain) + 2 * SOLVERS[DEFAULT].seconds(problem),
        transfers=True,
    ),
    "local_search": Solver(
        propose=_searched,
        seconds=lambda problem: 1e-3 * len(problem.chain) + 2 * SOLVERS[DEFAULT].seconds(problem),
        transfers=True,
        patient=True,
    ),
}
SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {name: _listed(schedules) for name, schedules in LISTS.items()}
    | {name: _tabled(build, _WORK.get(name, _cubic)) for name, build in TABLES.items()}
    | _OTHERS
)
NAMES = ("auto", *SOLVERS)
CHOSEN = (
    "keep_all",
    "input_drop",
    "floating_drop",
    "exact",
    "pofo",
    "autocapper",
    "local_search",
)  # the solvers that "auto" chooses from


class JoinSolver(Protocol):
    """A function that returns the simulated best schedule of a join, in about `effort` seconds if possible.

    Raises `BudgetTooSmall`.
    """

    def __call__(self, join: Join, mem: int, slots: int, *, effort: float = math.inf) -> JoinTimeline: ...


def all_of_join(join: Join, mem: int, slots: int, *, effort: float = math.inf) -> JoinTimeline:
    """Return the simulation of the schedule of a join that saves everything and recomputes nothing.

    Raises `BudgetTooSmall` if it needs more than `mem` bytes.
    """
    chains = {0: join.trunk, **dict(enumerate(join.branches, start=1))}
    ops = {number: keep_all.schedules(chain)[0].ops for number, chain in chains.items() if chain}
    numbers = [*range(1, len(chains)), *([0] if join.trunk else [])]
    forwards = [On(number, op) for number in numbers for op in ops[number] if isinstance(op, Forward)]
    backwards = [
        On(number, op) for number in reversed(numbers) for op in ops[number] if isinstance(op, Backward)
    ]
    meet = [] if join.trunk else [Loss()]
    timeline = simulate_join(join, JoinSchedule((*forwards, *meet, *backwards)))
    if timeline.peak > mem:
        raise BudgetTooSmall(minimum=timeline.peak, budget=mem)
    return timeline


def _canonical(join: Join, mem: int, slots: int, *, effort: float = math.inf) -> JoinTimeline:
    """Solve a join by the canonical form; effort is ignored, since its table is small, or too large to be tried."""
    return joins.best_canonical(join, mem, slots)


def _unless_all_fits(propose: JoinSolver) -> JoinSolver:
    def proposed(join: Join, mem: int, slots: int, *, effort: float = math.inf) -> JoinTimeline:
        try:
            return all_of_join(join, mem, slots)
        except BudgetTooSmall:
            return propose(join, mem, slots, effort=effort)

    return proposed


JOINS: Mapping[str, JoinSolver] = MappingProxyType(
    {
        "keep_all": all_of_join,
        "canonical": _unless_all_fits(_canonical),
        "linear": _unless_all_fits(joins.best_linear),
    }
)
