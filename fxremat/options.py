"""The options that users can set for planning: typed, checked once, and shared by all functions that take options.

    options = options_of(mem="4GiB", offload=True, search=Search(seconds=3))
    def compile(model, mem, *, solver="auto", **options: Unpack[CompileOptions])

`Options` is immutable. The settings of one feature, such as offloading, are one option, whose type is in
`fxremat.settings`. `CompileOptions` names the fields of `Options` for type checkers, except `mem` and `solver`, which
`compile` and the like have as parameters of their own.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, TypedDict

import torch
from torch.export import Dim

from fxremat.cost.device_memory import OPTIMIZERS, Division
from fxremat.cost.devices import Device
from fxremat.cost.trace import Timer, Trace
from fxremat.errors import FxrematError, InvalidBudget
from fxremat.host.tier import HostTier
from fxremat.ops.parameters import check_optimizer
from fxremat.planned_step import Means
from fxremat.plans import Plan
from fxremat.settings import Inductor, Loss, Offload, Search, Slices, Wish, check_wishes
from fxremat.solvers.registry import JOINS, LISTS, SOLVERS, TABLES
from fxremat.solvers.registry import NAMES as CHAINS
from fxremat.units import (
    Budget,
    Bytes,
    Percent,
    did_you_mean,
    format_bytes,
    parse_budget,
    parse_bytes,
    shortened,
)

log = logging.getLogger(__name__)

PLANNERS = ("auto", *LISTS, *TABLES)  # names of the solvers that plan models
# names of the chain solvers that can also offload tensors
TRANSFERRING = tuple(name for name, solver in SOLVERS.items() if solver.transfers)
BACKENDS = ("eager", "inductor")
COUNTS = ("allocated", "reserved")
COMPRESSED = ("int8", "fp8")

# input name -> dimension -> its range: an `export.Dim`, or (minimum, maximum)
Sizes = Mapping[str, Mapping[int, Dim | tuple[int, int]]]
Ranges = Mapping[str, Mapping[int, tuple[int, int]]]


class PlanOptions(TypedDict, total=False):
    """The settings of `Options` except `mem`, `solver` and `plan`, for signatures: `**options: Unpack[PlanOptions]`."""

    device_mem: int | str | None
    exact: bool | None
    dynamic: bool | Sizes | None
    offload: bool | HostTier | Offload | None
    slices: bool | Slices | None
    backend: str | Inductor | None
    optimizer: torch.optim.Optimizer | str | None
    costs: str | Device | Trace | Timer
    loss: int | str | Loss | None
    search: Search
    method: str
    fullgraph: bool
    never_again: Wish | Sequence[Wish]
    keep: Wish | Sequence[Wish]
    count: str
    compress: str | bool | None


class StepOptions(PlanOptions, total=False):
    """The options of `CapturedStep.plan`: those of `PlanOptions`, and the solver."""

    solver: str


class CompileOptions(PlanOptions, total=False):
    """The settings of `Options` except `mem` and `solver`."""

    plan: Plan | str | os.PathLike[str] | None


Points = tuple[tuple[int, int], ...]
"""Measurements of a loss: (bytes assumed for outputs of these shapes, bytes measured), smallest outputs first."""

SINGLES = 32  # bytes of the single numbers that a loss may compute, however small the outputs are
MOST_POINTS = 8


def _with_point(points: Points, assumed: int, measured: int) -> Points:
    """Add a measurement; of several with the same outputs, the largest counts. At most `MOST_POINTS` are kept."""
    found = dict(points)
    found[assumed] = max(measured, found.get(assumed, 0))
    ordered = sorted(found.items())
    return (*ordered[:1], *ordered[1:][1 - MOST_POINTS :])


def _at(points: Points, assumed: int, fixed: int) -> int:
    """Return the bytes to expect for other outputs, from at least one measurement.

    From one, all bytes but the `fixed` ones, and for smaller outputs some single numbers, are taken to grow with the
    outputs; from several, the parts between them are taken to be linear, so that nothing else that does not grow is
    scaled.

    Args:
        fixed: negative where a loss leaves a part of the outputs out, which stays: these bytes less.
    """
    if len(points) == 1:
        ((known, measured),) = points
        stays = min(fixed + (SINGLES if assumed < known else 0), measured)
        return stays + math.ceil((measured - stays) * Fraction(assumed, known))
    above = next((place for place, (known, _) in enumerate(points) if known >= assumed), len(points) - 1)
    (low, first), (high, last) = points[max(above, 1) - 1], points[max(above, 1)]
    return max(0, math.ceil(first + (last - first) * Fraction(assumed - low, high - low)))


@dataclass(frozen=True, kw_only=True)
class SeenLoss:
    """Measured memory of a loss that the user computes outside the model."""

    # peaks between the end of the forward and the beginning of the backward; (): not measured
    peaks: Points = ()
    held: Points = ()  # memory during the backward, without the gradients of the model's outputs
    fixed: int = 0  # the bytes of these that gradients of parameters of the loss take, whatever the outputs are
    # bytes by which values of the last measured loss are smaller than outputs, at its peak and in `held`
    left_out: tuple[int, int] = (0, 0)
    early: int = 0  # bytes of gradients of parameters that the loss has made when the model's backward begins
    as_traced: bool = False  # the gradients that it hands in lie as they were traced, so that nothing copies them
    # `peaks` and `held` of calls that return their loss: of what the program computes before the backward
    beside: tuple[Points, Points] = ((), ())
    is_expected: bool = False  # `peaks` was not measured, but is what fits: see `runtime.unmeasured_loss`

    def peak_at(self, assumed: int) -> int | None:
        """Return the bytes to expect between forward and backward; None if they were not measured.

        Args:
            assumed: the bytes that are assumed for the outputs before a loss was measured.
        """
        return _at(self.peaks, assumed, self.fixed - self.left_out[0]) if self.peaks else None

    def held_at(self, assumed: int) -> int:
        """Return the bytes to expect during the backward."""
        return _at(self.held, assumed, self.fixed - self.left_out[1]) if self.held else 0

    def is_guess_at(self, assumed: int) -> bool:
        """Tell whether the bytes to expect for these outputs follow from one measurement alone, of others."""
        return len(self.peaks) == 1 and self.peaks[0][0] != assumed

    def beside_at(self, scale: int) -> tuple[int, int]:
        """Return the bytes to expect between forward and backward of a call that returns its loss, and in the backward.

        From one measurement they are not taken to grow with the outputs, since they need not: larger ones are measured.

        Args:
            scale: the bytes of the outputs, as `graphs.accounting.scale_of_loss` counts them.
        """
        peak, held = (
            _at(points, min(scale, points[0][0]) if len(points) == 1 else scale, 0) if points else 0
            for points in self.beside
        )
        return peak, held

    def with_beside(self, scale: int, peak: int, held: int) -> SeenLoss:
        """Add a measurement of a call that returns its loss."""
        peaks, helds = self.beside
        return replace(self, beside=(_with_point(peaks, scale, peak), _with_point(helds, scale, held)))

    def without_points(self) -> SeenLoss:
        """Discard the measurements, since the loss takes other memory now."""
        return replace(self, peaks=(), held=(), beside=((), ()))

    def with_loss(self, assumed: int, *, peak: int | None, held: int, anew: bool = False) -> SeenLoss:
        """Add a measurement of a loss outside; if `anew`, it takes the place of all others, as of what was expected.

        Args:
            peak: its bytes between forward and backward; None: not measured.
            held: its bytes during the backward.
        """
        seen = self
        if anew or (self.is_expected and peak is not None):
            seen = replace(self.without_points(), is_expected=False)
        if not assumed:
            return seen
        return (seen if peak is None else seen.with_peak(assumed, peak)).with_held(assumed, held)

    def with_peak(self, assumed: int, measured: int) -> SeenLoss:
        """Add a measurement between forward and backward."""
        return replace(self, peaks=_with_point(self.peaks, assumed, measured))

    def with_held(self, assumed: int, measured: int) -> SeenLoss:
        """Add a measurement during the backward."""
        return replace(self, held=_with_point(self.held, assumed, measured))


@dataclass(frozen=True)
class Options:
    """The options of a plan, checked.

    Args:
        mem: the budget, in any form that `fxremat.compile` takes. None: the budget of `plan`.
        device_mem: instead of `mem`, what the training process may have on the device in all, in bytes or as "24GiB":
            parameters, buffers, inputs, the state of `optimizer`, gradients that wait, on CUDA the context and the
            allocator's reserve (estimated), and the step, for which `mem` is what all that leaves.
        exact: let the planner choose the means, and say in the plan what each would give. True: those with which
            gradients are equal bit for bit: recomputation, and activations on the host where nothing else fits or
            where that is at least 5 % faster; with `device_mem` and an optimizer also parameters and its state on the
            host, as Offload(weights=True, updates="step") has them, where nothing else fits. False: slices and
            compiled kernels, too, which round otherwise. `offload`, `slices` and `backend` force or forbid a means.
            None: recomputation, and what these options say. Input sizes are fixed where there is a choice.
        plan: a saved plan, or the path of its file. It is used without planning if it belongs to the captured step.
            If it does not, that is an error; if `mem` is given, it is a warning, and a new plan is made. Input sizes
            are fixed.
        solver: one of `PLANNERS`; with offloading also one of `TRANSFERRING`.
        dynamic: which input sizes may change, as in torch.compile. None: each size is fixed until it changes. True:
            all sizes may change, and the model is captured once. False: all sizes are fixed; every combination of
            sizes is captured and planned separately, as always with slices or offloading. A dict gives ranges of
            sizes that may change from the start: {"tokens": {0: (2, 8), 1: Dim("n", min=16, max=4096)}}, where `Dim`
            is torch.export's. Sizes outside of a range are allowed; a budget in percent refers to the largest sizes.
        offload: whether activations may be stored on the host: True, a tier of `fxremat.host.tier`, or an `Offload`
            with more settings. None: no, or as `exact` says.
        slices: whether groups of ops may run in slices of the batch or sequence: True, or a `Slices` with more
            settings. None: no, or as `exact` says.
        backend: "eager": PyTorch's own kernels, with bitwise equal results; "inductor", or an `Inductor` with more
            settings: groups of ops of the planned step are compiled. None: "eager", or as `exact` says.
        optimizer: the optimizer of the model's parameters: SGD, Adam, AdamW, or another that updates each element
            separately. With offload=Offload(weights=True), the step runs it. With `device_mem`, or if `costs` names a
            device, its state is counted on the device; it may then be any optimizer of torch.optim, or a name, such
            as "adamw" or "sgd-momentum"; None counts the state of AdamW.
        costs: "measure": run each different op. "estimate": count flops and bytes, for a typical device of the
            model's type. The name of a known device, such as "H200", or a `fxremat.Device`: estimate for that device.
            A `fxremat.Trace`: use the seconds of a run recorded with torch.profiler, perhaps on another machine. A
            function: it gets a node of the captured graph and returns seconds, like torch's CustomRuntimeEstimator.
        loss: bytes that a loss outside the model allocates, as a number or a text such as "300MB", or a `Loss` with
            more settings.
        search: limits of the search for plans.
        method: name of the model's method that training calls and that is planned, such as "training_step".
        fullgraph: True: it is an error if dynamo cannot capture the model as one graph, as with torch.compile. False:
            the model is then trained as several graphs within one budget.
        never_again: forward ops that are never recomputed: a pattern of module names, such as "*.router", a function
            that gets a node of the captured graph and returns a bool, or a list of these.
        keep: ops, given as in `never_again`, that are never recomputed and whose results are never offloaded.
        count: "allocated": `mem` limits the bytes of tensors and workspaces. "reserved": it limits all that PyTorch's
            caching allocator takes from the device for them (`Plan.predicted_reserved`), on CUDA; `mem` is then given
            in bytes, or is "min" or "auto".
        compress: how the values that the backward reads may be stored in fewer bytes where the step would not fit
            otherwise. None: without loss, as bits or short integers, so that gradients are equal bit for bit. "int8" or
            "fp8": also as numbers of eight bits with one scale for each row, so that gradients are rounded
            (docs/compression.md). False: not at all.

    Raises:
        InvalidBudget: a size or budget has an invalid form.
        FxrematError: another option has an invalid value, or two options cannot be combined.
    """

    _: KW_ONLY
    mem: int | str | None = None
    device_mem: int | str | None = None
    exact: bool | None = None
    plan: Plan | str | os.PathLike[str] | None = None
    solver: str = "auto"
    dynamic: bool | Sizes | None = None
    offload: bool | HostTier | Offload | None = None
    slices: bool | Slices | None = None
    backend: str | Inductor | None = None
    optimizer: torch.optim.Optimizer | str | None = None
    costs: str | Device | Trace | Timer = "measure"
    loss: int | str | Loss | None = None
    search: Search = field(default_factory=Search)
    method: str = "forward"
    fullgraph: bool = False
    never_again: Wish | Sequence[Wish] = ()
    keep: Wish | Sequence[Wish] = ()
    count: str = "allocated"
    compress: str | bool | None = None
    # True: a saved plan of another step is an error. Set internally.
    strict: bool | None = field(default=None, repr=False)
    # memory of the loss outside the model, measured during steps. Set internally.
    loss_seen: SeenLoss | None = field(default=None, repr=False)
    # number of backwards of a call that ran with retain_graph=True. Set internally.
    retained: int = field(default=0, repr=False)
    # what `device_mem` leaves for a step, once that is known. Set internally.
    division: Division | None = field(default=None, repr=False)
    # the means that were tried before weights may be on the host. Set internally.
    tried: tuple[Means, ...] = field(default=(), repr=False)
    # True: the captured graph is for PyTorch's kernels, so that none can be compiled. Set internally.
    as_captured: bool = field(default=False, repr=False)
    # True: plan without anything remembered in this process. Set internally.
    pure: bool = field(default=False, repr=False)
    budget: Budget = field(init=False, repr=False)  # the parsed `mem`

    # The next fields are options in full form, such as `Offload()` for offload=True; None: the feature is off.
    host: Offload | None = field(init=False, repr=False)
    slicing: Slices | None = field(init=False, repr=False)
    inductor: Inductor | None = field(init=False, repr=False)
    loss_outside: Loss = field(init=False, repr=False)
    device: Device | None = field(init=False, repr=False)  # the device to estimate costs for; None: the user named none
    ranges: Ranges = field(init=False, repr=False)  # the size ranges that `dynamic` contains; {}: none

    def __post_init__(self) -> None:
        self._set("host", _host(self.offload))
        self._set("slicing", _slicing(self.slices))
        if self.exact is not None and not isinstance(self.exact, bool):
            raise FxrematError(f"exact is {shortened(self.exact)}; it is True, False, or None")
        self._set("inductor", _inductor(self.backend) if self.backend is not None else self._chosen_inductor())
        self._set("loss_outside", self.loss if isinstance(self.loss, Loss) else _of_size(self.loss))
        self._set("device", _device(self.costs))
        self._set("ranges", _ranges(self.dynamic))
        if not isinstance(self.method, str):
            raise FxrematError(f'method is {shortened(self.method)}; it is the name of one, such as "training_step"')
        if not isinstance(self.fullgraph, bool):
            raise FxrematError(f"fullgraph is {shortened(self.fullgraph)}; it is True or False")
        if not isinstance(self.search, Search):
            raise FxrematError(f"search is {shortened(self.search)}; it is a Search, such as Search(seconds=60)")
        check_wishes("never_again", _several(self.never_again))
        check_wishes("keep", _several(self.keep))
        self._check_plan()
        self._set("budget", self._budget())
        self._check_backend()
        self._check_optimizer()
        self._check_solver()
        self._check_count()
        self._check_compress()

    @property
    def measures(self) -> bool:
        """True if the costs of ops are measured by running them."""
        return self.costs == "measure"

    @property
    def timer(self) -> Trace | Timer | None:
        """The user's profiler trace or function that gives the seconds of ops; None if `costs` is neither."""
        return self.costs if not isinstance(self.costs, str | Device) else None

    @property
    def wishes(self) -> tuple[Wish, ...]:
        """The module patterns or predicates of all ops that must never be recomputed: `never_again` and `keep`."""
        return (*_several(self.never_again), *_several(self.keep))

    @property
    def kept(self) -> tuple[Wish, ...]:
        """The module patterns or predicates of ops whose results must also stay on the device: `keep`."""
        return _several(self.keep)

    @property
    def offloads(self) -> bool:
        """True if activations may be offloaded to the host."""
        return self.host is not None and self.host.activations

    @property
    def hosts_weights(self) -> bool:
        """True if parameters may be stored on the host; each backward then also runs the optimizer."""
        return self.host is not None and self.host.weights

    @property
    def tier(self) -> HostTier | None:
        """The user's host tier, which stores offloaded tensors; None: the user chose none, or nothing is offloaded."""
        return self.host.tier if self.host else None

    @property
    def host_limit(self) -> int | None:
        """Maximum bytes offloaded to the host at a time; None: no limit, or nothing is offloaded."""
        return self.host.bytes if self.host else None

    @property
    def compiles(self) -> bool:
        """True if groups of ops are compiled with Inductor."""
        return self.inductor is not None

    @property
    def was_told_to_compile(self) -> bool:
        """True if groups of ops are compiled with Inductor because the user gave `backend`."""
        return self.compiles and self.backend is not None

    @property
    def chooses(self) -> bool:
        """True if the planner chooses the means by which the step fits."""
        return self.exact is not None and not self.tried

    @property
    def may_offload(self) -> bool:
        """True if the planner may choose to offload activations."""
        return self.chooses and self.offload is None

    @property
    def may_host_weights(self) -> bool:
        """True if the planner may let parameters live on the host where nothing else fits."""
        return self.may_offload and self.device_mem is not None and isinstance(self.optimizer, torch.optim.Optimizer)

    @property
    def may_slice(self) -> bool:
        """True if the planner may choose to run groups of ops in slices."""
        return self.chooses and self.exact is False and self.slices is None

    @property
    def counts_reserved(self) -> bool:
        """True if `mem` limits the bytes that the device's allocator reserves."""
        return self.count == "reserved"

    @property
    def resizable(self) -> bool:
        """True if one captured graph may be used for several input sizes.

        It cannot with a saved plan, offloading, slices, compiled kernels or a limit of reserved bytes.
        """
        fixed = self.plan or self.host or self.slicing or self.compiles or self.counts_reserved or self.compress
        return not (fixed or self.may_offload or self.may_slice)

    @property
    def needs_fixed_sizes(self) -> str:
        """Name of the option that needs inputs of fixed sizes, for error messages."""
        if self.plan:
            return "a saved plan"
        if self.chooses and not (self.host or self.slicing or (self.backend and self.compiles)):
            return f"exact={self.exact}"
        if self.compiles:
            return 'backend="inductor"'
        if self.compress:
            return f"compress={self.compress!r}"
        return "slices" if self.slicing else "offloading" if self.host else 'count="reserved"'

    @property
    def needs_one_graph(self) -> str:
        """Name of the option that needs a model captured as one graph, for error messages; "": there is none."""
        if self.plan:
            return "a saved plan"
        if self.offloads_by_chain:
            return f"offload with solver={self.solver!r}"
        if self.was_told_to_compile and (self.host or self.slicing):
            return f'backend="inductor" with {"offload" if self.host else "slices"}'
        if self.slicing and self.slicing.drop_outputs:
            return "slices=Slices(drop_outputs=True)"
        if self.counts_reserved:
            return 'count="reserved"'
        if self.compress:
            return f"compress={self.compress!r}"
        return ""

    @property
    def plans_for_retaining(self) -> bool:
        """True if plans can have room for backwards with retain_graph=True: those of single ops, without copies."""
        hosts = self.host is not None or self.may_offload or self.hosts_weights
        return not (hosts or self.compiles or self.counts_reserved or self.plan)

    @property
    def may_change(self) -> bool | None:
        """The `dynamic` argument for torch.compile. False: all sizes are fixed; True: all are symbolic.

        None: a size is fixed until it changes; the sizes in `ranges` are symbolic from the start.
        """
        if not self.resizable:
            return False
        return self.dynamic if isinstance(self.dynamic, bool) else None

    @property
    def stepping(self) -> torch.optim.Optimizer | None:
        """The optimizer that the planned step runs when parameters may be on the host; None: the user's loop runs it.
        """
        return self.optimizer if self.hosts_weights and not isinstance(self.optimizer, str) else None

    @property
    def offloads_by_chain(self) -> bool:
        """True if activations are offloaded, and the solver, one for chains, decides when each is copied."""
        return self.offloads and self.solver in TRANSFERRING

    @property
    def saved(self) -> Plan:
        """The saved plan that the user passed."""
        assert isinstance(self.plan, Plan)
        return self.plan

    @property
    def of_capture(self) -> dict[str, object]:
        """The settings that the captured graph depends on, by option name; the plans of one captured step share them.
        """
        return {
            "method": self.method,
            "dynamic": self.dynamic,
            "backend": (self.compiles, self.inductor and self.inductor.random),
            "offload": self.hosts_weights,
            "loss": self.loss_outside.gradients,
            "fullgraph": self.fullgraph,
        }

    def longest(self, name: str, dimension: int | None) -> int | None:
        """Return the largest size given in `dynamic` for a dimension of an input; None: there is none."""
        if dimension is None or dimension not in (expected := self.ranges.get(name, {})):
            return None
        return expected[dimension][1]

    def without_choice(self) -> Options:
        """Return a copy for models that are several graphs: named means only, and offloading if it may be chosen."""
        if not self.chooses:
            return self
        offload = True if self.may_offload else self.offload
        return replace(self, exact=None, offload=offload, backend=self.backend or "eager")

    def with_weights_on_host(
        self, tried: tuple[Means, ...], parameters: Iterable[torch.Tensor]
    ) -> Options | None:
        """Return the options by which parameters may live on the host after all else failed; None if they may not.

        Args:
            tried: the means that failed.
            parameters: those of the model.
        """
        if not self.may_host_weights or not isinstance(self.optimizer, torch.optim.Optimizer):
            return None
        own = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in own for parameter in parameters):
            log.info("parameters cannot live on the host: none of the optimizer's is one of the model's")
            return None
        hosted = Offload(weights=True, updates="step")
        try:
            return replace(self, offload=hosted, backend="eager", division=None, tried=tried)
        except FxrematError as refused:
            log.info("parameters cannot live on the host: %s", refused)
            return None

    def quick(self) -> Options:
        """Return a copy of these options with a search time of 0 seconds, so that plans are not improved op by op."""
        return replace(self, search=replace(self.search, seconds=0.0))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _chosen_inductor(self) -> Inductor | None:
        """Return how the planner may compile groups of ops; None if it may not. Dropout draws as in eager PyTorch."""
        plain = self.plan is None and self.measures and not (self.hosts_weights or self.counts_reserved)
        plain = plain and not self.as_captured
        return Inductor(random="eager") if self.exact is False and plain and not self.offloads_by_chain else None

    def _budget(self) -> Budget:
        """Return the budget of a step; before `device_mem` is divided, all of it."""
        if self.device_mem is None:
            return parse_budget(self.mem)
        try:
            total = Bytes(parse_bytes(self.device_mem))
        except InvalidBudget as error:
            raise InvalidBudget(f"device_mem: {error}") from None
        return total if self.division is None else Bytes(self.division.budget)

    def _check_plan(self) -> None:
        if self.device_mem is not None and (self.mem is not None or self.plan is not None):
            other = "mem" if self.plan is None else "plan"
            raise FxrematError(
                "give device_mem, which is for all that the process has on the device, or "
                f"{other}, which is for a step, not both"
            )
        if self.plan is None:
            if self.mem is None and self.device_mem is None:
                raise InvalidBudget(
                    'the budget is missing: give mem, such as mem="4GiB" or mem="60%", or device_mem="24GiB"'
                )
            return
        if not isinstance(self.plan, Plan | str | os.PathLike):
            raise FxrematError(f"plan is {shortened(self.plan)}; it is a plan, or the file that plan.save(path) wrote")
        if self.device:
            raise FxrematError("plan runs as it was saved; it does not go with another device's costs")
        if self.compiles or self.dynamic:
            named = "backend" if self.compiles else "dynamic"
            runs = "with PyTorch's kernels" if self.compiles else "for fixed sizes"
            raise FxrematError(f"plan runs as it was saved, {runs}; {named} does not go with it: leave {named} out")
        if not isinstance(self.plan, Plan):
            self._set("plan", Plan.load(self.plan))
        self._check_goes_with(self.saved)
        if self.saved.weights and not self.hosts_weights:
            when = ', updates="step"' if self.saved.weights.later else ""
            raise FxrematError(
                f"the plan updates weights; it goes with offload=Offload(weights=True{when}) and the optimizer: "
                f"{self.saved.weights.optimizer}"
            )
        if self.strict is None:
            self._set("strict", self.mem is None)
        if self.mem is None:
            self._set("mem", self.saved.budget)

    def _check_goes_with(self, plan: Plan) -> None:
        """Raise `FxrematError` for an option that contradicts a saved plan, or that says how to make one."""
        for named in ("solver", "never_again", "keep"):
            if getattr(self, named) != getattr(Options, named):
                raise FxrematError(f"plan runs as it was saved; {named} is for making one: leave out one of the two")
        if self.slicing and not plan.slices:
            raise FxrematError("plan runs as it was saved, without slices; it does not go with slices")
        made, copies = plan.compression, plan.chosen.transfers
        contradicted = {
            ("runs ops in slices", "slices=False"): plan.slices and self.slices is False,
            ("runs ops in slices, which round otherwise", "exact=True"): plan.slices and self.exact,
            ("stores values in fewer bytes", "compress=False"): made and self.compress is False,
            ("rounds values that it stores", "exact=True"): made and made.rounded and self.exact,
            ("lets values wait on the host", "offload=False"): copies and self.offload is False,
        }
        for (does, option), so in contradicted.items():
            if so:
                raise FxrematError(f"the plan {does}: it does not go with {option}; make a plan with that option")
        limit = self.host and self.host.bytes
        if limit and plan.on_host > limit:
            raise FxrematError(
                f"the plan lets {format_bytes(plan.on_host)} wait on the host, and Offload(limit=...) allows "
                f"{format_bytes(limit)}"
            )

    def _check_backend(self) -> None:
        if self.compiles and self.offloads_by_chain:
            raise FxrematError(f'backend="inductor" offloads by solver="auto"; it does not go with {self.solver!r}')
        if self.compiles and not self.measures:
            raise FxrematError('backend="inductor" measures its kernels; it goes with costs="measure"')

    def _check_optimizer(self) -> None:
        given = self.optimizer
        if not isinstance(given, torch.optim.Optimizer | None) and (
            self.hosts_weights or not isinstance(given, str) or given.lower() not in OPTIMIZERS
        ):
            raise FxrematError(
                f"optimizer is {shortened(given)}; it is one of torch.optim or, to count its state on a device that a "
                f"step is estimated for, one of {', '.join(OPTIMIZERS)}"
            )
        if self.hosts_weights and given is None:
            raise FxrematError(
                "offload=Offload(weights=True) and optimizer go together: the step then updates the parameters itself"
            )
        if given is not None and not self.hosts_weights and self.device is None and self.device_mem is None:
            raise FxrematError(
                'optimizer goes with costs="H100", where its state is counted, as with device_mem; or with '
                "offload=Offload(weights=True), where the step updates the parameters itself: these two go together"
            )
        if isinstance(given, torch.optim.Optimizer) and (self.hosts_weights or self.device_mem is None):
            check_optimizer(given)

    def _check_solver(self) -> None:
        known = (*PLANNERS, *TRANSFERRING) if self.offloads else PLANNERS
        if self.kept and self.offloads_by_chain:
            raise FxrematError(
                f"keep says what stays on the device, and solver={self.solver!r} moves blocks: leave out one of the two"
            )
        if isinstance(self.solver, str) and self.solver in known:
            if self.hosts_weights and self.offloads_by_chain:
                raise FxrematError(
                    f'solver={self.solver!r} places transfers of activations alone; with weights on the host use "auto"'
                )
            return
        if isinstance(self.solver, str) and self.solver in TRANSFERRING:
            raise FxrematError(f"solver={self.solver!r} moves values to the host; it goes with offload=True")
        if isinstance(self.solver, str) and self.solver in (*CHAINS, *JOINS):
            raise FxrematError(
                f"solver={self.solver!r} is one for chains and joins (fxremat.solve); those that plan models are "
                + ", ".join(known)
            )
        raise FxrematError(
            f"unknown solver {shortened(self.solver)}{did_you_mean(str(self.solver), known)}; those that plan models "
            f"are {', '.join(known)}"
        )


    def _check_compress(self) -> None:
        if self.compress is not None and self.compress is not False and self.compress not in COMPRESSED:
            raise FxrematError(
                f"compress is {shortened(self.compress)}; it is None, False, or one of {', '.join(COMPRESSED)}"
            )
        if not self.compress:
            return
        if self.exact is not None:
            raise FxrematError(f"compress={self.compress!r} is a means that the user names; leave exact out")
        others = {
            "a saved plan": self.plan is not None,
            "slices": self.slicing,
            "weights on the host": self.hosts_weights,
            'backend="inductor"': self.was_told_to_compile,
        }
        if other := next((name for name, used in others.items() if used), None):
            raise FxrematError(f"compress={self.compress!r} does not go with {other}, which reads values as they are")

    def _check_count(self) -> None:
        if self.count not in COUNTS:
            raise FxrematError(f"count is {shortened(self.count)}; it is one of {', '.join(COUNTS)}")
        if not self.counts_reserved:
            return
        if self.device_mem is not None:
            raise FxrematError('count="reserved" goes with mem; device_mem leaves room for what is reserved')
        if self.host or self.compiles or self.plan is not None:
            other = "a saved plan" if self.plan is not None else "offload" if self.host else 'backend="inductor"'
            raise FxrematError(f'count="reserved" replays single ops on one stream; it does not go with {other}')
        if isinstance(self.budget, Percent):
            raise InvalidBudget('count="reserved" goes with bytes, as in mem="4GiB", "min" or "auto", not with percent')


