"""A call of an op that overwrites its operand only if a new result would have the operand's layout.

A graph for fixed sizes is measured on real values before it runs, and ops whose layouts disagree allocate new
results (`cost.measure`). A graph for all sizes meets layouts that were not measured, so each call checks its
own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import accumulate, islice
from operator import mul
from typing import Any, NamedTuple

import torch

from fxremat.graphs.overwriting import overwriting


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, argument: Any) -> Any:
        """Return the layout (shape, strides, dtype) of a tensor, and any other argument unchanged."""
        if not isinstance(argument, torch.Tensor):
            return argument
        return cls(argument.shape, argument.stride(), argument.dtype)


def overwrite_where_alike(target: Any, place: int, *args: Any, **kwargs: Any) -> Any:
    """Run an op so that it overwrites an operand, if a new result would have its layout; else run it as captured.

    Args:
        place: the index of the operand in `args`.
    """
    operand: torch.Tensor = args[place]
    alone = operand.untyped_storage().nbytes() == operand.nbytes
    if alone and _result_lies_as(operand, target, place, args, kwargs):
        target, args, kwargs = overwriting(target, place, args, kwargs)
    return target(*args, **kwargs)


def _result_lies_as(operand: torch.Tensor, target: Any, place: int, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a new result would have the layout of the operand.

    A pointwise op gives what is contiguous the strides of `torch.empty`, also where a size is 1 and any would do.
    """
    layouts = tuple(map(_Layout.of, args))
    if operand.is_contiguous():
        strides = accumulate((max(1, size) for size in operand.shape[:0:-1]), mul, initial=1)
        if operand.stride()[::-1] != (*islice(strides, operand.dim()),):
            return False
        if {each for each in layouts if isinstance(each, _Layout)} == {layouts[place]}:
            return True
    return _alike(target, place, layouts, tuple(kwargs.items()))


@functools.lru_cache(maxsize=4096)
def _alike(target: Any, place: int, args: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> bool:
    """Tell, by meta tensors, whether a new result would have the layout of the operand to overwrite."""
    made = [
        torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="meta") if isinstance(a, _Layout) else a
        for a in args
    ]
    return bool(_Layout.of(target(*made, **dict(options))) == args[place])
