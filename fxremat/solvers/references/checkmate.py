"""Checkmate's mixed integer program for a chain: each block has one value, which is stored or recomputed.

    phase t = n .. 1 runs some forwards in order, then B_t

    S[t, l]  A_l is stored when phase t begins          S[n, l] = 0
    R[t, l]  the forward of l runs in phase t           P = S + R <= 1: A_l is in memory at some time in phase t
    least  sum of forward(l) R[t, l]   with   R[t, l] <= P[t, l-1],  S[t-1, l] <= P[t, l],  P[t, t] = P[t, t-1] = 1

    memory, with phase[t] and a_0, while
    F_l in phase t    A_i, i < l-1, that S[t-1] keeps;  A_{l-1} P;  A_l P + scratch R;  A_i, i > l, in S[t]
    B_t               A_i, i < t-1, that S[t-1] keeps;  A_{t-1};  A_t;  d_{t-1} + scratch
    after B_t         what B_t needs without A_t and scratch, in phase t-1

a_l is the output of block l, A_l all that its backward reads, d_l the gradient of a_l.

Its class of schedules does not distinguish a_l and A_l: every forward saves, with the fastest option of its block, and
a drop frees all of A_l. So keep-all is one of its schedules, a pass that saves little is not.

Jain et al., Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization (2020), section 4; solved by
HiGHS. Their forward stages are left out: on a chain no op is worth running twice in the forward pass.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op, Schedule, Value
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.solvers.keep_all import fastest

_LONGEST = 40  # maximum number of blocks
_Floats = npt.NDArray[np.float64]


class Row(NamedTuple):
    """A constraint of the program: the weighted sum of variables is at most `most`."""

    weights: dict[int, int]
    most: int


def schedules(chain: Chain, mem: int, *, seconds: float = 60) -> list[Schedule]:
    """Return a list with the fastest schedule within `mem` bytes in which every forward saves.

    Args:
        chain: up to 12 blocks are solved in seconds.
        mem: bytes.
        seconds: time limit, after which the best schedule found so far is returned.

    Raises:
        BudgetTooSmall: no schedule of the class fits; the minimum is that of the class.
        FxrematError: the chain is too long, or nothing was found in time.
    """
    n = len(chain)
    if n > _LONGEST:
        raise FxrematError(f"a chain of {n} blocks is too long for checkmate; up to {_LONGEST} can be tried")
    found = _solve(chain, mem, seconds)
    if found is None:
        raise BudgetTooSmall(minimum=_least(chain, seconds), budget=mem)
    return [_schedule(chain, found)]


def _solve(chain: Chain, mem: int, seconds: float) -> _Floats | None:
    """Return the values of the variables of the fastest solution that fits into `mem` bytes; None if none fits.

    HiGHS may exceed a bound by a millionth; the program is then solved again with less memory.
    """
    n, memory = len(chain), _memory(chain)
    seconds_of = np.zeros(2 * n * n)
    for t in range(1, n + 1):
        for block in range(1, t + 1):
            seconds_of[_r(n, t, block)] = chain.blocks[block - 1].forward_time
    slack = 0
    while slack <= mem:
        rows = [*_logic(n), *(Row(row.weights, mem - slack - row.most) for row in memory)]
        x = _highs(n, rows, seconds_of, seconds)
        if x is None:
            return None
        peak = _peak(memory, x)
        if peak <= mem:
            return x
        slack += peak - mem
    return None


def _least(chain: Chain, seconds: float) -> int:
    """Return the lowest peak, in bytes, of any schedule in which every forward saves."""
    n, memory = len(chain), _memory(chain)
    unit = max(1, max(sum(row.weights.values()) + row.most for row in memory))
    rows = [*_logic(n), *(Row(row.weights | {2 * n * n: -unit}, -row.most) for row in memory)]
    x = _highs(n, rows, np.eye(1, 2 * n * n + 1, 2 * n * n)[0], seconds)
    assert x is not None  # saving everything is always a solution
    return _peak(memory, x)


def _highs(n: int, rows: list[Row], cost: _Floats, seconds: float) -> _Floats | None:
    """Return the solution with the least cost, with the first 2 n^2 variables being 0 or 1; None if there is none.

    A further variable may have any value from 0 to 1. Raises `FxrematError` if the time limit is too short.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # imported here since it takes a second
    from scipy.sparse import lil_matrix

    scale = [max([1, *map(abs, row.weights.values())]) for row in rows]
    matrix = lil_matrix((len(rows), cost.size))
    for place, row in enumerate(rows):
        for variable, weight in row.weights.items():
            matrix[place, variable] = weight / scale[place]
    most = [row.most / by for row, by in zip(rows, scale)]
    fixed = _fixed(n)
    low, high = np.zeros(cost.size), np.ones(cost.size)
    for variable, value in fixed.items():
        low[variable] = high[variable] = value
    result = milp(
        cost / max(1e-300, cost.max()),
        constraints=LinearConstraint(matrix.tocsr(), -np.inf, np.array(most)),
        integrality=np.array(np.arange(cost.size) < 2 * n * n, dtype=np.int64),
        bounds=Bounds(low, high),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.x is None and result.status == 1:
        raise FxrematError(
            f"HiGHS found no schedule in {seconds:g} s; give it more seconds or another solver"
        )
    return None if result.x is None else np.round(result.x[: 2 * n * n])


def _s(n: int, t: int, block: int) -> int:
    return (t - 1) * n + block - 1


def _r(n: int, t: int, block: int) -> int:
    return n * n + _s(n, t, block)


def _fixed(n: int) -> dict[int, int]:
    """Return variable -> 0 for variables that are always 0.

    Nothing is stored at first, and no block after t is used before the backward of t.
    """
    fixed = {_s(n, n, block): 0 for block in range(1, n + 1)}
    for t in range(1, n + 1):
        for block in range(t + 1, n + 1):
            fixed |= {_s(n, t, block): 0, _r(n, t, block): 0}
    return fixed


def _logic(n: int) -> list[Row]:
    """Return the constraints of valid schedules: computed values have their inputs, and kept values were computed."""
    rows = []
    for t in range(1, n + 1):
        for block in range(1, t + 1):
            there = {_s(n, t, block): 1, _r(n, t, block): 1}
            absent = dict.fromkeys(there, -1)
            rows.append(Row(there, 1))
            if block >= t - 1:
                rows.append(Row(absent, -1))
            if block < t:
                rows.append(Row(absent | {_r(n, t, block + 1): 1}, 0))
                rows.append(Row(absent | {_s(n, t - 1, block): 1}, 0))
    return rows


def _memory(chain: Chain) -> list[Row]:
    """Return the bytes in use at each moment as sums over the variables; `most` is the constant term here, not a bound.
    """
    n, phase = len(chain), chain.phase_sizes
    options = [block.choices[fastest(block)] for block in chain.blocks]
    sizes = [0, *(option.saved_bytes for option in options)]
    rows = [Row({}, phase[0]), Row({}, phase[n] + chain.input_bytes)]
    for t in range(1, n + 1):
        held = phase[t] + chain.input_bytes
        kept = {_s(n, t - 1, i): sizes[i] for i in range(1, t - 1)}
        for block in range(1, t + 1):
            weights = {variable: size for i, (variable, size) in enumerate(kept.items(), 1) if i < block - 1}
            for i in (block - 1, block):
                if i:
                    weights |= {_s(n, t, i): sizes[i], _r(n, t, i): sizes[i]}
            weights[_r(n, t, block)] += options[block - 1].save_scratch or 0
            weights |= {_s(n, t, i): sizes[i] for i in range(block + 1, t + 1)}
            rows.append(Row(weights, held))
        read = sizes[t - 1] + chain.grad_sizes[t - 1] + options[t - 1].backward_scratch
        rows.append(Row(kept, held + sizes[t] + read))
        if t > 1:
            rows.append(Row(kept, phase[t - 1] + chain.input_bytes + sizes[t - 1]))
    return rows


def _peak(memory: list[Row], x: _Floats) -> int:
    """Return the peak bytes of a solution."""
    return max(
        row.most + sum(size for variable, size in row.weights.items() if x[variable]) for row in memory
    )


def _schedule(chain: Chain, x: _Floats) -> Schedule:
    """Return the ops of a solution as a schedule."""
    n = len(chain)
    ops: list[Op] = []
    for t in range(n, 0, -1):
        there = [0, *(x[_s(n, t, i)] + x[_r(n, t, i)] for i in range(1, t + 1))]
        kept = [0, *(x[_s(n, t - 1, i)] for i in range(1, t))]
        for block in range(1, t + 1):
            if x[_r(n, t, block)]:
                ops.append(Forward(block, Keep.ALL, fastest(chain.blocks[block - 1])))
            if block < t and there[block - 1] and not kept[block - 1]:
                ops.append(Drop(Value("A", block - 1)))
        ops.append(Backward(t))
        if t > 1 and not kept[t - 1]:
            ops.append(Drop(Value("A", t - 1)))
    return Schedule(tuple(ops))
