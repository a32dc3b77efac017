"""Solves one branch of a join by itself: the cost of each part of it in each memory, and the ops of that part.

A row (s, c) of the table runs the backwards t..s starting from block s: c = t, or, if block t was saved without
its input, c = n + 1 + option.
"""

from dataclasses import dataclass

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Op
from fxremat.jit import jit
from fxremat.solvers.input_drop import bounds, fill_tiles, trace_row
from fxremat.solvers.op_codes import decode
from fxremat.solvers.rows import Filled, Grid, Rows, lay_out, value
from fxremat.solvers.sizes import ChainSizes, Floats, Ints, in_bytes, in_slots
from fxremat.solvers.tiles import fill_tiles_by_diagonal


@dataclass(frozen=True, kw_only=True)
class Tails:
    """The filled table of `input_drop` (dynamic programming for one chain) for one branch."""

    chain: Chain
    slots: int
    exact: ChainSizes  # the chain's sizes in bytes
    sizes: ChainSizes  # the chain's sizes in slots
    low: Ints  # [s, c]: the least memory of a row, in bytes
    rows: Rows  # seconds of recomputation for each row and number of memory slots (equal parts of the budget)

    def costs(self, s: int, c: int) -> Floats:
        """Return the seconds of recomputation of row (s, c), for each number of memory slots from 0 on.

        The input of block s is stored in addition. The module's docstring defines rows.
        """
        costs: Floats = _dense(self.rows, s, c, self.slots)
        return costs

    def ops(self, s: int, t: int, c: int, m: int, full: int) -> tuple[Op, ...]:
        """Return the ops of row (s, c), which run the backwards t..s within m bytes beside the input of block s.

        The slots of the table stand for `full` bytes.
        """
        table = Filled(self.exact, self.low, self.rows, len(self.chain), self.slots, full)
        return decode(self.chain, trace_row(table, s, t, c, m)).ops


def tails(chain: Chain, mem: int, slots: int) -> Tails:
    """Fill the table of one chain for every budget up to `mem` bytes, which are divided into `slots` levels."""
    n, exact, sizes = len(chain), in_bytes(chain), in_slots(chain, mem, slots)
    grid = Grid(sizes, lay_out(*bounds(sizes, n), slots), n, slots)
    fill_tiles_by_diagonal(
        n, "joins", lambda distance, worker, workers: fill_tiles(grid, distance, worker, workers)
    )
    low, _ = bounds(exact, n)
    return Tails(chain=chain, slots=slots, exact=exact, sizes=sizes, low=low, rows=grid.rows)


@jit
def _dense(rows: Rows, s: int, c: int, slots: int) -> Floats:
    costs = np.empty(slots + 1)
    for m in range(slots + 1):
        costs[m] = value(rows, s, c, m)
    return costs
