"""Ops that store a tensor in fewer bytes, and bring it back: masks as bits, without loss, and numbers rounded.

    packed = fxremat::pack_bits(mask, order)                     eight elements of a bool tensor to a byte
    mask   = fxremat::unpack_bits(packed, shape, order, dtype)

    rounded, scales = fxremat::round_rows(x, order, dtype)       int8 or float8_e4m3fn, with one scale for each row
    x'              = fxremat::scale_rows(rounded, scales, shape, order, dtype)

`order` has the dimensions of the tensor in the order of memory, outermost first: a tensor that comes back has the
strides that it had.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fxremat.torch_private import memory_order

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SHORTEST_ROW = 64  # elements that share a scale at least, if the tensor has so many
AT_A_TIME = 1 << 18  # elements that are handled at a time, so that no copy of the whole tensor is needed
# a product with this number moves the lowest bits of the eight bytes of an int64 into its highest byte
_GATHER = 0x0102040810204080


@torch.library.custom_op("fxremat::pack_bits", mutates_args=())
def pack_bits(mask: Tensor, order: Sequence[int]) -> Tensor:
    """Return the elements of a bool tensor as bits, eight to a byte, in the order of memory.

    Where the tensor lies in another order than its fake, the result remembers that order.
    """
    real = tuple(order)
    if not lies_in(mask, real):
        real = tuple(memory_order(mask))
    flat = _in_memory_order(mask, real)
    packed = _packed_by_numpy(flat) if flat.device.type == "cpu" else packed_by_words(flat)
    if real != tuple(order):
        packed.fxremat_order = real  # type: ignore[attr-defined]
    return packed


@pack_bits.register_fake
def _(mask: Tensor, order: Sequence[int]) -> Tensor:
    return mask.new_empty([-(-mask.numel() // 8)], dtype=torch.uint8)


@torch.library.custom_op("fxremat::unpack_bits", mutates_args=())
def unpack_bits(packed: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor of zeros and ones, of any dtype, whose bits were packed."""
    count = math.prod(shape)
    if packed.device.type == "cpu":
        flat = _unpacked_by_numpy(packed, count, dtype)
    else:
        bits = unpacked_by_words(packed)[:count]
        flat = bits.view(torch.bool) if dtype is torch.bool else bits.to(dtype)
    return _of_order(flat, shape, getattr(packed, "fxremat_order", order))


@unpack_bits.register_fake
def _(packed: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _of_order(packed.new_empty([math.prod(shape)], dtype=dtype), shape, order)


@torch.library.custom_op("fxremat::round_rows", mutates_args=())
def round_rows(x: Tensor, order: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor rounded to int8 or float8_e4m3fn, and one scale for each row, in float32.

    A row is what lies next to each other in memory: the last dimensions of the tensor, as few as have 64 elements.
    The error of an element is at most 1/254 of the largest of its row with int8, and at most 1/16 of itself with fp8.
    """
    rows = _in_memory_order(x, order).view(-1, row_length(x.shape, order))
    rounded = torch.empty(rows.shape, dtype=dtype, device=x.device)
    scales = torch.empty([rows.shape[0], 1], dtype=torch.float32, device=x.device)
    for some in _parts(rows.shape[0], rows.shape[1]):
        part = rows[some].float()
        torch.div(part.abs().amax(1, keepdim=True), LARGEST[dtype], out=scales[some])
        quotient = part / scales[some].masked_fill(scales[some] == 0, 1)
        quotient.clamp_(-LARGEST[dtype], LARGEST[dtype])  # the scale is rounded, too
        rounded[some] = quotient.round_() if dtype is torch.int8 else quotient
    return rounded.view(-1), scales.view(-1)


@round_rows.register_fake
def _(x: Tensor, order: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = x.numel() // row_length(x.shape, order)
    return x.new_empty([x.numel()], dtype=dtype), x.new_empty([rows], dtype=torch.float32)


@torch.library.custom_op("fxremat::scale_rows", mutates_args=())
def scale_rows(
    rounded: Tensor, scales: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the rounded tensor times its scales, in a dtype and with the strides it had."""
    rows = rounded.view(scales.numel(), -1)
    made = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    for some in _parts(rows.shape[0], rows.shape[1]):
        made[some] = rows[some].float().mul_(scales[some, None])
    return _of_order(made.view(-1), shape, order)


@scale_rows.register_fake
def _(rounded: Tensor, scales: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _of_order(scales.new_empty([math.prod(shape)], dtype=dtype), shape, order)


def _packed_by_numpy(flat: Tensor) -> Tensor:
    packed = torch.empty([-(-flat.numel() // 8)], dtype=torch.uint8)
    for some in _parts(packed.numel(), 8):
        bits = flat[some.start * 8 : some.stop * 8]
        packed[some] = torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    return packed


def _unpacked_by_numpy(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    flat = torch.empty([count], dtype=dtype)
    for some in _parts(packed.numel(), 8):
        part = flat[some.start * 8 : some.stop * 8]
        bits = np.unpackbits(packed[some].numpy(), count=part.numel(), bitorder="little")
        part.copy_(torch.from_numpy(bits))
    return flat


def _parts(count: int, elements: int) -> Iterator[slice]:
    """Yield slices of `count` rows of so many elements, a limited number of elements at a time."""
    step = max(1, AT_A_TIME // elements)
    yield from (slice(start, min(start + step, count)) for start in range(0, count, step))


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


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...], order: tuple[int, ...]) -> dict[int, int]:
    """Return dimension -> stride, for dimensions of more than one element of a tensor without gaps."""
    strides, step = dict[int, int](), 1
    for dimension in reversed(order):
        if shape[dimension] > 1:
            strides[dimension] = step
        step *= shape[dimension]
    return strides


def lies_in(tensor: Tensor, order: tuple[int, ...]) -> bool:
    """Tell whether a tensor lies in memory in this order of its dimensions, without gaps."""
    strides = tensor.stride()
    return all(strides[place] == stride for place, stride in _strides(tuple(tensor.shape), order).items())


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
