"""Implements `solve`: asks one solver, or those that the time allows, and simulates the schedules they propose.

A `Join` of chains has solvers of its own, `JOINS`, whose schedules `simulate_join` simulates.
"""

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import overload

from fxremat.chains.chain import Chain, Join
from fxremat.chains.join_schedule import JoinSchedule
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import Accounting, Timeline, simulate
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidBudget, InvalidSchedule
from fxremat.jit import running_seconds
from fxremat.solvers import keep_all
from fxremat.solvers.registry import CHOSEN, DEFAULT, JOINS, NAMES, SOLVERS, Problem, search
from fxremat.solvers.time_bound import lower_bound
from fxremat.units import integer, shortened

EFFORT = 10.0  # default seconds of search
MOST_SLOTS = 100_000


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best schedule found for a chain, the solver that found it, and a lower bound on the time of any schedule."""

    solver: str
    timeline: Timeline
    fluid_time: float  # simulated seconds if memory were freed and allocated byte by byte as copies proceed
    lower_bound: float  # seconds that no schedule within the budget beats

    @property
    def schedule(self) -> Schedule:
        """The schedule to run."""
        return self.timeline.schedule


@dataclass(frozen=True, kw_only=True)
class JoinSolution:
    """The best schedule found for a join of chains, and the solver that found it."""

    solver: str
    timeline: JoinTimeline
    lower_bound: float  # seconds of all forwards and backwards, each once and with its fastest option

    @property
    def schedule(self) -> JoinSchedule:
        """The schedule to run."""
        return self.timeline.schedule


@overload
def solve(
    chain: Chain,
    mem: int,
    *,
    solver: str = "auto",
    platform: Platform | None = None,
    slots: int = 500,
    effort: float = EFFORT,
    accounting: Accounting = "whole",
) -> Schedule: ...
@overload
def solve(
    chain: Join,
    mem: int,
    *,
    solver: str = "auto",
    platform: Platform | None = None,
    slots: int = 500,
    effort: float = EFFORT,
) -> JoinSchedule: ...
def solve(
    chain: Chain | Join,
    mem: int,
    *,
    solver: str = "auto",
    platform: Platform | None = None,
    slots: int = 500,
    effort: float = EFFORT,
    accounting: Accounting = "whole",
) -> Schedule | JoinSchedule:
    """Return the fastest schedule found that fits into `mem` bytes.

    Args:
        chain: the model, in bytes and seconds.
        mem: bytes, or those of the platform if they are fewer; the chain's input counts, parameters do not.
        solver: one of `SOLVERS`; "auto" asks those of `CHOSEN` that its time allows and keeps the best. For a join
            one of `JOINS`, and "auto" asks them all.
        platform: the machine; with `to_host` and `from_host`, values may leave and come back.
        slots: steps of memory in a dynamic program; if they cover every byte the answer is exact.
        effort: seconds that "auto" may run; it asks the default chain solver however long that runs. Long joins get a
            coarser table for less effort.
        accounting: "whole" as a runtime frees and allocates, or "fluid", the relaxation that the papers solve.

    Raises:
        BudgetTooSmall: the solver has no schedule that fits; `.minimum` is the least number of bytes that works.

    >>> from fxremat import Block
    >>> block = Block(forward_time=1.0, backward_time=2.0, output_bytes=4, saved_bytes=9)
    >>> print(solve(Chain(blocks=(block, block), input_bytes=4), 25))
    Fck1 Fall2 B2 Fall1 B1
    """
    if isinstance(chain, Join):
        return _winner_of_join(chain, mem, solver, platform, slots, effort)[1].schedule
    return best(
        chain, mem, solver=solver, platform=platform, slots=slots, effort=effort, accounting=accounting
    ).schedule


def best(
    chain: Chain,
    mem: int,
    *,
    solver: str = "auto",
    platform: Platform | None = None,
    slots: int = 500,
    effort: float = EFFORT,
    accounting: Accounting = "whole",
) -> Timeline:
    """Return the simulation of the schedule that `solve` returns; arguments and errors are the same."""
    return _winner(chain, mem, solver, platform, slots, effort, accounting)[1]


@overload
def solution(
    chain: Chain,
    mem: int,
    *,
    solver: str = "auto",
    platform: Platform | None = None,
    slots: int = 500,
    effort: float = EFFORT,
    accounting: Accounting = "whole",
) -> Solution: ...
@overload
def solution(
    chain: Join,
    mem: int,
    *,
    solver: str = "auto",
    platform: Platform | None = None,
    slots: int = 500,
    effort: float = EFFORT,
) -> JoinSolution: ...
def solution(
    chain: Chain | Join,
    mem: int,
    *,
    solver: str = "auto",
    platform: Platform | None = None,
    slots: int = 500,
    effort: float = EFFORT,
    accounting: Accounting = "whole",
) -> Solution | JoinSolution:
    """Return the schedule of `solve` with the solver's name, its simulation, and a lower bound on any schedule's time.

    Arguments and errors are those of `solve`.
    """
    if isinstance(chain, Join):
        name, joined = _winner_of_join(chain, mem, solver, platform, slots, effort)
        return JoinSolution(solver=name, timeline=joined, lower_bound=_least_time(chain))
    name, timeline = _winner(chain, mem, solver, platform, slots, effort, accounting)
    machine = _machine(platform, mem)
    fluid = simulate(chain, timeline.schedule, machine, accounting="fluid") if timeline.sent else timeline
    return Solution(
        solver=name,
        timeline=timeline,
        fluid_time=fluid.time,
        lower_bound=lower_bound(chain, mem, platform),
    )


def _winner(
    chain: Chain,
    mem: int,
    solver: str,
    platform: Platform | None,
    slots: int,
    effort: float,
    accounting: Accounting,
) -> tuple[str, Timeline]:
    """Return the name of the solver with the best schedule, and the simulation of that schedule."""
    if not isinstance(chain, Chain):
        raise FxrematError(f"the chain is {shortened(chain)}; it is a Chain, or a Join of chains")
    if not isinstance(platform, Platform | None):
        raise FxrematError(f"platform is {shortened(platform)}; it is a Platform, or None")
    mem, slots = _check_mem(mem), check_slots(slots)
    check_effort(effort)
    if solver not in NAMES:
        raise FxrematError(f"unknown solver {shortened(solver)}; there are {', '.join(NAMES)}")
    if platform is not None and platform.memory is not None:
        mem = min(mem, platform.memory)
    machine = _machine(platform, mem)
    problem = Problem(
        chain=chain,
        mem=mem,
        platform=machine,
        slots=slots,
        judge=lambda schedule: simulate(chain, schedule, machine, accounting=accounting),
        effort=effort,
    )
    return _auto(problem) if solver == "auto" else (solver, ask(problem, solver))


def _check_mem(mem: object) -> int:
    whole = integer(mem)
    if whole is None or whole < 0:
        raise InvalidBudget(
            f"mem is {shortened(mem)}; solvers take a whole number of bytes, such as 4294967296"
        )
    return whole


def check_slots(slots: object) -> int:
    """Return `slots`, the number of memory levels of a table, as an int. Raises `FxrematError` if it is out of range.
    """
    whole = integer(slots)
    if whole is None or not 1 <= whole <= MOST_SLOTS:
        raise FxrematError(f"slots is {shortened(slots)}; it is a whole number from 1 to {MOST_SLOTS}")
    return whole


def check_effort(effort: object, name: str = "effort") -> None:
    """Raise `FxrematError` unless `effort` is a number of seconds, 0 or more; the message calls it `name`."""
    if isinstance(effort, bool) or not isinstance(effort, Real) or not float(effort) >= 0:
        raise FxrematError(f"{name} is {shortened(effort)}; it is a number of seconds, 0 or more")


def _winner_of_join(
    join: Join, mem: int, solver: str, platform: Platform | None, slots: int, effort: float
) -> tuple[str, JoinTimeline]:
    """Return the name of the solver with the best schedule of a join, and the simulation of that schedule."""
    mem, slots = _check_mem(mem), check_slots(slots)
    check_effort(effort)
    if solver not in ("auto", *JOINS):
        raise FxrematError(
            f"a join is solved by auto, {', '.join(JOINS)}; {shortened(solver)} is none of them"
        )
    if platform is not None and platform.linked:
        raise FxrematError("the values of a join do not travel: leave out to_host and from_host")
    if solver != "auto":
        return solver, JOINS[solver](join, mem, slots)
    deadline = running_seconds() + effort
    found: list[tuple[str, JoinTimeline]] = []
    refusals: list[BudgetTooSmall] = []
    for name, propose in JOINS.items():
        try:
            left = max(0.0, deadline - running_seconds())
            found.append((name, propose(join, mem, slots, effort=left)))
        except BudgetTooSmall as refusal:
            refusals.append(refusal)
        except FxrematError:  # raised if the join is too large for this solver
            continue
        if found and found[-1][1].time <= _least_time(join):
            return found[-1]
    if not found:
        raise min(refusals, key=lambda refusal: refusal.minimum)
    return min(found, key=lambda entry: _merit(entry[1]))


def _least_time(join: Join) -> float:
    return math.fsum(chain.least_time for chain in (*join.branches, *([join.trunk] if join.trunk else [])))


def ask(problem: Problem, solver: str) -> Timeline:
    """Return the simulation of the fastest schedule that one solver proposes. Raises `BudgetTooSmall` if none fits."""
    if SOLVERS[solver].transfers and None in (problem.platform.to_host, problem.platform.from_host):
        raise FxrematError(f"{solver} moves values to the host: give a platform with to_host and from_host")
    proposed = SOLVERS[solver].propose(problem)
    fitting = [timeline for schedule in proposed if (timeline := _fit(problem, schedule)) is not None]
    if not fitting:
        raise BudgetTooSmall(minimum=_least(problem, proposed), budget=problem.mem)
    return min(fitting, key=_merit)


def _least(problem: Problem, proposed: list[Schedule]) -> int:
    """Return the lowest peak of the proposed schedules in bytes.

    If none of them can run, return the peak without recomputation.
    """
    roomy = replace(problem.platform, memory=None)
    peaks = []
    for schedule in proposed:
        try:
            peaks.append(simulate(problem.chain, schedule, roomy).peak)
        except InvalidSchedule:  # raised if the schedule copies to the host, and the platform has no link to it
            continue
    return min(peaks) if peaks else simulate(problem.chain, keep_all.schedules(problem.chain)[0]).peak


def _fit(problem: Problem, schedule: Schedule) -> Timeline | None:
    try:
        timeline = problem.judge(schedule)
    except InvalidSchedule:
        return None
    return timeline if timeline.peak <= problem.mem else None


def _auto(problem: Problem) -> tuple[str, Timeline]:
    """Ask the solvers of `CHOSEN` that the time allows, the quickest first, until no faster schedule is possible.

    On 8,796 random instances without a link (2 to 14 blocks) no other solver was faster than these. With a link, the
    others together led to a faster schedule on 4 of 546 instances (2 to 20 blocks), by at most 1.9 %.
    """
    deadline = running_seconds() + problem.effort
    found: list[tuple[str, Timeline]] = []
    refusals: list[BudgetTooSmall] = []
    unable: list[FxrematError] = []
    names = [name for name in CHOSEN if problem.platform.linked or not SOLVERS[name].transfers]
    for name in sorted(names, key=lambda name: (SOLVERS[name].patient, SOLVERS[name].seconds(problem))):
        left = deadline - running_seconds()
        if name != DEFAULT and SOLVERS[name].seconds(problem) > left:
            continue
        try:
            found.append((name, ask(replace(problem, effort=max(left, 0.0) / 2), name)))
        except BudgetTooSmall as refusal:
            refusals.append(refusal)
        except FxrematError as error:  # raised if the chain is too long for this solver
            unable.append(error)
            continue
        if found and (found[-1][1].time <= problem.chain.least_time or _is_optimal(problem, found[-1][0])):
            return found[-1]
    if not found:
        raise min(refusals, key=lambda refusal: refusal.minimum) if refusals else unable[0]
    name, timeline = min(found, key=lambda entry: _merit(entry[1]))
    if problem.platform.linked and (left := deadline - running_seconds()) > 0:
        timeline = problem.judge(search(replace(problem, effort=left), timeline.schedule))
    return name, timeline


def _is_optimal(problem: Problem, solver: str) -> bool:
    return solver == "exact" and not problem.platform.linked


def _machine(platform: Platform | None, mem: int) -> Platform:
    """Return the platform with a memory of `mem` bytes, but at least one byte."""
    return replace(platform or Platform(), memory=max(mem, 1))


def _merit(timeline: Timeline | JoinTimeline) -> tuple[float, int]:
    return timeline.time, timeline.peak
