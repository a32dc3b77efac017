"""The dynamo backend: torch.compile captures, AOTAutograd differentiates, and its partition function plans the step.

    torch.compile(model, backend="fxremat", options={"mem": "4GiB"})
    fxremat.compile(model, mem="4GiB")                                     the same, as a drop-in module
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxremat import kernels
from fxremat.budget import SHRUNK, free_bytes, free_memory, has_shrunk
from fxremat.cost.device_memory import SLACK, bytes_of_inputs, divided
from fxremat.cost.devices import Device
from fxremat.cost.layouts import LayoutsDiffer, Strides
from fxremat.cost.segments import expand_segments
from fxremat.cost.workspaces import make_workspaces, warn_of_trials
from fxremat.data_stack import with_room_for_calls
from fxremat.device import kind_of
from fxremat.errors import BudgetTooSmall, CaptureError, FxrematError, InvalidBudget, NotSymbolic
from fxremat.graphs.accounting import device_of, held, held_beside_copies, largest_tensor, scale_of_loss
from fxremat.graphs.captured import (
    Captured,
    inputs_of,
    note_dropped,
    places_of,
    read_joint,
    with_updates_inside,
)
from fxremat.graphs.cudnn_batch_norm import batch_norms_of_cudnn
from fxremat.graphs.names import FLOAT, note_names
from fxremat.graphs.nodes import tangents_in
from fxremat.graphs.symbolic import SymbolicGraph, has_symbolic_sizes
from fxremat.host.default import default_tier
from fxremat.host.tier import span_bytes
from fxremat.ops.parameters import Weights
from fxremat.ops.recurrent import lending
from fxremat.options import Options, SeenLoss, check_name, options_of
from fxremat.passes.masked_writes import masked_writes_as_ops
from fxremat.passes.numbers import refuse_symbols
from fxremat.passes.pipelines import PIPELINES, normalize
from fxremat.passes.recurrent import recurrent_as_ops
from fxremat.passes.regions import inline_regions
from fxremat.passes.tangents import bear_any_layout
from fxremat.planning.captured_step import CapturedStep, FixedStep
from fxremat.planning.facts import estimated_keep_all, facts_of, sizes_with_loss
from fxremat.planning.graph_programs import as_in_a_step, programs_of, programs_of_single_ops, tier_of
from fxremat.planning.limits import limit_of
from fxremat.planning.means import seen_before
from fxremat.planning.paths import NO_ROOM
from fxremat.planning.sizes import Dimension, PlansOfSizes, SizedStep
from fxremat.planning.step import LargestCall, Reference, Step, TrainedParameters, named
from fxremat.planning.wishes import wished
from fxremat.plans import Plan
from fxremat.profiles import enough
from fxremat.progress import telling
from fxremat.runtime.assigned_data import copy_assigned_data, refuse_assignments
from fxremat.runtime.attention_masks import checking, unmark
from fxremat.runtime.auxiliary_outputs import (
    DETACHED,
    AuxiliaryOutputs,
    GradientsSeen,
    auxiliary_outputs_of,
    check_runs_again,
    runs_again,
)
from fxremat.runtime.called_graph import CalledGraph
from fxremat.runtime.capture_errors import refuse_without_gradients
from fxremat.runtime.coordinator import Coordinator
from fxremat.runtime.devices import check_devices
from fxremat.runtime.double_backward import EXCEEDING, FOLLOWED, Rerun, TwiceDifferentiable
from fxremat.runtime.dropped_outputs import DroppedOutputs, WatchedOutputs, bytes_at
from fxremat.runtime.fixed import Fixed
from fxremat.runtime.loss_meter import LossMeter, MeasuredLoss, OutputsHeard
from fxremat.runtime.ranks import ranks_of
from fxremat.runtime.real_layouts import real_layouts
from fxremat.runtime.sized import Sized
from fxremat.runtime.step_memory import OtherModels
from fxremat.runtime.target_kernels import kernels_of
from fxremat.runtime.torch_compile import Graphs, WholeGraph, graphs_of
from fxremat.runtime.unmeasured_loss import plan_expecting_less
from fxremat.runtime.unused import telling_unused, without_unread
from fxremat.runtime.varying import warn_of_fixed
from fxremat.step.liveness import Sizes
from fxremat.torch_private import (
    among_ranks,
    aot_backend,
    boxed,
    copied,
    differentiate_as_eager,
    forget_history,
    input_and_dimension,
    input_place,
    is_compiling,
    is_float,
    is_state,
    is_tensor_of_subclass,
    leaves_to_python,
    marked_most,
    never_donate,
    parameter_name,
    real_tensors,
    take_gradients_as_they_lie,
    taking_a_list,
    written_inputs,
)
from fxremat.transfers.network import communicates
from fxremat.units import Auto, Least, Percent, format_bytes, parse_bytes

log = logging.getLogger(__name__)
KEPT_PLANS = 8  # this many of the latest plans can be read by users
# a step is traced at most so often; each trace uses the real strides that were measured after the last one
MOST_TRACES = 4
# A step is planned again only if recomputation makes it slower than keeping everything by this factor, and the
# loss needs less memory than was reserved for it, by more than GAIN - 1 of the budget.
GAIN = 1.01
NOTED = 1.001  # a loss with which a step exceeds its plan by this factor is a warning; less is in the log
MANY_SIZES = 3  # after this many combinations of input sizes a warning says what each new one costs


NOT_COPIED = "gradients of the loss outside the model are not copied: the next call plans without copies"
HELD_NOW = (
    "%s of outputs, which earlier calls of %s had dropped before the backward, are held until it has ended, "
    "beside what was planned: the next call plans for that"
)
UNREAD = (
    "a graph of {model} cannot be planned, so that it cannot read weights that live on the host ({told}): leave "
    "weights=True out, or keep its parameters out of the optimizer that fxremat.compile is given"
)
WRITTEN = (
    "forward writes to {named}, which the step updates itself with Offload(weights=True) (an Embedding with max_norm "
    "does, and clamping in forward): write to it after optimizer.step(), or give it to another optimizer than the one "
    "that fxremat.compile takes"
)
FOREIGN = (
    "none of the optimizer's parameters is one of the model's; where they were replaced, as by "
    "load_state_dict(assign=True), make the optimizer anew, and pass both to fxremat.compile"
)
REPLACED = (
    "%d of the %d parameters that the step updates are no longer the model's (load_state_dict(assign=True) replaces "
    "parameters): the step is captured again, and the new ones are updated only if the optimizer has them"
)


class Until(Enum):
    """The stage at which a training call ends."""

    CAPTURED = "captured"  # the call ends when the step is captured and measured; the next call captures again
    PLANNED = "planned"  # the call ends before the forward runs; the next call runs the plan
    RUN = "run"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a `Backend` that a planned call may change, to be taken back if nothing fits."""

    options: Options
    divided_for: tuple[int, int, int]
    weights: Weights | None
    plans: tuple[Plan, ...]


class Reached(FxrematError):
    """Raised to end a training call at the requested stage; not a failure."""

    def __init__(self, step: CapturedStep | None = None) -> None:
        super().__init__("the call was to go no further")
        self.step = step  # the captured step, if the call ended at CAPTURED


