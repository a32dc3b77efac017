"""Uses of a device's memory while a model is trained on it, and the rest, for the peak of a step.

    given       parameters, buffers and inputs that the step reads
    state       the optimizer's state
    the larger of
      peak        of forward and backward, which `mem` limits: activations, temporaries and the new gradients
      stepping    gradients, and what the optimizer allocates during its step

Gradients exist in both phases, and are counted once in each. With gradient accumulation, the gradients of
earlier micro-batches are needed in addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn

from fxremat.budget import AUTO_MARGIN
from fxremat.cost.devices import Device
from fxremat.cost.optimizer_memory import memory_of_optimizer
from fxremat.graphs.accounting import rounded
from fxremat.graphs.captured import Captured, inputs_of
from fxremat.graphs.names import parameter_of
from fxremat.ops.parameters import ELEMENTWISE
from fxremat.step.step_graph import Origin
from fxremat.torch_private import fake_mode
from fxremat.units import format_bytes

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **{kind.__name__.lower(): (kind, {}) for kind in ELEMENTWISE},
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
}
"""Optimizers that users can name: the class, and the settings on which the size of its state depends."""

USUAL = "adamw"  # the optimizer that is assumed if none is named


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Uses of a device's memory in training, in bytes."""

    device: Device
    optimizer: str  # the name of the optimizer, for messages
    given: int  # bytes of parameters, buffers and inputs that the step reads
    state: int = 0  # bytes of the optimizer's state
    stepping: int = 0  # bytes of gradients and temporaries during the optimizer's step

    @property
    def total(self) -> int:
        """Bytes of memory of the device; a very large number if that is not stated."""
        return 2**62 if self.device.memory is None else self.device.memory

    @property
    def margin(self) -> int:
        """Bytes reserved for driver, CUDA context and fragmentation."""
        return int(AUTO_MARGIN * self.total)

    @property
    def free(self) -> int:
        """Bytes left for the peak of a step; negative if the device is too small."""
        return self.total - self.given - self.state

    @property
    def auto(self) -> int:
        """The budget in bytes that mem="auto" means on this device."""
        return self.free - self.margin

    def left(self, peak: int) -> int:
        """Return the bytes left free by a step with this peak in bytes; negative if the device is too small."""
        return self.free - max(peak, self.stepping)

    def fits(self, peak: int) -> str:
        """Say in a few words whether a step with this peak fits; "?" if the device's memory is not stated."""
        if self.device.memory is None:
            return "?"
        left = self.left(peak)
        return f"{format_bytes(left)} left" if left >= 0 else f"no: {format_bytes(-left)} over"

    def __str__(self) -> str:
        """Return a phrase for messages that names what else occupies the device's memory."""
        return (
            f"{format_bytes(self.given)} of parameters, buffers and inputs, and {format_bytes(self.state)} of "
            f"optimizer state ({self.optimizer})"
        )

    def shortage(self, least: int) -> str:
        """Explain, for an error message, why mem="auto" fails for a step whose least budget is `least` bytes."""
        return (
            f"{self.device} has {format_bytes(self.total)}: {self}, and {format_bytes(self.margin)} for driver, "
            f"context and fragments leave {format_bytes(max(0, self.auto))}, and the step takes {format_bytes(least)} "
            "at least"
        )

    def facts(self, *, budget: int, peak: int, least: int) -> Iterator[tuple[str, str]]:
        """Yield what a plan prints about this device, as (label, text).

        Args:
            budget: bytes.
            peak: the plan's peak in bytes.
            least: the least budget that works, in bytes.
        """
        yield "memory", format_bytes(self.total)
        yield "held", str(self)
        if budget > self.total:
            yield "budget", f"{format_bytes(budget)} is {format_bytes(budget - self.total)} more than the device has"
        elif budget > self.free:
            yield "budget", f"{format_bytes(budget)} is more than the {format_bytes(max(0, self.free))} left for a step"
        if self.stepping > peak:
            yield "update", f"{format_bytes(self.stepping)} of gradients and temporaries while the optimizer steps"
        yield "fits", self._answer(peak, least)

    def _answer(self, peak: int, least: int) -> str:
        """Say whether the planned peak fits, and if not, whether a lower one would."""
        left, at_least = self.left(peak), self.left(least)
        if left >= self.margin:
            return f"yes: {format_bytes(left)} left beside the planned {format_bytes(peak)}"
        if left >= 0:
            needed = f"driver, context and fragments may take {format_bytes(self.margin)}"
            return f"hardly: {format_bytes(left)} left beside the planned {format_bytes(peak)}, and {needed}"
        if at_least >= 0:
            return (
                f"not the planned {format_bytes(peak)}, which is {format_bytes(-left)} over; but a budget of up to "
                f'{format_bytes(self.free)} does, and the least is {format_bytes(least)}; "auto" is what is left'
            )
        return f"no: {format_bytes(-at_least)} over, even with the least budget of {format_bytes(least)}"


def memory_on(device: Device, joint: Captured, optimizer: torch.optim.Optimizer | str | None) -> DeviceMemory:
    """Return what a device's memory is used for while it trains the parameters of a joint graph.

    If the step updates its weights itself, weights, gradients and optimizer state are part of its peak, and not
    counted here.

    Args:
        optimizer: the optimizer of these parameters, or a name in `OPTIMIZERS`; None: `USUAL` is assumed.
    """
    block = device.torch_device
    placeholders = (v for v in joint.values if v.origin is Origin.PRIMAL and joint.shown[v.index].op == "placeholder")
    given = sum(rounded(value.bytes, block) for value in placeholders if value.index not in joint.updates_of)
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__ if optimizer else ""
    if joint.updates_of:
        return DeviceMemory(device=device, optimizer=f"{name}'s is in the peak", given=given)
    trained = _trained(joint)
    held = memory_of_optimizer(_optimizer_of(trained, optimizer), partial(rounded, device=block), foreach=True)
    gradients = sum(rounded(node.meta["val"].numel() * node.meta["val"].element_size(), block) for node in trained)
    return DeviceMemory(
        device=device,
        optimizer=name or f"{OPTIMIZERS[USUAL][0].__name__}, assumed",
        given=given,
        state=held.state,
        stepping=gradients + held.update,
    )


def _trained(joint: Captured) -> list[fx.Node]:
    """Return the parameters that get a gradient; if none has a name, all inputs that get one."""
    pairs = zip(inputs_of(joint), joint.backward_outputs, strict=False)
    found = [node for node, gradient in pairs if isinstance(gradient, fx.Node)]
    return [node for node in found if parameter_of(node)] or found


def _optimizer_of(
    trained: Iterable[fx.Node], optimizer: torch.optim.Optimizer | str | None
) -> torch.optim.Optimizer:
    """Return the optimizer, or one of this name of parameters like the trained ones, without data."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    kind, settings = OPTIMIZERS[(optimizer or USUAL).lower()]
    with fake_mode():
        alike = [nn.Parameter(torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)) for node in trained]
        return cast(Any, kind)(alike or [nn.Parameter(torch.empty(0))], **settings)  # type: ignore[no-any-return]
