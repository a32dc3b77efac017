"""Training of models with sharded or replicated parameters: reading a parameter gathers it, as an op of the step.

    with sharded.for_training():        the model's own code reads self.weight, and gets the full parameter
        step(*inputs)                   dynamo captures the gather, autograd its reduction

During such a call the class of each module is replaced by a subclass with a property for every such parameter,
and FSDP2's hooks are removed, as they would gather and reduce by themselves. In any other call the model is as
`fully_shard` left it. Parameters stay the same tensors, so optimizers, `state_dict` and checkpoints are not
affected.

A step may leave gradients unreduced (`no_sync`): they are summed, in full size, in `.grad` of tensors without
memory of their own, one for each parameter. The next step that reduces adds them to its own gradients first.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxremat.errors import FxrematError
from fxremat.ops.gathered import Sharing, gather
from fxremat.runtime.torch_fsdp import (
    Casts,
    ShardedParameter,
    adopt,
    back_to_shards,
    casts_of,
    is_hook,
    is_sharded,
    parameters_of,
    syncs,
)

WAITING = "_fxremat_unreduced"  # attribute of a module during a call: parameter name -> tensor for unreduced gradients


REPLICATED = "_fxremat_replicated"  # attribute of a model whose parameters all ranks hold in full: these parameters


class Reduction(Enum):
    """The treatment of gradients in a step."""

    REDUCE = "reduce"  # reduce the gradients over the ranks
    KEEP = "keep"  # keep the gradients unreduced, in full size on this rank
    REDUCE_ALL = "reduce all"  # reduce the gradients together with those that earlier steps kept


@dataclass(frozen=True, eq=False)
class _Reading:
    """The classes that a module gets in training calls, by the kind of reduction, and the dtype casts of removed hooks.
    """

    module: nn.Module
    classes: Mapping[Reduction, type]
    casts: Casts | None


class _Step:
    """An object that lives as long as the autograd graph of a step, whose hooks refer to it."""


def _nobody() -> None:
    """Return None, like a weak reference to an object that is gone."""


@dataclass(eq=False)
class Shared:
    """The parameters of a model that are sharded or replicated over ranks, with their unreduced gradients."""

    model: nn.Module
    parameters: Sequence[ShardedParameter]
    readings: Sequence[_Reading]
    # index in `parameters` -> tensor whose `.grad` holds unreduced gradients
    unreduced: dict[int, torch.Tensor] = field(default_factory=dict)
    sync: bool = True  # True if gradients are reduced; for sharded models FSDP2's own flag counts too
    reduction: Reduction = Reduction.REDUCE  # what the current step does with the gradients of sharded parameters
    active: bool = False  # True while sharded parameters are gathered when they are read
    # returns the step whose backward will reduce the unreduced gradients, or None
    _taken: Callable[[], _Step | None] = _nobody

    @classmethod
    def of(cls, model: nn.Module) -> Shared | None:
        """Return the sharded or replicated parameters of a model; None if no `fully_shard` was called on it."""
        replicated = model.__dict__.get(REPLICATED)
        if replicated is not None:
            if is_sharded(model):
                raise FxrematError("this model is both replicated and sharded; call one fully_shard on it")
            return cls(model, replicated, _readings(model, replicated, {}))
        if not is_sharded(model):
            return None
        parameters = parameters_of(model)
        return cls(model, parameters, _readings(model, parameters, casts_of(model)))

    def _next_reduction(self) -> Reduction:
        if not (self.sync and (not is_sharded(self.model) or syncs(self.model))):
            return Reduction.KEEP
        return Reduction.REDUCE_ALL if self._kept() else Reduction.REDUCE

    def _kept(self) -> bool:
        """Tell whether there are unreduced gradients that no step in progress will reduce.

        A step whose outputs were freed before its backward will not reduce any.
        """
        return self._taken() is None and any(tensor.grad is not None for tensor in self.unreduced.values())

    @contextlib.contextmanager
    def for_training(self) -> Iterator[None]:
        """Within this context, modules gather sharded parameters from the ranks when they read them."""
        back_to_shards(self.model)
        self.reduction = reduction = self._next_reduction()
        with contextlib.ExitStack() as stack:
            if reduction is not Reduction.REDUCE:
                stack.enter_context(self._with_unreduced(reduction))
            for reading in self.readings:
                stack.enter_context(_swapped(reading, reduction))
            self.active = True
            try:
                yield
            finally:
                self.active = False

    @property
    def forwards(self) -> dict[Reduction, Callable[..., Any]]:
        """The model's own forward, with the casts of its mixed precision policy, for each way to reduce gradients."""
        classes: Mapping[Reduction, Any] = next((r.classes for r in self.readings if r.module is self.model), {})
        return {
            kind: types.MethodType(classes.get(kind, type(self.model)).forward, self.model) for kind in Reduction
        }

    def stand_in(self, module: nn.Module) -> None:
        """Let FSDP2 also find the model's state through the compiled module `module`."""
        if is_sharded(self.model):
            adopt(module, self.model)

    @contextlib.contextmanager
    def _with_unreduced(self, reduction: Reduction) -> Iterator[None]:
        """Within this context, give modules a tensor for each parameter, in the attribute `WAITING`.

        With KEEP it is the tensor whose `.grad` collects gradients; with REDUCE_ALL it is the gradient
        collected so far, or zeros.
        """
        given: dict[nn.Module, dict[str, torch.Tensor]] = {}
        for place, parameter in enumerate(self.parameters):
            for module, name in parameter.places:
                tensor = self._unreduced(place, parameter, module, name)
                if reduction is Reduction.REDUCE_ALL:
                    tensor = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                given.setdefault(module, {})[name] = tensor
        for module, tensors in given.items():
            module.__dict__[WAITING] = tensors
        try:
            yield
        finally:
            for module in given:
                del module.__dict__[WAITING]

    def _unreduced(self, place: int, parameter: ShardedParameter, module: nn.Module, name: str) -> torch.Tensor:
        """Return a leaf tensor of a parameter's full shape, with no memory of its own, which collects its gradient."""
        if place not in self.unreduced:
            shard = _local(module._parameters[name])
            sharing = parameter.sharing
            shape = (sharing.rows, *shard.shape[1:]) if shard.dim() else ()
            empty = torch.zeros((), dtype=sharing.reduced_in or sharing.dtype, device=shard.device)
            self.unreduced[place] = empty.expand(shape).requires_grad_()
        return self.unreduced[place]

    def before_backward_of(self, outputs: Sequence[torch.Tensor]) -> None:
        """Register hooks on the outputs: when backward begins, gathered parameters and unreduced gradients are freed.

        An evaluation between forward and backward leaves the root module's parameters gathered, while gradients
        belong to shards. Unreduced gradients are freed only in a step that reduces them together with its own.
        """
        reduces_all = self.reduction is Reduction.REDUCE_ALL
        step = _Step()
        if reduces_all:
            self._taken = weakref.ref(step)

        def begin(_: torch.Tensor, step: _Step = step) -> None:
            back_to_shards(self.model)
            if reduces_all:
                self._taken = _nobody
                for tensor in self.unreduced.values():
                    tensor.grad = None

        for output in outputs:
            if output.requires_grad:
                output.register_hook(begin)


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def note_replicated(model: nn.Module, parameters: Sequence[ShardedParameter]) -> None:
    """Record on the model that every rank holds these parameters in full, and that their gradients are averaged."""
    model.__dict__[REPLICATED] = parameters


