"""Classes of settings, one per feature, that `fxremat.compile` takes as options; they check their values.

    offload=Offload(limit="16GiB")               what may wait on the host
    slices=Slices(max_parts=8)                   which regions run in slices
    backend=Inductor(random="eager")             how regions are compiled
    loss=Loss(bytes="300MB")                     what a loss outside the model allocates
    search=Search(seconds=60)                    how long programs are searched for

A setting is a value: two with the same fields are equal, and nothing in it changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import fx

from fxremat.errors import FxrematError, InvalidBudget
from fxremat.host.tier import HostTier
from fxremat.search.refine import EFFORT
from fxremat.solvers.choose import check_effort, check_slots
from fxremat.torch_inductor import check_settings
from fxremat.units import parse_bytes, shortened

RANDOM = ("inductor", "eager")  # valid values of Inductor(random=...)
GRADIENTS = ("loss", "all")  # valid values of Loss(gradients=...)
# selects ops: a predicate on nodes of the captured graph, or a pattern of module names
Wish = Callable[[fx.Node], bool] | str
MANY_SLICES = 1 << 20  # maximum number of slices of a region if the user sets no limit


class Setting:
    """Base class of the settings; `repr` gives a call that makes the same setting."""

    def __repr__(self) -> str:
        """Return a call with the fields that differ from their defaults."""
        changed = ((f.name, getattr(self, f.name)) for f in fields(self) if f.init)  # type: ignore[arg-type]
        usual = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        given = ", ".join(f"{name}={value!r}" for name, value in changed if value != usual[name])
        return f"{type(self).__name__}({given})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Offload(Setting):
    """What may be stored on the host while the step does not need it: activations, parameters, optimizer state.

    Args:
        tier: where on the host: a tier of `fxremat.host.tier`, such as fxremat.FileTier("/fast/disk"). None: pinned
            memory for a CUDA device, else files.
        limit: bytes that may wait there at a time, in the forms of a size, such as "16GiB". None: as many as the plan
            needs.
        activations: values that the forward computes may wait there.
        weights: parameters and the optimizer's state may live there. `mem` then covers parameters, their gradients and
            the optimizer's state as well, and each backward is a step of `optimizer`. Parameters may start on the CPU
            where all else is on the device.

    Raises:
        FxrematError: a field has a value that it cannot have; or neither activations nor weights may wait.
    """

    tier: HostTier | None = None
    limit: int | str | None = None
    activations: bool = True
    weights: bool = False
    bytes: int | None = field(init=False)  # `limit` in bytes; None: no limit

    def __post_init__(self) -> None:
        if self.tier is not None and not isinstance(self.tier, HostTier):
            raise FxrematError(f"Offload: tier is {shortened(self.tier)}; it is a host tier such as FileTier()")
        _check_bools(self, "activations", "weights")
        if not (self.activations or self.weights):
            raise FxrematError("Offload(activations=False) moves nothing; it goes with weights=True")
        _set(self, "bytes", _size("Offload: limit", self.limit))


@dataclass(frozen=True, kw_only=True, repr=False)
class Slices(Setting):
    """Settings for running groups of ops (a vocabulary head, a wide MLP, a convolutional trunk) in slices of rows.

    Regions are sliced only where that saves memory or costs no time. Gradients that are sums over slices are equal up
    to rounding, no longer bit for bit: docs/slices.md. With slices, a plan holds for inputs of one size only.

    Args:
        max_parts: slices of a region at most, 2 or more. None: as many as the budget needs.
        reduce_dtype: the type in which gradients of half precision are summed over slices: torch.float32, or "same" for
            the type of the gradient. None: float32 where that fits into the budget.
        drop_outputs: return large tensors that only feed the loss, such as logits, as NaN of the same shape that takes
            no memory.

    Raises:
        FxrematError: a field has a value that it cannot have.
    """

    max_parts: int | None = None
    reduce_dtype: torch.dtype | str | None = None
    drop_outputs: bool = False

    def __post_init__(self) -> None:
        parts = self.max_parts
        if parts is not None and not (isinstance(parts, int) and not isinstance(parts, bool) and parts > 1):
            raise FxrematError(f"Slices: max_parts is {shortened(parts)}; it is None, or 2 or more")
        if self.reduce_dtype not in (None, "same", torch.float32):
            raise FxrematError(
                f'Slices: reduce_dtype is {shortened(self.reduce_dtype)}; it is None, torch.float32 or "same"'
            )
        _check_bools(self, "drop_outputs")

    @property
    def most(self) -> int:
        """Maximum number of slices of a region."""
        return MANY_SLICES if self.max_parts is None else self.max_parts


@dataclass(frozen=True, kw_only=True, repr=False)
class Inductor(Setting):
    """Settings for compiling groups of ops of the planned step with Inductor; each compiled group is measured.

    Gradients are those of torch.compile up to rounding: docs/kernels.md. Sizes of inputs are fixed then.

    Args:
        random: whose dropout masks are drawn: "inductor", those of torch.compile, made again from a seed where they
            are recomputed; or "eager", those of eager PyTorch. None: "inductor" on CUDA, where drawing them in a
            compiled region costs nothing, else "eager".
        config: patches of `torch._inductor.config` by name.

    Raises:
        FxrematError: a field has a value that it cannot have, or Inductor has no such setting.
    """

    random: str | None = None
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.random is not None and self.random not in RANDOM:
            raise FxrematError(
                f"Inductor: random is {shortened(self.random)}; it is None or one of {', '.join(RANDOM)}"
            )
        if self.config is not None and not isinstance(self.config, Mapping):
            raise FxrematError(
                f"Inductor: config is {shortened(self.config)}; it is settings of torch._inductor.config by name"
            )
        check_settings(self.config or {})

    def draws_from_seeds(self, *, in_triton: bool) -> bool:
        """Tell whether dropout masks are generated from seeds that are part of the graph, as torch.compile does it.

        If `in_triton`, Inductor compiles for this device with Triton, and seeds are the default.
        """
        return (self.random or ("inductor" if in_triton else "eager")) == "inductor"


@dataclass(frozen=True, kw_only=True, repr=False)
class Loss(Setting):
    """What fxremat cannot see of a loss: its memory if it is outside the model, and which outputs get gradients.

    Args:
        bytes: what a loss outside the model allocates between forward and backward, in the forms of a size. None:
            nothing where the model returns its loss; else four times the bytes of its outputs, five times those of an
            fp32 copy in half precision. On CUDA the first step measures it, and the next is planned for that.
        gradients: which outputs of a model that returns its loss take a gradient: "loss", it alone; if another one
            comes after all, that step runs as plain PyTorch, outside of the budget, and the next is planned for it.
            "all": every output, from the start.

    Raises:
        FxrematError: a field has a value that it cannot have.
    """

    bytes: int | str | None = None
    gradients: str = "loss"
    size: int | None = field(init=False)  # `bytes` as a number; None: not given

    def __post_init__(self) -> None:
        if self.gradients not in GRADIENTS:
            raise FxrematError(
                f"Loss: gradients is {shortened(self.gradients)}; it is one of {', '.join(GRADIENTS)}"
            )
        _set(self, "size", _size("Loss: bytes", self.bytes))


@dataclass(frozen=True, kw_only=True, repr=False)
class Search(Setting):
    """Limits of the search for plans.

    Args:
        seconds: time for solver="auto" to improve schedules of blocks op by op, if it did so for all budgets. It stops
            at the budget that was asked for, so that it usually takes less. 0: schedules are not improved.
        slots: number of memory levels in the dynamic programs, from 1 to 100,000.
        progress: show bars while ops are measured and programs improved, where stderr is a terminal.

    Raises:
        FxrematError: a field has a value that it cannot have.
    """

    seconds: float = EFFORT
    slots: int = 500
    progress: bool = True

    def __post_init__(self) -> None:
        check_effort(self.seconds, "Search: seconds")
        if math.isinf(seconds := float(self.seconds)):
            raise FxrematError(
                f"Search: seconds is {self.seconds!r}; it is a finite number of seconds, such as 60"
            )
        _set(self, "seconds", seconds)
        _set(self, "slots", check_slots(self.slots))
        _check_bools(self, "progress")


def check_wishes(name: str, wishes: Sequence[object]) -> None:
    """Raise `FxrematError` unless each of `wishes` is a pattern of module names or a predicate on nodes."""
    for wish in wishes:
        if not (isinstance(wish, str) or callable(wish)):
            raise FxrematError(
                f'{name} has {wish!r}; a wish is a pattern of modules such as "*.router", or a function that takes a '
                "node of the graph and returns a bool"
            )


def _set(setting: object, name: str, value: object) -> None:
    object.__setattr__(setting, name, value)


def _check_bools(setting: object, *names: str) -> None:
    for name in names:
        if not isinstance(given := getattr(setting, name), bool):
            raise FxrematError(f"{type(setting).__name__}: {name} is {shortened(given)}; it is True or False")


def _size(name: str, given: int | str | None) -> int | None:
    """Parse a size such as "16GiB" into bytes; None for None. Raises `InvalidBudget`, with `name` in the message."""
    try:
        return None if given is None else parse_bytes(given)
    except InvalidBudget as error:
        raise InvalidBudget(f"{name}: {error}") from None
