"""BatchNorm in training split into two ops, statistics and normalization, and how a BatchNorm is recomputed.

    y, mean, rstd, running' = batch_norm(x, weight, bias, running)      as captured, reads x three times

    mean, rstd, running'    = batch_statistics(x, running)              a few numbers per channel, which plans keep
    y                       = batch_normalized(x, weight, bias, mean, rstd)     the part that is worth recomputing

(rstd is 1 over the standard deviation.) If the statistics are kept, recomputing `y` takes one pass over `x` and
does not touch running statistics. On a CPU the normalization has the bits of the original op, whose kernel
scales by `rstd * weight` and shifts by `bias - mean * scale` both in training and in evaluation, so that a
BatchNorm in evaluation mode with the scale as its weight, and a variance of one, computes the same. That holds
if `x` is contiguous, or in channels_last; otherwise the original op runs.

To have exact bits, the op for statistics also runs the original op, and drops `y`: where both ops follow each
other, one original op is emitted instead (`passes.lower`). Where other bits are allowed (compiled regions), it
computes only the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx

from fxremat.graphs.cudnn_batch_norm import CUDNN

aten = torch.ops.aten

FORMATS = (torch.channels_last, torch.channels_last_3d)


@torch.library.custom_op("fxremat::batch_statistics", mutates_args=())
def batch_statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean and rstd of each channel of a batch, and the new running statistics (empty if there are none).

    Args:
        x: (batch, channels, ...)
        exact: True: compute them with the kernel of the original BatchNorm, for the same bits.
    """
    mean, var = _running(x, running_mean, running_var)
    if exact:
        _, batch_mean, rstd, mean, var = _whole(x, None, None, mean, var, momentum, eps)
    else:
        mean, var = mean.clone(), var.clone()
        batch_mean, batch_var = aten.batch_norm_update_stats(x, mean, var, momentum)
        rstd = torch.rsqrt(batch_var + eps)
    if running_mean is None:
        mean, var = x.new_empty(0), x.new_empty(0)
    return batch_mean, rstd, mean, var


@batch_statistics.register_fake
def _(x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    made = [x.new_empty(x.shape[1], dtype=dtype_of_statistics(x)) for _ in range(2)]
    running = [x.new_empty(0) if old is None else torch.empty_like(old) for old in (running_mean, running_var)]
    return made[0], made[1], running[0], running[1]


@torch.library.custom_op("fxremat::batch_normalized", mutates_args=())
def batch_normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, eps: float
) -> Tensor:
    """Return the output of a BatchNorm with given batch statistics, in the layout of `x`."""
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    if not is_dense(x) or not all(parameter.is_contiguous() for parameter in parameters):
        running = _running(x, None, None)
        return cast(Tensor, _whole(x, weight, bias, *running, 0.0, eps)[0])
    scale = rstd if weight is None else rstd * weight
    made = aten._native_batch_norm_legit_no_training(x, scale, bias, mean, torch.ones_like(mean), 0.0, 0.0)
    return cast(Tensor, made[0])


@batch_normalized.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x) if is_dense(x) else torch.empty_like(x, memory_format=torch.contiguous_format)


def _running(x: Tensor, mean: Tensor | None, var: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the running statistics; zeros of the same dtype for None, since kernels depend on the dtype."""
    dtype = dtype_of_statistics(x)
    some = [x.new_zeros(x.shape[1], dtype=dtype) if old is None else old for old in (mean, var)]
    return some[0], some[1]


def dtype_of_statistics(x: Tensor) -> torch.dtype:
    """Return the dtype of the batch statistics: float64 if `x` is float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _whole(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Any:
    mean, var, momentum, eps = rest
    return aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, momentum, eps)


def is_dense(x: Tensor) -> bool:
    """Tell whether `x` is contiguous or in channels_last; in other layouts CPU kernels round in another order."""
    return x.is_contiguous() or any(
        x.dim() == dimensions and x.is_contiguous(memory_format=format_)
        for dimensions, format_ in zip((4, 5), FORMATS, strict=True)
    )


STATISTICS = torch.ops.fxremat.batch_statistics.default
NORMALIZED = torch.ops.fxremat.batch_normalized.default
WHOLE = aten._native_batch_norm_legit_functional.default
# op -> number of its results before the new running statistics
RUNNING: dict[Any, int] = {WHOLE: 3, CUDNN: 4, STATISTICS: 2}


# How Inductor decomposes the statistics op and the normalization op.


def _inductor_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float, _: bool
) -> tuple[Tensor, ...]:
    kept = dtype_of_statistics(x)
    var, mean = torch.var_mean(x.to(kept), dim=[0, *range(2, x.dim())], correction=0)
    rstd = torch.rsqrt(var + eps)
    if running_mean is None or running_var is None:
        return mean, rstd, x.new_empty(0), x.new_empty(0)
    count = x.numel() // x.shape[1]
    unbiased = var * (count / (count - 1) if count > 1 else math.nan)
    new = (momentum * mean + (1 - momentum) * running_mean, momentum * unbiased + (1 - momentum) * running_var)
    return mean, rstd, new[0].to(running_mean.dtype), new[1].to(running_var.dtype)


