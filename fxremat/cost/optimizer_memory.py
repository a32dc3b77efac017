"""Memory of an optimizer: what it keeps for each parameter, and what an update allocates.

The optimizer itself takes two steps on fake tensors, one of each shape and type of the model's parameters, and all
that it allocates is counted. So nothing is computed, and the sizes are its own.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxremat.torch_private import fake_mode, real_tensors

Rounding = Callable[[int], int]  # the bytes that the device's allocator counts for a tensor of so many bytes
Optimizers = list[torch.optim.Optimizer]
NUMBER = 8  # bytes of one number, such as a count of steps
SAMPLE = 1 << 16  # number of elements of the parameter that is updated to measure updates of all parameters at once


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """The bytes of an optimizer on the device."""

    state: int
    update: int  # what an update allocates on top of weights, gradients and state


_known: dict[tuple[Any, ...], OptimizerMemory] = {}  # what was counted in this process: counts may vary by some bytes
_shares: dict[tuple[Any, ...], float] = {}  # what updates of all parameters at once were measured to allocate
NUMBERS = 16  # bytes of temporary numbers for each parameter, where these are on the device


def memory_of_optimizer(
    optimizer: torch.optim.Optimizer,
    rounding: Rounding,
    *,
    cuda: bool,
    untrained: Container[int] = frozenset(),
) -> OptimizerMemory:
    """Return what an optimizer keeps and allocates for its parameters that are trained; nothing is computed.

    Args:
        untrained: the `id` of parameters that get no gradient, though they could.
        cuda: on a CUDA device: it updates all parameters at once unless it is told otherwise, and counts steps on the
            host.
    """
    state = update = 0
    for group in optimizer.param_groups:
        settings, at_once = _settings(optimizer, group, foreach=cuda)
        trained = (p for p in group["params"] if p.requires_grad and id(p) not in untrained)
        kinds = Counter((tuple(p.shape), p.dtype) for p in trained)
        for (shape, dtype), count in kinds.items():
            key = type(optimizer), repr(settings), shape, dtype, rounding(1), cuda
            if key not in _known:
                with fake_mode(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of optimizers that tell of their own future
                    make = partial(_like, optimizer, settings)
                    _known[key] = memory_of_one(make, shape, dtype, rounding, numbers=not cuda)
            one = _known[key]
            state += count * (one.state + (0 if cuda else NUMBERS))
            if at_once:
                alike = type(optimizer), repr(settings), dtype
                if alike not in _shares:
                    _shares[alike] = _share_at_once(type(optimizer), settings, dtype)
                update += math.ceil(count * rounding(math.prod(shape) * dtype.itemsize) * _shares[alike])
            else:
                update = max(update, one.update)
    return OptimizerMemory(state=state, update=update)


def _settings(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, foreach: bool
) -> tuple[dict[str, Any], bool]:
    """Return the settings of a group that the optimizer's class takes, and whether it updates all parameters at once.
    """
    taken = inspect.signature(type(optimizer).__init__).parameters
    settings = {key: value for key, value in group.items() if key in taken and key != "params"}
    settings = {key: float(value) if isinstance(value, Tensor) else value for key, value in settings.items()}
    at_once = settings.get("foreach")
    if at_once is None:
        at_once = foreach and "foreach" in taken and not settings.get("fused")
    return settings | ({"foreach": False} if "foreach" in taken else {}), bool(at_once)


def _share_at_once(kind: Any, settings: Mapping[str, Any], dtype: torch.dtype) -> float:
    """Return what an update of all parameters at once allocates, over their bytes: measured on a small real one.

    Fake tensors do not know all ops on lists of tensors.
    """
    with real_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameter = nn.Parameter(torch.zeros(SAMPLE, dtype=dtype))
        optimizer = kind([parameter], **{**settings, "foreach": True})
        parameter.grad = torch.zeros(SAMPLE, dtype=dtype)
        optimizer.step()
        meter = _Meter(lambda size: size if size > NUMBER else 0)  # numbers do not grow with the parameters
        with meter:
            optimizer.step()
    return meter.peak / parameter.nbytes


def _like(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: nn.Parameter) -> Optimizers:
    kind: Any = type(optimizer)
    return [kind([parameter], **settings)]


def memory_of_one(
    make: Callable[[nn.Parameter], Optimizers],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rounding: Rounding,
    *,
    numbers: bool = False,
) -> OptimizerMemory:
    """Return the memory of optimizers of one parameter of this shape; they are made and step in the current fake mode.

    Args:
        numbers: counts of steps and the like are on the device in any case, as where that is the host itself.
    """
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizers = make(parameter)
    parameter.grad = torch.zeros(shape, dtype=dtype)
    with _Meter(rounding):
        for optimizer in optimizers:
            optimizer.step()
    meter = _Meter(rounding)
    with meter:
        for optimizer in optimizers:
            optimizer.step()
    state = {
        tensor.untyped_storage()._cdata: rounding(tensor.untyped_storage().nbytes())
        for optimizer in optimizers
        for of in optimizer.state.values()
        for tensor in of.values()
        if isinstance(tensor, Tensor) and (tensor.dim() or numbers or _on_device(optimizer))
    }
    return OptimizerMemory(state=sum(state.values()), update=meter.peak)


def _on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether numbers such as the count of steps are on the parameter's device: if not, they are on the host."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


class _Meter(TorchDispatchMode):
    """A count of the bytes that ops allocate, and of their largest sum at a time."""

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounding, self._alive, self.peak = rounding, dict[int, tuple[StorageWeakRef, int]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.5  # for the count of steps and the like, which fake tensors do not have
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), self._rounding(storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result
