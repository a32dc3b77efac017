"""Memory of the optimizers that `fxremat fits` knows by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxremat.cost.optimizer_memory import OptimizerMemory, Optimizers, Rounding, memory_of_one
from fxremat.errors import FxrematError
from fxremat.torch_private import fake_mode

CODE = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-5)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)",
    "adafactor": "torch.optim.Adafactor(model.parameters(), lr=1e-3)",
    "muon": "torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-5, fused=True)",
}
"""The lines that make the optimizers whose memory is counted; Muon updates matrices, and AdamW all else."""


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
            one = memory_of_one(partial(_made, name, table), shape, dtype, rounding)
            state += count * one.state
            update = max(update, one.update)  # parameters are updated one after the other, or without temporaries
    return OptimizerMemory(state=state, update=update)


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


def _muon(parameters: Sequence[nn.Parameter], table: bool) -> Optimizers:
    matrices = [p for p in parameters if p.dim() == 2 and not table]
    others = [p for p in parameters if p.dim() != 2 or table]
    muon: Optimizers = [torch.optim.Muon(matrices)] if matrices else []
    return [*muon, *([torch.optim.AdamW(others, fused=True)] if others else [])]


def _made(name: str, table: bool, parameter: nn.Parameter) -> Optimizers:
    return _MAKERS[name]([parameter], table)


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
