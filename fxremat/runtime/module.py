"""The module that fxremat.compile returns: it trains inside the budget, and behaves like the model otherwise.

`drop_in(model, options)` returns an instance of a class made for it: a subclass of the model's own, with the
same name, whose instance shares the model's `__dict__`. So `isinstance`, attributes, methods, indexing, hooks
and names are the model's, and what is set on either is set on both. Only `forward` differs: a training call
(train mode, gradients enabled) runs the planned graphs, any other call the model's own forward. fxremat keeps
its own state in a slot, outside of the shared dictionary.

    compiled(x)
      Module.__call__            runs the model's hooks, as before
      Rematerialized.forward     runs the planned step, which was captured from the model's own forward, or that forward
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fxremat import heartbeat
from fxremat.cost.devices import Device
from fxremat.cost.layouts import LayoutsDiffer
from fxremat.errors import BudgetTooSmall, CaptureError, FxrematError
from fxremat.graphs.names import tied_names
from fxremat.ops.parameters import Weights
from fxremat.ops.random import GeneratorStates, HostDraws, devices_of
from fxremat.options import Options
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.planning.captured_step import CapturedStep
from fxremat.planning.wishes import check_named
from fxremat.plans import Plan
from fxremat.progress import telling
from fxremat.runtime.attention_masks import (
    ComputedMask,
    leaves_masks_out,
    left_out,
    padding_masks,
    position_ids,
)
from fxremat.runtime.capture_errors import explained, is_not_one_graph, note_failed_check, submodule_error
from fxremat.runtime.changing_attributes import ChangingAttributes
from fxremat.runtime.coordinator import Coordinator
from fxremat.runtime.dynamo import Backend, Reached, Until
from fxremat.runtime.hosted_weights import HostedWeights
from fxremat.runtime.last_call import SEVERAL_CALLS, LastCall
from fxremat.runtime.plain_errors import plain_error
from fxremat.runtime.replaced_forward import PlannedChild, has_forward, largest_child, replaced_in
from fxremat.runtime.transformers_hooks import (
    groups_heads,
    of_transformers,
    requires_grad_hooks,
    set_up,
    without_requires_grad_hooks,
)
from fxremat.runtime.trial import Buffers, try_steps
from fxremat.runtime.varying import by_name, mark, positional
from fxremat.torch_private import (
    UNKNOWN_LINE,
    among_ranks,
    backend_failure,
    children_of,
    compiled_in_parts,
    compiled_step,
    flex_attention_with_gradients,
    forget_graphs,
    global_hooks,
    graph_break_place,
    is_data_parallel,
    is_traced,
    left_to_python,
    outside_graphs,
    planning_error,
    sizes_unmarked,
    storage_of,
    trace_again,
    write_forward,
)
from fxremat.units import format_bytes

if TYPE_CHECKING:
    from fxremat.runtime.sharded import Reduction, Shared

    _Base = nn.Module
else:
    _Base = object  # at run time the class is combined with the model's class

log = logging.getLogger(__name__)

INSIDE = (
    "a model that fxremat.compile returned plans its own graph within its own budget; it cannot be a part of another "
    "graph (fullgraph=True): compile the whole with fxremat.compile instead"
)
BYPASSED = (
    "this training call never reached fxremat: `forward` was replaced on the instance, and calls neither the forward "
    "that was there before nor a part that is most of the model, so that no budget held; compile what it calls: "
    "model.part = fxremat.compile(model.part, mem=...)"
)
TRIALS = 3  # trials of two steps each until no step captures a graph any more, as it may where a model counts calls
IN_EVAL_MODE = (
    "parameters of the compiled {name} get gradients in eval mode, where it runs as it is: nothing is planned, and no "
    "budget holds. Call model.train() before training steps"
)
UNPLANNED = (
    "parameters of the compiled {name} get gradients, but none of its training calls went through `{method}`: nothing "
    "is planned, and no budget holds. Call the module that fxremat.compile returned; where a method of it calls parts "
    '(`self.net(x)`), compile the part, or name the method: fxremat.compile(model, mem=..., method="training_step")'
)
MASKED = (
    "{where} captured graphs keep an attention mask that masks nothing, and eager mode leaves it out: as heads share "
    "keys and values here, gradients round otherwise than in eager mode, and CUDA does not use flash attention. Where "
    "nothing is padded, call the model without attention_mask"
)
ONE_GRAPH = "{error}. fxremat.compile trains such a model as several graphs, but {reason} needs one"
NOT_RUN = "a step that is captured without running the model (fxremat.plan runs one that has data)"
TRAINED = (
    "%s is trained as several graphs within one budget, and planned after its first steps, which recompute most "
    "(fullgraph=True makes this an error): %s"
)
PLANNED = (
    "%s is several graphs, which only a run shows: a few steps run for this plan, after which buffers, gradients and "
    "random states are as before (fullgraph=True makes this an error): %s"
)
NO_GRAPHS = (
    "no part of {name} could be captured as a graph: it runs as plain PyTorch, and no budget holds. {reason}. What is "
    "around a line that breaks the graph, such as the body of a loop, can be captured in a method of its own"
)
NOTHING_TO_PLAN = "there is nothing to plan: the model's forward computes nothing that needs a gradient"
UNKNOWN_COPY = (
    "this copy of a compiled module was made without fxremat's knowledge (DataParallel copies modules so); "
    "use copy.deepcopy, or DistributedDataParallel around the compiled module"
)
UNREDUCED = (
    "DistributedDataParallel reduces gradients after the backward, and with Offload(weights=True) the backward updates "
    'the parameters: give Offload(weights=True, updates="step"), which updates them after that, or compile '
    "fxremat.fully_shard(model, replicate=True), which reduces gradients inside of the backward"
)
MADE_INPUTS = (
    "forward pre-hooks of %s make %s of inputs, and the budget counts no inputs: make them in forward, or take as much "
    "off mem"
)
LATER = (
    "%s is several graphs, each of which may give a parameter a part of its gradient: parameters on the host are "
    'updated in optimizer.step(), as with Offload(weights=True, updates="step")'
)
TRANSFORMS = {
    "torch.func": "a transform of torch.func (grad, vmap, ...)",
    "TorchDispatchMode": "a TorchDispatchMode (FlopCounterMode, ...)",
    "forward_ad": "forward-mode differentiation (torch.autograd.forward_ad)",
}
UNDER_TRANSFORM = (
    "under {name} the plain model runs: fxremat's budget does not hold there"
)


# what is kept for the compiled modules whose parameters are watched; see `_Training.watch`
_watching: weakref.WeakSet[_Training] = weakref.WeakSet()


@dataclass(eq=False)
class _Training:
    """The state that fxremat keeps for a module returned by `fxremat.compile`."""

    model: nn.Module
    # the method, if one was set on the model instance before fxremat.compile; None: the class's method is used
    own: Any
    plain: Callable[..., Any]  # the model's own method that is planned; `forward` unless the user names another
    backend: Backend
    step: Callable[..., Any]  # the captured and planned form of `plain`
    shared: Shared | None  # the parameters, if they are sharded or replicated over ranks
    # way to reduce gradients of sharded or replicated parameters -> the step that does it
    shared_steps: Mapping[Reduction, Callable[..., Any]]
    # returns a new `step`; if its argument is True, one that captures each combination of input sizes
    # separately
    step_anew: Callable[[bool], Callable[..., Any]]
    calls: int = 0  # number of calls of the compiled module's own forward
    warned: bool = False  # True once a warning said that steps exceed the budget
    # True if padding masks without masked positions stay in the graph, since the model computes masks itself
    keeps_masks: bool = False
    hooks_off: bool = False  # True if forward hooks that only call requires_grad_ are removed during capture
    replaced: tuple[Any, Any] = (None, None)  # (a `forward` that was set on the instance later, its wrapper)
    # module whose forward was replaced -> its planned child
    children: dict[nn.Module, PlannedChild] = field(default_factory=dict)
    reached: PlannedChild | None = None  # the one that the replaced forward called last
    # `plain`, captured by dynamo as several graphs; None: it is captured as one graph
    in_parts: Callable[..., Any] | None = None
    broken_by: str = ""  # why the model is several graphs, until that was told
    telling: str = TRAINED  # the warning that tells it
    not_one_graph: str = ""  # the error of its capture as one graph
    # True while a model of several graphs may run once, in order to be planned before its first training call
    may_try: bool = False
    # True if the forward was replaced and cannot be captured, so that a child is planned instead
    by_child: bool = False
    # id of a parameter -> handle of a hook on it, removed when a call is planned that may give the parameter a gradient
    watched: dict[int, Any] = field(default_factory=dict)
    last_call: LastCall = field(default_factory=LastCall)  # of a model that is one graph
    changing: ChangingAttributes = field(default_factory=ChangingAttributes)
    written: set[str] | None = None  # buffers that steps of several graphs write to; None: not known yet
    hooks_of_all: tuple[Any, ...] = field(default_factory=global_hooks)  # of all modules, when the last call began
    # the `storage_of` each input, before the forward pre-hooks of the compiled module; None: it has none
    given: frozenset[int] | None = None
    each_alone: bool = False  # True if the budget is for each call, also where several come before one backward
    told_of_inputs: bool = False  # True once a warning said that these hooks make inputs

    @functools.cached_property
    def of_transformers(self) -> bool:
        """True if the model is one of transformers, or has one inside."""
        return of_transformers(self.model)

    @property
    def needs_one_graph(self) -> str:
        """The reason why the model has to be captured as one graph; "" if there is none."""
        backend = self.backend
        looks = backend.until is Until.CAPTURED or (backend.until is Until.PLANNED and not self.may_try)
        shared = "a model whose parameters ranks share" if self.shared else ""
        return backend.options.needs_one_graph or shared or (NOT_RUN if looks else "")

    def look_at_global_hooks(self) -> None:
        """Capture the model again at this call if hooks of all modules were added or removed: dynamo guards none."""
        before, self.hooks_of_all = self.hooks_of_all, global_hooks()
        if before != self.hooks_of_all:
            self.backend.outdated = True
            self.capture_anew()

    def capture_anew(self) -> None:
        """Capture a model of several graphs as if it had not been captured before."""
        if self.in_parts is not None:
            self.in_parts = self.backend.coordinator = None
            forget_graphs()

    def tell_of_made_inputs(self, *inputs: Any) -> None:
        """Warn, once, if forward pre-hooks of the compiled module have made inputs: a plan of one graph counts none."""
        if self.given is None or self.told_of_inputs or self.backend.coordinator is not None:
            return
        made = sum(size for storage, size in _storages(inputs).items() if storage not in self.given)
        if made:
            self.told_of_inputs = True
            log.warning(MADE_INPUTS, self.backend.model, format_bytes(made))

    def breaks_up(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Capture the model as several graphs from now on, after its capture as one graph ended with this error.

        Return False, and do nothing, if the options need one graph, or if the plain model also fails at this call.
        """
        backend = self.backend
        strict = self.in_parts is not None or backend.options.fullgraph or self.needs_one_graph
        if strict or not is_not_one_graph(error):
            return False
        parent = replaced_in(self.model, itself=self.own is not None)
        if parent is not None and self.child_of(parent) is not None:
            return False  # a wrapper around the model breaks the graph, so the wrapped model is planned instead
        clear = explained(error, lambda: _plain_error(self, args, kwargs))
        if not isinstance(clear, CaptureError):
            return False
        place = graph_break_place(error) if backend_failure(error) is None else None  # else the error says more
        named = submodule_error(self.model, error) or clear
        where = named.place or ("" if place is None or place == UNKNOWN_LINE else place)
        check_named(self.model, backend.options.wishes)
        self._coordinate(where)
        self.not_one_graph = str(clear).rstrip(".")
        self.broken_by = f"tracing stops at {where}" if where else self.not_one_graph
        return True

    def tell_of_graphs(self) -> None:
        """Tell once, when the first graph is planned, that the model is several graphs, and why."""
        if self.broken_by and self.telling:
            log.warning(self.telling, self.backend.model, self.broken_by)
            self.broken_by = ""

    def _coordinate(self, where: str = "") -> Coordinator:
        """Plan all calls of graphs between two backwards together from now on.

        Args:
            where: the line at which the first graph ends; "": the model is one graph.
        """
        backend = self.backend
        devices = [tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())]
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        model = weakref.ref(self.model)

        def parameters() -> Iterable[tuple[str, torch.Tensor]]:
            return alive.named_parameters() if (alive := model()) is not None else ()

        options = backend.coordinate()
        weights = HostedWeights(backend.weights) if backend.weights is not None else None
        if weights is not None and options.host is not None and options.host.updates == "backward":
            log.warning(LATER, backend.model)
        backend.coordinator = coordinator = Coordinator(options, backend.model, where, device, parameters, weights)
        name = f"{options.method} of {backend.model}"
        dynamic = options.may_change if options.resizable else None
        trace_again(self.model.modules())
        self.in_parts = compiled_in_parts(self.plain, backend, name, dynamic, coordinator.capturing)
        return coordinator

    def share_budget(self) -> None:
        """Plan several calls before one backward together from now on; where that cannot be, warn once instead."""
        if reason := self.needs_one_graph or ("a model whose weights live on the host" if self.backend.weights else ""):
            self.last_call.tell_once(self.backend.model, reason, stacklevel=7)
            return
        self._coordinate().ignore_next_step()
        log.warning(SEVERAL_CALLS, self.backend.model)

    def watch(self) -> None:
        """Warn, once, when a parameter gets a gradient although no call has been planned."""
        reference = weakref.ref(self)

        def seen(_: torch.Tensor) -> None:
            training = reference()
            if training is not None and training.watched:
                training.unwatch()
                method = training.backend.options.method
                text = UNPLANNED if training.model.training else IN_EVAL_MODE
                warnings.warn(text.format(name=type(training.model).__name__, method=method), stacklevel=2)

        for parameter in self.model.parameters():
            if parameter.requires_grad and id(parameter) not in self.watched:
                self.watched[id(parameter)] = parameter.register_post_accumulate_grad_hook(seen)
        _watching.add(self)

    def child_of(self, parent: nn.Module, least: float | None = None) -> PlannedChild | None:
        """Return the planned child of a module whose forward was replaced: the child with most of the parameters.

        None if parameters are sharded or replicated, if the step runs an optimizer, or if no child has enough of them.

        Args:
            least: number of elements of parameters that are enough. None: half of the model's.
        """
        if least is None:
            least = sum(p.numel() for p in self.model.parameters()) / 2
        name = largest_child(parent, least)
        if name is None or self.shared is not None or self.backend.options.optimizer is not None:
            return None
        plain, known = children_of(parent)[name], self.children.get(parent)
        if known is None or plain not in (known.plain, known.planned):
            planned = drop_in(plain, self.backend.options, self.backend.target)
            planned._fxremat.backend.plans = self.backend.plans
            self.children[parent] = known = PlannedChild(parent, name, plain, planned)
        return known

    def inside(self, parent: nn.Module) -> list[PlannedChild]:
        """Return the planned child of a module whose forward was replaced, then that child's own, and so on.

        The forward may call any of them (those of PEFT's adapters skip some), and the first that it calls is planned.
        Once one was called, it is the only one.
        """
        least, training = sum(p.numel() for p in self.model.parameters()) / 2, self
        found: list[PlannedChild] = []
        while (child := training.child_of(parent, least)) is not None and (not found or has_forward(child.plain)):
            found.append(child)
            parent, training = child.plain, child.planned._fxremat
        return [child for child in found if child is self.reached] or found

    def unwatch(self) -> None:
        """Remove the hooks of `watch` from the model's parameters, which other compiled models may share.

        Those of the model compiled with other budgets are removed too.
        """
        for training in list(_watching):
            if training.model is self.model:
                shared = [*training.watched]
            else:
                shared = [id(p) for p in self.model.parameters() if id(p) in training.watched]
            for key in shared:
                training.watched.pop(key).remove()
            if not training.watched:
                _watching.discard(training)


