"""Operations as integers, so that compiled code can write a schedule down; `decode` makes ops of them.

A code is 8 * number + kind, where the number is a block, or for SAVE an option counted over the whole chain.
The first entry of a tape is how many codes follow.
"""

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op, Schedule, Value
from fxremat.jit import jit
from fxremat.solvers.sizes import Ints

NONE, CHECKPOINT, SAVE, BACKWARD, DROP = range(5)


@jit
def emit(tape: Ints, kind: int, number: int) -> Ints:
    """The tape with one more op, in place where there is room."""
    count = tape[0] + 1
    if count == tape.size:
        tape = np.concatenate((tape, np.zeros(tape.size, dtype=np.int64)))
    tape[count] = 8 * number + kind
    tape[0] = count
    return tape


@jit
def emit_pass(tape: Ints, s: int, j: int) -> Ints:
    """The tape with the forwards of blocks s..j, which keep the input of s and store a_j."""
    for block in range(s, j + 1):
        tape = emit(tape, CHECKPOINT if block == s else NONE, block)
    return tape


def decode(chain: Chain, tape: Ints) -> Schedule:
    """The schedule that a tape holds."""
    saves = [
        Forward(number, Keep.ALL, option)
        for number, block in enumerate(chain.blocks, start=1)
        for option in range(len(block.choices))
    ]

    def op(code: int) -> Op:
        number, kind = divmod(code, 8)
        match kind:
            case 0:
                return Forward(number, Keep.NONE)
            case 1:
                return Forward(number, Keep.CHECKPOINT)
            case 2:
                return saves[number]
            case 3:
                return Backward(number)
            case _:
                return Drop(Value("a", number))

    codes = tape[1 : tape[0] + 1].tolist()
    ops = {code: op(code) for code in set(codes)}
    return Schedule(tuple(ops[code] for code in codes))
