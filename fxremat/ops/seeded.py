"""Dropout whose masks are computed from a seed, which is a value of the graph.

    seeds = fxremat::seeds(n, device=d)                          one int64 for each dropout of the graph; random
    seed  = select(seeds, 0, i)                                  the seed of one dropout: a view
    mask  = fxremat::seeded_mask(seed, shape, p, dtype)          true for kept elements; the same whenever it is made
    y     = fxremat::masked(x, mask, p)                          mask * x * (1 / (1 - p)): dropped elements are zero

Only the first op uses a generator, so recomputing a mask needs no saved generator state.

In a compiled region these ops become what Inductor makes of `aten.native_dropout` (`DECOMPOSITIONS`), and the
same seeds give the masks of `torch.compile(model)`. Outside of compiled regions they draw other random numbers,
so a mask that was drawn in a compiled region has to be recomputed in one. The kernels of this file are for
measuring ops one by one, and for graphs that run entirely uncompiled.
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
    """Draw the seeds of a graph from the device's generator, as Inductor's kernel does, with the same numbers."""
    return torch.randint(SEEDS.min, SEEDS.max, [count], dtype=torch.int64, device=device)


@seeds.register_fake
def _(count: int, *, device: torch.device) -> Tensor:
    return torch.empty([count], dtype=torch.int64, device=device)


@torch.library.custom_op("fxremat::seeded_mask", mutates_args=())
def seeded_mask(seed: Tensor, shape: Sequence[int], p: float, dtype: torch.dtype) -> Tensor:
    """Return the contiguous mask of a dropout, which is a function of the seed and the other arguments.

    Reading the seed synchronizes with the device.

    Args:
        seed: one int64, without dimensions.
        dtype: the dtype of the dropout's input, in which Inductor compares random numbers with `p`.
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
    # the same order of multiplications as in torch's decomposition of `native_dropout`
    return mask * x * float(1 / (1 - p))


def _inductor_mask(seed: Tensor, shape: Sequence[int], p: float, dtype: torch.dtype) -> Tensor:
    return _kept(inductor_uniform(seed, shape), p, dtype)


DECOMPOSITIONS: dict[torch._ops.OpOverload[Any, Any], Callable[..., Tensor]] = {
    torch.ops.fxremat.seeds.default: inductor_seeds,
    torch.ops.fxremat.seeded_mask.default: _inductor_mask,
    torch.ops.fxremat.masked.default: _masked,
}

# if run uncompiled, the op draws other numbers than compiled code does
ALWAYS_COMPILED = frozenset([torch.ops.fxremat.seeded_mask.default])
