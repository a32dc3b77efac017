"""Plans for steps whose budget covers weights, gradients, optimizer state and activations.

    sources    programs of the Pareto frontier, from keep-all (no recomputation) to programs that recompute much
    each       with the weight updates added, and as little copied to the host as makes it fit (`transfers.weights`)
    chosen     the fastest by simulated times (`transfers.clock`)

How weights and activations share the budget is found by trying several sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fxremat.errors import BudgetTooSmall
from fxremat.search.candidate import Candidate, Frontier
from fxremat.step.costs import Costs, Link, ParameterUpdate
from fxremat.step.liveness import live_bytes
from fxremat.step.transferred import ProgramWithTransfers
from fxremat.transfers.activations import least_size, trips
from fxremat.transfers.weights import Choice, choose, hosted, step_bytes, update_inside

SOURCES = 16  # number of programs that are tried
# fractions of the budget for which copies are chosen; with smaller ones, ops wait less for copies
SPARE = (1.0, 0.95, 0.9)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A plan for a step that updates its weights."""

    candidate: Candidate  # a candidate whose program includes the updates and copies of parameters
    choice: Choice
    minimum: int  # bytes: the least peak of any plan
    step_bytes: int  # bytes: the peak of `optimizer.step()`, where that updates the parameters; else 0

    @property
    def peak(self) -> int:
        """The peak in bytes of forward, backward and the updates."""
        return max(self.candidate.peak, self.step_bytes)


def best_within(
    frontier: Frontier,
    units: Sequence[ParameterUpdate],
    costs: Costs,
    link: Link,
    budget: int,
    *,
    settled: frozenset[int] | None = None,
    values_too: bool = False,
    host_mem: int | None = None,
) -> Trained:
    """Return the fastest plan whose peak, with weights and optimizer state on the device, is within `budget` bytes.

    Args:
        units: the cost of each parameter's update.
        settled: the parameters that an earlier plan has moved to the host; None: they are chosen here.
        values_too: True: activations may be copied to the host as well.
        host_mem: bytes that may be on the host at a time. None: no limit.

    Raises:
        BudgetTooSmall: no plan fits; `.minimum` is the least budget of any plan.
    """
    best: Trained | None = None
    tightest: Trained | None = None  # the plan of least memory: all it can offload is on the host
    least: int | None = None
    smallest = least_size(frontier.keep_all.peak)
    for source in frontier.spread(SOURCES):
        program = update_inside(source.program(), units)
        possible = trips(program, costs, smallest) if values_too else []
        choosing = partial(
            choose, program, units, costs, link, possible=possible, settled=settled, host_mem=host_mem
        )
        most, _ = choosing(0)
        last_moment = hosted(program, units, most, costs, link, 0).performed(costs)
        floor = max(last_moment.memory.peak, step_bytes(units, most.hosted))
        if least is None or floor < least:
            least, tightest = floor, _trained(source, most, last_moment, units)
        for share in SPARE:
            choice, fits = choosing(int(budget * share))
            fits = fits and step_bytes(units, choice.hosted) <= budget
            if not fits and floor <= budget and share == 1.0:
                choice = most
            elif not fits:
                continue
            timed = hosted(program, units, choice, costs, link, budget)
            if timed.peak > budget or (best and best.candidate.time <= timed.time):
                continue
            swapped = timed.performed(costs)
            if swapped.memory.peak <= budget:
                best = _trained(source, choice, swapped, units)
    assert least is not None
    assert tightest is not None
    if best is None and budget < least:
        raise BudgetTooSmall(minimum=least, budget=budget)
    best = best or tightest  # if early copies leave no room, the plan of the least budget is the best
    return replace(best, minimum=min(least, best.peak))


def _trained(
    source: Candidate, choice: Choice, swapped: ProgramWithTransfers, units: Sequence[ParameterUpdate]
) -> Trained:
    return Trained(
        candidate=source.transferring(swapped),
        choice=choice,
        minimum=swapped.memory.peak,
        step_bytes=step_bytes(units, choice.hosted),
    )


def resident_peak(candidate: Candidate, units: Sequence[ParameterUpdate], costs: Costs) -> int:
    """Return the peak in bytes of a candidate's step with its updates, if all weights and state are on the device."""
    inside = live_bytes(update_inside(candidate.program(), units), costs.sizes).peak
    return max(inside, step_bytes(units, frozenset()))
