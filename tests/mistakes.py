"""Mistakes that the tests of the solvers must notice: each is one edit of one file, and the test that fails on it.

`tests/test_mistakes.py` applies them one by one to a copy of the sources.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """Replace `right`, which occurs once in `file`, by `wrong`, and `test` fails."""

    file: str  # below fxremat/
    right: str
    wrong: str
    test: str  # a file below tests/, or file::test


MISTAKES: list[Mistake] = []

TABLES = "solvers/test_tables.py"
MISTAKES += [
    # a cut that gives the right part one block too few
    Mistake(
        "solvers/persistent.py",
        "again, j + 1, sizes.out[j], s, j)",
        "again, j + 2, sizes.out[j], s, j)",
        TABLES,
    ),
    # the backward of a saved block does not have to fit
    Mistake(
        "solvers/persistent.py",
        "need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o], sizes.saved[o] + low[s + 1, t])",
        "need = max(phase[t] + sizes.save[o], sizes.saved[o] + low[s + 1, t])",
        TABLES,
    ),
    # the input that a saved block loses is never rebuilt
    Mistake(
        "solvers/input_drop.py",
        "relax(rows, s, c, need, again + sizes.extra[o], j + 1, saved[o], s, n + 1 + o)",
        "relax(rows, s, c, need, again + sizes.extra[o], j + 1, saved[o], 0, 0)",
        TABLES,
    ),
    # a lost input is paid for with one forward too many
    Mistake(
        "solvers/input_drop.py",
        "again = forward[j - 1] - forward[s - 1]\n                for o in range(start[j], start[j + 1]):\n                    need",
        "again = forward[j] - forward[s - 1]\n                for o in range(start[j], start[j + 1]):\n                    need",
        TABLES,
    ),
    # scratch memory of the forward that saves is forgotten
    Mistake(
        "solvers/sizes.py",
        "save=units([option.saved_bytes + (option.save_scratch or 0) for _, _, option in options])",
        "save=units([option.saved_bytes for _, _, option in options])",
        TABLES,
    ),
    # sizes are rounded down to slots
    Mistake(
        "solvers/sizes.py",
        "min(-(-size * slots // mem), limit)",
        "min(size * slots // mem, limit)",
        TABLES,
    ),
    # a move forgets that the old checkpoint gives its memory back
    Mistake(
        "solvers/floating_drop.py",
        "(s + 1) * width + e, out[s] - out[s - 1], 0, 0)",
        "(s + 1) * width + e, out[s], 0, 0)",
        TABLES,
    ),
    # a floating branch never leaves a saved block behind
    Mistake("solvers/floating_drop.py", "if s == rest and e > n:", "if s == rest and e > n + 99:", TABLES),
    # a cut stops one block short of where it may
    Mistake(
        "solvers/floating_drop.py",
        "for x in range(max(j, rest + 1), t):",
        "for x in range(max(j, rest + 1) + 1, t):",
        TABLES,
    ),
    # the longest segment is the first
    Mistake(
        "solvers/bound.py",
        "min(option.backward_scratch for",
        "max(option.backward_scratch for",
        "solvers/test_bound.py",
    ),
    # what is on the host costs nothing to fetch
    Mistake(
        "solvers/bound.py",
        "return 1 / platform.to_host + 1 / platform.from_host",
        "return 0 / platform.to_host + 0 / platform.from_host",
        "solvers/test_bound.py",
    ),
    # the gradients of the blocks behind are not held
    Mistake(
        "chain.py",
        "weight_grads += block.weight_grad_bytes",
        "weight_grads += 0 * block.weight_grad_bytes",
        "test_chain.py",
    ),
]
