"""Solvers of joins: the canonical form of uniform joins, or one chain. `simulate_join` evaluates both.

    best_canonical    branches alternate; each part of a branch that is left for later first is finished last
    best_linear       one branch after the other, as one chain, in several orders and for several budgets
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
_ORDERS = 6  # orders of branches that are tried
_ROUNDED_UP = (1.0, 1.02, 1.05)  # factors of the budget that a table is built for, to make up for rounding sizes up
_FEWEST = 4  # schedules of a list that are tried at least, whatever the effort
_QUICK = 1.0  # seconds that tables may run, whatever the effort
_LONGEST = 10  # ops for each block: longer schedules are not tried
_OP_SECONDS = 1e-4  # to simulate an op of a join, about
_ROOMS = (1.0, 1.1, 1.25, 1.5, 2.0)  # factors of the budget for the one chain, which overestimates memory


def best_canonical(join: Join, mem: int, slots: int = 200) -> JoinTimeline:
    """Return the simulated schedule of the canonical form. Raises `BudgetTooSmall`."""
    chains = [*join.branches, *([join.trunk] if join.trunk else [])]
    full, steps, exact = _steps(chains, mem, slots)
    found = []
    for room in (1.0,) if exact else _ROUNDED_UP:
        table = canonical.build(join, int(full * room), steps)
        found.append(simulate_join(join, table.schedule(mem, full=full)))
    return min(found, key=_merit)


def _steps(chains: Sequence[Chain], mem: int, slots: int) -> tuple[int, int, bool]:
    """Return (bytes, slots, exact) for a table of `mem` bytes; exact: each size is a whole number of slots."""
    unit = gcd(*map(grain, chains))
    steps = max(1, mem // unit)
    return (steps * unit, steps, True) if steps <= slots else (mem, slots, False)


def best_linear(join: Join, mem: int, slots: int = 200, *, effort: float = inf) -> JoinTimeline:
    """Return the fastest schedule of the join as one chain, over orders and budgets. Raises `BudgetTooSmall`.

    It builds tables of all orders for all budgets if they need no more than `effort` seconds by an estimate, or of
    fewer orders if those do; otherwise it tries periodic and binomial schedules of the one chain, since some hundred
    blocks of it are too many for a table. What is tried depends neither on the clock nor on `mem`, so that the minimum
    in the error works.
    """
    orders = list(islice(permutations(range(len(join.branches))), _ORDERS))
    affordable = int(min(_ORDERS, max(effort, _QUICK) / _table_seconds(chain_of(join, orders[0]), slots)))
    smallest: list[JoinTimeline] = []
    others: list[JoinTimeline] = []
    for order in orders[:affordable]:
        chain = chain_of(join, order)
        least = max(1, input_drop.build(chain, 1, 1).least)
        smallest.append(_linear(join, order, chain, least, slots))  # these do not depend on `mem`
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
    """Estimate the seconds that `best_linear` takes to build all tables for one order of branches."""
    splits = len(chain) * float(sum(len(block.choices) for block in chain.blocks)) ** 2 / 6
    return (2 + len(_ROOMS)) * splits * (1e-7 + 1e-9 * slots)


def _listed(join: Join, order: Sequence[int], effort: float) -> Iterator[JoinTimeline]:
    """Yield periodic and binomial schedules of the join as one chain, simulated on the join, as `effort` allows."""
    chain = chain_of(join, order)
    count = max(_FEWEST, int(effort / (_OP_SECONDS * 4 * len(chain))))
    for proposed in (periodic.schedules(chain), binomial.schedules(chain)):
        short = [schedule for schedule in proposed if len(schedule.ops) <= _LONGEST * len(chain)]
        for schedule in short[:: -(-len(short) // count) or 1]:
            yield simulate_join(join, translated(join, order, schedule))


def _linear(join: Join, order: Sequence[int], chain: Chain, mem: int, slots: int) -> JoinTimeline:
    """Return the schedule of the join as one chain for `mem` bytes, simulated on the join; it may not fit there."""
    full, steps, _ = _steps([chain], mem, slots)
    schedule = input_drop.build(chain, full, steps).schedule(mem, full=full)
    return simulate_join(join, translated(join, order, schedule))


def _merit(timeline: JoinTimeline) -> tuple[float, int]:
    return timeline.time, timeline.peak
