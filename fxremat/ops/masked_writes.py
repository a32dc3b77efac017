"""`target[mask] = value` with a gradient for `value`, whose size is known before the mask is.

    gradient of value  =  fxremat::masked_sum(gradient, mask, shape)    what lies under the mask, summed over to `shape`

PyTorch's autograd selects the gradient's rows under the mask, and only then adds them up: no step could be captured
around it, as the number of these rows is data. In the op the numbers are the same, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

POSITION = 8  # bytes of an index that a mask is turned into, for each of its dimensions


@torch.library.custom_op("fxremat::masked_sum", mutates_args=())
def masked_sum(gradient: Tensor, mask: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the numbers under a mask, summed over the dimensions that a tensor of this shape was expanded in.

    Takes as much memory as with a mask that is True everywhere, so that a plan holds for all masks. On CUDA it waits
    for the device, as PyTorch's does.

    Args:
        mask: of bools, for the first dimensions of `gradient`.
    """
    most = gradient.nbytes + POSITION * mask.numel() * mask.dim()
    selected = gradient[mask]
    _ = torch.empty(max(0, most - selected.nbytes), dtype=torch.uint8, device=gradient.device)
    return selected.sum_to_size(tuple(shape))


@masked_sum.register_fake
def _(gradient: Tensor, mask: Tensor, shape: Sequence[int]) -> Tensor:
    return gradient.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gradient, mask, _ = inputs
    ctx.save_for_backward(mask)
    ctx.like = gradient.shape


def _expanded(ctx: Any, upper: Tensor) -> tuple[Tensor, None, None]:
    (mask,) = ctx.saved_tensors
    return upper.new_zeros(ctx.like).index_put([mask], upper), None, None


masked_sum.register_autograd(_expanded, setup_context=_keep)


class _MaskedWrite(torch.autograd.Function):
    """Writes a value under a mask; its backward is PyTorch's, but for the op."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.shape = value.shape
        target[mask] = value
        ctx.mark_dirty(target)
        return target

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (mask,), (gradient,) = ctx.saved_tensors, gradients
        needed, _, trained = ctx.needs_input_grad
        before = gradient.index_put([mask], gradient.new_zeros(())) if needed else None
        return before, None, masked_sum(gradient, mask, ctx.shape) if trained else None


def write(target: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """Write a value under a mask, as `target[mask] = value` does; return the target."""
    written: Tensor = _MaskedWrite.apply(target, mask, value)  # type: ignore[no-untyped-call]
    return written
