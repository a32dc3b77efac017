"""The state of generators and autocast at a call of a captured graph, for running it again as plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Set

import torch

from fxremat.ops.random import GeneratorStates


class CallState:
    """The current state of random generators, also of the CPU's, and of autocast, on these devices.

    Args:
        draws: whether the call draws random numbers; only then generators are read, which takes some microseconds.
    """

    def __init__(self, devices: Set[torch.device], *, draws: bool = True) -> None:
        self._random = GeneratorStates(devices) if draws else None
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({device.type for device in devices})
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
