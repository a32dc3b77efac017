"""A solved table, and how schedules are read off it for budgets: all dynamic programs over memory share it."""

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
    """Costs of a chain for every budget up to `mem` bytes, in `slots` steps."""

    chain: Chain
    mem: int
    slots: int
    least: int  # bytes: with less nothing fits, whatever the slots
    enough: int  # bytes: from here on everything is kept
    curve: Floats  # curve[k]: seconds of recomputation within k slots, infinite where nothing fits
    trace: Callable[[int, int], Ints]  # (bytes beyond the input, bytes that `slots` stand for) -> op codes

    def schedule(self, budget: int, *, full: int | None = None) -> Schedule:
        """Return a schedule that fits in `budget` bytes, the fastest of the table.

        With full = mem, the default, it is at least as fast as `curve` says. With less, the table's slots count as
        smaller than they were when sizes were rounded up to them: that makes up for the rounding, and the schedule
        still fits.
        """
        if budget < self.least:
            raise BudgetTooSmall(minimum=self.least, budget=budget)
        return decode(self.chain, self.trace(budget - self.chain.input_bytes, full or self.mem))

    def frontier(self, count: int) -> list[Schedule]:
        """Return at most `count` schedules, from the fastest down to the one with the least memory."""
        if self.mem < self.least:
            raise BudgetTooSmall(minimum=self.least, budget=self.mem)
        steps = [k for k in range(1, self.slots + 1) if self.curve[k] < self.curve[k - 1]]
        picks = sorted({round(i) for i in np.linspace(0, len(steps) - 1, max(1, count - 1))} if steps else ())
        budgets = [max(self.least, steps[i] * self.mem // self.slots) for i in picks]
        schedules = [self.schedule(budget) for budget in reversed(budgets)]
        return list(dict.fromkeys([*schedules, self.schedule(self.least)]))[:count]

    def spread(self, apart: float, above: int = 0) -> list[Schedule]:
        """Return schedules for budgets from `mem` down to the least, each `apart` times the next.

        Budgets of `above` bytes or less are left out.
        """
        budgets, budget = list[int](), float(self.mem)
        while budget > max(self.least, above):
            slot = int(budget) * self.slots // self.mem
            while slot and self.curve[slot] == self.curve[slot - 1]:
                slot -= 1  # the least budget of the same time
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
    """Return the table that consists of filled rows; `whole` is the row of the whole chain.

    `low` is the least memory of each row, `high` one from which on all is kept, both in bytes; `always` is the number
    of seconds that any schedule of the table recomputes.
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
    """Builder of a solver's table for one chain, budget and resolution."""

    def __call__(self, chain: Chain, mem: int, slots: int) -> Table: ...


def grain(chain: Chain) -> int:
    """Return the largest unit in bytes of which every size of the chain is an integer multiple."""
    sizes = [chain.input_bytes, *chain.grad_sizes, *chain.phase_sizes, *chain.output_sizes]
    for block in chain.blocks:
        sizes.append(block.forward_scratch)
        for option in block.choices:
            sizes += [option.saved_bytes, option.backward_scratch, option.save_scratch or 0]
    return gcd(*sizes) or 1
