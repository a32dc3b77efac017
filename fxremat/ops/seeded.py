"""Dropout whose masks are a function of a seed, where the seed is a value of the graph.

    seeds = fxremat::seeds(n, device=d)                          one int64 for each dropout of the graph: the one draw
    seed  = select(seeds, 0, i)                                  the seed of one dropout: a view
    mask  = fxremat::seeded_mask(seed, shape, p, dtype)          true for kept elements; the same whenever it is made
    y     = fxremat::masked(x, mask, p)                          mask * x * (1 / (1 - p)): dropped elements are zero

Only the first op uses a generator, so a mask that is recomputed is an ordinary op: no generator state is saved or
replayed for it.

In a compiled region these ops become what Inductor makes of `aten.native_dropout` (`DECOMPOSITIONS`), and the same
seeds give the masks of `torch.compile(model)`. Called by themselves they draw other random numbers: a mask that was
drawn in a compiled region has to be drawn again in one. The kernels of this file are for
measuring ops one by one, and for graphs that run uncompiled from end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxremat.torch_inductor import inductor_seeds, inductor_uniform

SEEDS = torch.iinfo(torch.int64)  # Inductor's kernel draws from `min` to below `max`


@torch.library.custom_op("fxremat::seeds", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def seeds(count: int, *, device: torch.device) -> Tensor:
    """Draw the seeds of a graph from the device's generator, with the numbers that Inductor's kernel gives."""
    return torch.randint(SEEDS.min, SEEDS.max, [count], dtype=torch.int64, device=device)


@seeds.register_fake
def _(count: int, *, device: torch.device) -> Tensor:
    return torch.empty([count], dtype=torch.int64, device=device)


@torch.library.custom_op("fxremat::seeded_mask", mutates_args=())
def seeded_mask(seed: Tensor, shape: Sequence[int], p: float, dtype: torch.dtype) -> Tensor:
    """Return the mask of a dropout, contiguous: a function of the seed and the other arguments alone.

    Reading the seed synchronizes with the device.

    Args:
        seed: one int64, without dimensions.
        dtype: the type of the dropout's input, in which Inductor compares random numbers with `p`.
    """
    generator = torch.Generator(seed.device).manual_seed(int(seed))
    return _kept(torch.rand(shape, generator=generator, dtype=torch.float32, device=seed.device), p, dtype)


@seeded_mask.register_fake
def _(seed: Tensor, shape: Sequence[int], p: float, dtype: torch.dtype) -> Tensor:
    return seed.new_empty(shape, dtype=torch.bool)


@torch.library.custom_op("fxremat::masked", mutates_args=())
def masked(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return the output of a dropout, in the layout of `x`."""
    return (mask * x).mul_(1 / (1 - p))


@masked.register_fake
def _(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return _masked(x, mask, p)


def _kept(uniform: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    return uniform.to(dtype) > p


def _masked(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return mask * x * float(1 / (1 - p))  # the order of torch's decomposition of `native_dropout`


def _inductor_mask(seed: Tensor, shape: Sequence[int], p: float, dtype: torch.dtype) -> Tensor:
    return _kept(inductor_uniform(seed, shape), p, dtype)


DECOMPOSITIONS: dict[torch._ops.OpOverload[Any, Any], Callable[..., Tensor]] = {
    torch.ops.fxremat.seeds.default: inductor_seeds,
    torch.ops.fxremat.seeded_mask.default: _inductor_mask,
    torch.ops.fxremat.masked.default: _masked,
}

ALWAYS_COMPILED = frozenset([torch.ops.fxremat.seeded_mask.default])  # its own kernel draws other numbers
