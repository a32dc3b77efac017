"""Auxiliary outputs, which a model returns besides its loss: they cost nothing unless gradients arrive for them.

A model that returns its loss often also returns what it computed the loss from: logits, hidden states, keys and
values. Nearly every training loop needs no gradient for these. AOTAutograd's backward still expects a gradient
for each of them, made of zeros where autograd has none, and adds it in. That costs memory and time, and gives
other bits than eager PyTorch where the sum has another layout. So here

    capture     outputs that the loss is computed from are detached: the graph is what eager autograd would run
    call        an autograd function connects them to the loss and to the model's inputs again
    backward    the loss's gradient is passed to the planned backward; if a gradient arrives for another output too,
                the step runs again as plain PyTorch, and from the next call on every output's gradient is planned for
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx

from fxremat.errors import CaptureError
from fxremat.graphs.captured import Captured
from fxremat.runtime.call_state import CallState
from fxremat.runtime.double_backward import REFUSED
from fxremat.torch_private import storage_of, version_of

Step = Callable[..., Sequence[Any]]


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

    expected: tuple[int, ...]  # outputs that will get a gradient: scalars, and outputs from which no scalar is computed
    # indices of auxiliary outputs: outputs from which a scalar output, such as a loss, is computed
    beside: tuple[int, ...]


def auxiliary_outputs_of(module: fx.GraphModule) -> Outputs:
    """Find the outputs of a graph from which a scalar output (a loss) is computed. O(nodes).

    `module` is a graph as dynamo passes it to a backend; a view counts as the tensor that it is a view of.
    """
    trained = {position: node for position, node in enumerate(_outputs(module)) if _is_trained(node)}
    scalars = [position for position, node in trained.items() if node.meta["example_value"].numel() == 1]
    before = set(_ancestors([trained[position] for position in scalars]))
    storages = {storage for node in before for storage in _storages(node)}
    beside = tuple(
        position
        for position, node in trained.items()
        if position not in scalars and (node in before or not storages.isdisjoint(_storages(node)))
    )
    return Outputs(expected=tuple(position for position in trained if position not in beside), beside=beside)


def _outputs(module: fx.GraphModule) -> list[Any]:
    return list(cast(Sequence[Any], _end(module).args[0]))


def _end(module: fx.GraphModule) -> fx.Node:
    end: fx.Node = next(iter(reversed(module.graph.nodes)))
    return end


def _is_trained(node: object) -> bool:
    if not isinstance(node, fx.Node) or node.op == "placeholder":
        return False
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and value.requires_grad


def _ancestors(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
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


def detach_outputs(module: fx.GraphModule, positions: Iterable[int]) -> fx.GraphModule:
    """Detach the outputs at these positions, in place; return a copy of the module without that change.

    The copy shares parameters and other attributes with the module.
    """
    before = fx.GraphModule(module, copy.deepcopy(module.graph))
    outputs = _outputs(module)
    with module.graph.inserting_before(_end(module)):
        for position in positions:
            node = outputs[position]
            outputs[position] = module.graph.call_method("detach", (node,))
            outputs[position].meta = {**node.meta, "example_value": node.meta["example_value"].detach()}
    _end(module).args = (tuple(outputs),)
    module.recompile()
    return before


class AuxiliaryOutputs:
    """A captured step, planned without gradients of its auxiliary outputs until one of them gets a gradient.

    Args:
        module: the graph that dynamo captured; its auxiliary outputs are detached in place.
        outputs: the result of `auxiliary_outputs_of` for the graph.
        differentiate: the function that compiles the graph.
        inputs: example inputs to compile for.
    """

    def __init__(
        self, module: fx.GraphModule, outputs: Outputs, differentiate: Differentiate, inputs: Sequence[Any]
    ) -> None:
        self.positions = (*outputs.expected, *outputs.beside)
        self.expected = len(outputs.expected)
        self.whole = detach_outputs(module, outputs.beside)
        self.differentiate = differentiate
        self.surprised = False  # True once an auxiliary output has got a gradient
        self.every_output = False  # True if the compiled step `planned` expects a gradient for every output
        try:
            self.planned = differentiate(module, inputs, again=True)
        except RunsOnce:
            self._take_every_gradient(inputs)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if self.surprised and not self.every_output:
            self._take_every_gradient(inputs)
        if self.every_output:
            return self.planned(*inputs)
        call = _Call(self, inputs)
        trained = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        outputs = list(self.planned(*inputs))
        tie: Any = _Tie.apply
        tied = tie(call, *(outputs[position] for position in self.positions), *trained)
        for position, output in zip(self.positions, tied, strict=True):
            outputs[position] = output
        return outputs

    def _take_every_gradient(self, inputs: Sequence[Any]) -> None:
        self.planned = self.differentiate(self.whole, inputs)
        self.every_output = True


class _Call:
    """One call of an `AuxiliaryOutputs`, with all that is needed to run it again: inputs, random states and autocast.
    """

    def __init__(self, step: AuxiliaryOutputs, inputs: tuple[Any, ...]) -> None:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        self.step = step
        self.inputs: list[Any] = list(inputs)
        self.versions = [version_of(x) for x in tensors]
        self.state = CallState(tensors)

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

    def again(self, saved: Iterable[Tensor], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the step again as plain PyTorch; return the gradients of the inputs that require grad.

        Args:
            saved: the inputs that `give_to_autograd` has saved.
            gradients: one for each of the step's `positions`; None if the output got none.
        """
        saved = iter(saved)
        inputs = [_apart(next(saved) if value is _SAVED else value) for value in self.inputs]
        with self.state.restored():
            outputs = self.step.whole(*inputs)
        places = zip(self.step.positions, gradients, strict=True)
        given = [(outputs[position], gradient) for position, gradient in places if gradient is not None]
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

    Its arguments after `call` are the outputs at the step's `positions`, then those inputs.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = tensors[: len(call.step.positions)]
        ctx.call, ctx.inputs = call, len(tensors) - len(outputs)
        ctx.set_materialize_grads(False)
        call.give_to_autograd(ctx)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if all(gradient is None for gradient in gradients[call.step.expected :]):
            return None, *gradients, *(None for _ in range(ctx.inputs))
        if torch.is_grad_enabled():
            raise CaptureError(REFUSED.format(reason="the loss reads outputs beside the one that the model returns"))
        call.step.surprised = True
        warnings.warn(SURPRISE, stacklevel=2)
        return None, *(None for _ in gradients), *call.again(ctx.saved_tensors, gradients)


SURPRISE = (
    "the loss reads outputs of the model beside the loss that the model returns: this step ran as plain PyTorch, "
    "without a budget; from the next one on a gradient of every output is planned for, "
    'which compile(..., loss=Loss(gradients="all")) does from the start'
)
