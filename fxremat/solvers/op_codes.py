"""Encodes ops of a schedule as integers, so that compiled code can write them; `decode` turns them into ops.

A code is 8 * number + kind, where the number is a block, or for SAVE an option counted over the whole chain. They are
stored in an array whose first entry is the number of codes that follow.
"""

from functools import cache

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op, Schedule, Value
from fxremat.jit import jit
from fxremat.solvers.sizes import Ints

NONE, CHECKPOINT, SAVE, BACKWARD, DROP = range(5)


@jit
def emit(codes: Ints, kind: int, number: int) -> Ints:
    """Append one op to the array of codes, which is reallocated if it is full; return the array."""
    count = codes[0] + 1
    if count == codes.size:
        longer = np.zeros(2 * codes.size, dtype=np.int64)
        for k in range(count):
            longer[k] = codes[k]
        codes = longer
    codes[count] = 8 * number + kind
    codes[0] = count
    return codes


@jit
def emit_pass(codes: Ints, s: int, j: int) -> Ints:
    """Append the forwards of blocks s..j, which keep the input of s and store the output of j; return the array."""
    for block in range(s, j + 1):
        codes = emit(codes, CHECKPOINT if block == s else NONE, block)
    return codes


def decode(chain: Chain, codes: Ints) -> Schedule:
    """Return the schedule that an array of codes stands for."""
    saves = [
        _saving(number, option)
        for number, block in enumerate(chain.blocks, start=1)
        for option in range(len(block.choices))
    ]
    listed = codes[1 : codes[0] + 1].tolist()
    ops = {code: saves[code // 8] if code % 8 == SAVE else _op(code) for code in set(listed)}
    return Schedule(tuple(ops[code] for code in listed))


@cache
def _saving(block: int, option: int) -> Forward:
    return Forward(block, Keep.ALL, option)


@cache
def _op(code: int) -> Op:
    """Return the op of a code other than SAVE; tables of one chain have the same few ops again and again."""
    number, kind = divmod(code, 8)
    match kind:
        case 0:
            return Forward(number, Keep.NONE)
        case 1:
            return Forward(number, Keep.CHECKPOINT)
        case 3:
            return Backward(number)
        case _:
            return Drop(Value("a", number))
