"""The state of generators and autocast at a call of a captured graph, for running it again as plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fxremat.ops.random import GeneratorStates


class CallState:
    """The current state of random generators and of autocast, on the CPU and on the devices of these tensors.

    Args:
        draws: whether the call draws random numbers; only then generators are read, which takes some microseconds.
    """

    def __init__(self, tensors: Iterable[Tensor], *, draws: bool = True) -> None:
        tensors = list(tensors)
        self._random = GeneratorStates(tensors) if draws else None
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in sorted({tensor.device.type for tensor in tensors})
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this state within the context, with gradients enabled; afterwards all is as before."""
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            if self._random is not None:
                stack.enter_context(self._random.replayed())
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield
