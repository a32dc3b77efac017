"""Weights in 4 bits, as bitsandbytes keeps them for QLoRA (arXiv:2305.14314): NF4 with quantized block statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxremat.errors import FxrematError
from fxremat.fitting.loaded import META, Loaded, needs

BLOCK, OUTER_BLOCK = 64, 256  # weights that share a statistic; statistics that share one of their own
CODE, OUTER_CODE = 16, 256  # values that 4 bits of a weight stand for, and 8 bits of a statistic
COMPUTED = torch.bfloat16  # the dtype in which products are computed
CONFIG = (
    'transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, '
    "bnb_4bit_compute_dtype=torch.bfloat16)"
)
NOTE = "weights in 4 bits: each product is computed with a bfloat16 copy of its weight, as for 1,536 tokens or more"


def in_four_bits(loaded: Loaded) -> Loaded:
    """Return the model with the weights of all linear layers but the head in 4 bits, as transformers loads it.

    Raises:
        FxrematError: bitsandbytes is missing, or the model is not of transformers.
    """
    if loaded.library != "transformers":
        raise FxrematError(f'train="qlora" is for models of transformers, which loads weights in 4 bits; {loaded.name} '
                           "is none")
    model: Any = loaded.model
    layer = _layer_class()
    head = model.get_output_embeddings()
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head]
    if head is None:
        found.pop()  # the last linear layer is kept as it is
    for name, linear in found:
        model.set_submodule(name, layer(linear))
    model.is_loaded_in_4bit = True  # PEFT asks for it
    first, *rest = loaded.code
    code = (f"{first[:-1]}, quantization_config={CONFIG})", *rest)
    return replace(loaded, code=code, notes=(*loaded.notes, NOTE))


@functools.cache
def _layer_class() -> Any:
    """Return the class of a linear layer of bitsandbytes whose weight has no data."""
    try:
        import bitsandbytes
    except ImportError:
        raise needs("bitsandbytes", 'train="qlora"') from None

    class Linear4bit(bitsandbytes.nn.Linear4bit):  # type: ignore[misc]  # PEFT puts its adapters for 4 bits on such
        """A linear layer with the packed weight, and the statistics of its blocks as buffers."""

        def __init__(self, linear: nn.Linear) -> None:
            has_bias = linear.bias is not None
            super().__init__(linear.in_features, linear.out_features, has_bias, COMPUTED, device=META)
            count = linear.weight.numel()
            blocks = -(-count // BLOCK)
            weight: Any = nn.Parameter(_empty((count + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
            weight.compress_statistics, weight.quant_type = True, "nf4"
            self.weight = weight
            self.register_buffer("absmax", _empty(blocks, dtype=torch.uint8))
            self.register_buffer("code", _empty(CODE))
            self.register_buffer("offset", _empty())
            self.register_buffer("outer_absmax", _empty(-(-blocks // OUTER_BLOCK)))
            self.register_buffer("outer_code", _empty(OUTER_CODE))
            if has_bias:
                self.bias = linear.bias

        def forward(self, x: Tensor) -> Tensor:
            """Return x times the weight, which is in bfloat16 for the duration of the product."""
            of_weight = (self.weight, self.absmax, self.outer_absmax, self.outer_code, self.offset)
            y: Tensor = _product(x.to(COMPUTED), (self.out_features, self.in_features), *of_weight)
            return (y if self.bias is None else y + self.bias.to(COMPUTED)).to(x.dtype)

    return Linear4bit


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class _Product(torch.autograd.Function):
    """The product with a weight that forward and backward unpack for themselves; no copy of it is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], *of_weight: Tensor) -> Tensor:
        ctx.shape = shape
        ctx.save_for_backward(*of_weight)
        return x @ _unpacked(shape, *of_weight).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        unpacked = _unpacked(ctx.shape, *ctx.saved_tensors)
        return gradient @ unpacked, None, None, None, None, None, None


_product: Callable[..., Any] = _Product.apply


def _unpacked(
    shape: tuple[int, int], weight: Tensor, absmax: Tensor, outer_absmax: Tensor, outer_code: Tensor, offset: Tensor
) -> Tensor:
    """Return the weight in bfloat16, by the kernels that bitsandbytes runs."""
    ops = torch.ops.bitsandbytes
    statistics = ops.dequantize_blockwise.default(absmax, outer_absmax, outer_code, OUTER_BLOCK, torch.float32) + offset
    unpacked: Tensor = ops.dequantize_4bit.default(weight, statistics, BLOCK, "nf4", list(shape), COMPUTED)
    return unpacked
