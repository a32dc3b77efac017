"""The survey of a step graph: the Pareto frontier of its programs in peak and time.

A survey cuts the graph into chains of blocks in several ways and solves each chain for many budgets, first
coarsely, then finely for the ways that turned out best. Peak and time of the schedules are evaluated op by op.
The survey does not know the user's budget: it always evaluates the same programs, and drops those that others
beat in both memory and time. So a smaller budget can never lead to a faster plan. `search.refine` improves the
programs op by op, up to the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import simulate
from fxremat.chains.simulate_join import simulate_join
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidSchedule
from fxremat.linearize.chain_of import chain_of
from fxremat.linearize.crossings import carry_levels, crossings, low_cuts
from fxremat.linearize.lay_out import lay_out
from fxremat.linearize.save_sets import Solved, add_options
from fxremat.linearize.towers import find_towers, join_of, on_the_layout
from fxremat.search.candidate import Candidate, FromJoin, FromSchedule, Frontier, unbeaten
from fxremat.search.executions import Executions
from fxremat.search.refine import EFFORT, lowered
from fxremat.solvers import DEFAULT, LISTS, TABLES, keep_all
from fxremat.solvers.joins import canonical
from fxremat.solvers.registry import JOINS
from fxremat.solvers.table import Table
from fxremat.step.costs import Costs
from fxremat.step.layout import Layout
from fxremat.step.order import order_of
from fxremat.step.step_graph import StepGraph

NEAR_LEAST = 1.15  # the last table of a chain covers budgets up to this multiple of the chain's least memory
APART = 1.01  # ratio of successive budgets for which a chain is solved
# number of schedules of each table that are evaluated first; chains with one on the frontier get more
A_FEW = 5
LARGE = 2000  # ops; for larger graphs half as many schedules are evaluated
LUMP = 500  # maximum ops of a block; a way to cut the graph with a larger block is skipped if another way has none
MOST_BLOCKS = 100  # the time to fill a table grows with the cube of it, and op by op the search goes on from there
FINEST = 250  # number of blocks for programs of the least memory, for which small blocks matter most
MOST_VALUES = 6  # maximum number of values that may cross a cut between blocks
JOIN_SLOTS = 150  # memory levels in the table of a join (chains that meet only at the end)
MEASURING_EFFORT = 0.3 * EFFORT  # of the search for an order in which a step is measured
MEASURING_SLOTS = 100  # memory levels in the table that decides in which order ops are measured
JOIN_STEP = 0.85  # ratio of each budget that a join is solved for to the one before
FAR = 1 << 50  # number of bytes that exceeds any need


def survey(
    graph: StepGraph,
    costs: Costs,
    *,
    solver: str = "auto",
    slots: int = 500,
    effort: float = EFFORT,
    ways: int | None = None,
    known: Frontier | None = None,
) -> Frontier:
    """Cut the graph into chains, solve them for many budgets, and return the Pareto frontier of the schedules.

    With "auto" and an effort in seconds, it also searches for programs that need less memory than any schedule
    of blocks; a solver that is named decides alone what runs. `slots` is the number of memory levels in the
    solvers' tables. Runs a second or two for a GPT of 12 layers. Raises `FxrematError` for an unknown solver.

    Args:
        ways: number of ways to cut that are tried at most, those with the smallest blocks first; None: all.
        known: the frontier of the same graph beside another loss: only the ways to cut that are on it are tried.
    """
    if solver not in (names := ("auto", *LISTS, *TABLES)):
        raise FxrematError(f"no solver {solver!r} plans models; there are {', '.join(sorted(names))}")
    layouts = _layouts_of(known) if known else list(_layouts(graph, costs, MOST_BLOCKS, ways))
    judge = _Judge(graph, costs)
    keep_everything = judge.keep_everything(layouts[0])
    if solver in LISTS:
        found = [c for layout in layouts for c in judge.of(layout, LISTS[solver](judge.chain(layout)))]
    else:
        found = _solved(layouts, judge, solver, slots)
        found += _joined(judge, graph, slots)
        finest = next(_layouts(graph, costs, FINEST, 1))
        if solver == "auto" and len(finest.blocks) > MOST_BLOCKS + 1:
            found.append(_least(finest, judge))
    candidates = tuple(unbeaten([keep_everything, *found]))
    if solver == "auto" and effort > 0:
        candidates = lowered(candidates, costs, effort=effort)
    return Frontier(keep_all=keep_everything, candidates=candidates)


def _layouts_of(frontier: Frontier) -> list[Layout]:
    """Return the ways to cut that the candidates of a frontier have, without those for the least memory.

    That of keeping everything comes first.
    """
    every = (frontier.keep_all, *frontier.candidates)
    return [*{id(each.layout): each.layout for each in every if len(each.layout.blocks) <= MOST_BLOCKS + 1}.values()]


def kept(graph: StepGraph, costs: Costs) -> Frontier:
    """Return the frontier whose only candidate recomputes nothing, without a search."""
    everything = _Judge(graph, costs).keep_everything(next(_layouts(graph, costs, MOST_BLOCKS)))
    return Frontier(keep_all=everything, candidates=(everything,))


def order_within(graph: StepGraph, costs: Costs, budget: int) -> Sequence[int] | None:
    """Return an order of the ops, with recomputations, in which the step fits into `budget` bytes; None if none does.

    That is the order of a program of nearly the least memory by blocks, or, where that does not fit, op by op.
    """
    coarse, judge = _coarse(graph, costs)
    candidates = [coarse] if coarse.peak <= budget else _lowest(graph, costs, coarse, judge)
    return next((each.order().ops for each in candidates if each.peak <= budget), None)


def order_of_least(graph: StepGraph, costs: Costs) -> Sequence[int]:
    """Return an order of the ops, with recomputations, in which the step takes nearly the least memory."""
    return _lowest(graph, costs, *_coarse(graph, costs))[-1].order().ops


def _coarse(graph: StepGraph, costs: Costs) -> tuple[Candidate, _Judge]:
    """Return a candidate of nearly the least memory by blocks, for the first way to cut, and what evaluated it."""
    layout, judge = next(_layouts(graph, costs, FINEST)), _Judge(graph, costs)
    return _nearly_least(layout, judge, judge.keep_everything(layout).peak), judge


def _lowest(graph: StepGraph, costs: Costs, coarse: Candidate, judge: _Judge) -> tuple[Candidate, ...]:
    """Return candidates of little memory, made from one for large blocks, and one for small ones; the least is last."""
    fine = _least(next(_layouts(graph, costs, FINEST, 1)), judge)
    return lowered(tuple(unbeaten([coarse, fine])), costs, effort=MEASURING_EFFORT)


def least_of(graph: StepGraph, costs: Costs) -> Candidate:
    """Return a candidate of nearly the least memory, without a survey: the one of the way to cut with small blocks."""
    return _least(next(_layouts(graph, costs, FINEST, 1)), _Judge(graph, costs))


def _least(layout: Layout, judge: _Judge) -> Candidate:
    """Return the candidate of nearly the least memory for one way to cut the graph."""
    everything = judge.keep_everything(layout)
    return min(everything, _nearly_least(layout, judge, everything.peak), key=lambda candidate: candidate.peak)


def _nearly_least(layout: Layout, judge: _Judge, everything: int) -> Candidate:
    """Return the candidate of nearly the least memory that a coarse table has; `everything` is keep-all's peak."""
    build, chain = TABLES[DEFAULT], judge.chain(layout)
    table = build(chain, int(NEAR_LEAST * build(chain, max(1, everything), 1).least) + 1, MEASURING_SLOTS)
    return min(judge.of(layout, table.frontier(2)), key=lambda candidate: candidate.peak)


