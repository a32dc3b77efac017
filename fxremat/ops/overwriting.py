"""An op that overwrites its operand only where a new result would have the operand's layout.

A graph for one size is measured on real values before it runs, and ops whose layouts disagree are put back
(`cost.measure`). One for every size meets layouts that nobody has seen, so that each call looks for itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from fxremat.step.overwriting import new_result


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, argument: Any) -> Any:
        """The layout of a tensor; any other argument as it is."""
        if not isinstance(argument, torch.Tensor):
            return argument
        return cls(argument.shape, argument.stride(), argument.dtype)


def overwrite_where_alike(target: Any, swapped: bool, *args: Any, **kwargs: Any) -> Any:
    """Run an overwriting op, or the op as it was captured.

    Args:
        target: the overwriting one; its first argument is what it overwrites.
        swapped: whether that came second as captured.
    """
    operand: torch.Tensor = args[0]
    options = tuple(item for item in kwargs.items() if item[0] != "grad_input")
    whole = operand.untyped_storage().nbytes() == operand.nbytes
    if whole and _alike(target, swapped, tuple(map(_Layout.of, args)), options):
        return target(*args, **kwargs)
    captured, args, kwargs = new_result(target, swapped, args, kwargs)
    return captured(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _alike(target: Any, swapped: bool, args: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> bool:
    """Whether a new result would have the layout of the operand that is overwritten; nothing is computed."""
    made = [
        torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="meta") if isinstance(a, _Layout) else a
        for a in args
    ]
    captured, given, rest = new_result(target, swapped, tuple(made), dict(options))
    return bool(_Layout.of(captured(*given, **rest)) == args[0])