# fields that are set internally, not by users
HIDDEN = ("loss_seen", "retained", "strict", "as_captured", "pure", "division", "tried")
NAMES = tuple(field.name for field in fields(Options) if field.init and field.name not in HIDDEN)
DECIDING_ON_KERNELS = ("exact", "costs", "count", "offload", "solver")  # where `backend` is None: see `exact`
RENAMED = {  # option of an earlier version -> what to write now
    "cost": 'costs="estimate"',
    "device": 'costs="H100"; for several devices, fxremat.compare(model, inputs, ["A100", "H100"], mem=...)',
    "effort": "search=Search(seconds=...)",
    "slots": "search=Search(slots=...)",
    "progress": "search=Search(progress=False)",
    "loss_bytes": 'loss="300MB", or loss=Loss(bytes=...)',
    "only_loss": 'loss=Loss(gradients="all")',
    "host_mem": 'offload=Offload(limit="16GiB")',
    "offload_weights": "offload=Offload(weights=True)",
    "shapes": 'dynamic={"tokens": {1: (16, 4096)}}',
    "reduce": "slices=Slices(reduce_dtype=torch.float32)",
    "outputs": "slices=Slices(drop_outputs=True)",
    "kernels": 'backend="inductor"',
    "inductor": "backend=Inductor(config=...)",
    "random": 'backend=Inductor(random="eager")',
}


