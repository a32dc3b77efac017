"""Memory of an optimizer: what it keeps for each parameter, and what an update allocates.

The optimizer itself takes two steps on fake tensors, one of each shape and type of the model's parameters, and all
that it allocates is counted. So nothing is computed, and the sizes are its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxremat.errors import FxrematError
from fxremat.torch_private import fake_mode

Rounding = Callable[[int], int]  # the bytes that the device's allocator counts for a tensor of so many bytes
Optimizers = list[torch.optim.Optimizer]

CODE = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-5)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)",
    "adafactor": "torch.optim.Adafactor(model.parameters(), lr=1e-3)",
    "muon": "torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-5, fused=True)",
}
"""The lines that make the optimizers whose memory is counted; Muon updates matrices, and AdamW all else."""


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """The bytes of an optimizer on the device."""

    state: int
    update: int  # what an update allocates on top of weights, gradients and state


def memory_of(name: str, trained: Mapping[str, Tensor], rounding: Rounding) -> OptimizerMemory:
    """Return what an optimizer allocates for these parameters, by name; they need no data.

    Raises:
        FxrematError: the library of the optimizer is missing.
    """
    kinds: dict[tuple[Any, ...], int] = {}
    for parameter, tensor in trained.items():
        kind = (tuple(tensor.shape), tensor.dtype, name == "muon" and _is_table(parameter))
        kinds[kind] = kinds.get(kind, 0) + 1
    if name == "adamw8bit":
        return _of_bitsandbytes(kinds, rounding)
    state = update = 0
    with fake_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optimizers that tell of their own future
        for (shape, dtype, table), count in kinds.items():
            one, its_update = _of_one(_MAKERS[name], shape, dtype, table, rounding)
            state += count * one
            update = max(update, its_update)  # parameters are updated one after the other, or without temporaries
    return OptimizerMemory(state=state, update=update)


def _of_one(
    make: Callable[[Sequence[nn.Parameter], bool], Optimizers],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    table: bool,
    rounding: Rounding,
) -> tuple[int, int]:
    """Return the bytes of state and of an update for a parameter of this shape."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizers = make([parameter], table)
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
        for key, tensor in of.items()
        if isinstance(tensor, Tensor) and not (key == "step" and not _on_device(optimizer))
    }
    return sum(state.values()), meter.peak


def _on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the count of steps is a tensor on the parameter's device: where it is not, it stays on the host."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _of_bitsandbytes(kinds: Mapping[tuple[Any, ...], int], rounding: Rounding) -> OptimizerMemory:
    """Return the memory of AdamW8bit, whose kernels update in place; its tables of values are shared."""
    try:
        from bitsandbytes import optim
    except ImportError:
        raise FxrematError('optimizer="adamw8bit" needs bitsandbytes: pip install bitsandbytes') from None
    optimizer: Any = optim.AdamW8bit([nn.Parameter(torch.zeros(1))])  # type: ignore[attr-defined,no-untyped-call,unused-ignore]
    state, shared = 0, dict[str, int]()
    with fake_mode():
        for (shape, dtype, _), count in kinds.items():
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            parameter.grad = torch.zeros(shape, dtype=dtype)
            optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
            for key, tensor in optimizer.state[parameter].items():
                if isinstance(tensor, Tensor) and key.startswith("qmap"):
                    shared[key] = rounding(tensor.nbytes)
                elif isinstance(tensor, Tensor):
                    state += count * rounding(tensor.nbytes)
    return OptimizerMemory(state=state + sum(shared.values()), update=0)


class _Meter(TorchDispatchMode):
    """A count of the bytes that ops allocate, and of their largest sum at a time."""

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounding, self._alive, self.peak = rounding, dict[int, tuple[StorageWeakRef, int]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # the count of steps, which fake tensors do not have
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), self._rounding(storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def _muon(parameters: Sequence[nn.Parameter], table: bool) -> Optimizers:
    matrices = [p for p in parameters if p.dim() == 2 and not table]
    others = [p for p in parameters if p.dim() != 2 or table]
    muon: Optimizers = [torch.optim.Muon(matrices)] if matrices else []
    return [*muon, *([torch.optim.AdamW(others, fused=True)] if others else [])]


_MAKERS: dict[str, Callable[[Sequence[nn.Parameter], bool], Optimizers]] = {
    "adamw": lambda parameters, _: [torch.optim.AdamW(parameters, fused=True)],
    "sgd": lambda parameters, _: [torch.optim.SGD(parameters, fused=True)],
    "adafactor": lambda parameters, _: [torch.optim.Adafactor(parameters)],
    "muon": _muon,
}
"""Functions that make the optimizers of some parameters; they are told whether these are tables of vectors."""


def _is_table(name: str) -> bool:
    """Tell whether a parameter is an embedding or a head, which Muon does not update, by its name."""
    return any(part in name for part in ("embed", "wte", "wpe", "lm_head"))


def bytes_of(tensors: Iterable[Tensor], rounding: Rounding) -> int:
    """Return the bytes of tensors on the device; tied ones count once."""
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(rounding(tensor.numel() * tensor.element_size()) for tensor in distinct)
