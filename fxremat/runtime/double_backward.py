"""Gradients of gradients: a backward with `create_graph=True` runs the captured graph again as plain PyTorch.

A gradient penalty (WGAN-GP) and forces from an energy differentiate gradients. Those that a planned backward returns
cannot be differentiated. So here

    call        hooks on the outputs and on the autograd node of the planned step; nothing is kept alive
    backward    without `create_graph` the hooks do nothing
                with it they take the gradients of the outputs, run the captured graph as plain PyTorch on the inputs of
                the call, with the same random numbers, and return gradients that autograd can differentiate

Such a step has no budget. All others are as planned.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fxremat.errors import CaptureError
from fxremat.runtime.call_state import CallState
from fxremat.torch_private import is_compiled_backward, version_of

Step = Callable[..., Sequence[Any]]

UNPLANNED = (
    "the backward asks for gradients of gradients (create_graph=True), which no plan has: this step runs a second time "
    "as plain PyTorch, without a budget"
)
REFUSED = (
    "backward(create_graph=True) asks for gradients of gradients, for which the step runs again as plain PyTorch, but "
    "{reason}; use the uncompiled model for double backward"
)


@dataclass(frozen=True)
class Rerun:
    """The facts that a second run of a captured graph depends on."""

    draws: bool  # it draws random numbers
    refusal: str = ""  # the reason why it cannot run again


class TwiceDifferentiable:
    """A compiled step whose gradients can be differentiated.

    Args:
        step: the compiled step.
        plain: the graph that it was compiled from.
        rerun: what is known of that graph.
        tell: called before it runs again.
    """

    def __init__(self, step: Step, plain: Step, rerun: Rerun, tell: Callable[[], None]) -> None:
        self._step, self.plain, self.rerun, self.tell = step, plain, rerun, tell
        self.warned = False

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        call = _Call(self, inputs)
        outputs = self._step(*inputs)
        trained = [(k, t) for k, t in enumerate(outputs) if isinstance(t, Tensor) and t.grad_fn is not None]
        node = _compiled_node(t.grad_fn for _, t in trained)
        if node is not None:
            call.connect(node)
            for position, output in trained:
                output.register_hook(partial(call.take, position))
        return outputs


def _compiled_node(nodes: Iterable[Any]) -> Any:
    """Return the autograd node of a compiled step, behind which AOTAutograd may have put views; None if it has none."""
    level = list(nodes)
    for _ in range(4):
        if (found := next(filter(is_compiled_backward, level), None)) is not None:
            return found
        level = [node for above in level for node, _ in above.next_functions if node is not None]
    return None


class _Call:
    """A call of a `TwiceDifferentiable`: weak references to its inputs, and the state around it."""

    def __init__(self, step: TwiceDifferentiable, inputs: Sequence[Any]) -> None:
        self.step = step
        self.inputs = [weakref.ref(x) if isinstance(x, Tensor) else x for x in inputs]
        self.state = CallState((x for x in inputs if isinstance(x, Tensor)), draws=step.rerun.draws)
        self.versions = self._versions()  # of the inputs, as long as the forward does not write to them
        self.node: Callable[[], Any] = lambda: None  # returns the autograd node of the step while it is alive
        self._hook: Any = None  # on that node, from the first of the tangents on
        self.tangents: dict[int, Tensor] = {}  # by position of the output

    def connect(self, node: Any) -> None:
        """Note the autograd node of the step, whose forward has run."""
        now = self._versions()
        self.versions = [before if before == after else None for before, after in zip(self.versions, now, strict=True)]
        self.node = weakref.ref(node)

    def _versions(self) -> list[int | None]:
        return [version_of(x) if isinstance(x, Tensor) else None for x in self._given()]

    def _given(self) -> list[Any]:
        """Return the inputs; None for those that nobody holds any more."""
        return [x() if isinstance(x, weakref.ref) else x for x in self.inputs]

    def take(self, position: int, gradient: Tensor) -> None:
        """Note the gradient of an output, if gradients are going to be differentiated."""
        if not torch.is_grad_enabled():
            return
        if not self.tangents:  # only now, as a hook keeps the gradients of all outputs alive while the backward runs
            self._hook = self.node().register_hook(self._differentiable)
        self.tangents[position] = gradient

    def _differentiable(self, _: Sequence[Tensor | None], __: Sequence[Any]) -> Sequence[Tensor | None]:
        """Return gradients that autograd can differentiate, in place of the planned ones.

        Raises:
            CaptureError: the step cannot run again.
        """
        self._hook.remove()
        edges = self.node().next_functions
        tangents, self.tangents = self.tangents, {}
        inputs = self._inputs_again()
        if not self.step.warned:
            self.step.warned = True
            warnings.warn(UNPLANNED, stacklevel=2)
        self.step.tell()
        with self.state.restored():
            outputs = self.step.plain(*inputs)
        places = {edge: place for place, edge in reversed([*enumerate(edges)]) if edge[0] is not None}
        gradients: list[Tensor | None] = [None] * len(edges)
        found = torch.autograd.grad(
            [outputs[position] for position in tangents],
            [GradientEdge(*edge) for edge in places],
            list(tangents.values()),
            create_graph=True,
            allow_unused=True,
        )
        for place, gradient in zip(places.values(), found, strict=True):
            gradients[place] = gradient
        return tuple(gradients)

    def _inputs_again(self) -> list[Any]:
        """Return the inputs for the second run; those without gradient, to which the step may write, are copies."""
        if self.step.rerun.refusal:
            raise CaptureError(REFUSED.format(reason=self.step.rerun.refusal))
        given = self._given()
        if any(x is None and y is not None for x, y in zip(given, self.inputs, strict=True)):
            raise CaptureError(REFUSED.format(reason="an input of the model is freed already: hold it until then"))
        now = self._versions()
        if any(before not in (None, after) for before, after in zip(self.versions, now, strict=True)):
            raise CaptureError(REFUSED.format(reason="an input was modified in place after the forward"))
        return [x.clone() if isinstance(x, Tensor) and not x.requires_grad else x for x in given]
