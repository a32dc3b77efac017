"""Ops that store a tensor in fewer bytes, and bring it back: masks as bits, without loss, and numbers rounded.

    packed = fxremat::pack_bits(mask, order)                     eight elements of a bool tensor to a byte
    mask   = fxremat::unpack_bits(packed, shape, order, dtype)

    rounded, scales = fxremat::round_rows(x, order, dtype)       int8 or float8_e4m3fn, with one scale for each row
    x'              = fxremat::scale_rows(rounded, scales, shape, order)

`order` has the dimensions of the tensor in the order of memory, outermost first: a tensor that comes back has the
strides that it had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SHORTEST_ROW = 64  # elements that share a scale at least, if the tensor has so many
AT_A_TIME = 1 << 20  # elements that are rounded at a time, so that no copy of the whole tensor is needed
# a product with this number moves the lowest bits of the eight bytes of an int64 into its highest byte
_GATHER = 0x0102040810204080


@torch.library.custom_op("fxremat::pack_bits", mutates_args=())
def pack_bits(mask: Tensor, order: Sequence[int]) -> Tensor:
    """Return the elements of a bool tensor as bits, eight to a byte, in the order of memory."""
    flat = _in_memory_order(mask, order)
    if flat.device.type == "cpu":
        return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))
    return packed_by_words(flat)


@pack_bits.register_fake
def _(mask: Tensor, order: Sequence[int]) -> Tensor:
    return mask.new_empty([-(-mask.numel() // 8)], dtype=torch.uint8)


@torch.library.custom_op("fxremat::unpack_bits", mutates_args=())
def unpack_bits(packed: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor of zeros and ones, of any dtype, whose bits were packed."""
    count = math.prod(shape)
    if packed.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little"))
    else:
        bits = unpacked_by_words(packed)[:count]
    flat = bits.view(torch.bool) if dtype is torch.bool else bits.to(dtype)
    return _of_order(flat, shape, order)


@unpack_bits.register_fake
def _(packed: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _of_order(packed.new_empty([math.prod(shape)], dtype=dtype), shape, order)


@torch.library.custom_op("fxremat::round_rows", mutates_args=())
def round_rows(x: Tensor, order: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor rounded to int8 or float8_e4m3fn, and one scale for each row, of the dtype of `x`.

    A row is what lies next to each other in memory: the last dimensions of the tensor, as few as have 64 elements.
    The error of an element is at most 1/254 of the largest of its row with int8, and at most 1/16 of itself with fp8.
    """
    rows = _in_memory_order(x, order).view(-1, row_length(x.shape, order))
    rounded = torch.empty(rows.shape, dtype=dtype, device=x.device)
    scales = torch.empty([rows.shape[0], 1], dtype=x.dtype, device=x.device)
    step = max(1, AT_A_TIME // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        scale = scales[start : start + step]
        torch.div(part.abs().amax(1, keepdim=True), LARGEST[dtype], out=scale)
        quotient = part / scale.masked_fill(scale == 0, 1).float()
        quotient.clamp_(-LARGEST[dtype], LARGEST[dtype])  # the scale is rounded, too
        rounded[start : start + step] = quotient.round_() if dtype is torch.int8 else quotient
    return rounded.view(-1), scales.view(-1)


@round_rows.register_fake
def _(x: Tensor, order: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty([x.numel()], dtype=dtype), x.new_empty([x.numel() // row_length(x.shape, order)])


@torch.library.custom_op("fxremat::scale_rows", mutates_args=())
def scale_rows(rounded: Tensor, scales: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return the rounded tensor times its scales, in the dtype of the scales and with the strides it had."""
    rows = rounded.view(scales.numel(), -1)
    if not rows.dtype.is_floating_point:
        return _of_order((rows * scales[:, None]).view(-1), shape, order)
    return _of_order(rows.to(scales.dtype).mul_(scales[:, None]).view(-1), shape, order)


@scale_rows.register_fake
def _(rounded: Tensor, scales: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    return _of_order(scales.new_empty([math.prod(shape)]), shape, order)


def packed_by_words(flat: Tensor) -> Tensor:
    """Pack bits with PyTorch's ops: a product moves the lowest bits of eight bytes into one."""
    missing = -flat.numel() % 8
    words = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    return words.view(torch.int64).mul(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpacked_by_words(packed: Tensor) -> Tensor:
    """Unpack bits with PyTorch's ops: a table has the eight bytes for each byte."""
    return torch.index_select(_bytes_of_bits(packed.device), 0, packed.to(torch.int32)).view(torch.uint8)


def row_length(shape: Sequence[int], order: Sequence[int]) -> int:
    """Return the number of elements that share a scale: the product of the last sizes in the order of memory.

    As few sizes as have `SHORTEST_ROW` elements; all, if the tensor has fewer.
    """
    length = 1
    for dimension in reversed(order):
        length *= shape[dimension]
        if length >= SHORTEST_ROW:
            break
    return length


def _in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    return x.detach().permute(list(order)).reshape(-1)


def _of_order(flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return a flat tensor as one of this shape, whose dimensions lie in memory in the given order."""
    laid = flat.view([shape[dimension] for dimension in order])
    return laid.permute([*map(order.index, range(len(order)))])


@lru_cache
def _bytes_of_bits(device: torch.device) -> Tensor:
    """Return a table of 256 int64: the eight bits of a byte as eight bytes."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(bits.view(np.int64).reshape(-1).copy()).to(device)
