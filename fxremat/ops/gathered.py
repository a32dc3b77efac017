"""Ops that read a sharded or replicated parameter while a model is traced; `passes.sharding` makes them collectives.

    fxremat::gather    shard -> the full parameter, in the dtype that the model computes in
    fxremat::reduce    gradient of the full parameter -> gradient of the shard, reduced over the ranks

Each is one op while a model is traced, so that equal gathers can be found (tied weights), and gradients can be
added before they are reduced rather than after. A parameter is cut along its first dimension into as many parts
as there are ranks in its group, as `torch.distributed.fsdp.fully_shard` does; if they are not all equal, the
last ones are padded for the transfer. A parameter that every rank holds in full is not gathered; only its
gradient is reduced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxremat.errors import FxrematError

ALONE = "a shared parameter is read, and its gradient reduced, inside of a planned step alone"


class Sharing(NamedTuple):
    """The sharding or replication of a parameter; the ops of this file take these fields as arguments, in order."""

    rows: int  # number of rows of the full parameter, the size of its first dimension
    dtype: torch.dtype  # the dtype that the model computes in
    reduced_in: torch.dtype | None  # the dtype in which gradients are added; None: that of the gradient
    group: str  # the process group over which the parameter is sharded; "": each rank has all of it
    replicas: str  # the process group of the ranks that hold equal shards; "": no other rank holds an equal one
    op: str  # "avg" or "sum"
    before: float  # divisor of gradients before the reduction
    after: float  # divisor of gradients after the reduction
    bucket: int  # parameters with the same bucket are gathered, and their gradients reduced, together


@torch.library.custom_op("fxremat::gather", mutates_args=())
def gather(
    shard: Tensor,
    other: Tensor | None,
    sync: bool,
    rows: int,
    dtype: torch.dtype,
    reduced_in: torch.dtype | None,
    group: str,
    replicas: str,
    op: str,
    before: float,
    after: float,
    bucket: int,
) -> Tensor:
    """Return the full parameter of a shard. The arguments from `rows` on are the fields of `Sharing`.

    Args:
        other: with `sync`, unreduced gradients of earlier backwards, which are added before the gradient is reduced,
            or None; without `sync`, a tensor as large as the parameter, which gets the unreduced gradient.
        sync: True: the backward reduces the gradient over the ranks.
    """
    raise FxrematError(ALONE)


@torch.library.custom_op("fxremat::reduce", mutates_args=())
def reduce(
    gradient: Tensor,
    earlier: Tensor | None,
    rows: int,
    dtype: torch.dtype,
    reduced_in: torch.dtype | None,
    group: str,
    replicas: str,
    op: str,
    before: float,
    after: float,
    bucket: int,
    mine: int,
    stored: torch.dtype,
) -> Tensor:
    """Return the gradient, reduced over all ranks, of a shard of `mine` rows, in the dtype `stored`.

    The arguments from `rows` to `bucket` are the fields of `Sharing`. Unreduced gradients of earlier backwards,
    if given as `earlier`, are added first.
    """
    raise FxrematError(ALONE)


@gather.register_fake
def _(shard: Tensor, other: Tensor | None, sync: bool, rows: int, dtype: torch.dtype, *_: object) -> Tensor:
    return shard.new_empty((rows, *shard.shape[1:]) if shard.dim() else (), dtype=dtype)


@reduce.register_fake
def _(gradient: Tensor, earlier: Tensor | None, *sharing: Any) -> Tensor:
    *_, mine, stored = sharing
    return gradient.new_empty((mine, *gradient.shape[1:]) if gradient.dim() else (), dtype=stored)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, other, ctx.sync, *ctx.sharing = inputs
    ctx.mine, ctx.stored = shard.shape[0] if shard.dim() else 0, shard.dtype
    ctx.save_for_backward(other)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (other,) = ctx.saved_tensors
    no_more = [None] * (1 + len(ctx.sharing))
    if not ctx.sync:
        return None, gradient.to(other.dtype), *no_more
    return reduce(gradient, other, *ctx.sharing, ctx.mine, ctx.stored), None, *no_more


gather.register_autograd(_backward, setup_context=_keep)
