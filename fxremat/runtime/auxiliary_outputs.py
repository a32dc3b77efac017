"""Auxiliary outputs, which a model returns besides its loss: they cost nothing unless gradients arrive for them.

A model that returns its loss often also returns what it computed the loss from: logits, hidden states, keys and
values. Nearly every training loop needs no gradient for these. AOTAutograd's backward still expects a gradient
for each of them, made of zeros where autograd has none, and adds it in. That costs memory and time, and gives
other bits than eager PyTorch where the sum has another layout. So here

    capture     outputs that the loss is computed from are detached: the graph is what eager autograd would run
    call        an autograd function ties them to the loss and to the model's inputs again
    backward    the loss's gradient goes on to the planned backward; where a gradient comes for another output too, the
                step runs again as plain PyTorch, and from the next call on every output's gradient is planned for

Whether an output that the loss is not computed from gets a gradient (the scores of another head do, the last state of a
recurrent layer does not), the first backward shows. Where it got none, the next call captures the step without.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx

from fxremat.errors import BudgetTooSmall, CaptureError
from fxremat.graphs.captured import Captured
from fxremat.ops.random import devices_of
from fxremat.runtime.call_state import CallState
from fxremat.runtime.double_backward import DOUBLE, REFUSED
from fxremat.torch_private import forget_history, storage_of, version_of

log = logging.getLogger(__name__)

Step = Callable[..., Sequence[Any]]
DETACHED = "fxremat_detached"  # key of the meta of nodes that detach an output whose gradient is left out


class Differentiate(Protocol):
    """A function that compiles a graph.

    With `again` the step must be able to run twice on the same inputs; otherwise `RunsOnce` is raised.
    """

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], *, again: bool = False) -> Step:
        """Return the compiled step of `module`."""


class RunsOnce(Exception):
    """Raised for a step that reads inputs which it also overwrites, so that a second run would give other results."""


def runs_again(joint: Captured) -> bool:
    """Tell whether a second forward gives the same results: no op reads an input that the step overwrites.

    BatchNorm, and the update itself, may read it.
    """
    return all(
        joint.mutated_primals.isdisjoint(op.again_reads) or joint.updates.issuperset(op.writes) for op in joint.ops
    )


def check_runs_again(joint: Captured) -> None:
    """Raise `RunsOnce` if a second forward of a step would give other results."""
    if not runs_again(joint):
        raise RunsOnce


@dataclass(frozen=True)
class Outputs:
    """The positions of a graph's outputs that require grad."""

    scalars: tuple[int, ...]  # losses, most likely
    apart: tuple[int, ...]  # no scalar output is computed from them; they may get a gradient
    beside: tuple[int, ...]  # auxiliary outputs: a scalar output is computed from them
    mixed: frozenset[int] = frozenset()  # those of `apart` that share a differentiated value with a scalar

    @property
    def all(self) -> tuple[int, ...]:
        """Their positions, in order."""
        return tuple(sorted((*self.scalars, *self.apart, *self.beside)))


def auxiliary_outputs_of(module: fx.GraphModule) -> Outputs:
    """Find the outputs of a graph from which a scalar output (a loss) is computed. O(nodes).

    `module` is a graph as dynamo passes it to a backend; a view counts as the tensor that it is a view of.
    """
    trained = {position: node for position, node in enumerate(_outputs(module)) if _is_trained(node)}
    scalars = [position for position, node in trained.items() if node.meta["example_value"].numel() == 1]
    before = set(ancestors([trained[position] for position in scalars]))
    storages = {storage for node in before for storage in _storages(node)}
    others = [position for position in trained if position not in scalars]
    beside = [p for p in others if trained[p] in before or not storages.isdisjoint(_storages(trained[p]))]
    apart = [p for p in others if p not in beside]
    differentiated = {node for node in before if _requires_grad(node)}
    mixed = frozenset(p for p in apart if not differentiated.isdisjoint(ancestors([trained[p]])))
    return Outputs(tuple(scalars), tuple(apart), tuple(beside), mixed)


def _outputs(module: fx.GraphModule) -> list[Any]:
    return list(cast(Sequence[Any], _end(module).args[0]))


def _end(module: fx.GraphModule) -> fx.Node:
    end: fx.Node = next(iter(reversed(module.graph.nodes)))
    return end


