"""A solved table of a dynamic program over memory, and how schedules are read off it for different budgets."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Protocol

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Schedule
from fxremat.errors import BudgetTooSmall
from fxremat.solvers.op_codes import decode
from fxremat.solvers.rows import Rows, value
from fxremat.solvers.sizes import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Table:
    """Least recomputation time of a chain for every budget up to `mem` bytes, which are divided into `slots` levels."""

    chain: Chain
    mem: int
    slots: int
    least: int  # smallest budget in bytes with a schedule, whatever the number of slots
    enough: int  # smallest budget in bytes with which nothing is recomputed
    curve: Floats  # [k]: seconds of recomputation within k slots; infinite if nothing fits
    # (bytes beside the chain's input, bytes that all slots stand for) -> op codes of the schedule
    trace: Callable[[int, int], Ints]

    def schedule(self, budget: int, *, full: int | None = None) -> Schedule:
        """Return the fastest schedule in the table that fits into `budget` bytes.

        With full = mem, the default, it is at least as fast as `curve` says. With less, each slot counts as
        fewer bytes than when sizes were rounded up to slots: that compensates for the rounding, and the
        schedule still fits.
        """
        if budget < self.least:
            raise BudgetTooSmall(minimum=self.least, budget=budget)
        return decode(self.chain, self.trace(budget - self.chain.input_bytes, full or self.mem))

    def frontier(self, count: int) -> list[Schedule]:
        """Return at most `count` schedules, from the fastest to the one with the lowest memory."""
        if self.mem < self.least:
            raise BudgetTooSmall(minimum=self.least, budget=self.mem)
        steps = [k for k in range(1, self.slots + 1) if self.curve[k] < self.curve[k - 1]]
        picks = sorted({round(i) for i in np.linspace(0, len(steps) - 1, max(1, count - 1))} if steps else ())
        budgets = [max(self.least, steps[i] * self.mem // self.slots) for i in picks]
        schedules = [self.schedule(budget) for budget in reversed(budgets)]
        return list(dict.fromkeys([*schedules, self.schedule(self.least)]))[:count]

    def spread(self, apart: float, above: int = 0) -> list[Schedule]:
        """Return schedules for budgets from `mem` down to the least one, each budget `apart` times the next.

        Budgets of `above` bytes or less are left out.
        """
        budgets, budget = list[int](), float(self.mem)
        while budget > max(self.least, above):
            slot = int(budget) * self.slots // self.mem
            while slot and self.curve[slot] == self.curve[slot - 1]:
                slot -= 1  # find the least budget whose best schedule takes the same time
            budgets.append(max(self.least, slot * self.mem // self.slots))
            budget = min(budget, budgets[-1]) / apart
        if self.least > above:
            budgets.append(self.least)
        return list(dict.fromkeys(self.schedule(budget) for budget in dict.fromkeys(budgets)))


def table_of(
    chain: Chain,
    mem: int,
    slots: int,
    *,
    rows: Rows,
    whole: tuple[int, int],
    low: Ints,
    high: Ints,
    trace: Callable[[int, int], Ints],
    always: float = 0.0,
) -> Table:
    """Return a table made of filled rows; `whole` is the index of the row of the whole chain.

    `low` is the least memory of each row, `high` the least memory without recomputation, both in bytes.
    `always` is the number of seconds that every schedule of the table recomputes.
    """
    beyond = -(-chain.input_bytes * slots // mem)  # slots of the chain's input
    return Table(
        chain=chain,
        mem=mem,
        slots=slots,
        least=int(low[whole]) + chain.input_bytes,
        enough=int(high[whole]) + chain.input_bytes,
        curve=np.array([always + value(rows, *whole, k - beyond) for k in range(slots + 1)]),
        trace=trace,
    )


class Build(Protocol):
    """A function that builds a solver's table for a chain, a budget in bytes, and a number of slots."""

    def __call__(self, chain: Chain, mem: int, slots: int) -> Table: ...


def grain(chain: Chain) -> int:
    """Return the largest unit in bytes of which every size of the chain is a whole multiple."""
    sizes = [chain.input_bytes, *chain.grad_sizes, *chain.phase_sizes, *chain.output_sizes]
    for block in chain.blocks:
        sizes.append(block.forward_scratch)
        for option in block.choices:
            sizes += [option.saved_bytes, option.backward_scratch, option.save_scratch or 0]
    return gcd(*sizes) or 1
