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

import math
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn

from fxremat.budget import AUTO_MARGIN
from fxremat.cost.devices import Device
from fxremat.cost.optimizer_memory import OptimizerMemory, Rounding, memory_of_optimizer
from fxremat.errors import BudgetTooSmall
from fxremat.graphs.accounting import rounded
from fxremat.graphs.captured import Captured, inputs_of
from fxremat.graphs.names import parameter_of
from fxremat.graphs.nodes import storage_bytes
from fxremat.ops.parameters import ELEMENTWISE
from fxremat.step.step_graph import Origin
from fxremat.torch_private import fake_mode, storage_of
from fxremat.units import format_bytes

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **{kind.__name__.lower(): (kind, {}) for kind in ELEMENTWISE},
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
}
"""Optimizers that users can name: the class, and the settings on which the size of its state depends."""

CONTEXT = 768 * 2**20  # bytes of the CUDA context, its kernels and libraries: 767 MiB on an H200 with torch 2.11
SLACK = 400  # device_mem over this is left unused, so that inputs may grow a little
USUAL = "adamw"  # the optimizer that is assumed if none is named


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Uses of a device's memory in training, in bytes."""

    device: Device
    optimizer: str  # the name of the optimizer, for messages
    given: int  # bytes of parameters, buffers and inputs that the step reads
    state: int = 0  # bytes of the optimizer's state
    stepping: int = 0  # bytes of gradients and temporaries during the optimizer's step
    waiting: int = 0  # bytes of gradients that are there when a step begins
    # bytes for driver, CUDA context and fragmentation; None: `AUTO_MARGIN` of the device's memory
    apart: int | None = None

    @property
    def total(self) -> int:
        """Bytes of memory of the device; a very large number if that is not stated."""
        return 2**62 if self.device.memory is None else self.device.memory

    @property
    def margin(self) -> int:
        """Bytes reserved for driver, CUDA context and fragmentation."""
        return int(AUTO_MARGIN * self.total) if self.apart is None else self.apart

    @property
    def free(self) -> int:
        """Bytes left for the peak of a step; negative if the device is too small."""
        return self.total - self.given - self.state - self.waiting

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
        waiting = f", {format_bytes(self.waiting)} of gradients that wait" if self.waiting else ""
        return (
            f"{format_bytes(self.given)} of parameters, buffers and inputs{waiting}, and {format_bytes(self.state)} of "
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
            apart = f" and {format_bytes(self.margin)} for driver, context and fragments" if self.margin else ""
            return f"yes: {format_bytes(left - self.margin)} left beside the planned {format_bytes(peak)}{apart}"
        if left >= 0:
            needed = f"driver, context and fragments may take {format_bytes(self.margin)}"
            return f"hardly: {format_bytes(left)} left beside the planned {format_bytes(peak)}, and {needed}"
        if at_least >= 0:
            return (
                f"not the planned {format_bytes(peak)}, which is {format_bytes(-left)} over; but a budget of up to "
                f'{format_bytes(self.free)} does, and the least is {format_bytes(least)}; "auto" is what is left'
            )
        return f"no: {format_bytes(-at_least)} over, even with the least budget of {format_bytes(least)}"


@dataclass(frozen=True, kw_only=True)
class Division:
    """A division of `device_mem` in bytes: a step, and what the process has on the device all the time."""

    memory: DeviceMemory
    # divides again, with other values of the arguments of `divided`
    again: Callable[..., Division] = field(repr=False, compare=False)
    slack: int = 0  # bytes that are left unused

    @property
    def left(self) -> int:
        """The bytes that are left for a step; negative if there are none."""
        return self.memory.auto - self.slack

    @property
    def for_update(self) -> int:
        """The bytes of the device that are needed while the optimizer steps."""
        memory = self.memory
        return memory.given + memory.state + memory.stepping + memory.margin

    @property
    def budget(self) -> int:
        """The bytes that a step may take; 1, in which none fits, if the optimizer's update does not fit either."""
        return max(1, self.left) if self.for_update <= self.memory.total else 1

    def explained(self, error: BudgetTooSmall) -> BudgetTooSmall:
        """Return the error with the numbers of the whole device instead of those of a step."""
        total, memory = self.memory.total, self.memory
        if error.budget == total:
            return error  # it is explained already
        missing = error.minimum - self.left  # of more memory a part is set apart, too
        for_step = total + math.ceil(missing * (1.02 + AUTO_MARGIN if memory.device.cuda else 1.02))
        if self.for_update > for_step:
            update = f"{format_bytes(memory.stepping)} of gradients and temporaries while the optimizer steps"
            return BudgetTooSmall(self.for_update, total, note=f"device_mem is for {memory}, and {update}")
        return BudgetTooSmall(for_step, total, note=memory.shortage(error.minimum), reason=error.reason)

    def of(self, joint: Captured) -> Division:
        """Return the division for a captured step, which tells what gets a gradient."""
        found = self.again(untrained=_AllBut(frozenset(parameter_of(node) or "" for node in _trained(joint))))
        return replace(found, slack=self.slack, again=self.again)

    def of_other(self, total: int, optimizer: torch.optim.Optimizer | str | None) -> Division:
        """Return the division of another `device_mem`, in bytes, or with the state of another optimizer."""
        return replace(self.again(total=total, optimizer=optimizer), slack=total // SLACK)


@dataclass(frozen=True)
class _AllBut:
    """All names except for some."""

    names: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name not in self.names


def divided(
    total: int,
    device: Device,
    model: nn.Module,
    inputs: int,
    optimizer: torch.optim.Optimizer | str | None,
    *,
    hosted: bool,
    untrained: Container[str] = frozenset(),
) -> Division:
    """Divide the bytes that a training process may have on a device among a step and what is there besides.

    On CUDA the context and the allocator's reserve are estimated (`CONTEXT`, `AUTO_MARGIN`).

    Args:
        inputs: the bytes of the call's inputs.
        hosted: the optimizer's parameters and state are part of the step, which moves them from and to the host.
        untrained: names of parameters that get no gradient, though they could.
    """
    memory = replace(
        memory_of(model, inputs, device, optimizer, hosted=hosted, untrained=untrained),
        device=replace(device, name="device_mem", memory=total),
        apart=math.ceil(total - (total - CONTEXT) / (1 + AUTO_MARGIN)) if device.cuda else 0,
    )
    # a division keeps neither the model nor the optimizer alive
    its = optimizer if isinstance(optimizer, str | None) else weakref.ref(optimizer)
    given: dict[str, Any] = {"total": total, "device": device, "inputs": inputs, "hosted": hosted}
    return Division(memory=memory, again=partial(_divided_again, weakref.ref(model), optimizer=its, **given))


def memory_of(
    model: nn.Module,
    inputs: int,
    device: Device,
    optimizer: torch.optim.Optimizer | str | None,
    *,
    hosted: bool = False,
    untrained: Container[str] = frozenset(),
) -> DeviceMemory:
    """Return what a device's memory is used for while it trains a model, as far as the model itself tells.

    Args:
        inputs, optimizer, hosted, untrained: as those of `divided`.
    """
    rounding = partial(rounded, device=device.torch_device)
    own = _parameters_of(optimizer) if hosted and isinstance(optimizer, torch.optim.Optimizer) else set()
    named = {name: p for name, p in model.named_parameters() if id(p) not in own}
    trained = [p for name, p in named.items() if p.requires_grad and name not in untrained]
    name = _name_of(optimizer)
    held, gradients = OptimizerMemory(state=0, update=0), 0
    if not hosted:
        idle = {id(p) for name, p in named.items() if name in untrained}
        held = memory_of_optimizer(
            _optimizer_for(trained, optimizer), rounding, cuda=device.cuda, untrained=idle
        )
        gradients = _bytes(trained, rounding)
    return DeviceMemory(
        device=device,
        optimizer=f"{name}'s is in the peak" if hosted else name,
        given=_bytes([*named.values(), *model.buffers()], rounding) + inputs,
        state=held.state,
        stepping=gradients + held.update,
        waiting=_bytes([p.grad for p in named.values() if p.grad is not None], rounding),
    )


def _divided_again(
    model: weakref.ref[nn.Module],
    *,
    optimizer: weakref.ref[torch.optim.Optimizer] | torch.optim.Optimizer | str | None,
    **given: Any,
) -> Division:
    there, its = model(), optimizer() if isinstance(optimizer, weakref.ref) else optimizer
    assert there is not None
    return divided(model=there, optimizer=its, **given)


def bytes_of_inputs(inputs: Iterable[object], device: Device) -> int:
    """Return the bytes that a call's inputs take on the device; what is no tensor takes none."""
    return _bytes([x for x in inputs if isinstance(x, torch.Tensor)], partial(rounded, device=device.torch_device))


def _name_of(optimizer: torch.optim.Optimizer | str | None) -> str:
    """Return an optimizer's name for messages; of None that of the one that is assumed."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__
    if optimizer is None:
        return f"{_name_of(USUAL)}, assumed"
    kind, settings = OPTIMIZERS[optimizer.lower()]
    return ", ".join([kind.__name__, *(f"{name}={value}" for name, value in settings.items())])


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _bytes(tensors: Iterable[torch.Tensor], rounding: Rounding) -> int:
    """Return the bytes of the storages of tensors; a storage that several share counts once."""
    sizes = {storage_of(tensor): storage_bytes(tensor) for tensor in tensors}
    return sum(map(rounding, sizes.values()))


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
    name = _name_of(optimizer)
    if joint.updates_of:
        return DeviceMemory(device=device, optimizer=f"{name}'s is in the peak", given=given)
    trained = _trained(joint)
    alike = [node.meta["val"] for node in trained]
    held = memory_of_optimizer(_optimizer_for(alike, optimizer), partial(rounded, device=block), cuda=True)
    gradients = sum(rounded(tensor.numel() * tensor.element_size(), block) for tensor in alike)
    return DeviceMemory(
        device=device,
        optimizer=name,
        given=given,
        state=held.state,
        stepping=gradients + held.update,
    )


def _trained(joint: Captured) -> list[fx.Node]:
    """Return the parameters that get a gradient; if none has a name, all inputs that get one."""
    pairs = zip(inputs_of(joint), joint.backward_outputs, strict=False)
    found = [node for node, gradient in pairs if isinstance(gradient, fx.Node)]
    return [node for node in found if parameter_of(node)] or found


def _optimizer_for(
    trained: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | str | None
) -> torch.optim.Optimizer:
    """Return the optimizer, or one of this name of parameters like these, without data."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    kind, settings = OPTIMIZERS[(optimizer or USUAL).lower()]
    with fake_mode():
        alike = [nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype)) for tensor in trained]
        return cast(Any, kind)(alike or [nn.Parameter(torch.empty(0))], **settings)  # type: ignore[no-any-return]