def options_of(**options: Any) -> Options:
    """Return the options that a user passed as keyword arguments.

    Raises `InvalidBudget` if neither `mem` nor `plan` is given, `FxrematError` for an unknown option, and the
    errors of `Options`.
    """
    for name in options:
        check_name(name)
    return Options(**options)


def changed_options(options: Options, mem: int | str | None, **changed: Any) -> Options:
    """Return a copy of the options of a captured step with some of them `changed`; mem=None: the same budget.

    Raises `FxrematError` for an option that is unknown or would change the captured graph, and the errors of
    `Options`.
    """
    for name in changed:
        check_name(name)
    if "plan" in changed:
        raise FxrematError("a captured step makes plans: pass a saved one to fxremat.compile(model, plan=...)")
    stays: dict[str, Any] = {"plan": None, "strict": None, "as_captured": not options.compiles}
    if mem is not None:
        changed = {"mem": mem, "device_mem": None, "division": None} | changed
        if options.device is None and not options.hosts_weights:
            changed.setdefault("optimizer", None)  # its state was counted in `device_mem`
    elif options.division is not None and {"device_mem", "optimizer"} & changed.keys():
        total: Any = changed.get("device_mem", options.device_mem)
        optimizer = changed.get("optimizer", options.optimizer)
        changed["division"] = options.division.of_other(parse_bytes(total), optimizer) if total is not None else None
    made = replace(options, **stays, **changed)
    for setting, value in made.of_capture.items():
        if value != options.of_capture[setting]:
            # whether kernels are compiled may follow from other options
            name = next((given for given in (setting, *DECIDING_ON_KERNELS) if given in changed), setting)
            was, given = shortened(getattr(options, name)), shortened(getattr(made, name))
            raise FxrematError(
                f"{name}={given} changes what is captured, and this step was captured with {name}={was}: capture it "
                f"again, fxremat.capture(model, inputs, {name}={given})"
            )
    return made


