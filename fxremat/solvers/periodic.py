"""Checkpoints at equal distances, as torch.utils.checkpoint.checkpoint_sequential places them for k segments.

The chain is split into k segments of equal length. Every segment but the last runs without saving and keeps
only its input; the last one saves everything. Then, from the last segment to the first, each segment runs
again, saving everything, and its backwards follow.

    k = 2, n = 4:   Fck1 Fnone2  Fall3 Fall4 B4 B3  Fall1 Fall2 B2 B1
"""

import math

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Forward, Keep, Op, Schedule
from fxremat.solvers.keep_all import fastest


def schedules(chain: Chain) -> list[Schedule]:
    """Return the schedules with k segments for ten values of k from 2 to 2 sqrt(n), or fewer if the chain is short."""
    n = len(chain)
    most = max(2, round(2 * math.sqrt(n)))
    counts = {min(n, round(k)) for k in np.linspace(2, most, 10)}
    return [periodic(chain, k) for k in sorted(counts)]


def periodic(chain: Chain, k: int) -> Schedule:
    """Return the schedule with k segments, 1 <= k <= n."""
    n = len(chain)
    length = n // k  # the last segment also takes the remainder, as in checkpoint_sequential
    segments = [(i * length + 1, (i + 1) * length if i < k - 1 else n) for i in range(k)]
    *early, _ = segments
    ops: list[Op] = []
    for first, last in early:
        ops.append(Forward(first, Keep.CHECKPOINT))
        ops += [Forward(number, Keep.NONE) for number in range(first + 1, last + 1)]
    for first, last in reversed(segments):
        ops += [
            Forward(number, Keep.ALL, fastest(chain.blocks[number - 1])) for number in range(first, last + 1)
        ]
        ops += [Backward(number) for number in range(last, first - 1, -1)]
    return Schedule(tuple(ops))