def cut_by(model: nn.Module) -> str:
    """Return how many of a model's parameters are cut among ranks, and by what, as text; "" if there are none."""
    parameters = list(model.parameters())
    cut = sum(isinstance(parameter, DTensor) for parameter in parameters)
    by = "fully_shard" if is_sharded(model) else "parallelize_module"
    return f"{cut} of this model's {len(parameters)} parameters are cut among ranks ({by})" if cut else ""


def is_replicated(model: nn.Module) -> bool:
    """Tell whether `fully_shard(..., replicate=True)` was called on the model."""
    return REPLICATED in model.__dict__


@contextlib.contextmanager
def _swapped(reading: _Reading, reduction: Reduction) -> Iterator[None]:
    """Within this context, give a module the class whose properties gather parameters, and remove FSDP2's hooks."""
    module = reading.module
    names = ("_forward_pre_hooks", "_forward_hooks")
    before = {name: module.__dict__[name] for name in names}
    own = type(module)
    if reading.casts is not None or any(map(is_hook, (*before[names[0]].values(), *before[names[1]].values()))):
        module.__dict__[names[0]] = _others(before[names[0]])
        module.__dict__[names[1]] = _others(before[names[1]])
    module.__class__ = reading.classes[reduction]
    try:
        yield
    finally:
        module.__class__ = own
        for name, hooks in before.items():
            if module.__dict__[name] is not hooks:
                module.__dict__[name] = hooks