class Backend:
    """A dynamo backend that plans every joint graph that dynamo captures.

    Attributes:
        given: the options as the user gave them, without what calls added to `options`.
        plans: the plans that were made or ran latest, in this order; others go on running, but are not in the list.
        until: the stage at which calls end; those that end before they run raise `Reached`.
        outdated: True if the next call has to capture the model again.
        loss_is_other: True if it has to plan again, for another loss outside of the model.
        model: the name of the model's class, for reports.
        target: the device whose kernels are captured instead of a CPU's, for plans that are not run.
        input_names: the names of the model's inputs that may be passed by position, in order.
        tied: for parameters with several names, a map from the other names to the one in `named_parameters()`.
        weights: the optimizer's parameters, if the step updates them; None before the first call, or if it does not.
        coordinator: runs the graphs of a model that consists of several; None: each graph is an entire step.
    """

    def __init__(
        self,
        options: Options,
        target: Device | None = None,
        names: Sequence[str] = (),
        model: str = "model",
        tied: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if options.plan is None:  # a plan from a file needs no solvers, which `begin` compiles
            kernels.begin()
        self.model, self.tied = model, tied
        self.options = self.given = options
        self._before: Options | None = None  # before `coordinate`, if there was a choice
        self.target = target
        self.input_names = tuple(names)
        self.plans: deque[Plan] = deque(maxlen=KEPT_PLANS)
        self._others = OtherModels()
        self.until = Until.RUN
        self._layouts_vary = False  # True once a loss outside handed in gradients that lie otherwise than traced
        self._told_of_loss = False  # True once a warning told ranks that the loss takes more memory than planned
        self._planned_for = set[str]()  # the sizes of all plans so far, or the digests of graphs of fixed sizes
        self.measures_loss = True  # False: what runs between forward and backward is planned elsewhere
        self._mem_with_room: int | str | None = None  # the budget, while the least is taken for want of room
        self._sized_steps = list[Sized]()  # the steps of symbolic sizes that were captured since `forget_steps`
        self._last_step: Fixed | Sized | None = None  # the captured step whose forward ran last
        self._of_other_loss = list[Fixed | Sized]()  # those to plan again, if `loss_is_other`
        self._before_loss: Settings | None = None  # what was set before
        self.outdated = False  # True if less memory is free than before, or the captured step is no longer the model's
        self.loss_is_other = False  # True if the loss outside of the model takes more or less memory than planned
        self.weights: Weights | None = None
        self.coordinator: Coordinator | None = None
        self._stepped = set[int]()  # the `id` of each parameter of the model that steps update themselves
        self.hosted: frozenset[int] = frozenset()  # indices in the optimizer of the parameters that live on the host
        # key of a call (see `cost.layouts.key_of`) -> strides that were measured
        self._layouts: dict[str, Strides] = {} if options.plan is None else dict(options.saved.layouts)
        self._gradients = GradientsSeen()
        self._any_layout = False  # True if the backward that is being compiled accepts gradients of any strides
        # what `device_mem` was divided for: the most bytes of inputs, and the most parameters that had a gradient at
        # the beginning, and that were trained
        self._divided_for = (-1, -1, -1)
        self._free = 0  # most bytes that the device had free when one of the plans for reserved bytes was made
        self._fixed = False  # True if each combination of input sizes is captured separately
        # the combinations of input sizes that were planned for, as text, each after what such calls are given
        self._called_with: set[tuple[object, str]] = set()
        self._given: object = None  # what the graph is given that is being compiled, whatever the sizes
        # by what calls are given: what they do, whatever the sizes, and the sizes at which that was captured first
        self._first_sizes: dict[object, dict[object, str]] = {}
        self.captured_again = 0  # number of captures for input sizes that had been planned for
        # indices of the inputs that the graph writes to which is being compiled, if it has no backward
        self._writes_alone = list[int]()
        # how the graph that is being compiled can run again; None if it has no backward
        self._rerun: Rerun | None = None
        self._names: list[str | None] = []  # for each input of the captured graph, its parameter name, or None
        self._inputs: Sequence[Any] = ()  # the arguments for which a graph is being compiled
        self._placeholders: Sequence[fx.Node] = ()  # the placeholders of dynamo's graph that is being compiled
        self._largest_calls: dict[object, LargestCall] = {}  # by what calls do, whatever their sizes
        self._largest_call = LargestCall()  # the one of these that belongs to the graph that is being compiled
        self._of_callers: dict[object, DroppedOutputs] = {}  # by what calls do, as `_largest_calls`
        self._outputs = DroppedOutputs()  # the one of these that belongs to the graph that is being compiled
        # tells whether the next call of that graph captures it again, without gradients that it did not get
        self._captured_next: Callable[[], bool] = lambda: False
        self.replanned = 0  # how often steps got new plans without being captured again

    @with_room_for_calls
    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Return a compiled function for a captured graph. Raises `CaptureError` for sizes that depend on data."""
        inline_regions(module)
        recurrent_as_ops(module.graph)
        masked_writes_as_ops(module.graph)
        copy_assigned_data(module.graph)
        checks = unmark(module.graph, self.input_names)
        outputs = auxiliary_outputs_of(module)
        if outputs.all:
            refuse_symbols(module.graph, "example_value")
        run: Callable[..., Any]
        try:
            loss_alone = self.coordinator is None and self.options.loss_outside.gradients == "loss"
            if loss_alone and (outputs.beside or outputs.mixed):
                kind = _inputs_and_outputs(module.graph)
                run = AuxiliaryOutputs(module, outputs, self._differentiate, inputs, self._gradients, kind)
            else:
                run = (self._differentiate if self.coordinator is None else self._or_plain)(module, inputs)
            if outputs.all and self.weights is None:
                run = without_unread(run, module)
            return run if self.coordinator is None else checking(run, checks)
        finally:
            forget_history(module.graph)

    def _or_plain(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled function of one graph of several; one that cannot be planned runs as plain PyTorch.

        Where AOTAutograd cannot trace an op that reads data, dynamo leaves the function that calls it to Python.
        """
        try:
            return self._differentiate(module, inputs)
        except Exception as error:
            refused = isinstance(error, CaptureError) or not isinstance(error, FxrematError)
            if leaves_to_python(error):
                raise
            nested = any(isinstance(each, torch.Tensor) and each.is_nested for each in inputs)
            if not refused or (any(isinstance(size, torch.SymInt) for size in inputs) and not nested):
                raise  # where sizes change, dynamo is asked again for fixed ones
            told = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if self.weights is not None and self.weights.device.type != "cpu":
                raise CaptureError(UNREAD.format(model=self.model, told=told)) from error
            log.warning("a graph of %s cannot be planned, and runs as plain PyTorch: %s", self.model, told)
            return module.forward

    def _differentiate(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, again: bool = False
    ) -> Callable[..., Any]:
        self._inputs, began, self._writes_alone = inputs, time.monotonic(), list[int]()
        outputs = auxiliary_outputs_of(module)
        trained = outputs.all
        made: list[Fixed | Sized | CalledGraph] = []  # from the partition until the backward is compiled
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        names = map(parameter_name, placeholders)
        self._names = [name and self.tied.get(name, name) for name in names]
        self._placeholders = placeholders
        kind = _without_sizes(module.graph)
        self._given = tuple(each for each in kind if not isinstance(each, str))
        first_sizes = self._first_sizes.setdefault(self._given, {})
        is_new = kind not in first_sizes
        first_sizes.setdefault(kind, _shapes_at(_input_places(placeholders), inputs))
        self._largest_call = self._largest_calls.setdefault(kind, LargestCall(among=self._largest_calls))
        kind_of_outputs = _inputs_and_outputs(module.graph)
        self._outputs = self._of_callers.setdefault(kind_of_outputs, DroppedOutputs())
        gradients = self._gradients.of(kind_of_outputs)
        self._captured_next = lambda: not gradients.silent.isdisjoint(outputs.mixed)
        backend = aot_backend(
            fw_compiler=lambda graph, _: self._forward(graph, made[-1]),
            bw_compiler=lambda graph, _: made.pop().backward_of(graph),
            inference_compiler=partial(self._without_gradient, module),
            partition_fn=partial(self._partition, made=made, again=again),
        )
        before = len(self._called_with)
        try:
            with telling(f"capturing {self.model}"):
                compiled = self._traced(lambda: backend(module, _to_trace(placeholders, inputs)), inputs)
        except AssertionError as error:
            refuse_assignments(module.graph, error)
            raise
        finally:
            self._inputs = ()  # dynamo keeps backends alive, which must not keep the model alive
            self._placeholders = ()
        if self.until is Until.RUN:
            unrolled = len({*first_sizes.values()})  # the number of sizes that have ops of their own
            if len(self._called_with) > before:
                combinations = sum(given == self._given for given, _ in self._called_with)
                self._warn_of_many(combinations, time.monotonic() - began, unrolled=unrolled >= MANY_SIZES)
            else:
                self.captured_again += 1
                if is_new and self.coordinator is None and self.options.may_change is True:
                    self._warn_of_many(unrolled, time.monotonic() - began, unrolled=True)
        if self._writes_alone:
            compiled = self._keeping_values(module, self._writes_alone)
        rerun, self._rerun = self._rerun, None
        if rerun is not None:
            compiled = TwiceDifferentiable(compiled, module, rerun, self._unplanned, self._plan_for_retaining)
        if self.coordinator is None and self.measures_loss:
            stepping = self.options.stepping is not None
            judge, heard = self._judge_of_loss, self._judge_of_outputs
            others, replanned = self._others, lambda: self.replanned
            compiled = LossMeter(compiled, trained, judge, heard, others, stepping=stepping, replanned=replanned)
        return telling_unused(compiled, trained) if len(trained) > 1 or again else compiled

    def _without_gradient(self, module: fx.GraphModule, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Return the function of a graph whose outputs need no gradient; it is not planned.

        One that writes to its inputs, such as an optimizer's step, is run as it was before AOTAutograd traced it, which
        makes new tensors beside all that are written to.
        """
        self._writes_alone = written_inputs()
        if module.graph.find_nodes(op="call_function", target=torch.autograd.grad):
            log.warning(
                "%s calls torch.autograd.grad, and nothing that the graph returns is differentiated: it runs without a "
                "budget. Return the loss and differentiate it outside, or call its backward()",
                self.model,
            )
        run, coordinator = boxed(graph), self.coordinator
        if coordinator is None or self.weights is None:
            return run
        return taking_a_list(lambda arguments: run(coordinator.with_weights(arguments)))

    def _keeping_values(self, module: fx.GraphModule, written: Sequence[int]) -> Callable[..., Any]:
        """Return a function that first copies what it overwrites for graphs of the step whose backwards read it.

        Args:
            written: what it overwrites, as indices of the module's own parameters and buffers, and then its inputs.
        """
        if (coordinator := self.coordinator) is None:
            return module.forward
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        own = [tensor for _, tensor in named]

        def call(*inputs: Any) -> Any:
            given = (*own, *inputs)
            overwritten = [given[place] for place in written]
            if any(map(coordinator.is_on_host, overwritten)):
                raise FxrematError(WRITTEN.format(named="a parameter"))
            coordinator.keep_values(overwritten)
            return module.forward(*inputs)

        return call

    def _traced(self, trace: Callable[[], Callable[..., Any]], inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled step; trace it again while measured strides differ from those that it was traced with.

        Raises:
            LayoutsDiffer: they still differ after `MOST_TRACES` traces.
        """
        for _ in range(MOST_TRACES):
            try:
                with self._as_it_runs(inputs), lending(inputs):
                    return trace()
            except LayoutsDiffer as error:
                self.learn(error)
                differing = error.with_traceback(None)  # whose frames would refer to it, and hold this call's outputs
        raise differing

    def learn(self, differing: LayoutsDiffer) -> None:
        """Store real strides of results, for tracing the step again."""
        log.info("tracing again: results of %s lie otherwise than fake tensors tell", ", ".join(differing.ops))
        self._layouts |= differing.observed

    @contextlib.contextmanager
    def _as_it_runs(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Within this context, trace op results with their real strides, and gradients as eager PyTorch computes them.
        """
        cpu = self.target is None or not self.target.cuda
        layouts = real_layouts(self._layouts, cpu=cpu, compiled=self.options.compiles)
        cudnn = contextlib.nullcontext() if self.options.compiles else batch_norms_of_cudnn()
        with layouts, differentiate_as_eager(), self._kernels(inputs), cudnn:
            yield

    def _judge_of_loss(self) -> Callable[[MeasuredLoss], None]:
        """Return a function that takes the loss of the call that has just run."""
        ran = self._last_step
        plan = ran.plan if ran is not None else None
        return partial(self._take_loss, ran, plan) if ran is not None and plan is not None else lambda _: None

    def _judge_of_outputs(self, measured: bool) -> OutputsHeard | None:
        """Return whom to tell what the caller does with the outputs of the call that has just run; None: nobody.

        Ranks that communicate keep their plans.
        """
        ran = self._last_step
        plan = ran.plan if ran is not None else None
        if ran is None or plan is None:
            return None
        if not ran.outputs.places and (not measured or communicates(plan.graph)):
            return None
        return OutputsHeard(partial(ran.outputs.check, plan=plan), partial(self._take_outputs, ran, plan))

    def _take_outputs(self, ran: Fixed | Sized, plan: Plan, outputs: WatchedOutputs) -> None:
        """Plan again at the next call if the caller has dropped outputs that the plan counts as held, or the reverse.

        Args:
            ran: the captured step, and its plan at the sizes of the call.
            outputs: those of the call, as its backward has ended.
        """
        known, held = ran.outputs, outputs.held(apart_from=ran.outputs.held)
        if self.coordinator is not None:  # calls have been planned together since that step began
            return
        if relied := known.has_seen(held.keys()):
            size = format_bytes(bytes_at(held, relied))
            log.warning(HELD_NOW, size, self.model)
            self._plan_for_other_loss(ran)
        elif self._would_drop(known, plan, outputs.dropped):
            self._correct_largest_call(plan, dropped=known.places)
            self._plan_for_other_loss(ran)

    def _would_drop(
        self, known: DroppedOutputs, plan: Plan, dropped: Mapping[int, int], sizes: Sizes | None = None
    ) -> bool:
        """Count outputs as dropped from now on where that lowers the peak of a plan by more than `GAIN`.

        Args:
            sizes: those with which the step is planned next; None: those of the plan.
        """
        more = known.places | known.new(dropped)
        if more == known.places or self.options.plan is not None or communicates(plan.graph):
            return False
        if (plan.peak_with(sizes) if sizes else plan.predicted_peak) <= GAIN * plan.peak_dropping(more, sizes):
            return False
        size = format_bytes(bytes_at(dropped, more - known.places))
        log.info("%s of outputs are dropped before the backward: the next call plans for that", size)
        known.places = more
        return True

    def _take_loss(self, ran: Fixed | Sized, plan: Plan, loss: MeasuredLoss) -> None:
        """Plan again at the next call if budget or predicted peak do not hold with the loss outside the model.

        So it is if the loss takes so much less that a plan may be faster. A loss whose peak was not measured is taken
        to need what was planned.

        The plan of ranks that communicate stays, since they can only plan together, and may measure different losses.

        Args:
            ran: the captured step, and its plan at the sizes of the call.
        """
        if self.coordinator is not None:  # calls have been planned together since that step began
            return
        if not loss.assumed and loss.peak is not None:
            self._take_beside(ran, plan, loss, loss.peak)
            return
        if loss.anew and self._mem_with_room is not None:
            self.options, self._mem_with_room = replace(self.options, mem=self._mem_with_room), None
            seen, held = self.options.loss_seen or SeenLoss(), loss.held_beside(ran.outputs.places)
            self._plan_for_other_loss(ran, seen.with_loss(loss.assumed, peak=loss.peak, held=held, anew=True))
            return
        known = self.options.loss_seen
        expected = None if known is None else known.peak_at(loss.assumed)
        planned = self.options.loss_outside.size or (loss.assumed if expected is None else expected)
        stays = loss.held_beside(ran.outputs.places) + loss.early
        peak = planned if loss.peak is None else loss.peak if loss.exact else max(loss.peak, planned)
        took = peak + loss.early
        beside = held_beside_copies(plan.captured, device_of(plan.captured))
        predicted = plan.peak_with_loss(took, stays + beside)
        exceeds = predicted > max(plan.budget, plan.predicted_peak)
        free = self.options.plan is None  # else the plan is a saved one, which only a budget that is exceeded replaces
        more = exceeds or (free and predicted > GAIN * plan.predicted_peak)
        guessed = known is None or expected is None or known.is_expected or known.is_guess_at(loss.assumed)
        less = free and loss.exact and (guessed or loss.anew) and self.options.loss_outside.size is None
        less = less and (_would_gain(plan, planned - peak) or self._foresees_too_much(plan, loss, took))
        sizes, own = replace(plan.running.costs.sizes, outside=took), None  # those with what is known of it now
        traced = free and (more or less) and self._copies_nothing(ran, plan, sizes)
        if traced:
            own = plan.sizes_without_copies()
            sizes = replace(own, outside=took)
        drops = self._would_drop(ran.outputs, plan, loss.dropped, sizes if more or less else None)
        measured, held = None if loss.peak is None else peak, loss.held_beside(ran.outputs.places)
        seen = (known or SeenLoss()).with_loss(loss.assumed, peak=measured, held=held, anew=loss.anew)
        early, fixed = max(seen.early, loss.early), max(seen.fixed, loss.fixed)
        seen = replace(seen, early=early, fixed=fixed, left_out=loss.left_out, as_traced=seen.as_traced or traced)
        if not (more or less or drops):
            if free and loss.exact and self.options.loss_outside.size is None:
                self.options = replace(self.options, loss_seen=seen)  # for plans of other sizes, or for other reasons
            return
        aside = planned + (known.early if known else 0)
        (now, before), better = map(format_bytes, (took, aside)), enough(took)
        if now == before:
            now, before = f"{took:,} bytes", f"{aside:,} bytes"
        told = f"the loss outside the model allocated {now} where {before} had been set aside"
        if loss.peak is None or (more and took <= aside):  # what exceeds is not its peak
            what = "and of gradients that it has made of parameters " if loss.early else ""
            told = f"{format_bytes(stays)} of the loss outside the model {what}stay while the model's backward runs"
            better = ""  # a larger loss between forward and backward would make no room there
        if drops and not (more or less):
            self._correct_largest_call(plan, dropped=ran.outputs.places)
            self._plan_for_other_loss(ran, seen)
            return
        if (seen == known and not drops) or communicates(plan.graph):
            why = "another plan would be the same" if seen == known else "ranks that share a model keep their plan"
            if exceeds and not self._told_of_loss:
                self._told_of_loss = True
                way = better and f': fxremat.compile(..., loss="{better}") makes room for it'
                log.warning("%s, and %s%s", told, why, way)
            return
        self._plan_for_other_loss(ran, seen)
        if less or traced or drops:
            self._correct_largest_call(plan, sizes if less else own, ran.outputs.places if drops else None)
        by_much = predicted > NOTED * max(plan.budget, plan.predicted_peak)
        log.log(
            logging.WARNING if by_much else logging.INFO,
            "%s: the next call plans for that%s",
            told,
            better and f'; fxremat.compile(..., loss="{better}") does from the start',
        )

    def _take_beside(self, ran: Fixed | Sized, plan: Plan, loss: MeasuredLoss, took: int) -> None:
        """Plan again at the next call if what runs beside a returned loss takes other memory than planned.

        A program may make once what it keeps. So the second call is measured anew, and after the first one its bytes
        are planned for only where the least budget leaves room for them.

        Args:
            took: the peak between forward and backward, in bytes.
        """
        known, options = self.options.loss_seen or SeenLoss(), self.options
        scale, held = scale_of_loss(plan.captured), loss.held_beside(ran.outputs.places)
        if drops := self._would_drop(ran.outputs, plan, loss.dropped):
            self._correct_largest_call(plan, dropped=ran.outputs.places)
        seen = replace(known, early=max(known.early, loss.early), fixed=max(known.fixed, loss.fixed))
        alone = seen
        if loss.anew or loss.call == 2:
            seen = replace(seen, beside=((), ()))
        seen = seen.with_beside(scale, took, held)
        if loss.anew and self._mem_with_room is not None:
            self.options, self._mem_with_room = replace(options, mem=self._mem_with_room), None
            self._plan_for_other_loss(ran, seen)
            return
        sizes = sizes_with_loss(plan.captured, plan.running.costs.sizes, seen, options.loss_outside.size)
        foreseen, predicted = plan.peak_with(sizes), plan.predicted_peak
        exceeds, free = foreseen > max(plan.budget, predicted), options.plan is None
        differs = free and max(foreseen, predicted) > GAIN * min(foreseen, predicted)
        least, more = min(each.peak for each in plan.alternatives.candidates), max(sizes.outside, sizes.root)
        if loss.call == 1 and not isinstance(options.budget, Least) and least + more > plan.budget:
            exceeds, differs, seen = False, False, alone
        if seen == known or not (exceeds or differs) or communicates(plan.graph):
            if not (drops or alone.early > known.early):
                return
            seen = alone
        self._plan_for_other_loss(ran, seen)
        if seen == known:
            return
        before, now = (max(each.beside_at(scale)) + each.early for each in (known, seen))
        log.log(
            logging.WARNING if foreseen > NOTED * max(plan.budget, predicted) else logging.INFO,
            "%s allocated %s, of which %s stay, where %s had been set aside: the next call plans for that",
            "what runs between the model's forward and its backward",
            *(format_bytes(size) for size in (now, seen.beside_at(scale)[1] + seen.early, before)),
        )

    def _foresees_too_much(self, plan: Plan, loss: MeasuredLoss, peak: int) -> bool:
        """Tell whether a plan's peak, or that without recomputation, is foreseen too high for a loss of `peak` bytes.

        The latter counts if the budget is a percentage of it, which stays where other losses may read more outputs.
        """
        if not _only_recomputes(plan) or (isinstance(self.options.budget, Percent) and not loss.is_whole):
            return False
        sizes = replace(plan.running.costs.sizes, outside=peak)
        return plan.predicted_peak > GAIN * plan.peak_with(sizes) or self._is_of_less(plan, sizes)

    def _is_of_less(self, plan: Plan, sizes: Sizes) -> bool:
        """Tell whether a budget in percent is of less, as a loss takes less than the plan expects: see `sizes`."""
        in_percent = isinstance(self.options.budget, Percent) and _only_recomputes(plan)
        return in_percent and plan.keep_all_peak > GAIN * plan.keep_all_peak_with(sizes)

    def _correct_largest_call(self, plan: Plan, sizes: Sizes | None = None, dropped: Set[int] | None = None) -> None:
        """Let percentages be of less from now on, since a step takes less than its plan expects.

        Args:
            sizes: as in `PlannedStep.keep_all_peak_with`.
            dropped: likewise.
        """
        if _only_recomputes(plan):
            self._largest_call.correct(plan.keep_all_peak_with(sizes, dropped), plan.keep_all_peak)

    def _plan_for_other_loss(self, step: Fixed | Sized, seen: SeenLoss | None = None) -> None:
        """Plan a captured step again at the next call, with what is now known of the loss; None: nothing new."""
        self._before_loss = self._before_loss or self.settings
        self.options = replace(self.options, loss_seen=seen or self.options.loss_seen or SeenLoss())
        self._of_other_loss += [step] if step not in self._of_other_loss else []
        self.loss_is_other = True

    def _copies_nothing(self, ran: Fixed | Sized, plan: Plan, sizes: Sizes) -> bool:
        """Tell whether the step is to be planned without copies of gradients of the outputs, since it makes none.

        Args:
            sizes: those with which the step is planned next, with copies.
        """
        known = self.options.loss_seen
        if not ran.layouts.copies_nothing or self._layouts_vary or (known is not None and known.as_traced):
            return False
        without = replace(plan.sizes_without_copies(), outside=sizes.outside)
        if plan.peak_with(sizes) <= GAIN * plan.peak_with(without) and not self._is_of_less(plan, without):
            return False
        log.info(NOT_COPIED)
        return True

    def _take_layouts(self, step: Fixed | Sized, plan: Plan, as_traced: bool) -> None:
        """Plan again at the next call if the gradients that a loss outside hands in lie as traced, or do so no more.

        Plans have room for copies of them, until it is known that they lie as traced.

        Args:
            step: the captured step, and its plan at the sizes of the call.
        """
        if self.coordinator is not None or communicates(plan.graph):
            return
        known = self.options.loss_seen or SeenLoss()
        if known.as_traced:
            if as_traced:
                return
            self._layouts_vary = True
            log.warning(
                "the loss outside the model hands in gradients that lie otherwise than in the steps before, and may be "
                "copied: the next call plans for that"
            )
        elif not as_traced or self._layouts_vary or self.options.plan is not None:
            self._layouts_vary |= not as_traced
            return
        else:
            sizes = plan.sizes_without_copies()
            if plan.predicted_peak <= GAIN * plan.peak_without_copies() and not self._is_of_less(plan, sizes):
                return
            log.info(NOT_COPIED)
            self._correct_largest_call(plan, sizes)
        self._plan_for_other_loss(step, replace(known, as_traced=as_traced))

    def plans_as_captured(self) -> bool:
        """Plan with what is now known of the loss; tell whether that can be done without capturing anything again.

        Only for plans that recompute and do nothing else. Where sizes may change, the next call at each plans anew.
        """
        steps, options = [*self._of_other_loss], self.options
        self._of_other_loss.clear()
        if self.coordinator is not None or options.division is not None or isinstance(options.budget, Auto):
            return False
        if not steps or not all(_only_recomputes(step.plan) for step in steps):
            return False
        before, (earlier, self._before_loss) = self.settings, (self._before_loss, None)
        fixed = [step for step in steps if isinstance(step, Fixed)]
        try:
            if all(map(self._replans, fixed)):
                for sized in self._sized_steps:
                    sized.plan_anew(self.options)
                self.replanned += 1
                return True
        except BudgetTooSmall:
            if earlier is not None and self._others.ask_for_room():  # what this step takes is measured again then
                self.take_back(earlier)
                return True
        self.take_back(before)
        return False

    def follow(self) -> None:
        """Plan for the least memory from now on if the model within whose step this one runs needs the room."""
        others, options = self._others, self.options
        if not others.exist:
            return
        is_inside = others.wait()
        changeable = options.plan is None and options.division is None and not options.chooses
        if not (is_inside and others.takes_least and changeable) or isinstance(options.budget, Least):
            return
        log.warning(NO_ROOM, self.model, options.mem, "from now on")
        self.options, self.outdated = replace(options, mem="min"), True

    def make_room(self) -> bool:
        """Let models that are called within this one's steps take their least, since nothing fits beside them.

        Until what they take is measured again, this one takes its least, too.

        Returns:
            whether any of them took more, so that the call is to be tried again.
        """
        if self.options.loss_seen is None or not self._others.ask_for_room():
            return False
        self._mem_with_room = self.options.mem
        self.options = replace(self.options, mem="min")
        for sized in self._sized_steps:
            sized.plan_anew(self.options)
        self.outdated = not self._sized_steps
        return True

    def _replans(self, step: Fixed) -> bool:
        """Plan a captured step of fixed sizes again; tell whether it runs with its new plan now.

        Raises:
            BudgetTooSmall: no program fits.
        """
        if step.captured_next():
            return True  # and planned then
        plan, captured = step.plan, step.captured
        if plan.graph is not captured.graph or len(captured.ranks.ranks) > 1:
            return False
        self._largest_call = step.largest or self._largest_call
        captured = replace(captured, graph=captured.graph.dropping(step.outputs.places))
        return step.replan(*self._plan_fixed(captured, step.outputs))

    def forget_steps(self) -> None:
        """Prepare for capturing the model again: `plans_as_captured` is then about what is planned from now on."""
        self._called_with.clear()  # nor does dynamo know any more which sizes change
        self._sized_steps.clear()
        self._of_other_loss.clear()
        self._before_loss = None

    def divide_device_memory(self, model: nn.Module, call: Any) -> None:
        """Find what `device_mem` leaves for this step; plan again if that is less than at the last plan.

        It is less where gradients wait, and where inputs are larger. A small slack keeps plans from following every
        byte.
        """
        options = self.options
        if options.device_mem is None:
            return
        total, parameters = parse_bytes(options.device_mem), list(model.parameters())
        device = options.device or Device.like(next((p.device for p in parameters), torch.device("cpu")))
        inputs = bytes_of_inputs(pytree.tree_leaves(call), device)
        waiting, trained = sum(p.grad is not None for p in parameters), sum(p.requires_grad for p in parameters)
        if all(now <= most for now, most in zip((inputs, waiting, trained), self._divided_for, strict=True)):
            return  # no more than before: nothing is counted anew
        self._divided_for = max(inputs, self._divided_for[0]), max(waiting, self._divided_for[1]), trained
        found = divided(total, device, model, inputs, options.optimizer, hosted=options.hosts_weights)
        if options.division is not None and found.left >= options.division.left:
            return
        division = replace(found, slack=total // SLACK)
        self.options = replace(options, division=division)
        if self.plans:
            now, before = format_bytes(max(0, division.left)), format_bytes(self.plans[-1].budget)
            log.info("device_mem leaves %s for this step, planned for %s: it is planned anew", now, before)
            self.outdated = True
        if self.coordinator is not None:
            self.coordinator.take(self.options)

    @property
    def settings(self) -> Settings:
        """The settings that a call may change here; see `take_back`."""
        return Settings(
            options=self.options, divided_for=self._divided_for, weights=self.weights, plans=tuple(self.plans)
        )

    def take_back(self, before: Settings) -> None:
        """Set what a call has changed to what it was `before`, since nothing fits and the call does not run."""
        changed = self.options is not before.options
        self.options, self._divided_for, self.weights = before.options, before.divided_for, before.weights
        if self.coordinator is not None and changed:
            self.options = self.options.without_choice()
            self.coordinator.take(self.options)
        if tuple(self.plans) != before.plans:
            self.plans.clear()
            self.plans.extend(before.plans)

    def coordinate(self) -> Options:
        """Leave no choice of means, as in a model that is several graphs; return the options for it."""
        if self.options.chooses:
            self._before = self.options
        self.options = self.options.without_choice()
        return self.options

    @property
    def may_host(self) -> bool:
        """True if parameters may live on the host where nothing else fits, and do not yet."""
        return (self._before or self.options).may_host_weights and not self.options.hosts_weights

    def host_weights(self, error: BudgetTooSmall, model: nn.Module, call: Any) -> bool:
        """Let parameters live on the host from now on, if nothing else fits and the options leave that to the planner.

        Steps that are planned with all parameters on the device are planned anew then.

        Returns:
            whether they may, so that the call can be captured again.
        """
        before = self._before or self.options
        options = before.with_weights_on_host(error.means, model.parameters()) if self.may_host else None
        if options is None:
            return False
        log.info("nothing fits with all parameters on the device: they may live on the host (%s)", error)
        self.options, self._divided_for = options, (-1, -1, -1)
        self.plans.clear()
        self.divide_device_memory(model, call)
        self.outdated = True
        return True

    def look_at_free_memory(self) -> None:
        """Plan again at this call if the budget is "auto", and less memory is free than at the last plan.

        In a job of several ranks plans stay, since all ranks must have the same.
        """
        if not (self.plans and isinstance(self.options.budget, Auto)) or among_ranks():
            return
        plan = self.plans[-1]
        device, largest = device_of(plan.graph), largest_tensor(plan.graph)
        if plan.reserving:
            shrunk, found, known = free_memory(device) < SHRUNK * self._free, free_memory(device), self._free
        else:
            shrunk, found, known = has_shrunk(plan.budget, device, largest), free_bytes(device, largest), plan.budget
        if shrunk:
            now, before = format_bytes(found), format_bytes(known)
            log.info('mem="auto" has %s for this step, and was planned for %s: it is planned anew', now, before)
            self.outdated, self._free = True, 0

    def take_sizes_as_fixed(self, reason: BaseException | None = None) -> None:
        """Capture every combination of input sizes separately from now on, and report that with its reason, if any."""
        self._fixed = True
        warn_of_fixed(self.options, reason)

    @property
    def takes_numbers_as_fixed(self) -> bool:
        """True if a graph is captured for each value of an integer that a module has as attribute."""
        return self._fixed or self.options.may_change is not None

    def _warn_of_many(self, combinations: int, seconds: float, *, unrolled: bool) -> None:
        """Warn, after `MANY_SIZES` combinations of sizes of the same inputs, what each further one will cost.

        Args:
            unrolled: other sizes make other ops, so that no graph is for all of them.
        """
        if combinations != MANY_SIZES:
            return
        advice = "pad inputs to a few sizes, and drop the last, smaller batch"
        if unrolled:
            advice = f"the model runs other ops for other sizes, as in a loop over an input, so {advice}"
        elif self.options.resizable and not self._fixed and self.options.may_change is not True:
            advice = "fxremat.compile(..., dynamic=True) captures it once for all sizes"
        log.warning(
            "this model was planned for %d combinations of input sizes one by one, the last in %.1f s; every new "
            "one is captured and planned when it comes: %s",
            MANY_SIZES,
            seconds,
            advice,
        )

    def _kernels(self, inputs: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context that captures a step on a CPU with the CUDA ops of the target device, if there is one."""
        elsewhere = all(tensor.device.type == "cpu" for tensor in inputs if isinstance(tensor, torch.Tensor))
        if self.target is None or not (self.target.cuda and elsewhere):
            return contextlib.nullcontext()
        return kernels_of(self.target)

    def prepare_weights(self, tensors: Iterable[torch.Tensor]) -> Weights | None:
        """Return the optimizer's parameters, if the step updates them; None if it does not.

        Args:
            tensors: the inputs and parameters of a call, which show the device that the model computes on.
        """
        optimizer = self.options.stepping
        if optimizer is not None and self.weights is None:
            devices = [tensor.device for tensor in tensors]
            device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
            later = self.options.host is not None and self.options.host.updates == "step"
            self.weights = Weights(optimizer, self.options.tier or default_tier(device), device, later=later)
        return self.weights

    def look_at_parameters(self, model: nn.Module) -> None:
        """Capture the model again at this call if it has other parameters than those that the step updates."""
        now = {id(parameter) for parameter in model.parameters()}
        if self._stepped <= now:
            return
        log.warning(REPLACED, len(self._stepped - now), len(self._stepped))
        self._stepped, self.outdated = set(), True

    def _forward(self, graph: fx.GraphModule, step: Fixed | Sized | CalledGraph) -> Callable[..., Any]:
        never_donate()
        if self._any_layout:
            take_gradients_as_they_lie()
        run = step.forward_of(graph)
        of_subclasses: list[int] | None = None  # indices of the arguments of other classes, which dynamo checks

        def forward(arguments: list[Any]) -> Any:
            nonlocal of_subclasses
            if of_subclasses is None:
                of_subclasses = [place for place, argument in enumerate(arguments) if is_tensor_of_subclass(argument)]
            for place in of_subclasses:
                arguments[place] = arguments[place].as_subclass(torch.Tensor)
            if isinstance(step, Sized):
                step.outputs.may_assume = self.until is Until.RUN
            if self.until is Until.PLANNED:
                if isinstance(step, Sized):
                    step.choose(arguments)
                raise Reached
            if isinstance(step, CalledGraph):
                return run(arguments)
            if isinstance(step, Fixed) and step.may_take_more():
                self._use_more(step)
            self._last_step = step
            outputs = run(arguments)
            if step.plan is not None and (not self.plans or self.plans[-1] is not step.plan):
                self._put_last(step.plan)
            return outputs

        return taking_a_list(forward)

    def _use_more(self, step: Fixed) -> None:
        """Plan a step anew if it recomputes, since its budget in percent has grown with a larger call."""
        if _only_recomputes(step.plan) and step.plan.program.recomputed and self.coordinator is None:
            with contextlib.suppress(BudgetTooSmall):  # then the plan stays
                self._replans(step)

    def _put_last(self, plan: Plan) -> None:
        others = [each for each in self.plans if each is not plan]
        self.plans.clear()
        self.plans.extend((*others, plan))

    def _partition(
        self,
        module: fx.GraphModule,
        _: Sequence[Any],
        *,
        num_fwd_outputs: int,
        made: list[Fixed | Sized | CalledGraph],
        again: bool,
        **__: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._note_names(module.graph)
        note_dropped(module.graph, self._outputs.places)
        as_eager = self._as_eager(module, num_fwd_outputs)
        alone = self.coordinator is not None and has_symbolic_sizes(module.graph)  # runs single ops at any size
        module = normalize(module, self._eager_passes() if alone else self._passes())
        self._any_layout = (alone or not self.options.compiles) and bear_any_layout(module.graph)
        graph = SymbolicGraph(module, num_fwd_outputs) if has_symbolic_sizes(module.graph) else None
        joint = graph.now() if graph else read_joint(module, num_fwd_outputs)
        if graph and not graph.inputs:
            graph = None  # all sizes have turned out to be fixed
        self._rerun = self._rerun_of(joint)
        if self.coordinator is not None:
            made[:] = [called := self._called(graph, joint, self.coordinator)]
            return called.contract()
        refuse_without_gradients(joint)
        if graph and not self.options.resizable:
            raise NotSymbolic(self.options.needs_fixed_sizes)
        if graph and communicates(joint):
            raise NotSymbolic("communication between ranks")
        joint, trained = self._with_updates(joint)
        if again:
            check_runs_again(joint)
        check_devices(joint)
        expand_segments(device_of(joint))
        make_workspaces(device_of(joint))
        warn_of_trials(joint, device_of(joint))
        if graph:
            plans = self._plans_of_sizes(graph, joint)
            if self.until is Until.CAPTURED:
                self._check_layouts(Step(graph=joint, inputs=self._inputs), symbolic=True)
                raise Reached(SizedStep(plans, graph.dims, self._inputs))
            made[:] = [sized := self._sized(graph, plans)]
            return sized.contract()
        step = self._fixed_step(joint, trained, as_eager)
        if self.until is Until.CAPTURED:
            self._check_layouts(step)
            raise Reached(FixedStep(step, self.options))
        plan, step = self._plan_fixed(step, self._outputs)
        if self.until is Until.RUN:
            self._called_with.add((self._given, step.called_with))
        captured = replace(step, inputs=())  # inputs are not kept alive
        replaceable = _only_recomputes(plan) and self.weights is None and not communicates(plan.graph)
        fixed = Fixed(
            plan,
            captured,
            self._outputs,
            self.weights,
            self._take_layouts,
            largest=self._largest_call if isinstance(self.options.budget, Percent) else None,
            replaceable=replaceable,
        )
        fixed.captured_next = self._captured_next
        made[:] = [fixed]
        return fixed.contract()

    def _unplanned(self) -> None:
        """Record that a backward runs ops that no plan contains."""
        if self.coordinator is not None:
            self.coordinator.ignore_step()

    def _plan_for_retaining(self, backwards: int) -> None:
        """Plan at the next call for so many backwards of a call with retain_graph=True, if plans of this step can."""
        known = self.options.retained
        if known >= backwards:
            return
        fixed = self.coordinator is None and not any(p.sizes or communicates(p.graph) for p in self.plans)
        if fixed and self.options.plans_for_retaining:
            if not known:
                log.warning(FOLLOWED)
            self.options, self.outdated = replace(self.options, retained=backwards), True
        elif backwards == 1:
            log.warning(EXCEEDING)

    def _rerun_of(self, joint: Captured) -> Rerun:
        refusal = "" if runs_again(joint) else "it reads an input that it overwrites"
        if self.options.stepping is not None:
            refusal = "its weights may be on the host"
        elif communicates(joint):
            refusal = "its ranks share parameters"
        return Rerun(draws=any(op.random for op in joint.ops), refusal=refusal)

    def _called(self, graph: SymbolicGraph | None, joint: Captured, coordinator: Coordinator) -> CalledGraph:
        """Measure one of the graphs of a model that is several, search for its programs, and return it with these.

        Raises:
            FxrematError: the graph communicates with other ranks.
            NotSymbolic: results of its ops have other strides than traced; the caller captures it with fixed sizes.
        """
        if communicates(joint):
            raise FxrematError("a model that communicates with other ranks in its forward has to be one graph")
        check_devices(joint)
        expand_segments(device_of(joint))
        make_workspaces(device_of(joint))
        kernels.ready()
        step = Step(graph=joint, inputs=self._inputs)
        with real_tensors():
            try:
                costs = facts_of(step, self.options, coordinator.order_of(joint))
            except LayoutsDiffer as error:
                if graph is None:
                    raise
                self.learn(error)
                raise NotSymbolic("a result that lies otherwise than traced") from None
            if self.options.compiles and graph is None:
                costs = as_in_a_step(step, costs)
            tier = tier_of(self.options, device_of(joint))
            sized, order_of = graph is not None, coordinator.order_of
            programs, keep_all = programs_of(step, costs, self.options, tier, resizable=sized, order_of=order_of)
        may_run_again = not wished(joint, self.options.wishes)
        name, search = tier.name if tier else "", None
        if graph is not None and not coordinator.plans.keeps_all:
            search = partial(programs_of_single_ops, joint, options=self.options, tier=tier)
        return CalledGraph(
            joint,
            graph,
            costs,
            programs,
            keep_all,
            name,
            may_run_again=may_run_again,
            search=search,
            hosted=self._hosted_by(joint),
        )

    def _hosted_by(self, joint: Captured) -> dict[int, int]:
        """Return the parameters that live on the host among the inputs of one graph of several: place -> bytes."""
        if self.weights is None:
            return {}
        own, found = set(map(id, self.weights.parameters())), dict[int, int]()
        for place, node in enumerate(joint.primals):
            at = input_place(node)
            if at is None or id(self._inputs[at]) not in own:
                continue
            if joint.value_of[node] in joint.mutated_primals:
                raise FxrematError(WRITTEN.format(named=f"the parameter {self._names[at] or node.name}"))
            shown = node.meta["val"]
            found[place] = held(span_bytes(shown), shown.device)
        return found

    def _check_layouts(self, step: Step, *, symbolic: bool = False) -> None:
        """Measure a step that is only captured, and check that results have the strides that they were traced with.

        Raises:
            LayoutsDiffer: some results have other strides, so the step has to be traced again.
            NotSymbolic: the same in a step of symbolic sizes, which is then captured with fixed sizes.
        """
        kernels.ready()  # waits for the numba compilers in other processes, which would disturb the measurements below
        try:
            facts_of(step, self.options, partial(limit_of(step, self.options).order_of, step))
        except LayoutsDiffer as error:
            if not symbolic:
                raise
            self.learn(error)
            raise NotSymbolic("a result that lies otherwise than traced") from None

    def _passes(self) -> Sequence[str]:
        """Return the names of the passes to run on a captured graph; they depend on the kernels that will run it."""
        if (inductor := self.options.inductor) is None:
            return self._eager_passes()
        devices = [tensor.device for tensor in self._inputs if isinstance(tensor, torch.Tensor)]
        in_triton = any(kind_of(device).in_triton for device in devices)
        return PIPELINES["inductor from seeds" if inductor.draws_from_seeds(in_triton=in_triton) else "inductor"]

    def _eager_passes(self) -> Sequence[str]:
        """Return the names of the passes for PyTorch's own kernels.

        If the plan is for a CUDA device that the user describes, the passes assume nothing about a CPU's
        kernels.
        """
        elsewhere = self.options.device is not None and self.options.device.cuda
        return PIPELINES["any device" if elsewhere else "eager"]

    def _as_eager(self, module: fx.GraphModule, forward_outputs: int) -> Captured | None:
        """Return the step as eager PyTorch runs it, whose peak budgets in percent refer to if ops are compiled.

        None if no ops are compiled, or if sizes are symbolic.
        """
        if not self.options.compiles or has_symbolic_sizes(module.graph):
            return None
        module = fx.GraphModule(module, copied(module.graph))
        return read_joint(normalize(module, self._eager_passes()), forward_outputs)

    def _note_names(self, graph: fx.Graph) -> None:
        """Record in a joint graph which of its inputs are which parameters, for reports."""
        tangents = tangents_in(graph)
        inputs = [node for node in graph.nodes if node.op == "placeholder" and node not in tangents]
        places = [(node, input_place(node)) for node in inputs]
        note_names([(node, self._names[place]) for node, place in places if place is not None], self.model)
        for node, place in places:
            node.meta[FLOAT] = place is not None and is_float(self._placeholders[place])

    def _fixed_step(
        self, joint: Captured, trained: TrainedParameters | None, as_eager: Captured | None
    ) -> Step:
        """Return the step of a graph of fixed sizes, after all ranks that run it have compared their graphs."""
        called_with = _shapes_at(_input_places(self._placeholders), self._inputs)
        return Step(
            graph=joint,
            inputs=self._inputs,
            trained=trained,
            called_with=called_with,
            as_eager=as_eager,
            layouts=dict(self._layouts),
            ranks=ranks_of(joint, called_with),
        )

    def _plan_fixed(self, step: Step, outputs: DroppedOutputs) -> tuple[Plan, Step]:
        """Plan a step of fixed sizes, and append the plan to `plans`; return it with the step as it was planned.

        Args:
            outputs: what the caller does with those of such calls.
        """
        step = self._as_percent_of_largest(step)
        outputs.may_assume = self.until is Until.RUN

        def plan_with(options: Options) -> Plan:
            nonlocal step
            try:
                return FixedStep(step, options).plan()
            except BudgetTooSmall as error:
                larger = self._largest_call.with_more(error.budget, options.budget)
                if larger is None or len(step.ranks.ranks) > 1:
                    raise
                step = replace(step, reference=larger)
                return FixedStep(step, options).plan()

        def plan_step() -> Plan:
            return self._plan_call(plan_with, lambda: step.graph)

        def drop(places: Set[int]) -> None:
            nonlocal step
            step = replace(step, graph=step.graph.dropping(places))

        if len(step.ranks.ranks) > 1 or self.options.plan is not None:
            plan = plan_step()
            outputs.places |= places_of(plan.captured, plan.captured.dropped_outputs)  # those of a saved plan
        else:
            in_percent = isinstance(self.options.budget, Percent)
            plan = outputs.fitting(plan_step, step.graph, drop, in_percent=in_percent)
        if isinstance(budget := self.options.budget, Percent) and step.reference is None:
            everything = math.ceil(plan.budget * 100 / budget.of_keep_all)
            self._largest_call.note(Reference(bytes=everything, of=step.called_with))
        if step.trained and plan.weights:
            self.hosted |= {step.trained.numbers[value] for value in plan.weights.hosted}
        if self.options.tried:
            self.options = replace(self.options, tried=seen_before(self.options.tried))
        self._take_plan(plan)
        return plan, step

    def _as_percent_of_largest(self, step: Step) -> Step:
        """Return the step with the call that a budget in percent refers to, if an earlier one was larger."""
        largest = self._largest_call.reference
        if largest is None or largest.of == step.called_with:
            return step
        own = Reference(bytes=estimated_keep_all(step.graph, self.options), of=step.called_with)
        return step if self._largest_call.or_larger(own) is own else replace(step, reference=largest)

    def _take_plan(self, plan: Plan) -> None:
        """Append a plan that will run to `plans`, and prepare the device's allocator as the plan assumes it."""
        if plan.reserving:
            kind_of(device_of(plan.graph)).empty_cache()  # the step was replayed on an allocator that keeps nothing
            if isinstance(self.options.budget, Auto):  # for plans of several sizes, the one that had most decides
                self._free = max(self._free, free_memory(device_of(plan.graph)))
        self.plans.append(plan)
        sizes = plan.sizes or plan.captured.digest
        self._others.note_own(replaces=sizes in self._planned_for)
        self._planned_for.add(sizes)

    def _plans_of_sizes(self, graph: SymbolicGraph, joint: Captured) -> PlansOfSizes:
        """Return the planner for a graph of symbolic sizes, which plans at the sizes of each call.

        Raises:
            NotSymbolic: a symbolic size is not the size of an input.
        """
        placeholders = self._placeholders
        places = [input_place(node) for node in graph.primals]
        dimensions = [
            input_and_dimension(placeholders[place], self.input_names)
            for node in graph.inputs
            if (place := input_place(node)) is not None
        ]
        if len(dimensions) < len(graph.inputs):
            raise NotSymbolic("a size of something that is no input")
        shapes = {
            input_and_dimension(placeholders[place], self.input_names)[0]: node.meta["val"].shape
            for place, node in zip(places, graph.primals, strict=True)
            if place is not None and isinstance(node.meta.get("val"), torch.Tensor)
        }
        marked: dict[Dimension, int] = {
            (input_and_dimension(node, self.input_names)[0], dim): most
            for node, given in zip(placeholders, self._inputs, strict=True)
            for dim, most in marked_most(given).items()
        }
        ends = [self.options.longest(name, dim) or marked.get((name, dim)) for name, dim in dimensions]
        return PlansOfSizes(graph, joint, dimensions, ends, shapes, self.options, self._largest_call)

    def _sized(self, graph: SymbolicGraph, plans: PlansOfSizes) -> Sized:
        """Return the runner of a graph of symbolic sizes, which plans when calls with new sizes come."""
        placeholders, count = self._placeholders, len(self._placeholders)
        places = [input_place(node) for node in graph.primals]

        def as_called(arguments: Sequence[Any]) -> list[Any]:
            """Return the arguments in the order of the inputs that dynamo captured."""
            given: list[Any] = [None] * count
            for place, argument in zip(places, arguments, strict=True):
                if place is not None:
                    given[place] = argument
            return given

        sized = Sized(
            graph,
            plans,
            as_called=as_called,
            described=partial(_shapes_at, _input_places(placeholders)),
            outputs=self._outputs,
            take_layouts=self._take_layouts,
            plan_with=self._plan_call,
            on_plan=self._take_plan,
        )
        self._sized_steps.append(sized)
        return sized

    def _plan_call(self, plan: Callable[[Options], Plan], graph: Callable[[], Captured]) -> Plan:
        """Plan the step of a call; if it runs, perhaps with less for a loss outside: see `plan_expecting_less`."""
        if self.until is not Until.RUN:
            return plan(self.options)
        made, self.options = plan_expecting_less(plan, self.options, graph)
        return made

    def _with_updates(self, joint: Captured) -> tuple[Captured, TrainedParameters | None]:
        """Return the joint graph with the optimizer's updates inside, and the parameters that these update.

        If the step does not update weights itself, return the graph unchanged, and None.
        """
        optimizer = self.options.stepping
        if optimizer is None:
            return joint, None
        numbers = self._parameters(joint, optimizer)
        if not numbers:
            raise FxrematError(FOREIGN)
        weights = self.prepare_weights([joint.shown[value].meta["val"] for value in numbers])
        assert weights is not None
        self._stepped |= {id(weights.parameters()[number]) for number in numbers.values()}
        hosted = frozenset(value for value, number in numbers.items() if number in self.hosted)
        places = {joint.value_of[node]: place for place, node in enumerate(inputs_of(joint))}
        trained = TrainedParameters(
            weights=weights,
            optimizer=optimizer,
            numbers=numbers,
            names={value: self._names[places[value]] or joint.values[value].name for value in numbers},
            settled=hosted if self.plans else None,
        )
        if written := sorted(numbers.keys() & joint.mutated_primals):
            raise FxrematError(WRITTEN.format(named=named(trained, written)))
        joint = with_updates_inside(joint, set(numbers))
        if idle := sorted(hosted - joint.updates_of.keys()):
            raise FxrematError(
                f"this step has no gradient for {named(trained, idle)}, on the host since an earlier plan that updates "
                "them: freeze parameters before fxremat.compile, or call model.fxremat.to_device() and compile again"
            )
        return joint, trained

    def _parameters(self, joint: Captured, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        """Return value -> index in the optimizer, for the inputs of the graph that are parameters of the optimizer."""
        everyone = (p for group in optimizer.param_groups for p in group["params"])
        numbers = {id(parameter): number for number, parameter in enumerate(everyone)}
        return {
            joint.value_of[node]: numbers[id(given)]
            for node, given in zip(inputs_of(joint), self._inputs, strict=False)
            if id(given) in numbers and given.shape == node.meta["val"].shape
        }


def _would_gain(plan: Plan, freed: int) -> bool:
    """Tell whether `freed` more bytes may make a plan faster: it recomputes, and they exceed 1 % of its budget."""
    return plan.predicted_time > GAIN * plan.keep_all_time and freed > (GAIN - 1) * plan.budget


def _without_sizes(graph: fx.Graph) -> tuple[object, ...]:
    """Return what a graph of dynamo calls, and with which kinds of tensors: equal for calls that differ in sizes."""
    found: list[object] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            found += _kind_of_tensor(node)
        elif node.target is not operator.getitem and DETACHED not in node.meta and _kind_of_tensor(node):
            found.append(str(node.target))
    return tuple(found)


def _inputs_and_outputs(graph: fx.Graph) -> tuple[object, ...]:
    """Return which kinds of tensors a graph of dynamo takes, and what makes those that it returns.

    Equal for calls of which a caller uses the same outputs, as far as a graph can tell: loops over the input run an op
    more often if that is longer.
    """
    *_, end = graph.nodes
    returned: Any = end.args[0]
    found: list[object] = [kind for node in graph.find_nodes(op="placeholder") for kind in _kind_of_tensor(node)]
    for output in returned:
        if isinstance(output, fx.Node):
            made = output.all_input_nodes[0] if DETACHED in output.meta else output
            found.append((str(made.target), *_kind_of_tensor(made)))
    return tuple(found)


def _kind_of_tensor(node: fx.Node) -> list[object]:
    """Return what is the same for tensors that differ in sizes, in a list; an empty one for what is no tensor."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return []
    return [(value.dtype, value.dim(), value.device, value.requires_grad)]


def _to_trace(placeholders: Sequence[fx.Node], inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the inputs with which AOTAutograd traces: those of the call.

    Outside of dynamo, return the symbolic ones that the graph was captured with, if there are any.
    """
    shown = [node.meta.get("example_value") for node in placeholders]
    symbolic = not is_compiling() and any(isinstance(value, torch.SymInt) for value in shown)
    return shown if symbolic else inputs


def _input_places(placeholders: Sequence[fx.Node]) -> frozenset[int]:
    """Return the indices of the inputs of dynamo's graph that are no parameters, buffers or Python numbers."""
    return frozenset(place for place, node in enumerate(placeholders) if not (is_state(node) or is_float(node)))


def _shapes_at(places: Set[int], given: Sequence[Any]) -> str:
    """Return the shapes of the tensors with these indices, as text."""
    shapes = [x.shape for place, x in enumerate(given) if isinstance(x, torch.Tensor) and place in places]
    return ", ".join("x".join(map(str, shape)) or "1" for shape in shapes)


def fxremat(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(model, backend="fxremat", options={"mem": ...})`; dynamo calls this function.

    The options are the fields of `Options`; "mem" is required. If `torch.compile` breaks the model into several
    graphs, they share the budget.
    """
    given = dict(options or {})
    if mode is not None:
        raise FxrematError(
            f'mode={mode!r} belongs to another backend; fxremat takes options={{"mem": "4GiB"}}'
        )
    if "method" in given:
        raise FxrematError("method belongs to fxremat.compile; here what torch.compile is given is planned")
    if given.get("device_mem") is not None:
        raise FxrematError(
            "device_mem counts the parameters of a model, and this is a graph: give it to fxremat.compile, or here "
            'mem, for a step: torch.compile(..., options={"mem": "4GiB"})'
        )
    for name in given:
        check_name(name)
    if "mem" not in given and given.get("plan") is None:
        raise InvalidBudget('the fxremat backend needs a budget: torch.compile(..., options={"mem": "4GiB"})')
    chosen = options_of(**given)
    graphs = graphs_of(chosen, module, inputs)
    compiled = partial(_compiled, chosen)
    return WholeGraph(chosen, compiled, module, inputs) if graphs is None else compiled(graphs, module, inputs)


def _compiled(
    options: Options, graphs: Graphs | None, module: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Compile a graph that is one of several, or, with None, all of a call of a function from `torch.compile`."""
    backend = Backend(options)
    backend.coordinator = coordinator = graphs.coordinator if graphs else None
    try:
        with contextlib.nullcontext() if coordinator is None else coordinator.capturing():
            run = backend(module, inputs)
        return run if graphs is None or coordinator is not None else graphs.once(run)
    except NotSymbolic as error:
        raise CaptureError(
            f"{error} needs inputs of fixed sizes: torch.compile(..., dynamic=False) captures each combination by "
            "itself, as fxremat.compile does where it has to"
        ) from None


def _only_recomputes(plan: Plan | None) -> bool:
    """Tell whether a plan does nothing beside recomputing, and may be made anew without capturing the step again."""
    if plan is None:
        return False
    beside = plan.weights or plan.tier or plan.slices or plan.compression or plan.compiled or plan.means
    return not (beside or plan.saved_as or plan.reserving)
