"""Steps that run to see what a model does, and leave no trace in its parameters, buffers, gradients and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat.ops.random import GeneratorStates, host_draws_kept
from fxremat.torch_private import version_of

STATISTICS = ("running_mean", "running_var")  # the kernels of BatchNorm write them without a new version
TIMES = 2  # the first step captures the graphs, the second is measured


class Buffers:
    """The present values of a model's buffers.

    Args:
        only: the names of those that are copied; None: of all. Statistics of BatchNorm are copied in any case.
    """

    def __init__(self, model: nn.Module, only: Set[str] | None = None) -> None:
        self._values = [
            (name, buffer, buffer.clone() if only is None or _may_write(name, only) else None, version_of(buffer))
            for name, buffer in model.named_buffers()
        ]

    def written(self) -> set[str]:
        """Return the names of those that have been written to since, or have other values. Compares what was copied."""
        return {
            name
            for name, buffer, before, version in self._values
            if version_of(buffer) != version or not (before is None or torch.equal(buffer, before))
        }

    def restore(self) -> None:
        """Set the buffers that were copied to these values."""
        with torch.no_grad():
            for _, buffer, before, _ in self._values:
                if before is not None:
                    buffer.copy_(before)


def _may_write(name: str, written: Set[str]) -> bool:
    return name in written or name.rpartition(".")[2] in STATISTICS


def try_steps(
    model: nn.Module, module: nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Run forward and backward of a model `TIMES` times, with gradients of one for all outputs.

    Args:
        module: the drop-in of `model`, whose `method` is called.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    states = GeneratorStates([*model.parameters(), *tensors])
    buffers = Buffers(model)
    trained = [tensor for tensor in (*model.parameters(), *tensors) if tensor.requires_grad]
    call: Callable[..., Any] = getattr(module, method)
    try:
        for _ in range(TIMES):
            with states.replayed(), host_draws_kept(), torch.enable_grad():
                _backward(call(*args, **kwargs), trained)
    finally:
        buffers.restore()


def _backward(outputs: Any, trained: Sequence[torch.Tensor]) -> None:
    """Compute gradients of outputs, which are not kept."""
    leaves = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    given = [leaf for leaf in leaves if leaf.requires_grad]
    if given:
        ones = [torch.ones_like(leaf) for leaf in given]
        torch.autograd.grad(given, trained, ones, allow_unused=True)