def _others(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    return OrderedDict((key, hook) for key, hook in hooks.items() if not is_hook(hook))


def _readings(
    model: nn.Module, parameters: Sequence[ShardedParameter], casts: Mapping[nn.Module, Casts]
) -> list[_Reading]:
    read: dict[nn.Module, dict[str, ShardedParameter]] = {module: {} for module in casts}
    for parameter in parameters:
        for module, name in parameter.places:
            read.setdefault(module, {})[name] = parameter
    for module in model.modules():
        if module not in read and any(map(is_hook, module._forward_pre_hooks.values())):
            read[module] = {}

    def reading(module: nn.Module, named: Mapping[str, ShardedParameter]) -> _Reading:
        cast = casts.get(module)
        return _Reading(module, {kind: _class_of(module, named, cast, kind) for kind in Reduction}, cast)

    return [reading(module, named) for module, named in read.items()]


_classes: dict[Any, type] = {}


def _class_of(
    module: nn.Module, named: Mapping[str, ShardedParameter], casts: Casts | None, reduction: Reduction
) -> type:
    """Return a subclass of a module's class with a property for each sharded parameter, which gathers it when read.

    Modules of one class, with equal parameters and casts, get the same subclass.
    """
    own = type(module)
    about = tuple((name, parameter.sharing, parameter.inner) for name, parameter in named.items())
    key = (own, about, casts and (casts.inputs, casts.outputs), reduction)
    if key not in _classes:
        body: dict[str, Any] = {
            name: property(_reader(name, parameter.sharing, parameter.inner, reduction), _writer(name))
            for name, parameter in named.items()
        }
        if casts is not None:
            body["forward"] = _casting(own.forward, casts)
        body |= {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        _classes[key] = type(own.__name__, (own,), body)
    return _classes[key]


def _reader(name: str, sharing: Sharing, inner: Any, reduction: Reduction) -> Callable[[Any], Any]:
    numbers = tuple(sharing)
    sync = reduction is not Reduction.KEEP

    def read(self: Any) -> Any:
        parameter = self._parameters[name]
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        other = None if reduction is Reduction.REDUCE else self.__dict__[WAITING][name]
        whole = gather(shard, other, sync, *numbers)
        if inner is None:
            return whole
        mesh, placements = inner
        return DTensor.from_local(whole, mesh, placements, run_check=False)

    return read


def _writer(name: str) -> Callable[[Any, Any], None]:
    def write(self: Any, value: Any) -> None:
        raise FxrematError(f"forward sets the sharded parameter {name!r}; write to it outside of the training step")

    return write


def _casting(forward: Callable[..., Any], casts: Casts) -> Callable[..., Any]:
    """Wrap a forward to cast its inputs and outputs to the dtypes of a mixed precision policy."""

    def cast(value: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None:
            return value

        def one(leaf: Any) -> Any:
            floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if floating else leaf

        return torch.utils._pytree.tree_map(one, value)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cast(forward(self, *cast(args, casts.inputs), **cast(kwargs, casts.inputs)), casts.outputs)

    return run