class _Ours:
    """A descriptor for attributes that fxremat adds to modules; a model's own attribute of that name takes precedence.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        for registered in ("_parameters", "_buffers", "_modules"):
            if self._name in module.__dict__.get(registered, ()):
                return module.__dict__[registered][self._name]
        for base in type(module).__mro__[type(module).__mro__.index(Rematerialized) + 1 :]:
            if self._name in vars(base):
                return getattr(super(Rematerialized, module), self._name)
        return self._read(module)


class Inside:
    """The plans of a compiled module, and its weights on the host: `model.fxremat`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def plan(self) -> Any:
        """The plan of the latest call; None before the first training call, which makes it.

        For a model that consists of several graphs it is a `PlanOfGraphs`. It is made after the backward of the first
        step in which nothing is captured, mostly the second step (docs/graphs.md), and None if nothing fits: the next
        training call then raises `BudgetTooSmall`.
        """
        backend = self._module._fxremat.backend
        if backend.coordinator is not None:
            return backend.coordinator.plan
        return backend.plans[-1] if backend.plans else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the latest calls, one for each combination of input shapes; that of the last is last."""
        return tuple(self._module._fxremat.backend.plans)

    def to_device(self) -> Any:
        """Move the parameters and the optimizer state that are on the host back to the device, bit for bit.

        Model and optimizer can then train without fxremat, as if they had always been there. The next training call of
        this module moves parameters and state to the host again. Returns the module.
        """
        if self._module._fxremat.backend.weights:
            self._module._fxremat.backend.weights.back_to_device()
        return self._module

    def __repr__(self) -> str:
        planned = self.plan.headline if self.plan else "nothing is planned yet"
        return f"<fxremat in a {type(self._module).__name__}: {planned}>"


class Rematerialized(_Base):
    """The first base class of every compiled module, before the model's class.

    It adds the attributes `.plan` and `.fxremat`.

    `.plan` is the plan of the latest call, and `.fxremat` is an `Inside`. A model that has attributes of these names
    keeps them.
    """

    __slots__ = ()
    _fxremat: _Training

    if TYPE_CHECKING:
        plan: Any  # a Plan, a PlanOfGraphs, or None
        fxremat: Inside
    else:
        plan = _Ours(lambda module: Inside(module).plan)
        fxremat = _Ours(lambda module: Inside(module))

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the model's own class, so that `type(compiled)(config)` makes a plain model."""
        own = next(each for each in cls.__mro__ if not issubclass(each, Rematerialized))
        return own(*args, **kwargs)

    def __init_subclass__(cls, **_: Any) -> None:
        """Do nothing, so that the model's own `__init_subclass__` does not run for the class that fxremat makes."""

    @property
    def _compiled_call_impl(self) -> None:
        """None, so that a call of `model.compile()` does not change how this module is called."""

    @_compiled_call_impl.setter
    def _compiled_call_impl(self, function: Any) -> None:
        self.__dict__["_compiled_call_impl"] = function

    def compile(self, *_: Any, **__: Any) -> None:
        """Warn that there is nothing to do, since this module already runs planned graphs."""
        warnings.warn("this module is compiled by fxremat.compile; compile() changes nothing", stacklevel=2)

    def _replicate_for_data_parallel(self) -> None:
        raise FxrematError(UNKNOWN_COPY)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = drop_in(copy.deepcopy(self._fxremat.model, memo), self._fxremat.backend.given)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, _: Any) -> Any:
        return drop_in, (self._fxremat.model, self._fxremat.backend.given)


