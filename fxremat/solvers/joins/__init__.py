"""Solvers for joins of chains (branches that meet in a trunk or loss); `simulate_join` evaluates their schedules.

    best_canonical    branches may alternate; the part of a branch that is postponed first is finished last
    best_linear       branches run one after the other, as one chain; several orders and budgets are tried
"""

from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from math import gcd, inf

from fxremat.chains.chain import Chain, Join
from fxremat.chains.simulate_join import JoinTimeline, simulate_join
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import binomial, input_drop, periodic
from fxremat.solvers.joins import canonical
from fxremat.solvers.joins.linear import chain_of, translated
from fxremat.solvers.table import grain

__all__ = ["best_canonical", "best_linear"]
_ORDERS = 6  # maximum number of orders of the branches that are tried
# multiples of the budget for which tables are built, since rounding sizes up to slots wastes memory
_ROUNDED_UP = (1.0, 1.02, 1.05)
_FEWEST = 4  # minimum number of schedules of a list that are tried, whatever the effort
_QUICK = 1.0  # seconds of table building that are always allowed, whatever the effort
_LONGEST = 10  # longer schedules, in ops per block, are not tried
_OP_SECONDS = 1e-4  # approximate seconds to simulate one op of a join
# multiples of the budget that are tried, since treating the join as one chain overestimates its memory
_ROOMS = (1.0, 1.1, 1.25, 1.5, 2.0)


def best_canonical(join: Join, mem: int, slots: int = 200) -> JoinTimeline:
    """Return the simulation of the best schedule of the canonical form found. Raises `BudgetTooSmall` if none fits.

    In the canonical form, the part of a branch that is postponed first is finished last.
    """
    chains = [*join.branches, *([join.trunk] if join.trunk else [])]
    full, steps, exact = _steps(chains, mem, slots)
    found = []
    for room in (1.0,) if exact else _ROUNDED_UP:
        table = canonical.build(join, int(full * room), steps)
        found.append(simulate_join(join, table.schedule(mem, full=full)))
    return min(found, key=_merit)


def _steps(chains: Sequence[Chain], mem: int, slots: int) -> tuple[int, int, bool]:
    """Return (bytes, slots, exact) for a table of `mem` bytes, which are divided into slots of equal size.

    `exact` is True if each size is a whole number of slots.
    """
    unit = gcd(*map(grain, chains))
    steps = max(1, mem // unit)
    return (steps * unit, steps, True) if steps <= slots else (mem, slots, False)


def best_linear(join: Join, mem: int, slots: int = 200, *, effort: float = inf) -> JoinTimeline:
    """Return the fastest schedule of the join treated as one chain, over several orders and budgets.

    Tables are built for all orders and budgets if that takes at most `effort` seconds by an estimate, or for
    fewer orders if that does; otherwise periodic and binomial schedules of the one chain are tried, since some
    hundred blocks are too many for a table. What is tried depends neither on the clock nor on `mem`, so that
    the minimum in the error `BudgetTooSmall` works as a budget.
    """
    orders = list(islice(permutations(range(len(join.branches))), _ORDERS))
    affordable = int(min(_ORDERS, max(effort, _QUICK) / _table_seconds(chain_of(join, orders[0]), slots)))
    smallest: list[JoinTimeline] = []
    others: list[JoinTimeline] = []
    for order in orders[:affordable]:
        chain = chain_of(join, order)
        least = max(1, input_drop.build(chain, 1, 1).least)
        smallest.append(_linear(join, order, chain, least, slots))  # these schedules do not depend on `mem`
        for room in _ROOMS:
            if mem * room >= least:
                others.append(_linear(join, order, chain, int(mem * room), slots))
    if not affordable:
        smallest = list(_listed(join, orders[0], effort))
    fitting = [timeline for timeline in [*smallest, *others] if timeline.peak <= mem]
    if not fitting:
        raise BudgetTooSmall(minimum=min(timeline.peak for timeline in smallest), budget=mem)
    return min(fitting, key=_merit)


def _table_seconds(chain: Chain, slots: int) -> float:
    """Estimate the seconds that `best_linear` needs for all tables of one order of branches."""
    splits = len(chain) * float(sum(len(block.choices) for block in chain.blocks)) ** 2 / 6
    return (2 + len(_ROOMS)) * splits * (1e-7 + 1e-9 * slots)


def _listed(join: Join, order: Sequence[int], effort: float) -> Iterator[JoinTimeline]:
    """Yield simulations of periodic and binomial schedules of the join treated as one chain.

    There are as many as `effort` allows.
    """
    chain = chain_of(join, order)
    count = max(_FEWEST, int(effort / (_OP_SECONDS * 4 * len(chain))))
    for proposed in (periodic.schedules(chain), binomial.schedules(chain)):
        short = [schedule for schedule in proposed if len(schedule.ops) <= _LONGEST * len(chain)]
        for schedule in short[:: -(-len(short) // count) or 1]:
            yield simulate_join(join, translated(join, order, schedule))


def _linear(join: Join, order: Sequence[int], chain: Chain, mem: int, slots: int) -> JoinTimeline:
    """Return the simulation of the best schedule of the join treated as one chain for `mem` bytes; it may need more."""
    full, steps, _ = _steps([chain], mem, slots)
    schedule = input_drop.build(chain, full, steps).schedule(mem, full=full)
    return simulate_join(join, translated(join, order, schedule))


def _merit(timeline: JoinTimeline) -> tuple[float, int]:
    return timeline.time, timeline.peak
