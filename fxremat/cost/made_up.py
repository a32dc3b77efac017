"""Made-up data in the layout of fake tensors, for measuring ops without real inputs.

Floating-point values are neither zero nor denormal. Integers are valid indices for the op that reads them if
their limit is known, else zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.graphs.nodes import attribute, is_number
from fxremat.graphs.overwriting import called

aten = torch.ops.aten

PATTERN = 1 << 14  # number of random values; larger tensors repeat them


@dataclass(frozen=True)
class Call:
    """An op's function with its real arguments."""

    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.target(*self.args, **self.kwargs)


def call_of(node: fx.Node, *, fresh: bool = False) -> Call:
    """Return a call of a node's op on made-up tensors in the layouts of the node's inputs.

    Args:
        fresh: True: the call allocates a new result although it might overwrite an operand.
    """
    made: dict[fx.Node, Any] = {}

    def real(parent: fx.Node) -> Any:
        if parent not in made:
            made[parent] = value_like(parent, _index_limit(node))
        return made[parent]

    target, args, kwargs = called(node, fresh=fresh)
    return Call(target, fx.node.map_arg(args, real), fx.node.map_arg(kwargs, real))


def value_like(node: fx.Node, index_limit: int = 1) -> Any:
    """Return made-up data for a node's value: a tensor, a tuple of tensors, or a number.

    For a `get_attr` node the real object is returned.

    Args:
        index_limit: integers are drawn below it.
    """
    value = node.meta.get("val")
    if node.op == "get_attr":
        return attribute(node)
    if isinstance(value, torch.Tensor):
        return tensor_like(value, index_limit)
    if isinstance(value, tuple | list):
        return type(value)(tensor_like(v, index_limit) if isinstance(v, torch.Tensor) else v for v in value)
    return 1 if is_number(value) else value


def tensor_like(tensor: torch.Tensor, index_limit: int = 1) -> torch.Tensor:
    """Return a real tensor with the size, stride, dtype, device and storage size of a fake one.

    Args:
        index_limit: integers are drawn below it.
    """
    if tensor.layout is not torch.strided:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device, layout=tensor.layout)
    size = tensor.element_size()
    count = max(_span(tensor), tensor.untyped_storage().nbytes() // size)
    if count == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    pattern = _pattern(tensor, min(count, PATTERN), index_limit).to(tensor.dtype)
    data = torch.empty(count, dtype=tensor.dtype, device=tensor.device)
    whole = count - count % pattern.numel()
    data[:whole].view(-1, pattern.numel()).copy_(pattern)
    data[whole:].copy_(pattern[: count - whole])
    return data.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements from the storage's start to the last element of the tensor."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((size - 1) * step for size, step in steps)


def _pattern(tensor: torch.Tensor, count: int, index_limit: int) -> torch.Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.rand(count, device=tensor.device) * 0.5 + 0.1
    if tensor.dtype is torch.bool:
        return torch.ones(1, device=tensor.device)
    return torch.randint(max(1, index_limit), (count,), device=tensor.device)


def weights_like(node: fx.Node) -> Any:
    """Return made-up data for a parameter or input, scaled so that activations neither vanish nor explode."""
    value = value_like(node)
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1 and value.numel():
        storage = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        inner = max(1, value.numel() // value.shape[0])
        storage.sub_(0.35).mul_((48 / inner) ** 0.5)  # maps values of 0.1 to 0.6 to mean 0 and variance 1 / inner
    return value


def _index_limit(reader: fx.Node) -> int:
    """Return the limit below which integers are valid inputs of an op; 1, so that all are 0, if it is not known."""
    if reader.target is aten.embedding.default:
        weight = reader.args[0]
        return int(weight.meta["val"].shape[0]) if isinstance(weight, fx.Node) else 1
    if reader.target is aten.embedding_dense_backward.default:
        return int(reader.args[2])  # type: ignore[arg-type]
    return 1