def budget_for_each_call(module: Rematerialized) -> None:
    """Plan each call of a compiled module alone, where something else plans how many wait for their backward.

    What is allocated between a forward and its backward is planned there, too: it is no loss outside the module.
    """
    training = _training_of(module)
    training.each_alone, training.backend.measures_loss = True, False


def plan_now(module: Rematerialized, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Plan for these inputs without changing the model; the next training call runs the plan.

    A model that is one graph is not run. One that consists of several graphs runs two steps, since only a run
    shows which graphs there are; its buffers, gradients and the random generators are restored afterwards.
    """
    training = module._fxremat
    training.may_try = True
    try:
        _leave(module, Until.PLANNED, args, kwargs)
    finally:
        training.may_try = False
    coordinator = training.backend.coordinator
    for _ in range(TRIALS):
        if coordinator is None or training.backend.weights is not None or Inside(module).plan is not None:
            break  # steps with weights on the host need the optimizer, and are planned as they run
        try_steps(training.model, module, training.backend.options.method, args, kwargs)
        coordinator.settle()
    if (coordinator is None or coordinator.has_graphs) and Inside(module).plan is None:
        raise FxrematError(NOTHING_TO_PLAN)


def plans_by_running(
    model: nn.Module, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any], *, tells: bool = True
) -> Callable[[int | str | None], PlanOfGraphs | None] | None:
    """Run a few steps of a model that is several graphs; return a function that plans them for a budget.

    The steps take the least memory. Buffers, gradients and the random generators are as before afterwards. Parameters
    stay where they are: no plan has them on the host.

    Args:
        tells: whether the log tells that steps run.

    Returns:
        the function, which takes `mem` (not heeded with `device_mem`); None if no graph could be captured.
    """
    options = options.without_choice()
    module = drop_in(model, options if options.device_mem else replace(options, mem="min"))
    training = module._fxremat
    training.telling = PLANNED if tells else ""
    plan_now(module, args, kwargs)
    coordinator, division = training.backend.coordinator, training.backend.options.division
    if coordinator is None:
        return None

    def within(mem: int | str | None) -> PlanOfGraphs | None:
        plan = coordinator.plan if options.device_mem else coordinator.planned_within(replace(options, mem=mem))
        return replace(plan, on_device=division.memory) if plan and division else plan

    return within


def drop_in(model: nn.Module, options: Options, target: Device | None = None) -> Rematerialized:
    """Return a module that replaces the model in all respects, and trains inside a budget.

    Args:
        target: the device to plan for, if the module is only used to make plans; None: the module runs its plans on
            the model's own device.
    """
    write_forward(model)
    shared = _shared(model)
    method = options.method
    if not callable(getattr(model, method, None)):
        raise FxrematError(f"{type(model).__name__} has no method {method!r}; method is the one that training calls")
    if options.device_mem is not None and (by := _cut_by(model) or (shared and "ranks share these")):
        raise FxrematError(f"device_mem counts whole parameters, and {by}: give mem, for a step of one rank")
    if shared is not None and method != "forward":
        raise FxrematError(f"method={method!r} is for whole parameters; of those that ranks share, forward is planned")
    cls = _class_for(type(model), method, shared=shared is not None)
    made: Any = object.__new__(cls)
    object.__setattr__(made, "__dict__", model.__dict__)
    own = model.__dict__.get(method)
    plain = own or types.MethodType(getattr(type(model), method), model)
    backend = Backend(options, target, positional(plain), type(model).__name__, tied_names(model))
    if not options.resizable and options.dynamic:
        backend.take_sizes_as_fixed()
    name = f"{method} of {type(model).__name__}"
    only_fixed = False

    def step_of(forward: Callable[..., Any]) -> Callable[..., Any]:
        return compiled_step(
            forward, backend, name, options.may_change, bool(options.ranges), backend.take_sizes_as_fixed
        )

    def step_anew(fixed: bool) -> Callable[..., Any]:
        nonlocal only_fixed
        only_fixed |= fixed
        return compiled_step(plain, backend, name, False) if only_fixed else step_of(plain)

    if options.stepping is not None and (by := _cut_by(model)):
        raise FxrematError(
            f"Offload(weights=True) keeps whole parameters on the host, and {by}: offload=True moves activations, and "
            "more ranks hold smaller shards"
        )
    steps = {kind: step_of(own or forward) for kind, forward in shared.forwards.items()} if shared else {}
    training = _Training(model, own, plain, backend, step_of(plain), shared, steps, step_anew)
    object.__setattr__(made, "_fxremat", training)
    if shared is not None:
        shared.stand_in(made)
        heartbeat.watch()
    return cast(Rematerialized, made)


def captured(module: Rematerialized, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedStep:
    """Capture the step of a training call, and measure its ops; the model is neither run nor changed.

    Raises:
        FxrematError: the model is in eval mode, or nothing in it needs a gradient.
        CaptureError: the model is not one graph.
    """
    step = _leave(module, Until.CAPTURED, args, kwargs)
    if step is None:
        raise FxrematError(NOTHING_TO_PLAN)
    return step


def _leave(module: Any, until: Until, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedStep | None:
    """Make a training call that ends at the stage `until`.

    Returns:
        the captured step if the call ended at CAPTURED; None if it ended at PLANNED, or nothing needs a gradient.
    """
    backend, model = module._fxremat.backend, module._fxremat.model
    if not model.training:
        raise FxrematError(
            "the model is in eval mode, where it runs as it is and needs no plan; call model.train() first"
        )
    backend.until = until
    of_cuda = backend.target is not None and backend.target.cuda
    flex = flex_attention_with_gradients() if of_cuda else contextlib.nullcontext()
    try:
        with flex, torch.enable_grad(), telling(f"capturing {type(model).__name__}"):
            getattr(module, backend.options.method)(*args, **kwargs)
    except Reached as reached:
        return reached.step
    finally:
        backend.until = Until.RUN
    return None


def _shared(model: nn.Module) -> Shared | None:
    """Return the sharded or replicated parameters; None if there are none. Does not itself import torch.distributed."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from fxremat.runtime.sharded import Shared

    return Shared.of(model)


def _cut_by(model: nn.Module) -> str:
    """Return which parameters are cut among ranks, as text; "" if there are none.

    Does not itself import torch.distributed.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return ""
    from fxremat.runtime.sharded import cut_by

    return cut_by(model)


def _call_of(model: type[nn.Module]) -> Callable[..., Any]:
    """Return a `__call__` that calls a module as its class does; in training, sharded parameters are gathered."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = _training_of(self)
        hooked = self._forward_pre_hooks and _trains(self) and is_traced() is None
        training.given = frozenset(_storages((args, kwargs))) if hooked else None
        with _gathering(self, training):
            return model.__call__(self, *args, **kwargs)

    return call


def _gathering(module: Any, training: _Training) -> contextlib.AbstractContextManager[None]:
    """Return a context in which reading a sharded parameter gathers it; in eval mode, an empty one."""
    shared = training.shared
    if shared is None or shared.active or not _trains(module) or is_traced() is not None:
        return contextlib.nullcontext()
    return shared.for_training()


_classes: weakref.WeakValueDictionary[tuple[type[nn.Module], str, bool], type] = weakref.WeakValueDictionary()


def _class_for(model: type[nn.Module], method: str, *, shared: bool) -> type:
    """Return the class of compiled modules for models of a class, with that class's name and its method's signature.

    Args:
        method: the name of the planned method.
        shared: True if parameters are sharded or replicated, so that the class also gets `no_sync`.
    """
    if (known := _classes.get((model, method, shared))) is not None:
        return known
    names: dict[str, Any] = {
        "__slots__": ("_fxremat",),
        "__module__": model.__module__,
        "__qualname__": model.__qualname__,
        "__doc__": model.__doc__,
        "__jit_unused_properties__": [*getattr(model, "__jit_unused_properties__", ()), "_compiled_call_impl"],
        method: _Forward(getattr(model, method), method),
    }
    if method == "forward":
        names["__call__"] = outside_graphs(_call_of(model), INSIDE)
    if shared:
        names["no_sync"] = _no_sync
        if not hasattr(model, "set_requires_gradient_sync"):
            names["set_requires_gradient_sync"] = _set_requires_gradient_sync
    made = types.new_class(model.__name__, (Rematerialized, model), exec_body=lambda body: body.update(names))
    _classes[model, method, shared] = made
    return made


@contextlib.contextmanager
def _no_sync(self: Any) -> Iterator[None]:
    """Accumulate gradients without communication; the next backward outside of this context reduces them all.

    As with DistributedDataParallel, the forward must be within the context. Until gradients are reduced, each
    rank has them in full size, and they are not in `.grad`.
    """
    self.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        self.set_requires_gradient_sync(True)


def _set_requires_gradient_sync(self: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Set whether the next backwards reduce gradients over ranks, as FSDP2's method of the same name does.

    Raises `FxrematError` if weights may be on the host, where gradients that are not reduced have no place.
    """
    training = _training_of(self)
    if training.backend.options.stepping is not None and not requires_gradient_sync:
        raise FxrematError(
            "Offload(weights=True) keeps the gradients of parameters where these live, and those of no_sync() are not "
            'theirs yet: leave no_sync() out; with Offload(weights=True, updates="step") each backward reduces its '
            "gradients and adds them up"
        )
    shared = training.shared
    if shared is not None:
        shared.sync = requires_gradient_sync


class _Forward:
    """The descriptor of the planned method, usually `forward`.

    A function that a trainer later sets on the instance replaces it, and may call it. On the class it is a
    function with the signature of the model's own method, from which trainers read the names of inputs.
    """

    def __init__(self, own: Callable[..., Any], name: str) -> None:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _forward(self, args, kwargs)

        signed = functools.wraps(own)(forward)
        self.function: Any = functools.wraps(own)(outside_graphs(signed, INSIDE))
        self.name = name

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self.function
        own, training = module.__dict__.get(self.name), _training_of(module)
        if own is None or own is training.own:
            return self.function.__get__(module, owner)
        return own if self.name != "forward" else _running(training, own)

    def __set__(self, module: Any, function: Any) -> None:
        module.__dict__[self.name] = function

    def __delete__(self, module: Any) -> None:
        del module.__dict__[self.name]


def _training_of(module: Any) -> _Training:
    try:
        kept: _Training = module._fxremat
    except AttributeError:
        raise FxrematError(UNKNOWN_COPY) from None
    return kept


def _trains(module: Any) -> bool:
    return module.training and torch.is_grad_enabled()


def _running(training: _Training, own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward that was set on the instance; while `own` does not change, return the same wrapper."""
    if training.replaced[0] is not own:
        method = own if isinstance(own, types.MethodType) else None
        function: Callable[..., Any] = method.__func__ if method else own

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not _trains(training.model) or is_traced() is not None:
                return function(*args, **kwargs)
            return _run_replaced(training, training.model, function, args, kwargs)

        made = outside_graphs(forward, INSIDE)
        training.replaced = own, types.MethodType(made, method.__self__) if method else made
    return training.replaced[1]  # type: ignore[no-any-return]


def _run_replaced(
    training: _Training, parent: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a replaced forward unplanned; the original forward or `parent`'s largest child, if it calls one, is planned.

    Warns, once, if it calls neither.
    """
    training.unwatch()
    inside, calls = training.inside(parent), training.calls
    before = [child.planned._fxremat.calls for child in inside]
    with contextlib.ExitStack() as standing_in:
        for child in inside:
            child.planned._fxremat.backend.until = training.backend.until
            standing_in.enter_context(child.standing_in())
        result = forward(*args, **kwargs)
    called = (child for child, count in zip(inside, before, strict=True) if child.planned._fxremat.calls > count)
    reached = training.reached = next(called, None)
    if reached is not None:
        reached.tell()
    if reached is None and training.calls == calls and not training.warned:
        training.warned = True
        warnings.warn(BYPASSED, stacklevel=3)
    return result


def _forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the model's forward: the planned one in a training call, else the plain one."""
    training = _training_of(module)
    training.calls += 1
    if not _trains(module):
        return training.plain(*args, **kwargs)
    training.unwatch()
    if among_ranks():
        heartbeat.begin_step()
    if (tracer := is_traced()) is not None:
        if tracer in TRANSFORMS and not training.warned:
            training.warned = True
            warnings.warn(UNDER_TRANSFORM.format(name=TRANSFORMS[tracer]), stacklevel=3)
        return training.plain(*args, **kwargs)
    with contextlib.ExitStack() as alone:
        child = training.children.get(training.model)
        while child is not None:
            alone.enter_context(child.put_aside())
            child = child.planned._fxremat.children.get(child.plain)
        parent = replaced_in(training.model, itself=training.own is not None) if training.by_child else None
        if parent is None:
            return _forward_planned(module, training, args, kwargs)
        return _run_replaced(training, parent, training.plain, args, kwargs)


def _forward_planned(module: Any, training: _Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    training.tell_of_made_inputs(args, kwargs)
    backend = training.backend
    before = backend.settings
    try:
        return _forward_by_means(module, training, args, kwargs)
    except BudgetTooSmall:
        backend.take_back(before)  # another call, of smaller inputs, may fit without what this one was to change
        raise


def _forward_by_means(module: Any, training: _Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the planned forward; where nothing fits, with weights on the host, if the planner may choose that."""
    try:
        return _forward_once(module, training, args, kwargs)
    except BudgetTooSmall as error:
        backend = training.backend
        if not (backend.make_room() or backend.host_weights(error, training.model, (args, kwargs))):
            raise
        training.capture_anew()
        small = error.explained()  # without a traceback, whose frames would hold this call's outputs
    try:
        return _forward_once(module, training, args, kwargs)
    except (BudgetTooSmall, Reached):
        raise
    except FxrematError as refused:
        if training.backend.plans:
            raise
        raise small.without_weights(refused) from None


def _forward_once(module: Any, training: _Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    backend = training.backend
    weights = None
    if backend.options.stepping is not None:
        _check_trainable(training.model, args, kwargs)
        if backend.options.host is not None and backend.options.host.updates == "backward" and is_data_parallel():
            raise FxrematError(UNREDUCED)
        weights = backend.prepare_weights([*_tensors((args, kwargs)), *training.model.parameters()])
        if weights and backend.until is Until.RUN:
            backend.look_at_parameters(training.model)
            _settle(module, weights, args, kwargs)
    in_place = training.in_parts is not None and weights is not None and weights.device.type == "cpu"
    try:
        on_device = weights.seen_on_the_device() if weights and not in_place else contextlib.nullcontext()
        with on_device, _gathering(module, training):
            whole = bool(training.needs_one_graph) or backend.options.fullgraph
            with left_to_python(frozenset() if whole else training.changing.growing(training.model)):
                outputs = _run(training, args, kwargs)
            fixed = backend.takes_numbers_as_fixed
            training.changing.look(training.model, backend.captured_again, fixed=fixed, whole=whole)
            if training.shared is not None:
                training.shared.before_backward_of(_tensors(outputs))
    except Exception as error:
        if isinstance(planning_error(error) or error, Reached):
            raise (planning_error(error) or error) from None
        hooked = submodule_error(training.model, error)
        clear = hooked or explained(error, lambda: _plain_error(training, args, kwargs))
        parent = replaced_in(training.model, itself=training.own is not None)
        if not isinstance(clear, CaptureError) or parent is None or training.child_of(parent) is None:
            heartbeat.note_failure(clear or error)
            _check_trainable(training.model, args, kwargs)
            if clear is None:
                any(note_failed_check(error, plan.captured) for plan in backend.plans)
                raise
            reason = "" if backend.options.fullgraph else training.needs_one_graph
            if reason and isinstance(clear, CaptureError) and "not one graph" in str(clear):
                clear = CaptureError(ONE_GRAPH.format(error=str(clear).rstrip("."), reason=reason))
            if isinstance(clear, FxrematError):
                clear = clear.with_traceback(None)  # dynamo's stack frames would hide the cause
            try:
                raise clear from clear.__cause__
            finally:
                del hooked, clear  # an error that its own frames refer to keeps what they hold until it is collected
        training.by_child = True
    if training.by_child:
        return _forward(module, args, kwargs)
    return outputs


def _plain_error(training: _Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    if training.shared is not None or training.backend.weights is not None:
        return None  # the plain forward cannot run with parameters that are sharded or on the host
    return plain_error(training.model, training.plain, (args, kwargs))


def _run(training: _Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if training.backend.until is Until.RUN:
        training.look_at_global_hooks()
    is_in_parts = training.in_parts is not None
    named = by_name(training.backend.input_names, args, kwargs)
    masks, positions = _padding_masks(training, named), _position_ids(training, named)
    try:
        hooks_off = without_requires_grad_hooks(training.model) if training.hooks_off else contextlib.nullcontext()
        with hooks_off, left_out(masks, positions):
            return _run_step(training, args, kwargs)
    except Exception as error:
        place = graph_break_place(error)
        if isinstance(planning_error(error) or error, ComputedMask) and not training.keeps_masks:
            training.keeps_masks = True
        elif is_in_parts:
            raise
        elif place is not None and not training.hooks_off and requires_grad_hooks(training.model):
            training.hooks_off = True
        elif not set_up(training.model, place or "") and not training.breaks_up(error, args, kwargs):
            raise
    return _run(training, args, kwargs)


def _position_ids(training: _Training, named: Mapping[str, Any]) -> Sequence[torch.Tensor] | None:
    """Return the position ids of a call; None if their values must not decide about a graph.

    That is in models that compute them in several ways, in a job of several ranks that are given them, and in models
    that are not of transformers.
    """
    given = [*position_ids(named).values()]
    if training.keeps_masks or (given and among_ranks()) or not training.of_transformers:
        return None
    return given


def _padding_masks(training: _Training, named: Mapping[str, Any]) -> Sequence[torch.Tensor] | None:
    """Return the padding masks of a call that may be left out of the graph; None if the model computes masks itself.

    Also None in a job of several ranks, which all have to capture the same graph, and for models that are not of
    transformers and are given no mask.
    """
    masks = padding_masks(named)
    if not (training.keeps_masks or among_ranks()):
        return [*masks.values()] if masks or training.of_transformers else None
    if masks and not training.backend.plans and groups_heads(training.model):
        where = "in this model, which computes masks itself," if training.keeps_masks else "among ranks"
        warnings.warn(MASKED.format(where=where), stacklevel=5)
    return None


class _Begin:
    """The state at the beginning of a step, from which it begins again if `ComputedMask` is raised, or nothing fits.

    The first such step copies all buffers, later ones only those that steps were seen to write to. These copies
    are a part of the step's memory, except for those of the first step.
    """

    def __init__(
        self, training: _Training, coordinator: Coordinator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._training = training
        self._states: list[HostDraws | GeneratorStates | Buffers]
        self._beside = coordinator.capturing if training.written is None else contextlib.nullcontext
        with self._beside():
            self._buffers = Buffers(training.model, training.written)
            self._states = [HostDraws(), GeneratorStates(devices_of(_tensors((args, kwargs)))), self._buffers]

    def forget(self) -> None:
        """Record which buffers the step has written to, and free the copies."""
        with self._beside():
            self._training.written = self._buffers.written() | (self._training.written or set())
            del self._buffers, self._states

    def restore(self) -> None:
        """Restore buffers and generators, after graphs of the step have run."""
        for states in self._states:
            states.restore()


def _run_in_parts(training: _Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    coordinator, step = training.backend.coordinator, training.in_parts
    assert coordinator is not None
    assert step is not None
    begin: _Begin | None = None
    try:
        with coordinator.step():
            if leaves_masks_out() or training.backend.may_host:
                begin = _Begin(training, coordinator, args, kwargs)
            outputs = step(*args, **kwargs)
            coordinator.leave([x for x in _tensors(outputs) if x.requires_grad])
            if begin is not None:
                begin.forget()
        if coordinator.has_graphs:
            training.tell_of_graphs()
        elif not training.warned:
            training.warned = True
            warnings.warn(_no_graphs(training), stacklevel=6)
        return outputs
    except Exception as error:
        training.tell_of_graphs()
        if begin is not None and isinstance(planning_error(error) or error, ComputedMask | BudgetTooSmall):
            begin.restore()
        # only these inputs may have been wrong, so the next call tries to capture one graph again
        if coordinator.steps == 1:
            training.in_parts = training.backend.coordinator = None
        raise


def _no_graphs(training: _Training) -> str:
    reason = training.not_one_graph or "It reads the values of tensors, or PyTorch does not trace its code"
    return NO_GRAPHS.format(name=training.backend.model, reason=reason[0].upper() + reason[1:])


def _run_step(training: _Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    training.backend.divide_device_memory(training.model, (args, kwargs))
    mark(training.backend.options, training.backend.input_names, training.plain, args, kwargs)
    if training.backend.until is Until.RUN:
        training.backend.look_at_free_memory()
    backend = training.backend
    if training.in_parts is None and training.shared is None:
        backend.follow()
    if (backend.outdated or backend.loss_is_other) and training.shared is None:
        captured = not backend.outdated and backend.plans_as_captured()
        backend.outdated = backend.loss_is_other = False
        if not captured:
            backend.forget_steps()
            training.step = training.step_anew(False)
    runs = training.backend.until is Until.RUN
    if runs and training.last_call.awaits_backward and not training.each_alone:
        training.share_budget()
    training.last_call.forget()
    if training.in_parts is not None:
        if not runs:
            raise Reached
        return _run_in_parts(training, args, kwargs)
    outputs = _run_whole(training, args, kwargs)
    if runs:
        training.last_call.note(_tensors(outputs))
    return outputs


def _run_whole(training: _Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the step of a model that is one graph."""
    step = training.step
    if training.shared is not None:
        step = training.shared_steps[training.shared.reduction]
    fixed = training.backend.options.may_change is False
    try:
        with sizes_unmarked(_tensors((args, kwargs))) if fixed else contextlib.nullcontext():
            return step(*args, **kwargs)
    except LayoutsDiffer as error:  # raised in a step of symbolic sizes, which cannot be traced again
        training.backend.learn(error)
        training.backend.take_sizes_as_fixed(error)
        training.step = training.step_anew(True)
        return training.step(*args, **kwargs)


def _settle(module: Any, weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Plan, if there is no plan yet, and move weights to the host as planned, before a step that updates them itself.
    """
    training = module._fxremat
    backend = training.backend
    if not backend.plans and training.in_parts is None:
        plan_now(module, args, kwargs)
    if training.in_parts is None:  # else the coordinator moves them
        weights.settle(backend.hosted)
        weights.begin()


def _check_trainable(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = [*model.parameters(), *_tensors((args, kwargs))]
    if not any(tensor.requires_grad for tensor in tensors):
        raise FxrematError(
            "nothing to train: no parameter and no input requires grad; "
            "use model.eval() or torch.no_grad() to run the plain model"
        )


def _storages(value: Any) -> dict[int, int]:
    """Return the bytes of each storage in which dense tensors of a nested value lie, by `storage_of`; shards are none.
    """
    dense = (each for each in _tensors(value) if type(each) is torch.Tensor and each.layout is torch.strided)
    return {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in dense}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