def _is_trained(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op != "placeholder" and _requires_grad(node)


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.requires_grad


def ancestors(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield each node that some of these nodes are computed from, once. O(nodes)."""
    seen, stack = set[fx.Node](), list(nodes)
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
                yield parent


def _storages(node: fx.Node) -> Iterator[int]:
    value = node.meta.get("example_value")
    for item in value if isinstance(value, tuple | list) else (value,):
        if isinstance(item, Tensor):
            # raised for tensors without storage: sparse ones, or those of torch.func
            with contextlib.suppress(NotImplementedError):
                yield storage_of(item)


def detached_at(module: fx.GraphModule, positions: Iterable[int]) -> fx.GraphModule:
    """Return a copy of the module with the outputs at these positions detached.

    The copy shares parameters and other attributes with the module.
    """
    module = copied(module)
    outputs = _outputs(module)
    with module.graph.inserting_before(_end(module)):
        for position in positions:
            node = outputs[position]
            outputs[position] = module.graph.call_method("detach", (node,))
            value = node.meta["example_value"].detach()
            outputs[position].meta = {**node.meta, "example_value": value, DETACHED: True}
    _end(module).args = (tuple(outputs),)
    module.recompile()
    return module


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module with a copy of the graph, and with the same parameters and other attributes.

    The example values of the copy have no autograd history, which would keep tensors alive.
    """
    module = fx.GraphModule(module, copy.deepcopy(module.graph))
    forget_history(module.graph)
    return module


@dataclass(eq=False)
class OutputsSeen:
    """The positions of outputs that backwards were seen to give a gradient, or none, in calls that differ in sizes."""

    used: set[int] = field(default_factory=set)  # those that have got a gradient
    unused: set[int] = field(default_factory=set)  # those that got none in a backward through a scalar output
    zeros: set[int] = field(default_factory=set)  # of the latter, those that are planned for all the same

    @property
    def silent(self) -> Set[int]:
        """The outputs that need no gradient, going by what was seen, and whose gradient can be left out."""
        return self.unused - self.used - self.zeros


@dataclass(eq=False)
class GradientsSeen:
    """The gradients that a model's outputs were seen to get, or not; all captures of the model share this."""

    surprise: bool = False  # one of its auxiliary outputs has got a gradient
    by_kind: dict[object, OutputsSeen] = field(default_factory=dict)  # by what calls do, whatever their sizes

    def of(self, kind: object) -> OutputsSeen:
        """Return what was seen of calls of this kind."""
        return self.by_kind.setdefault(kind, OutputsSeen())


class AuxiliaryOutputs:
    """A captured step, planned without gradients of its auxiliary outputs until one of them gets a gradient.

    Args:
        module: the graph that dynamo captured.
        outputs: what `auxiliary_outputs_of` found in the graph.
        differentiate: the function that compiles the graph.
        inputs: example inputs to compile for.
        gradients: those that were seen of the model's outputs.
        kind: tells calls that differ in sizes alone from others.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        outputs: Outputs,
        differentiate: Differentiate,
        inputs: Sequence[Any],
        gradients: GradientsSeen,
        kind: object,
    ) -> None:
        self.whole = copied(module)  # dynamo removes from its own graph what tells parameters from inputs
        self.outputs = outputs
        self.differentiate = differentiate
        self.gradients, self.seen = gradients, gradients.of(kind)
        self.detached: frozenset[int] = frozenset()  # outputs for which `planned` expects no gradient
        self.settled = False  # `detached` stays as it is
        self.planned: Callable[..., Sequence[Any]]
        silent = frozenset() if gradients.surprise else self._silent
        try:
            self._plan(() if gradients.surprise else (*outputs.beside, *silent), inputs)
        except BudgetTooSmall:  # the search may miss by a little what fits with them
            if not silent:
                raise
            self._plan(outputs.beside, inputs)
            self.seen.zeros |= silent

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if not self.settled:
            self._learn(inputs)
        if self.settled and not self.detached:
            return self.planned(*inputs)
        call = _Call(self, inputs)
        trained = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        outputs = list(self.planned(*inputs))
        tie: Any = _Tie.apply
        tied = tie(call, *(outputs[position] for position in self.outputs.all), *trained)
        for position, output in zip(self.outputs.all, tied, strict=True):
            outputs[position] = output
        return outputs

    def note(self, gradients: Mapping[int, Tensor | None]) -> None:
        """Note which outputs got a gradient in a backward. Each is given by its position."""
        given = {position for position, gradient in gradients.items() if gradient is not None}
        self.seen.used |= given
        if not given.isdisjoint(self.outputs.scalars):
            self.seen.unused |= gradients.keys() - given

    @property
    def _silent(self) -> Set[int]:
        return self.seen.silent & self.outputs.mixed

    def _learn(self, inputs: Sequence[Any]) -> None:
        """Plan again if other outputs than planned got gradients."""
        silent = self._silent
        if self.gradients.surprise:
            if self.detached:
                self._plan((), inputs)
            self.settled = True
        elif not silent <= self.detached:
            log.info("outputs %s of the step got no gradient: it is captured again without theirs", sorted(silent))
            before = self.detached, self.planned
            try:
                self._plan((*self.outputs.beside, *silent), inputs)
            except BudgetTooSmall:  # the search may miss by a little what fits with them
                self.detached, self.planned = before
                self.seen.zeros |= silent
        elif not self.detached:
            self.settled = self.outputs.mixed <= self.seen.used

    def _plan(self, detached: Iterable[int], inputs: Sequence[Any]) -> None:
        """Plan the step without the gradients of these outputs, or with all gradients if it cannot run twice."""
        self.detached = frozenset(detached)
        if self.detached:
            with contextlib.suppress(RunsOnce):
                self.planned = self.differentiate(detached_at(self.whole, self.detached), inputs, again=True)
                return
            self.detached, self.settled = frozenset(), True
        self.planned = self.differentiate(self.whole, inputs)


class _Call:
    """One call of an `AuxiliaryOutputs`, with all that is needed to run it again: inputs, random states and autocast.
    """

    def __init__(self, step: AuxiliaryOutputs, inputs: tuple[Any, ...]) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        self.step = step
        self.detached = step.detached  # outputs for which it was planned without a gradient
        self.inputs: list[Any] = list(inputs)
        self.versions = [version_of(x) for x in tensors]
        self.state = CallState(devices_of(tensors))

    def give_to_autograd(self, ctx: Any) -> None:
        """Save the inputs with autograd, which checks that nobody changes them, and frees them.

        Inputs that the step itself has overwritten (running statistics, counters) are kept here: their values
        do not matter.
        """
        saved, versions = [], iter(self.versions)
        for place, value in enumerate(self.inputs):
            if isinstance(value, Tensor) and version_of(value) == next(versions):
                saved.append(value)
                self.inputs[place] = _SAVED
        ctx.save_for_backward(*saved)

    def again(self, saved: Iterable[Tensor], gradients: Mapping[int, Tensor | None]) -> Sequence[Tensor | None]:
        """Run the step as plain PyTorch, and return the gradients of the inputs that require grad.

        Args:
            saved: the inputs that `give_to_autograd` has saved.
            gradients: those of the outputs, by position; None where the output got none.
        """
        saved = iter(saved)
        inputs = [_apart(next(saved) if value is _SAVED else value) for value in self.inputs]
        with self.state.restored():
            outputs = self.step.whole(*inputs)
        given = [(outputs[position], gradient) for position, gradient in gradients.items() if gradient is not None]
        return torch.autograd.grad(
            [output for output, _ in given],
            [x for x in inputs if isinstance(x, Tensor) and x.requires_grad],
            [gradient for _, gradient in given],
            allow_unused=True,
        )


_SAVED = object()  # stands for an input that is saved with autograd


def _apart(value: Any) -> Any:
    """Detach a tensor from autograd's graph; copy one that needs no gradient, as the step may overwrite buffers."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_() if value.requires_grad else value.clone()


class _Tie(torch.autograd.Function):
    """An autograd function that returns the outputs, connected to the inputs that require a gradient.

    Its arguments after `call` are the step's outputs that require grad, then those inputs.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = tensors[: len(call.step.outputs.all)]
        ctx.call, ctx.inputs = call, len(tensors) - len(outputs)
        ctx.set_materialize_grads(False)
        call.give_to_autograd(ctx)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        by_position = dict(zip(call.step.outputs.all, gradients, strict=True))
        call.step.note(by_position)
        if all(by_position[position] is None for position in call.detached):
            return None, *gradients, *(None for _ in range(ctx.inputs))
        if torch.is_grad_enabled():
            reason = "the loss reads outputs beside the one that the model returns"
            raise CaptureError(REFUSED.format(what=DOUBLE, reason=reason))
        call.step.gradients.surprise = True
        warnings.warn(SURPRISE, stacklevel=2)
        return None, *(None for _ in gradients), *call.again(ctx.saved_tensors, by_position)


SURPRISE = (
    "the loss reads outputs of the model beside the loss that the model returns: this step ran as plain PyTorch, "
    "without a budget; from the next one on a gradient of every output is planned for, "
    'which compile(..., loss=Loss(gradients="all")) does from the start'
)
