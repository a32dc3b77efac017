"""A chain as integer arrays in bytes or slots: all that the dynamic programs need of memory and time.

    phase[t]          held in any case while d_t is the stored gradient
    out[l]            a_l
    run[s, j]         the most of a_l + scratch for l = s and a_{l-1} + a_l + scratch for l = s+1..j:
                      what a pass of forwards s..j needs, if its input is counted elsewhere
    saved[o]          A_l under option o; the options of block l are start[l] <= o < start[l+1]
    save[o]           A_l + scratch of the forward that saves it
    save_next[o]      a_{l-1} + save[o]
    back[o]           A_l + d_{l-1} + scratch of the backward
    extra[o]          seconds of its backward beyond those of the fastest option
    forward[l]        seconds of the forwards of blocks 1..l

a_l is the output of block l, A_l all that its backward reads, d_l the gradient of a_l.

Rounding happens here, once, and up: budgets are rounded down. What is stored again and again (`out`, `saved`) is
rounded value by value; what an op needs while it runs is summed in bytes first.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxremat.chains.chain import Chain

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class ChainSizes(NamedTuple):
    """The arrays described in the module's docstring; each is indexed by block (0..n) or by option of all blocks."""

    phase: Ints
    out: Ints
    run: Ints
    start: Ints
    saved: Ints
    save: Ints
    save_next: Ints
    back: Ints
    extra: Floats
    forward: Floats


def in_slots(chain: Chain, mem: int, slots: int) -> ChainSizes:
    """Return the sizes in slots of mem / slots bytes each, rounded up; with slots == mem, exactly in bytes."""

    def units(sizes: list[int]) -> Ints:
        limit = 2 * slots + 2  # sizes that cannot fit are capped, so that sums do not overflow
        return np.array([min(-(-size * slots // mem), limit) for size in sizes], dtype=np.int64)

    return _arrays(chain, units)


def in_bytes(chain: Chain) -> ChainSizes:
    """Return the sizes of a chain in bytes."""
    return _arrays(chain, lambda sizes: np.array(sizes, dtype=np.int64))


def _arrays(chain: Chain, units: Callable[[list[int]], Ints]) -> ChainSizes:
    out, grad, phase = chain.output_sizes, chain.grad_sizes, chain.phase_sizes
    # the gradients of the input and of all weights are stored when the first block's backward ends, so they
    # count as its scratch
    end = phase[0] - phase[1] - out[0]
    blocks = list(enumerate(chain.blocks, start=1))
    options = [(number, block, option) for number, block in blocks for option in block.choices]
    counts = [0, 0] + [len(block.choices) for block in chain.blocks]
    first = units([0] + [block.output_bytes + block.forward_scratch for block in chain.blocks])
    later = units([0] + [out[k - 1] + block.output_bytes + block.forward_scratch for k, block in blocks])
    return ChainSizes(
        phase=units(list(phase)),
        out=units(list(out)),
        run=_passes(first, later),
        start=np.cumsum(np.array(counts, dtype=np.int64)),
        saved=units([option.saved_bytes for _, _, option in options]),
        save=units([option.saved_bytes + (option.save_scratch or 0) for _, _, option in options]),
        save_next=units([out[k - 1] + o.saved_bytes + (o.save_scratch or 0) for k, _, o in options]),
        back=units(
            [
                max(o.saved_bytes + grad[k - 1] + o.backward_scratch, end if k == 1 else 0)
                for k, _, o in options
            ]
        ),
        extra=np.array([o.backward_time - min(c.backward_time for c in b.choices) for _, b, o in options]),
        forward=np.cumsum(np.array([0.0] + [block.forward_time for block in chain.blocks])),
    )


def _passes(first: Ints, later: Ints) -> Ints:
    """Return run[s, j], the need of forwards s..j, given each block's need as the first forward and as a later one."""
    run = np.broadcast_to(later, (first.size, first.size)).copy()
    run[np.diag_indices_from(run)] = first
    return np.maximum.accumulate(np.triu(run), axis=1)
