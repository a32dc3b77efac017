"""Classes of settings, one per feature, that `fxremat.compile` takes as options; they check their values.

    offload=Offload(limit="16GiB")               what may be stored on the host
    slices=Slices(max_parts=8)                   how groups of ops run in slices of the batch or sequence
    backend=Inductor(random="eager")             how groups of ops are compiled
    loss=Loss(bytes="300MB")                     the memory of a loss outside the model
    search=Search(seconds=60)                    limits of the search for plans

Settings are immutable; two settings with the same fields are equal.
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

RANDOM = ("inductor", "eager")  # values of Inductor(random=...)
GRADIENTS = ("loss", "all")  # values of Loss(gradients=...)
UPDATES = ("backward", "step")  # values of Offload(updates=...)
Wish = Callable[[fx.Node], bool] | str  # of ops: a predicate on nodes of the captured graph, or a pattern of modules
MANY_SLICES = 1 << 20  # slices of a region at most where the user sets no limit


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
    """A choice of what the host may store while the step does not need it: activations, parameters, optimizer state.

    Args:
        tier: where on the host: a tier of `fxremat.host.tier`, such as fxremat.FileTier("/fast/disk"). None: pinned
            memory for a CUDA device, else files.
        limit: bytes that may wait there at a time, in the forms of a size, such as "16GiB". None: as many as the plan
            needs.
        activations: values that the forward computes may wait there.
        weights: parameters and the optimizer's state may live there. `mem` then covers parameters, their gradients and
            the optimizer's state as well. Parameters may start on the CPU where all else is on the device.
        updates: when parameters are updated, with `weights`. "backward": each as soon as its gradient is there, so that
            each backward is a step of `optimizer`. "step": in `optimizer.step()`, from the gradients of all backwards
            since the last one, as accumulation, clipping by the norm and GradScaler need it. Gradients then live where
            their parameter does, and `mem` covers the updates too.

    Raises:
        FxrematError: a field has an invalid value, or `activations` and `weights` are both False.
    """

    tier: HostTier | None = None
    limit: int | str | None = None
    activations: bool = True
    weights: bool = False
    updates: str = "backward"
    bytes: int | None = field(init=False)  # what `limit` means

    def __post_init__(self) -> None:
        if self.tier is not None and not isinstance(self.tier, HostTier):
            raise FxrematError(f"Offload: tier is {shortened(self.tier)}; it is a host tier such as FileTier()")
        _check_bools(self, "activations", "weights")
        if not (self.activations or self.weights):
            raise FxrematError("Offload(activations=False) moves nothing; it goes with weights=True")
        if self.updates not in UPDATES:
            raise FxrematError(f'Offload: updates is {shortened(self.updates)}; it is "backward" or "step"')
        if self.updates == "step" and not self.weights:
            raise FxrematError('Offload(updates="step") goes with weights=True: else the user runs the optimizer')
        _set(self, "bytes", _size("Offload: limit", self.limit))


@dataclass(frozen=True, kw_only=True, repr=False)
class Slices(Setting):
    """Settings for running groups of ops (a vocabulary head, a wide MLP, a convolutional trunk) in slices of rows.

    Such a group is called a region; it is sliced only if that saves memory or costs no time. Gradients that are
    sums over slices are equal up to rounding, not bit for bit: see docs/slices.md. A plan with slices is valid
    only for inputs of one size.

    Args:
        max_parts: maximum number of slices of a region, 2 or more. None: as many as the budget requires.
        reduce_dtype: the dtype in which half-precision gradients are summed over slices: torch.float32, or "same" for
            the dtype of the gradient. None: float32 if that fits into the budget.
        drop_outputs: True: large tensors that only the loss is computed from, such as logits, are returned as NaN of
            the same shape without memory.

    Raises:
        FxrematError: a field has an invalid value.
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

    Gradients equal those of torch.compile up to rounding: see docs/kernels.md. Input sizes are fixed.

    Args:
        random: which random numbers dropout uses: "inductor": those of torch.compile, generated again from a seed if
            they are recomputed; "eager": those of eager PyTorch. None: "inductor" on CUDA, where generating them in a
            compiled group costs nothing, else "eager".
        whole_graphs: True: also compile the forward and the backward as one group each, as torch.compile does, so that
            Inductor fuses ops across layers; the fastest that fits is taken. Compiling takes as long as torch.compile
            does, several times if the budget is tight. False: only smaller groups. None: True on CUDA, where ops that
            are not fused are bound by the memory's bandwidth; elsewhere smaller groups come first, and torch.compile's
            own way competes with them where that may pay off within 10,000 steps.
        config: settings of `torch._inductor.config`, by name.

    Raises:
        FxrematError: a field has an invalid value, or Inductor has no such setting.
    """

    random: str | None = None
    whole_graphs: bool | None = None
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.whole_graphs not in (None, True, False):
            raise FxrematError(f"Inductor: whole_graphs is {shortened(self.whole_graphs)}; it is None, True or False")
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

    def compiles_whole_graphs(self, *, in_triton: bool) -> bool:
        """Tell whether forward and backward are also compiled whole; `in_triton` as for `draws_from_seeds`."""
        return in_triton if self.whole_graphs is None else self.whole_graphs


@dataclass(frozen=True, kw_only=True, repr=False)
class Loss(Setting):
    """Facts of a loss that fxremat cannot see: its memory if it is outside the model, and which outputs get gradients.

    Args:
        bytes: what a loss outside the model allocates between forward and backward, as a number or a text such as
            "300MB". None: 0 if the model returns its loss; else four times the bytes of its outputs, or, for
            half-precision outputs, five times the bytes of a float32 copy. The first step measures it, and later
            ones are planned with the result; so do steps 2, 4, 8 and so on, and those of larger inputs. Where the
            program profiles the step on a CPU, it only looks for values of the loss that are still held when the
            model's backward begins.
        gradients: which outputs get gradients if the model returns its loss. "loss": only the loss; if another output
            gets one, that step runs as plain PyTorch without a budget, and later steps are planned for it. "all":
            every output.

    Raises:
        FxrematError: a field has an invalid value.
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
        seconds: time in which solver="auto" improves plans op by op for all budgets. It stops at the requested
            budget, so it usually takes less. 0: plans are not improved op by op.
        slots: number of memory levels in the dynamic programs, from 1 to 100,000.
        progress: show progress bars if stderr is a terminal.

    Raises:
        FxrematError: a field has an invalid value.
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
        if not ((isinstance(wish, str) and wish) or callable(wish)):
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