class _Judge:
    """Evaluates the exact peak and the time of schedules of one step graph."""

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        self.costs, self._executions = costs, Executions(graph, costs)
        self._chains: dict[Layout, Chain] = {}

    def of(self, layout: Layout, schedules: Iterable[Schedule]) -> list[Candidate]:
        """Evaluate each distinct schedule of the layout's blocks as a candidate."""
        return [self._one(layout, schedule) for schedule in dict.fromkeys(schedules)]

    def _one(self, layout: Layout, schedule: Schedule) -> Candidate:
        order = order_of(layout, schedule)
        peak, time = self._executions.judge(order)
        return Candidate(peak=peak, time=time, layout=layout, origin=FromSchedule(schedule, order))

    def chain(self, layout: Layout) -> Chain:
        """Return the layout as a chain with bytes and seconds, cached."""
        if layout not in self._chains:
            self._chains[layout] = chain_of(layout, self.costs)
        return self._chains[layout]

    def keep_everything(self, layout: Layout) -> Candidate:
        """Return the candidate that recomputes nothing."""
        (found,) = self.of(layout, keep_all.schedules(self.chain(layout))[:1])
        return found


def _layouts(graph: StepGraph, costs: Costs, blocks: int, most: int | None = None) -> Iterator[Layout]:
    """Yield the step graph cut into a chain of blocks, for each way to cut its forward that is worth trying.

    Args:
        blocks: number of blocks of each way at most, or one more.
        most: number of ways at most, those that seem to need least memory first; None: all.
    """
    crossing = crossings(graph)
    forward, work = costs.seconds[: graph.forward_count], _work(graph, costs)
    ways = [(crossing.cuts(carried), carried) for carried in carry_levels(graph, crossing, forward)]
    ways += low_cuts(crossing, costs.sizes.values)
    ways.append((crossing.cuts(width=MOST_VALUES), frozenset()))
    distinct = dict.fromkeys((tuple(_thin(ends, work, blocks)), carried) for ends, carried in ways)
    largest = {way: _largest(way[0], graph.forward_count) for way in distinct}
    chosen = [way for way in distinct if not min(largest.values()) <= LUMP < largest[way]]
    if most is not None:
        chosen = sorted(chosen, key=lambda way: _weight(graph, costs, *way))[:most]
    solved: Solved = {}
    for ends, carried in chosen:
        yield add_options(lay_out(graph, ends, carried), costs.seconds, costs.sizes.values, solved)


