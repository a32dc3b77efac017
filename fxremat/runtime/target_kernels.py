"""Attention ops as CUDA runs them, captured on a CPU for plans that are never run.

    scaled_dot_product_attention    in half precision cuDNN's (H100, H200, B200) or flash attention, else the
                                    memory-efficient kernel, else products and a softmax; chosen from shapes and dtypes
                                    as PyTorch chooses on CUDA

Other ops are captured alike on CPU and CUDA: a dropout keeps a mask of one byte per element on both. A
BatchNorm, which on CUDA is cuDNN's, saves the same values on both, except for a buffer whose size only cuDNN
knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fxremat.cost.devices import Device
from fxremat.torch_private import composite_kernels, torch_release

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # largest head dimension that flash attention supports
GROUPED = (2, 14)  # torch release since which the memory-efficient kernel supports several heads that share keys
# since torch 2.14 cuDNN's attention has no dropout, and heads up to `NARROW_HEAD` (read in 2.11 and 2.14)
NARROWED = (2, 14)
NARROW_HEAD = 128  # largest head dimension that cuDNN's attention supports since torch 2.14
CUDNN_STEP = 8  # cuDNN's attention needs a head dimension that is a multiple of this
FLASH_STEP = 8  # for flash attention the head dimension is padded to a multiple of this


def captured_alike(one: Device, other: Device) -> bool:
    """Tell whether a captured step has the same attention ops for both devices."""
    return all(getattr(one, of) == getattr(other, of) for of in ("cuda", "flash", "cudnn_attention"))


@contextlib.contextmanager
def kernels_of(device: Device) -> Iterator[None]:
    """Within this context, capture attention as ops of the device's kernels; a CPU cannot run such graphs."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        saves = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        grouped = _same_heads(query, key, value, grouped=enable_gqa)
        if grouped and _takes_cudnn(query, key, value, attn_mask, dropout_p, device):
            bias = None if attn_mask is None else _as_bias(attn_mask, query)
            cudnn: Tensor = aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, saves, dropout_p, is_causal, scale=scale
            )[0]
            return cudnn
        if grouped and _takes_flash(query, key, value, attn_mask, is_causal, device):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if _takes_efficient(query, key, value, device, grouped=grouped):
            mask = None if attn_mask is None else _expanded(_as_bias(attn_mask, query), query, key)
            efficient: Tensor = aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, saves, dropout_p, is_causal, scale=scale
            )[0]
            return efficient
        plain: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return plain

    with composite_kernels({aten.scaled_dot_product_attention.default: attention}):
        yield


def _takes_cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, device: Device
) -> bool:
    """Tell whether PyTorch chooses cuDNN's attention (`can_use_cudnn_attention` in aten's cuda/sdp_utils.cpp)."""
    if device.cudnn_attention is None or query.dtype not in HALF or query.dim() != 4 or key.shape[-2] == 1:
        return False
    if mask is not None and mask.requires_grad:
        return False
    narrowed = torch_release() >= NARROWED
    if narrowed and (dropout_p or (query.shape[-2] == 1 and device.cudnn_attention == NARROW_HEAD)):
        return False
    widest = NARROW_HEAD if narrowed else device.cudnn_attention
    return all(width <= widest and width % CUDNN_STEP == 0 for width in (query.shape[-1], value.shape[-1]))


def _takes_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, device: Device
) -> bool:
    """Tell whether PyTorch chooses flash attention (`can_use_flash_attention` in aten's cuda/sdp_utils.cpp)."""
    width = query.shape[-1]
    if not device.flash or mask is not None or query.dtype not in HALF or query.dim() != 4:
        return False
    if causal and query.shape[-2] != key.shape[-2]:
        return False
    return width <= WIDEST_HEAD and width == key.shape[-1] == value.shape[-1]


def _same_heads(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> bool:
    """Tell whether query, key and value have equal batch sizes and, unless `grouped`, equal numbers of heads.

    Args:
        grouped: True if several heads may share a key and a value.
    """
    # compared one by one, since sizes may be symbolic
    batches, heads = ((query.shape[d] == key.shape[d] == value.shape[d]) for d in (0, 1))
    return batches and (heads or grouped)


def _takes_efficient(query: Tensor, key: Tensor, value: Tensor, device: Device, *, grouped: bool) -> bool:
    """Tell whether PyTorch chooses the memory-efficient attention kernel.

    See `can_use_mem_efficient_attention` in aten's cuda/sdp_utils.cpp.
    """
    groups = grouped and torch_release() >= GROUPED
    if query.dim() != 4 or not (groups or query.shape[1] == key.shape[1] == value.shape[1]):
        return False
    # devices without flash attention do not support bfloat16 either
    if query.dtype is torch.bfloat16 and not device.flash:
        return False
    step = 8 if query.dtype in HALF else 4
    return query.dtype in (*HALF, torch.float32) and query.shape[-1] % step == value.shape[-1] % step == 0


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, causal: bool, scale: float | None
) -> Tensor:
    width = query.shape[-1]
    if missing := -width % FLASH_STEP:
        query, key, value = (F.pad(t, (0, missing)) for t in (query, key, value))
    scale = width**-0.5 if scale is None else scale
    found: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, causal, scale=scale
    )[0]
    return found[..., :width] if missing else found


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask as a bias that is added to attention scores, since these kernels take no boolean masks."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)


def _expanded(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return bias.expand(*query.shape[:-1], key.shape[-2])
