"""Trial steps, which show what a model does, and then restore its parameters, buffers, gradients and random states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxremat.ops.random import GeneratorStates, devices_of, host_draws_kept
from fxremat.torch_private import version_of

# BatchNorm kernels write these buffers without increasing their version counters
STATISTICS = ("running_mean", "running_var")
TIMES = 2  # two steps are run: the first captures the graphs, the second is measured


class Buffers:
    """A copy of a model's buffers.

    Args:
        only: the names of the buffers to copy; None: all. Running statistics of BatchNorm are always copied.
    """

    def __init__(self, model: nn.Module, only: Set[str] | None = None) -> None:
        self._model = model
        self._values = [
            (name, buffer, buffer.clone() if only is None or _may_write(name, only) else None, version_of(buffer))
            for name, buffer in model.named_buffers()
        ]

    def written(self) -> set[str]:
        """Return the names of the buffers written to since the object was made.

        Writes are found by version counters and, for buffers that were copied, by comparing values.
        """
        return {
            name
            for name, buffer, before, version in self._values
            if version_of(buffer) != version or not (before is None or torch.equal(buffer, before))
        }

    def restore(self) -> None:
        """Put buffers that the model has replaced back, and the copied values into those that were copied."""
        with torch.no_grad():
            for name, buffer, before, _ in self._values:
                owner, _, own = name.rpartition(".")
                self._model.get_submodule(owner)._buffers[own] = buffer
                if before is not None:
                    buffer.copy_(before)


def _may_write(name: str, written: Set[str]) -> bool:
    return name in written or name.rpartition(".")[2] in STATISTICS


def try_steps(
    model: nn.Module, module: nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Run forward and backward of a model `TIMES` times, with gradients of one for all outputs.

    Args:
        module: the compiled form of `model`, whose `method` is called.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    states = GeneratorStates(devices_of([*model.parameters(), *tensors]))
    buffers = Buffers(model)
    trained = [tensor for tensor in (*model.parameters(), *tensors) if tensor.requires_grad]
    call: Callable[..., Any] = getattr(module, method)
    try:
        with _gradients_aside(trained):
            for _ in range(TIMES):
                with states.replayed(), host_draws_kept(), torch.enable_grad():
                    _backward(call(*args, **kwargs), trained)
    finally:
        buffers.restore()


@contextlib.contextmanager
def _gradients_aside(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within this context, `.grad` of these tensors is None, as a budget assumes at the start of a step."""
    aside = [(leaf, leaf.grad) for leaf in tensors if leaf.is_leaf and _may_be_put_back(leaf)]
    for leaf, _ in aside:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in aside:
            leaf.grad = gradient


def _may_be_put_back(leaf: torch.Tensor) -> bool:
    """Tell whether autograd lets `.grad` be assigned as it is; not where the leaf got other data after it was made."""
    gradient = leaf.grad
    seen = [None if x is None else (x.dtype, x.shape, x.device) for x in (leaf, gradient)]
    return gradient is not None and seen[0] == seen[1]


def _backward(outputs: Any, trained: Sequence[torch.Tensor]) -> None:
    """Compute the gradients of the outputs, and discard them."""
    leaves = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    given = [leaf for leaf in leaves if leaf.requires_grad]
    if given:
        ones = [torch.ones_like(leaf) for leaf in given]
        torch.autograd.grad(given, trained, ones, allow_unused=True)