def _largest(ends: Sequence[int], count: int) -> int:
    """Return the number of ops of the largest block if a forward of `count` ops is cut after `ends`."""
    return max(end - before for before, end in itertools.pairwise((-1, *ends, count - 1)))


def _weight(graph: StepGraph, costs: Costs, ends: Sequence[int], carried: frozenset[int]) -> int:
    """Return the bytes of the values that a way to cut carries, and of those that its largest block writes. O(ops)."""
    sizes = costs.sizes.values
    written = [0, *itertools.accumulate(sum(sizes[v] for v in op.writes) for op in graph.forward_ops)]
    blocks = itertools.pairwise((0, *(end + 1 for end in ends), graph.forward_count))
    return sum(sizes[v] for v in carried) + max(written[end] - written[begin] for begin, end in blocks)


def _work(graph: StepGraph, costs: Costs) -> list[float]:
    """Return what the ops before each position of the forward are of it: their share of its time and of its bytes."""
    seconds = costs.seconds[: graph.forward_count]
    written = [sum(costs.sizes.values[v] for v in op.writes) for op in graph.forward_ops]
    all_seconds, all_written = sum(seconds) or 1.0, sum(written) or 1
    shares = (time / all_seconds + size / all_written for time, size in zip(seconds, written, strict=True))
    return list(itertools.accumulate(shares, initial=0.0))


def _thin(ends: Sequence[int], work: Sequence[float], most: int) -> list[int]:
    """Return at most `most` of the positions that blocks end at, such that the largest block has the least work.

    O(len(ends)) for each of the steps in which that work is found to a thousandth of the mean.
    """
    if len(ends) <= most:
        return list(ends)
    low, high = 0.0, work[-1]
    while high - low > 1e-3 * work[-1] / most:
        share = (low + high) / 2
        low, high = (low, share) if len(_merged(ends, work, share)) <= most else (share, high)
    return _merged(ends, work, high)


