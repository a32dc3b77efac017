"""Candidates with copies to the host, and their simulated times.

    sources   programs of the Pareto frontier, from keep-all (no recomputation) to programs that recompute much
    budgets   from keep-all's peak down to the least that is possible with all possible values on the host
    each      for each source and budget, the values to copy so that it fits (`transfers.activations.cap`), and the
              simulated time; the fastest source counts

The resulting frontier mixes recomputing and offloading. A candidate that offloading makes neither faster nor
smaller stays unchanged.

The user can instead name a solver of chains that offloads (pofo, offload_dp, ...): its schedule decides which
values are copied, and the simulated clock (`transfers.clock`) when. If the program needs more memory than the
solver estimated, more values are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.errors import BudgetTooSmall
from fxremat.linearize.chain_of import chain_of
from fxremat.search.candidate import Candidate, FromSchedule, Frontier, unbeaten
from fxremat.solvers import solve
from fxremat.step.costs import Costs, Link
from fxremat.step.layout import Layout
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Program
from fxremat.step.transferred import ProgramWithTransfers
from fxremat.transfers.activations import (
    RoundTrip,
    cap,
    copies_of,
    least_size,
    most_on_host,
    swap,
    trips,
    trips_of,
)
from fxremat.transfers.clock import Floats, Ints
from fxremat.transfers.copies import TimedCopies, durations, need_of, time_copies

SOURCES = 16  # maximum number of programs to which copies to the host are added
STEP = 1.03  # ratio of successive budgets
COARSE_STEP = 1.12  # ratio of successive budgets for which a named solver is run
# fractions of the budget for which offloaded values are chosen; with smaller ones, ops wait less for copies
SPARE = (1.0, 0.93, 0.85)


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A program as a starting point for offloading, with the values that can be copied to the host."""

    candidate: Candidate
    program: Program
    need: Ints  # bytes at each step
    seconds: Floats  # seconds of each step
    trips: Sequence[RoundTrip]  # the values that can be copied to the host and back

    @classmethod
    def of(cls, candidate: Candidate, costs: Costs, least: int) -> Source:
        """Prepare a candidate for offloading: its program, and the times and memory of its steps.

        Args:
            least: bytes; only values of at least this size are copied.
        """
        program = candidate.program()
        need = need_of(program, live_bytes(program, costs.sizes))
        return cls(
            candidate=candidate,
            program=program,
            need=need,
            seconds=durations(program, costs),
            trips=trips(program, costs, least),
        )

    @property
    def least(self) -> int:
        """The peak in bytes of the program if all values that can be offloaded are on the host."""
        need = self.need.copy()
        for trip in self.trips:
            need[trip.away] -= trip.size
        return int(need.max(initial=0))

    def within(
        self, budget: int, link: Link, host_mem: int | None, faster_than: float
    ) -> Iterator[TimedCopies]:
        """Yield variants of this program, with copies to the host, that fit into `budget` bytes.

        Args:
            host_mem: bytes that may be on the host at a time. None: no limit.
            faster_than: seconds; slower versions are left out.
        """
        seen: set[tuple[RoundTrip, ...]] = set()
        for share in SPARE:
            chosen = cap(self.need.copy(), self.trips, int(budget * share))
            if chosen is None or tuple(chosen) in seen:
                continue
            seen.add(tuple(chosen))
            # bytes of offloaded activations on the host between forward and backward
            there = sum(link.on_host(trip.size) for trip in chosen)
            if host_mem is not None and there > host_mem:
                continue
            need = self.need.copy()
            copies = copies_of(self.program, chosen, need)
            timed = time_copies(self.program, *copies, need, self.seconds, link, budget)
            if timed.peak <= budget and timed.time < faster_than:
                yield timed


def with_offloading(frontier: Frontier, costs: Costs, link: Link, host_mem: int | None = None) -> Frontier:
    """Return the Pareto frontier with candidates added that copy values to the host.

    Args:
        costs: the costs that the frontier's times were computed with.
        host_mem: bytes that may be on the host at a time. None: no limit.
    """
    least = least_size(frontier.keep_all.peak)
    sources = [Source.of(p, costs, least) for p in frontier.spread(SOURCES)]
    found = list(_swapped(sources, frontier, costs, link, host_mem))
    return replace(frontier, candidates=tuple(unbeaten([*frontier.candidates, *found])))


def with_schedules(
    frontier: Frontier, costs: Costs, link: Link, solver: str, slots: int, host_mem: int | None = None
) -> Frontier:
    """Return the Pareto frontier of keep-all and the schedules that a solver of chains with offloading finds.

    It is run for a range of budgets, on the chains of the fastest and of the smallest candidate.

    Args:
        solver: the name of the solver.
        slots: the number of levels to which it rounds memory.
        host_mem: bytes that may be on the host at a time. None: no limit.
    """
    found = [frontier.keep_all]
    for candidate in {id(p.layout): p for p in (frontier.candidates[0], frontier.candidates[-1])}.values():
        found += _proposed(candidate, frontier.keep_all.peak, costs, link, solver, slots, host_mem)
    return replace(frontier, candidates=tuple(unbeaten(found)))


def _proposed(
    candidate: Candidate, most: int, costs: Costs, link: Link, solver: str, slots: int, host_mem: int | None
) -> Iterator[Candidate]:
    chain = chain_of(candidate.layout, costs)
    platform = Platform(to_host=link.to_host, from_host=link.from_host)
    budget = float(most)
    while True:
        budget /= COARSE_STEP
        try:
            schedule = solve(chain, int(budget), solver=solver, slots=slots, platform=platform, effort=1.0)
        except BudgetTooSmall:
            return
        for swapped in _scheduled(candidate.layout, schedule, int(budget), costs, link):
            if host_mem is None or most_on_host(swapped.program, costs, link) <= host_mem:
                yield replace(candidate, origin=FromSchedule(schedule)).transferring(swapped)


def _scheduled(
    layout: Layout, schedule: Schedule, budget: int, costs: Costs, link: Link
) -> Iterator[ProgramWithTransfers]:
    """Yield a schedule with its copies as a program; if it exceeds the budget, also one that offloads more values.
    """
    program, chosen = trips_of(layout, schedule, costs)
    yield swap(program, chosen, costs, link, budget)
    need = need_of(program, live_bytes(program, costs.sizes))
    for trip in chosen:
        need[trip.away] -= trip.size
    leaving = {trip.version for trip in chosen}
    others = [trip for trip in trips(program, costs) if trip.version not in leaving]
    more = cap(need, others, budget)
    if more:
        yield swap(program, sorted([*chosen, *more], key=lambda trip: trip.made), costs, link, budget)


def _swapped(
    sources: Sequence[Source], frontier: Frontier, costs: Costs, link: Link, host_mem: int | None
) -> Iterator[Candidate]:
    least = min(source.least for source in sources)
    budgets = {source.least for source in sources}
    budget = float(frontier.candidates[0].peak)
    while budget > least:
        budgets.add(int(budget))
        budget /= STEP
    for budget in sorted(budgets, reverse=True):
        without = next((p.time for p in frontier.candidates if p.peak <= budget), float("inf"))
        best: tuple[Candidate, TimedCopies] | None = None
        for source in sources:
            fastest = best[1].time if best else without
            if source.candidate.peak <= budget or fastest <= source.candidate.time:
                break  # later sources are slower without copies, and copies add time
            for timed in source.within(int(budget), link, host_mem, fastest):
                if best is None or timed.time < best[1].time:
                    best = source.candidate, timed
        if best:
            yield best[0].transferring(best[1].performed(costs))