def check_name(name: str) -> None:
    """Raise `FxrematError` if no option has this name; for a renamed option, the message says what to write now."""
    if name in RENAMED:
        raise FxrematError(f"the option {name} has a new form: {RENAMED[name]}")
    if name not in NAMES:
        near = did_you_mean(name, (*NAMES, "example_inputs"))
        raise FxrematError(f"unknown option {shortened(name)}{near}; there are {', '.join(NAMES)}")


def _several(given: Wish | Sequence[Wish]) -> tuple[Wish, ...]:
    return (given,) if isinstance(given, str) or not isinstance(given, Sequence) else tuple(given)


def _host(given: object) -> Offload | None:
    if isinstance(given, Offload):
        return given
    if isinstance(given, HostTier):
        return Offload(tier=given)
    if not isinstance(given, bool | None):
        raise FxrematError(
            f"offload is {shortened(given)}; it is True, False, a host tier such as FileTier(), or an Offload(...)"
        )
    return Offload() if given else None


def _slicing(given: object) -> Slices | None:
    if isinstance(given, Slices):
        return given
    if not isinstance(given, bool | None):
        raise FxrematError(f"slices is {shortened(given)}; it is True, False, or a Slices, such as Slices(max_parts=8)")
    return Slices() if given else None


def _inductor(given: object) -> Inductor | None:
    if isinstance(given, Inductor):
        return given
    if not isinstance(given, str) or given not in BACKENDS:
        raise FxrematError(f"backend is {shortened(given)}; it is one of {', '.join(BACKENDS)}, or an Inductor(...)")
    return Inductor() if given == "inductor" else None


