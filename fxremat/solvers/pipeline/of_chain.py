"""Turns a chain of blocks into layers of a pipeline, and lists ways to train stages with recomputation.

    layer l       its weights are the block's parameters; it saves what the block saves, and its input
    stage i..j    keep        saves each block with the option that a price of memory selects, for several prices
                  prefix      recomputes blocks i..m from the stage's input, and saves the others
                  segments    recomputes all blocks, in segments that start from checkpoints
    kept          the stage's input and what is saved, its output included: more than a stage that has sent its
                  output away may need
    peak          what is kept and, during the backward, gradients and scratch, or a recomputed segment

Which way is best depends on how many micro-batches are in flight, so the planner chooses. Chain solvers find
more ways; these can be listed at once for thousands of stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from fxremat.chains.chain import Chain
from fxremat.solvers.pipeline.model import Layer, Layers, Way
from fxremat.solvers.pipeline.stage_costs import Ways, undominated

_PRICES = 4  # maximum number of positive prices (seconds for each byte saved) at which options of blocks are compared
_SEGMENTS = (1, 2, 3, 4, 6, 8)  # numbers of recomputed segments that are tried
_PREFIXES = (0.25, 0.5, 0.75)  # fractions of a stage's saved bytes that belong to the recomputed prefix


def layers_of(chain: Chain) -> Layers:
    """Return each block as a layer that saves everything, with its fastest option."""
    parameters = [block.weight_grad_bytes for block in chain.blocks]
    if not any(parameters):  # the chain has no sizes of weight gradients
        parameters = [block.weight_bytes for block in chain.blocks]
    return Layers(
        input_bytes=chain.input_bytes,
        input_grad_bytes=chain.input_grad_bytes,
        layers=tuple(
            Layer(
                name=block.name,
                forward_time=block.forward_time,
                backward_time=min(option.backward_time for option in block.choices),
                weight_bytes=weight,
                saved_bytes=max(0, entering + _fastest_saved(chain, place) - block.output_bytes),
                output_bytes=block.output_bytes,
                grad_bytes=block.grad_bytes,
            )
            for place, (block, weight, entering) in enumerate(
                zip(chain.blocks, parameters, chain.output_sizes, strict=False)
            )
        ),
    )


def _fastest_saved(chain: Chain, place: int) -> int:
    return min(chain.blocks[place].choices, key=lambda o: (o.backward_time, o.saved_bytes)).saved_bytes


def ways_of(chain: Chain) -> Ways:
    """Return a function that lists the ways to train each stage (run of blocks) of a chain: what is recomputed."""
    prices = _prices(chain)
    priced = [_Priced.of(chain, price) for price in prices]

    def ways(first: int, last: int) -> list[Way]:
        found = []
        for one in priced:
            found.append(one.way(first, last, ()))
            cheap = one.saved[last + 1] - one.saved[first]
            for part in _PREFIXES:
                cut = one.cut(first, last, one.saved[first] + part * cheap)
                found.append(one.way(first, last, (first, cut)))
        least = priced[0]
        whole = least.saved[last + 1] - least.saved[first]
        for count in _SEGMENTS:
            starts = {
                least.cut(first, last, least.saved[first] + part * whole / count) for part in range(1, count)
            }
            found.append(least.way(first, last, (*sorted({first, *starts} - {last + 1}), last + 1)))
        return list(undominated(found))

    return ways


def _prices(chain: Chain) -> list[float]:
    """Return prices of memory in seconds per byte: 0, and some just above those at which a block changes its option."""
    ratios = []
    for block in chain.blocks:
        fast = min(block.choices, key=lambda o: (o.backward_time, o.saved_bytes))
        for option in block.choices:
            if option.saved_bytes < fast.saved_bytes:
                ratios.append(
                    (option.backward_time - fast.backward_time) / (fast.saved_bytes - option.saved_bytes)
                )
    ratios.sort()
    picks = (
        {ratios[(len(ratios) - 1) * part // (_PRICES - 1)] for part in range(_PRICES)} if ratios else set()
    )
    return [0.0, *(price * (1 + 1e-6) + 1e-18 for price in sorted(picks))]


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """A chain whose blocks have the options that one price of memory selects; entry b of a sum is over blocks 0..b - 1.
    """

    chain: Chain
    forward: list[float]  # entry b: seconds of the forwards of blocks 0..b - 1
    backward: list[float]  # entry b: seconds of the backwards of blocks 0..b - 1
    saved: list[float]  # entry b: bytes that blocks 0..b - 1 save
    beside: list[float]  # [block]: bytes of gradients and scratch while its backward runs

    @classmethod
    def of(cls, chain: Chain, price: float) -> _Priced:
        chosen = [
            min(block.choices, key=lambda o: (o.backward_time + price * o.saved_bytes, o.saved_bytes))
            for block in chain.blocks
        ]
        grads = chain.grad_sizes
        return cls(
            chain=chain,
            forward=list(accumulate((block.forward_time for block in chain.blocks), initial=0.0)),
            backward=list(accumulate((option.backward_time for option in chosen), initial=0.0)),
            saved=list(accumulate((float(option.saved_bytes) for option in chosen), initial=0.0)),
            beside=[
                max(
                    block.forward_scratch,
                    option.save_scratch or 0,
                    grads[place] + grads[place + 1] + block.held_bytes + option.backward_scratch,
                )
                for place, (block, option) in enumerate(zip(chain.blocks, chosen, strict=True))
            ],
        )

    def cut(self, first: int, last: int, saved: float) -> int:
        """Return 1 + the first block of first..last after which the chain's blocks so far save `saved` bytes or more.
        """
        for place in range(first, last):
            if self.saved[place + 1] >= saved:
                return place + 1
        return last + 1

    def way(self, first: int, last: int, again: tuple[int, ...]) -> Way:
        """Return the way that recomputes the segments again[k] .. again[k + 1] - 1 and saves the blocks after them."""
        entering = self.chain.output_sizes[first]
        after = again[-1] if again else first
        kept = entering + self.saved[last + 1] - self.saved[after]
        kept += sum(self.chain.output_sizes[start] for start in again[1:] if start <= last)
        peak = kept
        repeated = 0.0
        for start, end in pairwise(again):
            peak = max(peak, kept + self.saved[end] - self.saved[start])
            repeated += self.forward[end] - self.forward[start]
        beside = max(self.beside[first : last + 1])
        return Way(
            forward_time=self.forward[last + 1] - self.forward[first],
            backward_time=self.backward[last + 1] - self.backward[first] + repeated,
            kept_bytes=kept,
            peak_bytes=peak + beside,
        )
