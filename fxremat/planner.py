"""From a joint graph to the plan that runs it inside a budget.

    joint      = read_joint(graph)                      ops and values
    costs      = measure(joint) or estimate(joint)      seconds and bytes
    prospects  = survey(joint, costs)                   what memory buys: schedules judged by exact liveness
    chosen     = prospects.within(budget)               the fastest that fits
    graphs     = lower(chosen.program)

The survey does not know the budget: the same schedules are judged whatever it is, and those that are beaten in both
memory and time are dropped. So less memory can never lead to a plan that takes more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fxremat.chain import Chain
from fxremat.cost.blocks import chain_of
from fxremat.cost.table import Costs
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.linearize.cuts import carry_levels, crossings
from fxremat.linearize.joint import Joint
from fxremat.linearize.layout import Layout, lay_out
from fxremat.linearize.options import add_options
from fxremat.passes.liveness import live_bytes
from fxremat.passes.program import Program, rematerialize
from fxremat.schedule import Schedule
from fxremat.simulate import simulate
from fxremat.solvers import DEFAULT, LISTS, TABLES, keep_all

NEAR_LEAST = 1.15  # the last table is for this multiple of the least memory of the chain
STEPS_TO_JUDGE = 240_000  # how many steps of programs a survey of one layout replays, about
MOST_BLOCKS = 400


@dataclass(frozen=True, kw_only=True, eq=False)
class Prospect:
    """One way to run the step, judged exactly."""

    peak: int  # bytes above the start of the step
    time: float  # seconds
    layout: Layout
    chain: Chain
    schedule: Schedule

    def program(self) -> Program:
        """Every step of it."""
        return rematerialize(self.layout, self.schedule)


@dataclass(frozen=True, kw_only=True)
class Prospects:
    """What memory buys: from the fastest to the smallest, each slower and smaller than the one before."""

    keep_all: Prospect
    frontier: tuple[Prospect, ...]

    @property
    def minimum(self) -> int:
        """The least budget that works, in bytes."""
        return self.frontier[-1].peak

    def within(self, budget: int) -> Prospect:
        """The fastest that fits. Raises `BudgetTooSmall`."""
        for prospect in self.frontier:
            if prospect.peak <= budget:
                return prospect
        raise BudgetTooSmall(minimum=self.minimum, budget=budget)


def survey(joint: Joint, costs: Costs, *, solver: str = "auto", slots: int = 500) -> Prospects:
    """Lay the graph out as chains, solve them for many budgets, and judge every schedule by exact liveness.

    Takes a second or two for a GPT of 12 layers. Raises `FxrematError` for an unknown solver.
    """
    if solver not in (names := ("auto", *LISTS, *TABLES)):
        raise FxrematError(f"no solver {solver!r} plans models; there are {', '.join(sorted(names))}")
    layouts = list(_layouts(joint, costs))
    found = [_keep_everything(layouts[0], costs)]
    for layout in layouts:
        chain = chain_of(layout, costs)
        schedules = _schedules(chain, layout, solver, slots)
        found += [judge(layout, chain, schedule, costs) for schedule in schedules]
    return Prospects(keep_all=found[0], frontier=tuple(_unbeaten(found)))


def judge(layout: Layout, chain: Chain, schedule: Schedule, costs: Costs) -> Prospect:
    """The exact peak and time of a schedule."""
    program = rematerialize(layout, schedule)
    memory = live_bytes(program, costs.sizes)
    return Prospect(peak=memory.peak, time=costs.time(program), layout=layout, chain=chain, schedule=schedule)


def _layouts(joint: Joint, costs: Costs) -> Iterator[Layout]:
    """One layout for each set of carried values that is worth a try."""
    crossing = crossings(joint)
    forward = costs.seconds[: joint.forward_count]
    for carried in carry_levels(joint, crossing, forward):
        ends = _thin(crossing.cuts(carried), forward)
        yield add_options(lay_out(joint, ends, carried), costs.seconds, costs.sizes.values)


def _thin(ends: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """At most MOST_BLOCKS ends, those after the shortest blocks left out."""
    ends = list(ends)
    if len(ends) <= MOST_BLOCKS:
        return ends
    total = list(itertools.accumulate(seconds, initial=0.0))
    work = {end: total[end + 1] - total[before + 1] for before, end in zip([-1, *ends], ends, strict=False)}
    kept = sorted(work, key=lambda end: work[end], reverse=True)[:MOST_BLOCKS]
    return sorted(kept)


def _keep_everything(layout: Layout, costs: Costs) -> Prospect:
    chain = chain_of(layout, costs)
    return judge(layout, chain, keep_all.schedules(chain)[0], costs)


def _schedules(chain: Chain, layout: Layout, solver: str, slots: int) -> Iterable[Schedule]:
    """Schedules over the whole range of budgets, the same whatever the user's budget is."""
    if solver in LISTS:
        return LISTS[solver](chain)
    build = TABLES[DEFAULT if solver == "auto" else solver]
    count = max(20, min(100, STEPS_TO_JUDGE // (4 * len(layout.joint.ops))))
    most = max(1, simulate(chain, keep_all.schedules(chain)[0]).peak)
    table = build(chain, most, slots)
    nominals = [max(most, table.least)]
    while nominals[-1] / 2 > NEAR_LEAST * table.least:
        nominals.append(nominals[-1] // 2)
    nominals.append(int(NEAR_LEAST * table.least) + 1)
    schedules: dict[Schedule, None] = {}
    for nominal in nominals:
        schedules |= dict.fromkeys(build(chain, nominal, slots).frontier(count))
    return schedules


def _unbeaten(prospects: Iterable[Prospect]) -> Iterator[Prospect]:
    """Those that no other beats in both peak and time, fastest first."""
    least: int | None = None
    for prospect in sorted(prospects, key=lambda p: (p.time, p.peak)):
        if least is None or prospect.peak < least:
            least = prospect.peak
            yield prospect
