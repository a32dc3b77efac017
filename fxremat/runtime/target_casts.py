"""Autocast as CUDA casts, captured on a CPU for plans that are never run.

    single precision    layer_norm, exp, pow, softmax, sum, ...     a CPU leaves their type as it is
    as it is            cross_entropy_loss, quantile, fft, ...      a CPU casts to float32

Autocast of a CPU and of CUDA have lists of ops of their own. Within `casts_of` a forward under
`torch.autocast("cpu")` has CUDA's: results have other types, so a step keeps other bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fxremat.cost.devices import Device
from fxremat.torch_private import autocast_ops, composite_kernels, new_kernels, without_autocast_key

Kernel = Callable[..., Any]


def _names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


LOWER = _names(
    """
    _convolution convolution chain_matmul linalg_multi_dot einsum addmv addr mv gru_cell lstm_cell rnn_relu_cell
    rnn_tanh_cell _thnn_fused_gru_cell _thnn_fused_lstm_cell _scaled_dot_product_flash_attention cudnn_convolution
    cudnn_convolution_transpose _cudnn_rnn
    """
)
"""Ops that CUDA casts to the lower precision, and a CPU does not."""

SINGLE = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor softplus layer_norm native_layer_norm group_norm rms_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim norm.Scalar norm.ScalarOpt_dim cosine_similarity dist pdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
    """
)
"""Ops that CUDA casts to float32, and a CPU does not."""

SINGLE_UNLESS_ASKED = _names(
    """
    softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord
    """
)
"""Ops whose result CUDA makes float32 unless the call names a dtype."""

PROMOTED = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot vdot
    """
)
"""Ops whose tensors CUDA casts to the widest type among them."""


@contextlib.contextmanager
def casts_of(device: Device) -> Iterator[None]:
    """Within this context, let `torch.autocast("cpu")` cast as `torch.autocast("cuda")`, if it is a CUDA device."""
    if not device.cuda:
        yield
        return
    cuda, cpu = autocast_ops("AutocastCUDA"), autocast_ops("AutocastCPU")
    kinds = {LOWER: _lower, SINGLE: _single, SINGLE_UNLESS_ASKED: _single_unless_asked, PROMOTED: _promoted}
    cast = {
        op: kind(op)
        for names, kind in kinds.items()
        for name, op in cuda.items()
        if name in names and name not in cpu
    }
    uncast = {op: _as_it_is(op) for name, op in cpu.items() if name not in cuda}
    with new_kernels(cast, "AutocastCPU"), composite_kernels(uncast, key="AutocastCPU"):
        yield


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if _is_cast(tensor) else tensor, values)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _to(dtype_of: Callable[[Any], torch.dtype], op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of((args, kwargs))
        with without_autocast_key():
            return op(*_cast(args, dtype), **_cast(kwargs, dtype))

    return kernel


def _lower(op: Any) -> Kernel:
    return _to(lambda _: torch.get_autocast_dtype("cpu"), op)


def _single(op: Any) -> Kernel:
    return _to(lambda _: torch.float32, op)


def _promoted(op: Any) -> Kernel:
    def widest(values: Any) -> torch.dtype:
        types: set[torch.dtype] = set()
        tree_map_only(Tensor, lambda tensor: types.add(tensor.dtype), values)
        return torch.float32 if torch.float32 in types else torch.get_autocast_dtype("cpu")

    return _to(widest, op)


def _single_unless_asked(op: Any) -> Kernel:
    place = next(k for k, argument in enumerate(op._schema.arguments) if argument.name == "dtype")

    def kernel(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("dtype") is not None or (len(args) >= place and args[place - 1] is not None)
        if not asked and _is_cast(tensor):
            args, kwargs = args[: place - 1], kwargs | {"dtype": torch.float32}
        with without_autocast_key():
            return op(tensor, *args, **kwargs)

    return kernel


def _as_it_is(op: Any) -> Kernel:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if op.has_kernel_for_dispatch_key(composite):
        return lambda *args, **kwargs: op.decompose(*args, **kwargs)  # autocast goes on for the ops inside

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast_key():
            return op(*args, **kwargs)

    return kernel
