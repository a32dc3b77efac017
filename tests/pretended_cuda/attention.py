"""cuDNN's attention as far as its memory goes: its graphs run inside of cuDNN, of which there is nothing here.

Sizes and layouts are those that torch allocates in aten/src/ATen/native/cudnn/MHA.cpp. What the backward needs besides
is not known without cuDNN: a float32 sum of the query's gradient stands for it, which is what flash attention takes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

OFFSETS_OF_A_DRAW = 16  # of the generator's, where attention drops out
_libraries: list[torch.library.Library] = []  # torch forgets the kernels with their library


def register() -> None:
    """Put these functions in the place of torch's kernels."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there are kernels already
        library.impl("_scaled_dot_product_cudnn_attention", forward, "CUDA")
        library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CUDA")
    _libraries.append(library)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    with_sums: bool,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Allocate output, log-sums and two seeds; a dropout moves the generator on."""
    *outer, rows, _ = query.shape
    sums = torch.empty((*outer, rows, 1), dtype=torch.float32, device=query.device)
    seed, offset = (torch.empty((), dtype=torch.long, device=query.device) for _ in range(2))
    if dropout:
        generator = torch.cuda.default_generators[query.device.index]
        generator.set_offset(generator.get_offset() + OFFSETS_OF_A_DRAW)
    output = _laid_out_as(query, (*outer, rows, value.shape[-1]))
    return output, sums, Tensor(), Tensor(), rows, key.shape[-2], seed, offset, Tensor()


def backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Allocate the three gradients, and meanwhile a sum in float32."""
    _sums = torch.empty(query.numel(), dtype=torch.float32, device=query.device)
    return tuple(_laid_out_as(tensor, tuple(tensor.shape)) for tensor in (query, key, value))


def _laid_out_as(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """New memory whose dimensions lie in the order of a tensor's."""
    order = sorted(range(len(shape)), key=tensor.stride, reverse=True)
    strides = [math.prod(shape[inner] for inner in order[order.index(d) + 1 :]) for d in range(len(shape))]
    return torch.empty_strided(tuple(shape), strides, dtype=tensor.dtype, device=tensor.device)