def _inductor_normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, _: float
) -> Tensor:
    shape = (1, -1, *(1 for _ in range(x.dim() - 2)))
    output = (x.to(mean.dtype) - mean.view(shape)) * rstd.view(shape)
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    return output.to(x.dtype)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    STATISTICS: _inductor_statistics,
    NORMALIZED: _inductor_normalized,
}


# Functions on nodes of the statistics op and the normalization op, and on how a BatchNorm is recomputed.


def normalized_by(statistics: fx.Node) -> fx.Node | None:
    """Return the normalization op that reads the results of a statistics op; None if there is none, or for other nodes.
    """
    if statistics.target is not STATISTICS:
        return None
    readers = (reader for item in statistics.users for reader in item.users)
    return next((reader for reader in readers if reader.target is NORMALIZED), None)


def runs_as_one(statistics: fx.Node, normalized: fx.Node, *, again: bool) -> bool:
    """Tell whether batch statistics and the normalization right after them can be emitted as one BatchNorm op.

    Args:
        again: True for a recomputation.
    """
    shown = cast(fx.Node, normalized.args[0]).meta["val"]  # without a weight, statistics have the dtype of `x`
    typed = normalized.args[1] is not None or shown.dtype == dtype_of_statistics(shown)
    return bool(statistics.args[5]) and (typed or not again)


def whole_call(statistics: fx.Node, normalized: fx.Node, *, again: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return function and arguments of the original BatchNorm that these two ops were split from.

    Args:
        again: True for a recomputation, which does not update running statistics.
    """
    x, mean, var, momentum, eps, _ = statistics.args
    _, weight, bias, *_ = normalized.args
    if again or mean is None:
        return aten._native_batch_norm_legit.no_stats, (x, weight, bias, True, momentum, eps)
    return aten._native_batch_norm_legit_functional.default, (x, weight, bias, mean, var, True, momentum, eps)


def batch_norm_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a BatchNorm: x, weight, bias, running mean and variance, training, momentum, epsilon."""
    if node.target is aten._native_batch_norm_legit.no_stats:
        x, weight, bias, *rest = node.args
        return x, weight, bias, None, None, *rest
    return node.args


def is_training_batch_norm(node: fx.Node) -> bool:
    """Tell whether a node updates running statistics: a BatchNorm in training, or its statistics as an op of its own.
    """
    return node.target in RUNNING and (node.target is not WHOLE or bool(node.args[5]))


def again_call(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return function and positional arguments for recomputing an op.

    They are those of the first execution, except that a BatchNorm does not update its running statistics.
    """
    if not is_training_batch_norm(node):
        return node.target, node.args
    if node.target is STATISTICS:
        return node.target, (node.args[0], None, None, *node.args[3:])
    x, weight, bias, _, _, *rest = node.args
    if node.target is CUDNN:
        return node.target, (x, weight, bias, None, None, *rest)
    training, momentum, eps = rest
    return aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps)


def again_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a recomputation of an op reads; for a BatchNorm, without running statistics."""
    if not is_training_batch_norm(node):
        return node.all_input_nodes
    return [argument for argument in again_call(node)[1] if isinstance(argument, fx.Node)]


def made_again(op: fx.Node, shown: fx.Node) -> bool:
    """Tell whether recomputing an op also gives the output `shown`; it gives all but new running statistics."""
    if not is_training_batch_norm(op) or shown is op:
        return True
    return cast(int, shown.args[1]) < RUNNING[op.target]
