"""Checkpoints of a uniform chain: the binomial schedules, and the number of forwards that they run.

    adjoint chain of length l: a_0 and the last gradient are stored; B_{l+1} .. B_1 need a_l .. a_0
    slots: the most values that are stored, including a_0, the running value and the gradient

    forwards(0, m >= 2) = 0        forwards(l, 3) = l (l + 1) / 2
    forwards(l, m) = min over 1 <= i <= l of  i + forwards(l - i, m - 1) + forwards(i - 1, m)

In closed form, with s = m - 2 checkpoints beyond the running value and the least r for which l < C(s + r, s):

    forwards(l, m) = r (l + 1) - C(s + r, r - 1)

A forward "consumes" its input unless that was checkpointed. In a chain that saves, an Fall_k precedes each B_k:
l + 1 forwards more, which is also how checkpoint-schedules counts (its Revolve(l + 1, m - 2)).

a_l is the output of block l. Griewank and Walther, Algorithm 799: Revolve (2000); thesis of A. Shilova (2021), Theorem
1.
"""

from collections.abc import Iterator
from math import comb

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Forward, Keep, Op, Schedule
from fxremat.errors import FxrematError
from fxremat.solvers.keep_all import fastest

_CANDIDATES = 40  # schedules that are proposed, at most


def schedules(chain: Chain) -> list[Schedule]:
    """Return the schedules for 1, 2, .. n - 1 checkpoints as if all blocks were alike, or 40 of them if n is larger."""
    most = max(1, len(chain) - 1)
    counts = {round(float(count)) for count in np.geomspace(1, most, min(most, _CANDIDATES))}
    counts |= set(range(1, most + 1)) if most <= _CANDIDATES else set()
    return [schedule(chain, count + 2) for count in sorted(counts)]


def schedule(chain: Chain, slots: int) -> Schedule:
    """Return the binomial schedule with `slots` slots; each block runs, saving all (Fall), just before its backward."""
    ops: list[Op] = []
    for op in adjoint(0, len(chain) - 1, slots):
        if isinstance(op, Backward):
            ops.append(Forward(op.block, Keep.ALL, fastest(chain.blocks[op.block - 1])))
        ops.append(op)
    return Schedule(tuple(ops))


def adjoint(first: int, length: int, slots: int) -> Iterator[Op]:
    """Yield the ops of the adjoint chain from a_first to B_{first + length + 1} and back; no block is saved."""
    todo = [(first, length, slots)]
    while todo:
        start, length, m = todo.pop()
        if length == 0:
            yield Backward(start + 1)
            continue
        step = first_checkpoint(length, m)
        yield Forward(start + 1, Keep.CHECKPOINT)
        for i in range(2, step + 1):
            yield Forward(start + i, Keep.NONE)
        todo.append((start, step - 1, m))
        todo.append((start + step, length - step, m - 1))


def count(length: int, slots: int) -> int:
    """Return the fewest forwards for an adjoint chain of `length`. Raises `FxrematError` if it is impossible.

    >>> count(5, 3), count(5, 4), count(5, 7)
    (15, 8, 5)
    """
    if slots < (3 if length else 2):
        raise FxrematError(
            f"{slots} slots are too few for an adjoint chain of length {length}; it takes {3 if length else 2}"
        )
    if length == 0:
        return 0
    s, r = slots - 2, 1
    while comb(s + r, s) <= length:
        r += 1
    return r * (length + 1) - comb(s + r, r - 1)


def first_checkpoint(length: int, slots: int) -> int:
    """Return the least i for which storing a_i first is optimal, 1 <= i <= length. The cost is convex in i."""

    def cost(i: int) -> int:
        return i + count(length - i, slots - 1) + count(i - 1, slots)

    if slots == 3:
        return length  # no slot for a second checkpoint
    low, high = 1, length
    while low < high:
        middle = (low + high) // 2
        if cost(middle) <= cost(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low
