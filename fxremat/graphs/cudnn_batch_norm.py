"""Ops that run cuDNN's BatchNorm, for models whose BatchNorms eager PyTorch computes with cuDNN.

    y, mean, rstd, reserve, running' = cudnn_batch_norm(x, weight, bias, running)       in training
    y                                = cudnn_batch_norm_evaluated(x, weight, bias, running)

While a graph is traced, PyTorch decomposes `aten.cudnn_batch_norm`, so that native kernels run instead, which
round differently. The op cannot be captured as it is, since it overwrites the running statistics, which its
schema does not say. The ops here return new statistics instead. `reserve` is a buffer that cuDNN passes from
the forward to the backward; only cuDNN knows its size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxremat.torch_private import composite_kernels, cudnn_reserve_bytes, suggested_format

aten = torch.ops.aten
Gradients = tuple[Tensor | None, ...]


@torch.library.custom_op("fxremat::cudnn_batch_norm", mutates_args=())
def cudnn_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return output, mean, rstd and reserve of a BatchNorm in training, then the new running mean and variance.

    The last two are empty tensors if there are no running statistics.

    Args:
        x: (batch, channels, ...), contiguous or in channels_last.
    """
    mean, var = (None if old is None else old.clone() for old in (running_mean, running_var))
    made = aten.cudnn_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
    new = [x.new_empty(0) if statistic is None else statistic for statistic in (mean, var)]
    return *made, new[0], new[1]


@torch.library.custom_op("fxremat::cudnn_batch_norm_backward", mutates_args=())
def cudnn_batch_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, reserve: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias of a BatchNorm in training.

    `reserve` is copied, since cuDNN may write into it.
    """
    gradient = gradient.contiguous(memory_format=suggested_format(x))
    made: tuple[Tensor, Tensor, Tensor] = aten.cudnn_batch_norm_backward(
        x, gradient, weight, None, None, mean, rstd, eps, reserve.clone()
    )
    return made


@torch.library.custom_op("fxremat::cudnn_batch_norm_evaluated", mutates_args=())
def cudnn_batch_norm_evaluated(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    """Return the output of a BatchNorm in evaluation mode, which does not change the running statistics."""
    made: tuple[Tensor, ...] = aten.cudnn_batch_norm(x, weight, bias, running_mean, running_var, False, 0.0, eps)
    return made[0]


@cudnn_batch_norm.register_fake
def _(
    x: Tensor, weight: Tensor, _: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *__: float
) -> tuple[Tensor, ...]:
    running = [x.new_empty(0) if old is None else torch.empty_like(old) for old in (running_mean, running_var)]
    reserve = x.new_empty(cudnn_reserve_bytes(x), dtype=torch.uint8)
    return _laid_out(x), torch.empty_like(weight), torch.empty_like(weight), reserve, *running


@cudnn_batch_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _laid_out(x), torch.empty_like(weight), torch.empty_like(weight)


@cudnn_batch_norm_evaluated.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return _laid_out(x)


def _laid_out(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=suggested_format(x))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _, _, _, ctx.eps = inputs
    _, mean, rstd, reserve, *running = output
    ctx.mark_non_differentiable(mean, rstd, reserve, *running)
    ctx.save_for_backward(x, weight, mean, rstd, reserve)


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Gradients:
    return *cudnn_batch_norm_backward(gradient, *ctx.saved_tensors, ctx.eps), None, None, None, None


def _keep_evaluated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, mean, var, ctx.eps = inputs
    ctx.save_for_backward(x, weight, mean, var)


def _backward_evaluated(ctx: Any, gradient: Tensor) -> Gradients:
    needed = list(ctx.needs_input_grad[:3])
    made = aten.native_batch_norm_backward(gradient, *ctx.saved_tensors, None, None, False, ctx.eps, needed)
    return *(grad if wanted else None for grad, wanted in zip(made, needed, strict=True)), None, None, None


cudnn_batch_norm.register_autograd(_backward, setup_context=_keep)
cudnn_batch_norm_evaluated.register_autograd(_backward_evaluated, setup_context=_keep_evaluated)

CUDNN = torch.ops.fxremat.cudnn_batch_norm.default


@contextlib.contextmanager
def batch_norms_of_cudnn() -> Iterator[None]:
    """Within this context, capture BatchNorms that eager PyTorch computes with cuDNN as the ops of this file."""
    kernels: dict[Any, Callable[..., Any]] = {aten.cudnn_batch_norm.default: _captured}
    with composite_kernels(kernels, key="Autograd"):
        yield


def _captured(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute the results of `aten.cudnn_batch_norm` by ops whose writes to running statistics are in the graph."""
    if not training:
        assert mean is not None  # PyTorch chooses cuDNN only if there are running statistics
        assert var is not None
        nothing = weight.new_empty(0)
        return cudnn_batch_norm_evaluated(x, weight, bias, mean, var, eps), nothing, nothing, nothing
    y, saved_mean, rstd, reserve, new_mean, new_var = cudnn_batch_norm(x, weight, bias, mean, var, momentum, eps)
    if mean is not None and var is not None:
        mean.copy_(new_mean)
        var.copy_(new_var)
    return y, saved_mean, rstd, reserve
