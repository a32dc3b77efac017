"""All that a user can set: typed, checked once, the same through every door.

    options = options_of(mem="4GiB", effort=3)          what compile, plan and the dynamo backend begin with
    def compile(model, mem, *, solver="auto", **options: Unpack[CompileOptions])

`Options` is a value: nothing in it changes while a model is planned and trained. `CompileOptions` names the same
settings for type checkers, but for `mem` and `solver`, which the doors have as parameters of their own.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from fractions import Fraction
from numbers import Real
from typing import Any, TypedDict

import torch

from fxremat.cost.device_memory import OPTIMIZERS
from fxremat.cost.devices import Device
from fxremat.errors import FxrematError, InvalidBudget
from fxremat.host.tier import HostTier
from fxremat.ops.parameters import check_optimizer
from fxremat.plans import Plan
from fxremat.search.refine import EFFORT
from fxremat.solvers.choose import check_effort, check_slots
from fxremat.solvers.registry import JOINS, LISTS, SOLVERS, TABLES
from fxremat.solvers.registry import NAMES as CHAINS
from fxremat.torch_inductor import check_settings
from fxremat.units import Budget, parse_budget, parse_bytes, shortened

PLANNERS = ("auto", *LISTS, *TABLES)  # solvers that plan models
TRANSFERRING = tuple(name for name, solver in SOLVERS.items() if solver.transfers)  # with offload=True, too
COSTS = ("measure", "estimate")
REDUCE = ("fp32", "same")  # how sums over slices are added up
KERNELS = ("eager", "inductor")
RANDOM = ("inductor", "eager")  # whose numbers dropouts draw
OUTPUTS = ("all", "loss")  # what a forward that runs in slices returns
MANY_SLICES = 1 << 20


Shapes = Mapping[str, Mapping[int, tuple[int, int]]]  # input -> dimension -> least and largest size


class PlanOptions(TypedDict, total=False):
    """The settings of `Options` beside `mem`, `solver` and `device`: `fxremat.plan` takes several devices, too."""

    cost: str
    slots: int
    loss_bytes: int | str | None
    only_loss: bool
    progress: bool
    effort: float
    offload: bool | HostTier
    host_mem: int | str | None
    offload_weights: bool | HostTier
    optimizer: torch.optim.Optimizer | str | None
    dynamic: bool | None
    shapes: Shapes | None
    slices: bool | int
    reduce: str | None
    outputs: str
    kernels: str
    inductor: Mapping[str, Any] | None
    random: str | None
    method: str


class StepOptions(PlanOptions, total=False):
    """The settings that a plan of a captured step may change."""

    solver: str
    device: str | Device | None


class CompileOptions(PlanOptions, total=False):
    """The settings of `Options` beside `mem` and `solver`, for signatures: `**options: Unpack[CompileOptions]`."""

    device: str | Device | None
    plan: Plan | str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class SeenLoss:
    """What a loss outside the model was seen to allocate, as shares of what is assumed where nothing is known."""

    peak: Fraction  # between forward and backward
    held: Fraction  # from the beginning of the backward on, gradients of outputs apart


@dataclass(frozen=True)
class Options:
    """What to plan for.

    Args:
        mem: the budget, in any of the forms of `fxremat.compile`. None: that of `plan`.
        plan: one that was saved, or its file: it runs without planning where it belongs to the step that is captured.
            Where it does not, that is an error; with `mem` a warning, and a plan within that is made. Sizes are fixed.
        solver: one of `PLANNERS`; with offload=True also one of `TRANSFERRING`.
        cost: "measure" runs every distinct op; "estimate" counts flops and bytes for `device`.
        device: with cost="estimate", the name of a known device, or a `fxremat.cost.devices.Device`.
        slots: steps of memory in the dynamic programs, from 1 to 100,000.
        loss_bytes: what a loss outside the model allocates between forward and backward, in the forms of a size. None:
            nothing where the model returns its loss; else four times the bytes of its outputs, five times those of an
            fp32 copy in half precision. On CUDA the first step measures it, and the next is planned for that.
        only_loss: where the model returns its loss, expect no gradient for what the loss is computed from. If one comes
            after all, that step runs as plain PyTorch, outside of the budget, and the next is planned for it.
            False: plan for it from the start.
        progress: show bars while ops are measured and the plan is refined, where stderr is a terminal.
        effort: seconds, about, that "auto" would take to improve on schedules of blocks op by op for every budget; it
            does so up to the one asked for. 0: it does not.
        offload: let values wait on the host: True (pinned memory for a CUDA device, else files), or a tier of
            `fxremat.host.tier`, such as fxremat.FileTier("/fast/disk").
        host_mem: what may wait there at a time, in the forms of a size. None: whatever the plan wants.
        offload_weights: let parameters live on the host: True or a tier, as for `offload`. `mem` then covers them,
            their gradients and the optimizer's state as well, and each backward is a step of `optimizer`. Parameters
            may start on the CPU where all else is on the device.
        dynamic: what the sizes of inputs are taken for, as in torch.compile. None: fixed at first, and where another
            comes, from then on as one that changes. True: all may change, and the model is captured once. False: fixed;
            every combination is captured and planned by itself, as it is with slices, and where something is offloaded.
        shapes: sizes that change from the start, with their range: {"tokens": {0: (2, 8), 1: (16, 4096)}}. Other sizes
            are allowed; a budget in percent refers to the largest.
        slices: let regions of the model (the vocabulary head, a wide MLP, a convolutional trunk without BatchNorm) run
            in slices, where that makes room or takes no more time: True, or in how many slices at most. Gradients that
            are sums over the slices are equal up to rounding, no longer bit for bit: docs/slices.md. Sizes are fixed
            then, as with offload.
        reduce: how sums over slices are added up where they are of half precision: "fp32", "same" (as they are), or
            None: in float32 where that fits.
        outputs: what forward returns beside its loss: "all", or "loss": with slices, what is large and the loss is
            computed from (logits, which libraries return) comes back as NaN in its shape, without memory.
        kernels: "eager" runs PyTorch's kernel of every op, with its bits; "inductor" compiles regions of the planned
            step with torch's Inductor. Gradients are then those of torch.compile up to rounding: docs/kernels.md.
            Sizes are fixed, as with slices.
        inductor: patches of `torch._inductor.config`, with kernels="inductor".
        random: whose dropout masks kernels="inductor" draws: "inductor", those of torch.compile, made again from a seed
            where they are recomputed; or "eager", those of eager PyTorch. None: "inductor" on CUDA, where drawing them
            in a compiled region costs nothing, else "eager".
        method: the method of the model that training calls and that is planned, such as "training_step".
        optimizer: of the model's parameters: SGD, Adam, AdamW, or another that treats each element by itself. With
            `offload_weights`, the one that the step runs. With `device`, the one whose state is counted on that device,
            which may also be a name: "adamw", "sgd-momentum" and others; None: AdamW's is counted.

    Raises:
        InvalidBudget: a size or budget of another form.
        FxrematError: any other value that a setting cannot have, or two that do not go together.
    """

    _: KW_ONLY
    mem: int | str | None = None
    plan: Plan | str | os.PathLike[str] | None = None
    solver: str = "auto"
    cost: str = "measure"
    device: str | Device | None = None
    slots: int = 500
    loss_bytes: int | str | None = None
    only_loss: bool = True
    progress: bool = True
    effort: float = EFFORT
    offload: bool | HostTier = False
    host_mem: int | str | None = None
    offload_weights: bool | HostTier = False
    optimizer: torch.optim.Optimizer | str | None = None
    dynamic: bool | None = None
    shapes: Shapes | None = None
    slices: bool | int = False
    reduce: str | None = None
    outputs: str = "all"
    kernels: str = "eager"
    inductor: Mapping[str, Any] | None = None
    random: str | None = None
    method: str = "forward"
    strict: bool | None = field(default=None, repr=False)  # a plan that does not belong is an error; no user sets this
    budget: Budget = field(init=False, repr=False)  # what `mem` means
    host_limit: int | None = field(init=False, repr=False)  # bytes that `host_mem` means
    loss_size: int | None = field(init=False, repr=False)  # bytes that `loss_bytes` means
    loss_seen: SeenLoss | None = field(default=None, repr=False)  # what steps have shown of it; no user sets this

    def __post_init__(self) -> None:
        self._check_plan()
        self._set("budget", parse_budget(self.mem))
        self._set("host_limit", _size("host_mem", self.host_mem))
        self._set("loss_size", _size("loss_bytes", self.loss_bytes))
        self._set("slots", check_slots(self.slots))
        self._set("effort", _seconds(self.effort))
        for name in ("only_loss", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise FxrematError(f"{name} is {shortened(getattr(self, name))}; it is True or False")
        self._check_costs()
        self._check_slices()
        self._check_tiers()
        self._check_kernels()
        self._check_solver()
        self._check_shapes()

    @property
    def resizable(self) -> bool:
        """Whether plans for other sizes can be made from one capture: not with slices, or what waits on the host."""
        return not (self.plan or self.offload or self.offload_weights or self.slices or self.compiles)

    @property
    def needs_fixed_sizes(self) -> str:
        """What of these settings needs inputs of fixed sizes, for messages."""
        if self.plan:
            return "a saved plan"
        return 'kernels="inductor"' if self.compiles else "slices" if self.slices else "offloading"

    @property
    def compiles(self) -> bool:
        """Whether regions of the step are compiled."""
        return self.kernels == "inductor"

    def draws_from_seeds(self, *, in_triton: bool) -> bool:
        """Whether dropouts of a step draw from seeds that are its values: where Triton compiles its regions, say."""
        return self.compiles and (self.random or ("inductor" if in_triton else "eager")) == "inductor"

    @property
    def stepping(self) -> torch.optim.Optimizer | None:
        """The optimizer that the step runs, with offload_weights."""
        return self.optimizer if self.offload_weights and not isinstance(self.optimizer, str) else None

    @property
    def may_change(self) -> bool | None:
        """What sizes are taken for while a model is captured, as `dynamic` says it."""
        return self.dynamic if self.resizable else False

    def longest(self, name: str, dimension: int | None) -> int | None:
        """The largest size that the user expects of an input's dimension; None where nothing is said."""
        if dimension is None or dimension not in (expected := (self.shapes or {}).get(name, {})):
            return None
        return expected[dimension][1]

    @property
    def most_slices(self) -> int:
        """Slices of a region at most; 0: none is cut."""
        return MANY_SLICES if self.slices is True else int(self.slices)

    @property
    def offloads_by_chain(self) -> bool:
        """Whether the solver is one of chains that places transfers itself."""
        return bool(self.offload) and self.solver in TRANSFERRING

    @property
    def tier(self) -> HostTier | None:
        """The host tier that the user chose, if any."""
        chosen = (tier for tier in (self.offload_weights, self.offload) if isinstance(tier, HostTier))
        return next(chosen, None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_plan(self) -> None:
        if self.plan is None:
            if self.mem is None:
                raise InvalidBudget('the budget is missing: give mem, such as mem="4GiB" or mem="60%"')
            return
        if not isinstance(self.plan, Plan | str | os.PathLike):
            raise FxrematError(f"plan is {shortened(self.plan)}; it is a plan, or the file that plan.save(path) wrote")
        for name in ("slices", "offload_weights", "device", "shapes"):
            if getattr(self, name):
                raise FxrematError(f"plan runs as it was saved; it does not go with {name}")
        if self.compiles or self.dynamic:
            raise FxrematError("plan runs as it was saved: with PyTorch's kernels, for fixed sizes")
        if not isinstance(self.plan, Plan):
            self._set("plan", Plan.load(self.plan))
        if self.strict is None:
            self._set("strict", self.mem is None)
        if self.mem is None:
            self._set("mem", self.saved.budget)

    @property
    def saved(self) -> Plan:
        """The plan that was given."""
        assert isinstance(self.plan, Plan)
        return self.plan

    def _check_costs(self) -> None:
        if not isinstance(self.cost, str) or self.cost not in COSTS:
            raise FxrematError(f'cost is {shortened(self.cost)}; it is "measure" or "estimate"')
        if self.device is None:
            return
        if self.cost == "measure":
            raise FxrematError(
                'device goes with cost="estimate"; measured costs are those of the model\'s device'
            )
        if not isinstance(self.device, str | Device):
            raise FxrematError(
                f"device is {shortened(self.device)}; it is the name of a known device or a "
                "fxremat.cost.devices.Device"
            )
        Device.named(self.device)

    def _check_slices(self) -> None:
        given = self.slices
        if not isinstance(given, bool) and not (isinstance(given, int) and given > 1):
            raise FxrematError(f"slices is {shortened(given)}; it is True, False, or how many at most, 2 or more")
        if self.reduce is not None and self.reduce not in REDUCE:
            raise FxrematError(f"reduce is {shortened(self.reduce)}; it is None or one of {', '.join(REDUCE)}")
        if self.reduce is not None and not given:
            raise FxrematError("reduce says how sums over slices are added up; it goes with slices=True")
        if self.outputs not in OUTPUTS:
            raise FxrematError(f"outputs is {shortened(self.outputs)}; it is one of {', '.join(OUTPUTS)}")
        if self.outputs == "loss" and not given:
            raise FxrematError('outputs="loss" leaves out what runs in slices; it goes with slices=True')

    def _check_kernels(self) -> None:
        if not isinstance(self.kernels, str) or self.kernels not in KERNELS:
            raise FxrematError(f"kernels is {shortened(self.kernels)}; it is one of {', '.join(KERNELS)}")
        if self.random is not None and self.random not in RANDOM:
            raise FxrematError(f"random is {shortened(self.random)}; it is None or one of {', '.join(RANDOM)}")
        if self.inductor is not None and not isinstance(self.inductor, Mapping):
            raise FxrematError(
                f"inductor is {shortened(self.inductor)}; it is settings of torch._inductor.config by name"
            )
        if not self.compiles:
            for name in ("inductor", "random"):
                if getattr(self, name) is not None:
                    raise FxrematError(f'{name} says how regions are compiled; it goes with kernels="inductor"')
            return
        check_settings(self.inductor or {})
        if self.offload or self.offload_weights:
            raise FxrematError('kernels="inductor" keeps everything on the device; it does not go with offloading')
        if self.cost == "estimate":
            raise FxrematError('kernels="inductor" measures its kernels; it goes with cost="measure"')

    def _check_tiers(self) -> None:
        for name in ("offload", "offload_weights"):
            if not isinstance(getattr(self, name), bool | HostTier):
                raise FxrematError(
                    f"{name} is {shortened(getattr(self, name))}; it is True, False or a host tier such as FileTier()"
                )
        if self.host_mem is not None and not (self.offload or self.offload_weights):
            raise FxrematError(
                "host_mem limits what is offloaded; it goes with offload=True or offload_weights"
            )
        self._check_optimizer()
        tiers = [tier for tier in (self.offload, self.offload_weights) if isinstance(tier, HostTier)]
        if len(tiers) == 2 and tiers[0] is not tiers[1]:
            raise FxrematError("offload and offload_weights go through one tier; give both the same")

    def _check_optimizer(self) -> None:
        given = self.optimizer
        if not isinstance(given, torch.optim.Optimizer | None) and (
            self.offload_weights or not isinstance(given, str) or given.lower() not in OPTIMIZERS
        ):
            raise FxrematError(
                f"optimizer is {shortened(given)}; it is one of torch.optim or, to count its state on a device that a "
                f"step is estimated for, one of {', '.join(OPTIMIZERS)}"
            )
        if self.offload_weights and given is None:
            raise FxrematError(
                "offload_weights and optimizer go together: the step then updates the parameters itself"
            )
        if given is not None and not self.offload_weights and self.device is None:
            raise FxrematError(
                'optimizer goes with cost="estimate", device="H100", where its state is counted; or with '
                "offload_weights=True, where the step updates the parameters itself: these two go together"
            )
        if isinstance(given, torch.optim.Optimizer):
            check_optimizer(given)

    def _check_shapes(self) -> None:
        if self.dynamic not in (None, True, False) or not isinstance(self.dynamic, bool | None):
            raise FxrematError(f"dynamic is {shortened(self.dynamic)}; it is None, True or False")
        if self.shapes is None:
            return
        if self.dynamic is False:
            raise FxrematError("shapes gives sizes that change; with dynamic=False none does")
        if not isinstance(self.shapes, Mapping) or not all(map(_is_range, self.shapes.items())):
            raise FxrematError(
                f"shapes is {shortened(self.shapes)}; it is the least and the largest size by input and dimension, "
                '2 at least: {"tokens": {0: (2, 8), 1: (16, 4096)}}'
            )

    def _check_solver(self) -> None:
        known = (*PLANNERS, *TRANSFERRING) if self.offload else PLANNERS
        if isinstance(self.solver, str) and self.solver in known:
            if self.offload_weights and self.offloads_by_chain:
                raise FxrematError(
                    f'solver={self.solver!r} places transfers of activations alone; with offload_weights use "auto"'
                )
            return
        if isinstance(self.solver, str) and self.solver in TRANSFERRING:
            raise FxrematError(f"solver={self.solver!r} moves values to the host; it goes with offload=True")
        if isinstance(self.solver, str) and self.solver in (*CHAINS, *JOINS):
            raise FxrematError(
                f"solver={self.solver!r} is one for chains and joins (fxremat.solve); those that plan models are "
                + ", ".join(known)
            )
        guess = difflib.get_close_matches(str(self.solver), known, n=1)
        raise FxrematError(
            f"unknown solver {shortened(self.solver)}{_perhaps(guess)}; those that plan models are {', '.join(known)}"
        )


HIDDEN = ("loss_seen", "strict")  # that no user sets
NAMES = tuple(field.name for field in fields(Options) if field.init and field.name not in HIDDEN)
OF_CAPTURE = ("method", "dynamic", "shapes", "only_loss", "kernels", "random", "offload_weights")


def options_of(**options: Any) -> Options:
    """The options that a user gave by name.

    Raises `InvalidBudget` where there is neither `mem` nor `plan`, `FxrematError` for an option that there is not, and
    what `Options` raises.
    """
    for name in options:
        _check_name(name)
    return Options(**options)


def changed_options(options: Options, mem: int | str | None, **changed: Any) -> Options:
    """Return the options for another plan of a step that was captured with these; mem=None is the same budget.

    Raises `FxrematError` for an option that there is not, or that decides what is captured, and what `Options` raises.
    """
    for name, value in changed.items():
        _check_name(name)
        if name in OF_CAPTURE and value != getattr(options, name):
            raise FxrematError(
                f"{name}={shortened(value)} changes what is captured, and this step was captured with "
                f"{name}={shortened(getattr(options, name))}: capture it again, fxremat.capture(model, inputs, "
                f"{name}={shortened(value)})"
            )
    return replace(options, plan=None, strict=None, mem=options.mem if mem is None else mem, **changed)


def _check_name(name: str) -> None:
    if name not in NAMES:
        guess = difflib.get_close_matches(name, NAMES, n=1)
        raise FxrematError(f"unknown option {shortened(name)}{_perhaps(guess)}; there are {', '.join(NAMES)}")


def _is_range(item: tuple[object, object]) -> bool:
    """Whether an input is given ranges of its sizes by dimension."""
    name, sizes = item
    if not isinstance(name, str) or not isinstance(sizes, Mapping):
        return False
    return all(
        isinstance(dim, int)
        and isinstance(ends, tuple | list)
        and len(ends) == 2
        and all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
        and 2 <= ends[0] <= ends[1]
        for dim, ends in sizes.items()
    )


def _perhaps(guess: list[str]) -> str:
    return f", did you mean {guess[0]!r}?" if guess else ""


def _size(name: str, given: int | str | None) -> int | None:
    try:
        return None if given is None else parse_bytes(given)
    except InvalidBudget as error:
        raise InvalidBudget(f"{name}: {error}") from None


def _seconds(given: object) -> float:
    check_effort(given)
    seconds = float(given) if isinstance(given, Real) else math.inf
    if math.isinf(seconds):
        raise FxrematError(f"effort is {given!r}; it is a finite number of seconds, such as 60")
    return seconds