def _of_size(given: Any) -> Loss:
    try:
        return Loss(bytes=given)
    except InvalidBudget as error:
        raise InvalidBudget(str(error).replace("Loss: bytes", "loss", 1)) from None


def _device(costs: object) -> Device | None:
    """Return the device that costs are estimated for; None if they are measured, or if no device is named."""
    if isinstance(costs, Device):
        return costs
    if isinstance(costs, Trace):
        return costs.on
    if callable(costs):
        return None
    if not isinstance(costs, str):
        raise FxrematError(
            f'costs is {shortened(costs)}; it is "measure", "estimate", a device by name or as a fxremat.Device, a '
            "fxremat.Trace, or a function that returns the seconds of a node"
        )
    try:
        return None if costs in ("measure", "estimate") else Device.named(costs)
    except FxrematError as error:
        raise FxrematError(f'costs: {error}; or it is "measure" or "estimate"') from None


def _ranges(dynamic: object) -> Ranges:
    """Return the size ranges in `dynamic` as input -> dimension -> (minimum, maximum); {} if it is None or a bool."""
    if dynamic is None or isinstance(dynamic, bool):
        return {}
    if isinstance(dynamic, Mapping) and all(map(_is_by_dimension, dynamic.items())):
        ends = {name: {dim: _ends(given) for dim, given in sizes.items()} for name, sizes in dynamic.items()}
        if all(map(_is_range, (pair for sizes in ends.values() for pair in sizes.values()))):
            return ends
    raise FxrematError(
        f"dynamic is {shortened(dynamic)}; it is None, True, False, or the least and the largest size by input and "
        'dimension, 2 at least: {"tokens": {0: (2, 8), 1: Dim("length", min=16, max=4096)}}'
    )


def _is_by_dimension(item: tuple[object, object]) -> bool:
    name, sizes = item
    return isinstance(name, str) and isinstance(sizes, Mapping) and all(isinstance(dim, int) for dim in sizes)


def _ends(given: Any) -> tuple[Any, ...]:
    """Return (minimum, maximum) of a range; for an invalid range, a tuple that `_is_range` rejects."""
    if isinstance(given, Dim):
        return given.min, given.max
    return tuple(given) if isinstance(given, tuple | list) else ()


def _is_range(ends: tuple[object, ...]) -> bool:
    """Tell whether a tuple consists of two ints, minimum and maximum, of at least 2 and in order."""
    match ends:
        case (int() as low, int() as high) if not (isinstance(low, bool) or isinstance(high, bool)):
            return 2 <= low <= high
    return False
