"""A lower bound for the time of a step with weight offloading: a mixed integer program, solved by HiGHS.

    interval j          from the start of op j to the start of the next one; it lasts seconds(j) + idle(j)
    back, out, gone     bytes of a unit that come back, are copied out, and are let go, by interval
    there(i, j)         bytes of unit i on the device when op j starts;  there(i, j+1) = there + back - gone
    sent(i, j)          bytes that the host has and the device may let go:  sent(i, j+1) = sent + out + back - gone

    least  sum of seconds + idle     with, in each interval, back <= speed * length, out <= speed * length
           there(i, j) = w_i where op j uses i;   sent = 0 when the op that writes i starts, and never below 0
           out(i, j) <= speed * idle(j) where op j writes i
           sum of there + beside <= M when each op starts
           what leaves in a gap, and what is copied out, is all of a unit or nothing

Memory is asked for at the starts of ops alone, so that no schedule is faster. Theorem 2 of Weight Offloading Strategies
(see `cycle`); (6) is printed there with a wrong sign. Cost: milliseconds for 8 layers; beyond `WHOLE` of them units may
leave in part, which makes the bound a linear program, weaker and still a bound.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from benchmarks.weight_reference.cycle import Cycle, Floats, Gap
from fxremat.errors import BudgetTooSmall

WHOLE = 12  # units
SECONDS = 20.0  # that HiGHS may take


def lower_bound(cycle: Cycle) -> float:
    """Seconds that no plan beats. Raises `BudgetTooSmall` where no plan fits."""
    if cycle.memory < cycle.least_memory:
        raise BudgetTooSmall(minimum=int(-(-cycle.least_memory // 1)), budget=int(cycle.memory))
    return _Program(cycle).least()


class _Program:
    """Rows and columns; columns are blocks of one number a (unit, interval)."""

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self.units, self.ops = len(cycle.units), len(cycle.ops)
        self.gaps = list(cycle.gaps())
        cells = self.units * self.ops
        self.blocks = {
            name: number * cells for number, name in enumerate(("back", "out", "gone", "there", "sent"))
        }
        self.idle = 5 * cells
        self.leaves = self.idle + self.ops
        self.paid = self.leaves + len(self.gaps)
        self.columns = self.paid + self.units
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def at(self, name: str, unit: int, interval: int) -> int:
        """The column of a number."""
        return self.blocks[name] + unit * self.ops + interval % self.ops

    def row(self, low: float, high: float, terms: Iterable[tuple[int, float]]) -> None:
        """Add  low <= sum of terms <= high."""
        self.entries += [(len(self.low), column, factor) for column, factor in terms]
        self.low.append(low)
        self.high.append(high)

    def least(self) -> float:
        for interval in range(self.ops):
            self._link(interval)
            self._memory(interval)
        for unit in range(self.units):
            self._balance(unit)
        self._wholes()
        self._uses()
        return self._solve()

    def _solve(self) -> float:
        from scipy.optimize import Bounds, LinearConstraint, milp  # a second to import: only when used
        from scipy.sparse import coo_array

        objective = np.zeros(self.columns)
        objective[self.idle : self.leaves] = 1.0
        whole = np.zeros(self.columns, dtype=np.int64)
        if self.units <= WHOLE:
            whole[self.leaves :] = 1
        row, column, factor = zip(*self.entries, strict=True)
        matrix = coo_array((factor, (row, column)), shape=(len(self.low), self.columns)).tocsr()
        found = milp(
            objective,
            integrality=whole,
            constraints=LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            bounds=Bounds(0.0, self._most()),
            options={"time_limit": SECONDS},
        )
        bound = found.mip_dual_bound if found.mip_dual_bound is not None else found.fun
        return self.cycle.seconds + max(0.0, float(bound or 0.0) * (1 - 1e-7))

    def _link(self, interval: int) -> None:
        """Limit what the link carries in an interval; a unit that is being written is not copied."""
        cycle, op = self.cycle, self.cycle.ops[interval]
        for name, speed in (("back", cycle.from_host), ("out", cycle.to_host)):
            terms = [(self.at(name, unit, interval), 1.0) for unit in range(self.units)]
            self.row(-np.inf, speed * op.seconds, [*terms, (self.idle + interval, -speed)])
        if op.writes:
            written = (self.at("out", op.unit, interval), 1.0)
            self.row(-np.inf, 0.0, [written, (self.idle + interval, -cycle.to_host)])

    def _memory(self, interval: int) -> None:
        room = self.cycle.memory - self.cycle.ops[interval].beside
        self.row(-np.inf, room, [(self.at("there", unit, interval), 1.0) for unit in range(self.units)])

    def _balance(self, unit: int) -> None:
        """Balance what is on the device, and what the host has, from interval to interval."""
        writer = self.cycle.writer[unit]
        for interval in range(self.ops):
            moved = [(self.at("back", unit, interval), -1.0), (self.at("gone", unit, interval), 1.0)]
            here, then = self.at("there", unit, interval), self.at("there", unit, interval + 1)
            self.row(0.0, 0.0, [(then, 1.0), (here, -1.0), *moved])
            if (interval + 1) % self.ops != writer:  # there what the host has becomes worthless
                here, then = self.at("sent", unit, interval), self.at("sent", unit, interval + 1)
                moved.append((self.at("out", unit, interval), -1.0))
                self.row(0.0, 0.0, [(then, 1.0), (here, -1.0), *moved])
            else:  # and what was let go must have been sent
                here = self.at("sent", unit, interval)
                self.row(0.0, np.inf, [(here, 1.0), *((column, -factor) for column, factor in moved), (self.at("out", unit, interval), 1.0)])  # fmt: skip # noqa: E501

    def _wholes(self) -> None:
        """Require that what leaves in each gap, and what is copied out in a cycle, is all of a unit or nothing."""
        for number, gap in enumerate(self.gaps):
            terms = [(self.at("gone", gap.unit, interval), 1.0) for interval in self._intervals(gap)]
            self.row(0.0, 0.0, [*terms, (self.leaves + number, -self.cycle.units[gap.unit])])
        for unit, size in enumerate(self.cycle.units):
            terms = [(self.at("out", unit, interval), 1.0) for interval in range(self.ops)]
            self.row(0.0, 0.0, [*terms, (self.paid + unit, -size)])

    def _intervals(self, gap: Gap) -> list[int]:
        return [gap.start, *self.cycle.covered(gap)]

    def _uses(self) -> None:
        """A unit is there when an op uses it, and nothing counts as sent when it is about to be written."""
        for unit, size in enumerate(self.cycle.units):
            for place in self.cycle.uses[unit]:
                self.row(size, size, [(self.at("there", unit, place), 1.0)])
            self.row(0.0, 0.0, [(self.at("sent", unit, self.cycle.writer[unit]), 1.0)])
            for place in set(self.cycle.uses[unit]) - {gap.start for gap in self.gaps if gap.unit == unit}:
                self.row(0.0, 0.0, [(self.at("gone", unit, place), 1.0)])

    def _most(self) -> Floats:
        """Upper bounds of all columns."""
        most = np.full(self.columns, np.inf)
        for unit, size in enumerate(self.cycle.units):
            start = self.blocks["there"] + unit * self.ops
            most[start : start + self.ops] = size
        most[self.leaves :] = 1.0
        return most
