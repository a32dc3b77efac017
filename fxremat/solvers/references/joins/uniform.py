"""Optimal checkpointing of uniform chains that meet in a loss, by dynamic programming.

    Opt(L, m, b)   least time for branches of which L_1 .. L_K forwards are left, in m slots; b_k = 1 if the
                   gradient that branch k ends with must stay, else it is freed

    Opt(0, m, b) = loss                                                                          m >= K
    Opt(L, m, b) = min over k and 1 <= i <= L_k of
                   i forwards + Opt(L[k <- L_k - i], m - 1, b[k <- 1]) + Opt0(i - 1, m - sum of b_j, j != k)

"checkpoint branch k, run i forwards of it; do all the rest; then finish these i with the memory that is left", which is
an adjoint chain (`binomial`). Every value occupies a slot; a forward puts its output in place of its input unless that
is replicated first, the loss and the backwards put gradients in place of what they read.

Branches are interchangeable, so states are kept with their pairs (L_k, b_k) in order. One table holds every m up to the
largest. O(m K prod(2 L_k)) states and steps, without the factor K! if branches are alike.

Beaumont et al., Optimal Memory-aware Backpropagation of Deep Join Networks (RR-9273), Theorem 3; thesis of
A. Shilova, Theorem 3. Theorem and Lemma 2, on the least number of slots, agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from fxremat.chains.join_schedule import JoinOp, JoinSchedule, Loss, On
from fxremat.chains.schedule import Forward, Keep
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.jit import jit
from fxremat.progress import progress
from fxremat.solvers import binomial
from fxremat.solvers.rows import least
from fxremat.solvers.sizes import Floats, Ints

_ENTRIES = 1 << 27  # maximum number of costs in a table: 8 bytes each, 1 GiB
_STEP = 2048  # number of states filled between two moments at which an interrupt can be handled


@dataclass(frozen=True, kw_only=True)
class UniformCosts:
    """Seconds of one forward, one backward, and the loss."""

    forward: float = 1.0
    backward: float = 1.0
    loss: float = 1.0


def multi_chain(
    lengths: Sequence[int],
    slots: int,
    keep_gradient: Sequence[int] | None = None,
    *,
    forward_time: float = 1.0,
    backward_time: float = 1.0,
    loss_time: float = 1.0,
) -> tuple[float, JoinSchedule]:
    """Return the least total seconds for branches of `lengths` blocks with `slots` stored values, and a schedule.

    Args:
        lengths: number of blocks of each branch.
        slots: maximum number of stored values.
        keep_gradient: for each branch, whether the gradient of its input is kept to the end; by default none is.
        forward_time, backward_time, loss_time: seconds of one forward, one backward, and the loss.

    Raises:
        BudgetTooSmall: `.minimum` is the least number of slots.

    >>> multi_chain((4, 10, 12), 9)[0]
    74.0
    """
    costs = UniformCosts(forward=forward_time, backward=backward_time, loss=loss_time)
    table = solve(lengths, slots, keep_gradient, costs)
    return table.makespan(slots), table.schedule(slots)


def trade_off(
    lengths: Sequence[int], keep_gradient: Sequence[int] | None = None
) -> tuple[list[float], list[float]]:
    """Return relative memory and relative time for every number of slots from the least that works.

    Slots are relative to those without recomputation, times to the least possible one; a forward, a backward
    and the loss take 1 second each. A. Shilova's thesis (2021), Fig. 1.8.

    >>> [round(y[0], 3) for y in trade_off((2, 2))]
    [0.833, 1.111]
    """
    everything, best = sum(lengths) + len(lengths), 2 * sum(lengths) + 1
    table = solve(lengths, everything, keep_gradient, UniformCosts())
    counts = range(table.least, everything + 1)
    return [m / everything for m in counts], [table.makespan(m) / best for m in counts]


def equiv_chain(branches: int, length: int, slots: int, *, costs: UniformCosts | None = None) -> float:
    """Return the seconds if operations at the same distance from the loss are merged (EQUIV-CHAIN, RR-9273 section 6).

    All branches have the same length; one value of the merged chain occupies a slot for each of them.
    """
    costs, m = costs or UniformCosts(), slots // branches
    need = 1 if length == 0 else 2 if length == 1 else 3
    if m < need:
        raise BudgetTooSmall(minimum=need * branches, budget=slots, unit="slots")
    if length == 0:
        return costs.loss
    forwards = 1 + binomial.count(length - 1, m)
    return branches * (forwards * costs.forward + length * costs.backward) + costs.loss


def branch_by_branch(
    lengths: Sequence[int],
    slots: int,
    keep_gradient: Sequence[int] | None = None,
    *,
    costs: UniformCosts | None = None,
) -> float:
    """Return the seconds if branches run one after the other, in the best order.

    Each branch but the last runs forward to its end without checkpoints, and later once more by itself.
    """
    costs = costs or UniformCosts()
    table = solve(lengths, slots, keep_gradient, costs)
    times = [_in_order(table, order, slots, costs) for order in permutations(range(len(lengths)))]
    if min(times) == np.inf:
        raise BudgetTooSmall(minimum=table.least, budget=slots, unit="slots")
    return min(times)


def _in_order(table: "UniformTable", order: Sequence[int], slots: int, costs: UniformCosts) -> float:
    """Return the seconds if branches run forward in this order, and are finished in the opposite one."""
    left, kept, m, time = list(table.lengths), list(table.keep_gradient), slots, 0.0
    for branch in order[:-1]:
        if left[branch]:
            others = sum(kept) - kept[branch]
            if m - others < (3 if left[branch] > 1 else 2):
                return np.inf
            forwards = left[branch] + binomial.count(left[branch] - 1, m - others)
            time += forwards * costs.forward + left[branch] * costs.backward
            left[branch], kept[branch], m = 0, 1, m - 1
    return time + table.cost(left, kept, m) if m >= 0 else np.inf


def least_slots(lengths: Sequence[int], keep_gradient: Sequence[int] | None = None) -> int:
    """Return the least number of slots (stored values) that works (A. Shilova's thesis, 2021, Lemma 2).

    >>> least_slots((4, 10, 12))
    7
    """
    kept = _kept(lengths, keep_gradient)
    ends = len(lengths) + sum(length > 0 for length in lengths)
    spare = any(length == 1 or (length == 0 and not b) for length, b in zip(lengths, kept))
    return ends if spare or not any(lengths) else ends + 1


@dataclass(frozen=True, kw_only=True)
class UniformTable:
    """Least seconds for every number of forwards left in each branch, kept gradients, and slots (stored values)."""

    lengths: tuple[int, ...]
    keep_gradient: tuple[int, ...]
    costs: UniformCosts
    strides: Ints
    opt: Floats  # [state, slots]: least seconds
    tails: Floats  # [length, slots]: least seconds of a single branch that is finished by itself

    @property
    def least(self) -> int:
        """The least number of slots that works."""
        return least_slots(self.lengths, self.keep_gradient)

    def makespan(self, slots: int) -> float:
        """Return the least total seconds with `slots` stored values. Raises `BudgetTooSmall`."""
        if slots < self.least:
            raise BudgetTooSmall(minimum=self.least, budget=slots, unit="slots")
        return self.cost(self.lengths, self.keep_gradient, slots)

    def cost(self, left: Sequence[int], kept: Sequence[int], slots: int) -> float:
        """Return the least seconds if `left` forwards of each branch are left, and `kept` gradients stay.

        Infinite if it cannot fit.
        """
        codes = sorted(2 * length + b for length, b in zip(left, kept))
        return float(self.opt[int(np.dot(codes, self.strides)), min(slots, self.opt.shape[1] - 1)])

    def schedule(self, slots: int) -> JoinSchedule:
        """Return a schedule with the least seconds. Raises `BudgetTooSmall`."""
        self.makespan(slots)
        ops: list[JoinOp] = []
        tails = []
        left, kept = list(self.lengths), list(self.keep_gradient)
        m = min(slots, self.opt.shape[1] - 1)
        while any(left):
            k, i = min(
                ((k, i) for k, length in enumerate(left) for i in range(1, length + 1)),
                key=lambda cut: self._cut(left, kept, m, *cut),
            )
            start = self.lengths[k] - left[k]
            ops.append(On(k + 1, Forward(start + 1, Keep.CHECKPOINT)))
            ops += [On(k + 1, Forward(start + step, Keep.NONE)) for step in range(2, i + 1)]
            tails.append((k, start, i - 1, m - sum(kept) + kept[k]))
            left[k], kept[k], m = left[k] - i, 1, m - 1
        ops.append(Loss())
        for k, start, length, slots_left in reversed(tails):
            ops += [On(k + 1, op) for op in binomial.adjoint(start, length, slots_left)]
        return JoinSchedule(tuple(ops))

    def _cut(self, left: list[int], kept: list[int], m: int, k: int, i: int) -> float:
        """Return the least seconds if branch k is checkpointed next and runs i forwards."""
        others = sum(kept) - kept[k]
        if m - others < 0:
            return np.inf
        rest = [length - i if j == k else length for j, length in enumerate(left)]
        then = [1 if j == k else b for j, b in enumerate(kept)]
        cost = i * self.costs.forward + self.cost(rest, then, m - 1)
        return cost + float(self.tails[i - 1, m - others])


def solve(
    lengths: Sequence[int], slots: int, keep_gradient: Sequence[int] | None, costs: UniformCosts
) -> UniformTable:
    """Build the table for every number of slots up to `slots`. Raises `FxrematError` if it would be too large."""
    if not lengths or any(length < 0 for length in lengths):
        raise FxrematError(
            f"lengths is {lengths!r}; each branch has 0 or more blocks, and there is one at least"
        )
    kept = _kept(lengths, keep_gradient)
    slots = max(0, min(slots, sum(lengths) + len(lengths) + 1))  # more slots are never useful
    codes = np.sort(np.array([2 * length + b for length, b in zip(lengths, kept)], dtype=np.int64))
    strides = np.concatenate(([1], np.cumprod(codes + 1)))
    entries = int(strides[-1]) * (slots + 1)
    if entries > _ENTRIES:
        raise FxrematError(
            f"branches of {', '.join(map(str, lengths))} blocks in {slots} slots make a table of {entries} costs; "
            f"up to {_ENTRIES} are practical"
        )
    opt = np.full((int(strides[-1]), slots + 1), np.inf)
    tails = _tails(max(lengths), slots, costs)
    for first in progress(range(0, len(opt), _STEP), "joins"):
        _fill(opt, tails, strides, costs.forward, costs.loss, first, min(first + _STEP, len(opt)))
    return UniformTable(
        lengths=tuple(lengths),
        keep_gradient=kept,
        costs=costs,
        strides=strides[:-1],
        opt=opt,
        tails=tails,
    )


def _kept(lengths: Sequence[int], keep_gradient: Sequence[int] | None) -> tuple[int, ...]:
    kept = tuple(int(bool(b)) for b in keep_gradient or (0,) * len(lengths))
    if len(kept) != len(lengths):
        raise FxrematError(f"keep_gradient has {len(kept)} entries for {len(lengths)} branches")
    return kept


def _tails(longest: int, slots: int, costs: UniformCosts) -> Floats:
    """Return [l, m]: the least seconds of finishing l + 1 blocks of one branch with m slots."""
    tails = np.full((max(1, longest), slots + 1), np.inf)
    for length in range(longest):
        for m in range(3 if length else 2, slots + 1):
            tails[length, m] = binomial.count(length, m) * costs.forward + (length + 1) * costs.backward
    return tails


@jit
def _fill(
    opt: Floats, tails: Floats, strides: Ints, forward: float, loss: float, first: int, end: int
) -> None:
    """Fill the table rows of states first..end-1; those of the states before them must be filled."""
    count, width = strides.size - 1, opt.shape[1]
    code, after = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for state in range(first, end):
        ordered, kept, left = True, 0, 0
        for k in range(count):
            code[k] = state % strides[k + 1] // strides[k]
            ordered = ordered and (k == 0 or code[k - 1] <= code[k])
            kept += code[k] & 1
            left += code[k] >> 1
        if not ordered:
            continue
        if left == 0:
            opt[state, count:] = loss
            continue
        row = opt[state]
        for k in range(count):
            if k + 1 < count and code[k] == code[k + 1]:
                continue  # the branch is equal to the next one, so it needs no separate try
            others = kept - (code[k] & 1)
            for i in range(1, (code[k] >> 1) + 1):
                after[:] = code
                _put(after, k, code[k] - (code[k] & 1) - 2 * i + 1)
                child, tail = opt[np.sum(after * strides[:-1])], tails[i - 1]
                for m in range(max(1, others + 2), width):
                    row[m] = least(row[m], i * forward + child[m - 1] + tail[m - others])


@jit
def _put(code: Ints, k: int, smaller: int) -> None:
    """Lower entry k of a sorted code to `smaller`, and move it so that the code stays sorted."""
    while k > 0 and code[k - 1] > smaller:
        code[k] = code[k - 1]
        k -= 1
    code[k] = smaller
