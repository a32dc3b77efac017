"""Checkpointing of a uniform chain by binomial schedules, and the number of forwards that they run.

    adjoint chain of length l: a_0 and the last gradient are stored; the backwards B_{l+1} .. B_1 need a_l .. a_0
    slots m: the largest number of stored values, including a_0, the running value and the gradient
    forwards(0, m >= 2) = 0        forwards(l, 3) = l (l + 1) / 2
    forwards(l, m) = min over 1 <= i <= l of  i + forwards(l - i, m - 1) + forwards(i - 1, m)

In closed form, with s = m - 2 checkpoints besides the running value and the least r for which l < C(s + r, s):

    forwards(l, m) = r (l + 1) - C(s + r, r - 1)

a_l is the output of block l. A forward replaces its input unless that was checkpointed. In a chain whose
backwards read saved activations, a forward that saves them (Fall_k) precedes each B_k: l + 1 forwards more,
which is also how checkpoint-schedules counts (its Revolve(l + 1, m - 2)). Griewank and Walther, Algorithm 799:
Revolve (2000); thesis of A. Shilova (2021), Theorem 1.
"""

from collections.abc import Iterator
from math import comb

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Forward, Keep, Op, Schedule
from fxremat.errors import FxrematError
from fxremat.solvers.keep_all import fastest

_CANDIDATES = 40  # maximum number of proposed schedules


def schedules(chain: Chain) -> list[Schedule]:
    """Return the binomial schedules for 1, 2, .. n - 1 checkpoints, or for 40 of these numbers if n is larger.

    The number of checkpoints is chosen as if all blocks were alike.
    """
    most = max(1, len(chain) - 1)
    counts = {round(float(count)) for count in np.geomspace(1, most, min(most, _CANDIDATES))}
    counts |= set(range(1, most + 1)) if most <= _CANDIDATES else set()
    return [schedule(chain, count + 2) for count in sorted(counts)]


def schedule(chain: Chain, slots: int) -> Schedule:
    """Return the binomial schedule with `slots` stored values.

    Before its backward, each block runs once more and saves.
    """
    ops: list[Op] = []
    for op in adjoint(0, len(chain) - 1, slots):
        if isinstance(op, Backward):
            ops.append(Forward(op.block, Keep.ALL, fastest(chain.blocks[op.block - 1])))
        ops.append(op)
    return Schedule(tuple(ops))


def adjoint(first: int, length: int, slots: int) -> Iterator[Op]:
    """Yield the ops from a_first (the output of block `first`) forward over `length` blocks, and all backwards to it.

    No forward saves for its backward.
    """
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
    """Return the fewest forwards for `length` blocks with `slots` stored values.

    Raises `FxrematError` if it is impossible.

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
    """Return the least i, 1 <= i <= length, for which storing the output of block i first is optimal.

    The cost is convex in i.
    """

    def cost(i: int) -> int:
        return i + count(length - i, slots - 1) + count(i - 1, slots)

    if slots == 3:
        return length  # a second checkpoint has no slot
    low, high = 1, length
    while low < high:
        middle = (low + high) // 2
        if cost(middle) <= cost(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low
