"""The survey of a joint graph: what memory buys, as the Pareto frontier of programs judged by exact liveness.

A survey lays the graph out as chains of blocks in several ways, solves each for many budgets, and judges the schedules
op by op; then it improves on the best of them op by op (`search.refine`). It does not know the budget: the same
programs are judged whatever it is, and those that are beaten in both memory and time are dropped. So less memory can
never lead to a plan that takes more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxremat.budget import bytes_of
from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import simulate
from fxremat.chains.simulate_join import simulate_join
from fxremat.cost.devices import Device
from fxremat.cost.estimate import estimate
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.linearize.chain_of import chain_of
from fxremat.linearize.crossings import carry_levels, crossings, low_cuts
from fxremat.linearize.lay_out import lay_out
from fxremat.linearize.save_sets import add_options
from fxremat.linearize.towers import find_towers, join_of, on_the_layout
from fxremat.search.candidate import Candidate, FromJoin, FromSchedule, Frontier, unbeaten
from fxremat.search.refine import EFFORT, SearchResult, search
from fxremat.solvers import DEFAULT, LISTS, TABLES, keep_all
from fxremat.solvers.joins import canonical
from fxremat.solvers.registry import JOINS
from fxremat.solvers.table import Table
from fxremat.step.costs import Costs, device_of
from fxremat.step.joint import Joint
from fxremat.step.layout import Layout
from fxremat.step.liveness import live_bytes
from fxremat.step.program import rematerialize
from fxremat.units import Budget

NEAR_LEAST = 1.15  # the last table is for this multiple of the least memory of the chain
STEPS_TO_JUDGE = 500_000  # how many steps of programs a survey replays, about
A_FEW = 5  # schedules of each table that are judged first: a layout whose few are all beaten is left at that
LARGE = 2000  # ops: half as many schedules of larger graphs are judged
MOST_BLOCKS = 250
MOST_VALUES = 6  # that cross a cut
JOIN_SLOTS = 150
MEASURING_SLOTS = 100  # of the table that tells in which order ops are measured
JOIN_STEP = 0.85  # from one budget that a join of towers is solved for to the next
FAR = 1 << 50  # bytes: more than anything needs


def survey(
    joint: Joint, costs: Costs, *, solver: str = "auto", slots: int = 500, effort: float = EFFORT
) -> Frontier:
    """Lay the graph out as chains, solve them for many budgets, judge every schedule by exact liveness, and refine.

    Takes some seconds, and about `effort` more, for a GPT of 12 layers. Only "auto" is refined: a solver that is
    asked for by name says itself what runs. Raises `FxrematError` for an unknown solver.
    """
    if solver not in (names := ("auto", *LISTS, *TABLES)):
        raise FxrematError(f"no solver {solver!r} plans models; there are {', '.join(sorted(names))}")
    layouts = list(_layouts(joint, costs))
    keep_everything = _keep_everything(layouts[0], costs)
    if solver in LISTS:
        chains = [(layout, chain_of(layout, costs)) for layout in layouts]
        found = [judge(layout, s, costs) for layout, chain in chains for s in LISTS[solver](chain)]
    else:
        found = _solved([_Solved.of(layout, costs, solver, slots) for layout in layouts])
        found += _joined(joint, costs, slots)
    frontier = list(unbeaten([keep_everything, *found]))
    if solver == "auto" and effort > 0:
        frontier = list(unbeaten([*frontier, *_refined(frontier, costs, effort)]))
    return Frontier(keep_all=keep_everything, candidates=tuple(frontier))


def order_for_measuring(joint: Joint, device: Device, budget: Budget) -> Sequence[int]:
    """The ops in an order in which the step fits into the budget, as far as estimates tell.

    The captured order where that needs no more than the budget, else that of a program of nearly the least memory.
    """
    costs = estimate(joint, device)
    layout = next(_layouts(joint, costs))
    everything = _keep_everything(layout, costs).peak
    if bytes_of(budget, everything, device_of(joint)) >= everything:
        return range(len(joint.ops))
    solved = _Solved.of(layout, costs, DEFAULT, MEASURING_SLOTS)
    least = min(solved.judged(2).values(), key=lambda candidate: candidate.peak)
    return [step.op for step in least.program().executions]


def judge(layout: Layout, schedule: Schedule, costs: Costs) -> Candidate:
    """The exact peak and time of a schedule."""
    program = rematerialize(layout, schedule)
    memory = live_bytes(program, costs.sizes)
    return Candidate(
        peak=memory.peak, time=costs.time(program), layout=layout, origin=FromSchedule(schedule)
    )


def _layouts(joint: Joint, costs: Costs) -> Iterator[Layout]:
    """One layout for each way to cut that is worth a try."""
    crossing = crossings(joint)
    forward = costs.seconds[: joint.forward_count]
    ways = [(crossing.cuts(carried), carried) for carried in carry_levels(joint, crossing, forward)]
    ways += low_cuts(crossing, costs.sizes.values)
    ways.append((crossing.cuts(width=MOST_VALUES), frozenset()))
    for ends, carried in dict.fromkeys(ways):
        yield add_options(lay_out(joint, _thin(ends, forward), carried), costs.seconds, costs.sizes.values)


def _thin(ends: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Keep at most MOST_BLOCKS ends: those after the shortest blocks are left out."""
    ends = list(ends)
    if len(ends) <= MOST_BLOCKS:
        return ends
    total = list(itertools.accumulate(seconds, initial=0.0))
    work = {end: total[end + 1] - total[before + 1] for before, end in zip([-1, *ends], ends, strict=False)}
    kept = sorted(work, key=lambda end: work[end], reverse=True)[:MOST_BLOCKS]
    return sorted(kept)