def _merged(ends: Sequence[int], work: Sequence[float], share: float) -> list[int]:
    """Return the positions that are left if each block takes in what follows it while it has at most this work."""
    kept, begin = [], 0.0
    for end, following in itertools.pairwise(ends):
        if work[following + 1] - begin > share:
            kept.append(end)
            begin = work[end + 1]
    return [*kept, ends[-1]]


@dataclass(frozen=True, eq=False)
class _Solved:
    """A way to cut the graph into blocks, with solver tables for smaller and smaller budgets.

    One table would be too coarse for small budgets.
    """

    layout: Layout
    chain: Chain
    judge: _Judge
    tables: tuple[Table, ...]

    @classmethod
    def of(cls, layout: Layout, judge: _Judge, solver: str, slots: int) -> _Solved:
        """Fill the tables, which cover the full range of budgets, whatever the user's budget is."""
        chain = judge.chain(layout)
        build = TABLES[DEFAULT if solver == "auto" else solver]
        most = max(1, simulate(chain, keep_all.schedules(chain)[0]).peak)
        tables = [build(chain, most, slots)]
        least = tables[0].least
        if most < least:
            tables = [build(chain, least, slots)]
        while tables[-1].mem / 2 > NEAR_LEAST * least:
            tables.append(build(chain, tables[-1].mem // 2, slots))
        tables.append(build(chain, int(NEAR_LEAST * least) + 1, slots))
        return cls(layout, chain, judge, tuple(tables))

    def few(self, count: int) -> list[Candidate]:
        """Return candidates for about `count` schedules of each table."""
        return self.judge.of(self.layout, (s for table in self.tables for s in table.frontier(count)))

    def many(self, apart: float) -> list[Candidate]:
        """Return candidates for a series of budgets, each `apart` times the next, each from the finest table for it."""
        smaller = [*(table.mem for table in self.tables[1:]), 0]
        tables = zip(self.tables, smaller, strict=True)
        return self.judge.of(self.layout, (s for table, above in tables for s in table.spread(apart, above)))


def _solved(layouts: Sequence[Layout], judge: _Judge, solver: str, slots: int) -> list[Candidate]:
    """Return candidates: a few for every way to cut the graph, and many for those with one on the Pareto frontier."""
    large = len(layouts[0].graph.ops) > LARGE
    solved = [_Solved.of(layout, judge, solver, slots) for layout in layouts]
    found = [candidate for each in solved for candidate in each.few(A_FEW // 2 if large else A_FEW)]
    on_frontier = {id(candidate.layout) for candidate in unbeaten(found)}
    for each in solved:
        if id(each.layout) in on_frontier:
            found += each.many(APART**2 if large else APART)
    return found


def _joined(judge: _Judge, graph: StepGraph, slots: int) -> Iterator[Candidate]:
    """Yield candidates for decreasing budgets that treat the model as a join of several chains; none if it is not one.

    In a join, chains of ops share no value until they meet, as in a siamese network.
    """
    costs, crossing = judge.costs, crossings(graph)
    towers = find_towers(graph, crossing, costs.seconds)
    if towers is None:
        return
    layout = add_options(towers.lay_out(graph, crossing), costs.seconds, costs.sizes.values)
    chain, parts = chain_of(layout, costs), towers.parts(layout)
    join = join_of(chain, parts)
    budget = JOINS["keep_all"](join, FAR, slots).peak
    try:
        table = canonical.build(join, budget, JOIN_SLOTS)
    except FxrematError:  # raised if there are too many branches for a table
        return
    while budget >= table.least:
        try:
            timeline = simulate_join(join, table.schedule(budget))
        except BudgetTooSmall:  # a small budget can fail, because memory is rounded to coarse levels
            return
        schedule = on_the_layout(timeline.schedule, parts)
        # a gradient that both branches add to may have to wait until values that it needs are freed
        with suppress(InvalidSchedule):
            (judged,) = judge.of(layout, [schedule])
            yield replace(judged, origin=FromJoin(schedule, judged.order(), timeline=timeline))
        budget = int(min(budget, timeline.peak) * JOIN_STEP)
