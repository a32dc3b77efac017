"""Keys of ops: texts that are equal for ops of equal cost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fxremat.graphs.collectives import is_collective, without_group_names
from fxremat.graphs.nodes import attribute, is_number
from fxremat.graphs.overwriting import called


def op_key(node: fx.Node, *, fresh: bool = False) -> str:
    """Return text that is equal for ops of equal cost: the op, its constants, and the layout of each tensor it reads.

    Args:
        fresh: the op allocates a new result although it might overwrite an operand.

    A layout includes the device, and the size of the storage if a tensor is only a part of it, since some ops
    copy all of it. A subgraph (the score function of flex attention) is represented by a digest of its code.
    """
    target, args, kwargs = called(node, fresh=fresh)
    args = without_group_names(node) if is_collective(node) else args
    arguments = ", ".join(_describe(argument) for argument in (*args, *_sorted(kwargs)))
    return f"{_named(target)}({arguments})"


def _named(target: object) -> str:
    """Return a name of the function that a node calls, the same in every process."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, FunctionType) else str(target)


def _sorted(options: Mapping[str, Any]) -> Iterator[Any]:
    for name in sorted(options):
        yield (name, options[name])


def _describe(argument: object) -> str:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, tuple | list):
            return f"({', '.join(_layout(item) for item in value)})"
        if value is None and argument.op == "get_attr":
            return _subgraph(attribute(argument))
        return _layout(value)
    if isinstance(argument, tuple | list):
        return f"({', '.join(_describe(item) for item in argument)})"
    return repr(argument)


def _subgraph(value: object) -> str:
    if not isinstance(value, fx.GraphModule):
        return type(value).__name__
    return f"graph {hashlib.sha256(str(value.graph).encode()).hexdigest()[:16]}"


def _layout(value: object) -> str:
    if is_number(value):
        return type(value).__name__
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    shape = "x".join(map(str, value.shape))
    if value.layout is not torch.strided:
        return f"{dtype}[{shape}|{value.layout}]"
    stride = "x".join(map(str, value.stride()))
    whole = value.untyped_storage().nbytes()
    part = f" of {whole} bytes" if whole != value.nbytes else ""
    flags = ("^" if value.is_conj() else "") + ("-" if value.is_neg() else "")
    device = "" if value.device.type == "cpu" else f" {value.device.type}"
    return f"{flags}{dtype}[{shape}|{stride}{part}]{device}"