def _keep_everything(layout: Layout, costs: Costs) -> Candidate:
    chain = chain_of(layout, costs)
    return judge(layout, keep_all.schedules(chain)[0], costs)


@dataclass(frozen=True, eq=False)
class _Solved:
    """A layout, and its tables for less and less memory: one alone would be too coarse for small budgets."""

    layout: Layout
    chain: Chain
    costs: Costs
    tables: tuple[Table, ...]

    @classmethod
    def of(cls, layout: Layout, costs: Costs, solver: str, slots: int) -> _Solved:
        """Fill the tables, which cover the whole range of budgets whatever the user's budget is."""
        chain = chain_of(layout, costs)
        build = TABLES[DEFAULT if solver == "auto" else solver]
        most = max(1, simulate(chain, keep_all.schedules(chain)[0]).peak)
        tables = [build(chain, most, slots)]
        least = tables[0].least
        if most < least:
            tables = [build(chain, least, slots)]
        while tables[-1].mem / 2 > NEAR_LEAST * least:
            tables.append(build(chain, tables[-1].mem // 2, slots))
        tables.append(build(chain, int(NEAR_LEAST * least) + 1, slots))
        return cls(layout, chain, costs, tuple(tables))

    def judged(self, count: int) -> dict[Schedule, Candidate]:
        """About `count` schedules of each table."""
        schedules = dict.fromkeys(s for table in self.tables for s in table.frontier(count))
        return {schedule: judge(self.layout, schedule, self.costs) for schedule in schedules}


def _solved(layouts: Sequence[_Solved]) -> list[Candidate]:
    """A few schedules of every layout, and many of those layouts that have some unbeaten one among the few."""
    first = A_FEW if len(layouts[0].layout.joint.ops) <= LARGE else A_FEW // 2
    few = [list(solved.judged(first).values()) for solved in layouts]
    everything = [candidate for candidates in few for candidate in candidates]
    best = {id(candidate.layout) for candidate in unbeaten(everything)}
    promising = [solved for solved in layouts if id(solved.layout) in best]
    steps = sum(3 * len(solved.layout.joint.ops) * len(solved.tables) for solved in promising)
    count = max(2 * first, min(100, STEPS_TO_JUDGE // steps))
    return everything + [candidate for solved in promising for candidate in solved.judged(count).values()]


def _joined(joint: Joint, costs: Costs, slots: int) -> Iterator[Candidate]:
    """Schedules of the join of the towers, where there are any, over the range of budgets."""
    crossing = crossings(joint)
    towers = find_towers(joint, crossing, costs.seconds)
    if towers is None:
        return
    layout = add_options(towers.lay_out(joint, crossing), costs.seconds, costs.sizes.values)
    chain, parts = chain_of(layout, costs), towers.parts(layout)
    join = join_of(chain, parts)
    budget = JOINS["keep_all"](join, FAR, slots).peak
    try:
        table = canonical.build(join, budget, JOIN_SLOTS)
    except FxrematError:  # too many towers for a table
        return
    while budget >= table.least:
        try:
            timeline = simulate_join(join, table.schedule(budget))
        except BudgetTooSmall:  # in slots, which are coarse for small budgets
            return
        schedule = on_the_layout(timeline.schedule, parts)
        judged = judge(layout, schedule, costs)
        yield replace(judged, origin=FromJoin(schedule, timeline))
        budget = int(min(budget, timeline.peak) * JOIN_STEP)


def _refined(frontier: Sequence[Candidate], costs: Costs, effort: float) -> Iterator[Candidate]:
    """The programs that a search from those of the frontier finds; each keeps the blocks of the one it began with."""

    def begin(place: int) -> SearchResult:
        candidate = frontier[place]
        return SearchResult(peak=candidate.peak, time=candidate.time, program=candidate.program(), began=place)

    starts = [(candidate.peak, candidate.time) for candidate in frontier]
    for found in search(starts, begin, costs, effort=effort):
        began = frontier[found.began]
        yield began if found.order is None else began.refined_to(found.order, found.program, costs)
