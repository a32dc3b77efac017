"""Gradients of gradients: a backward with `create_graph=True` runs the captured graph again as plain PyTorch.

A gradient penalty (WGAN-GP) and forces from an energy differentiate gradients. Those that a planned backward
returns cannot be differentiated. So here

    call        sets hooks on the outputs and on the autograd node of the planned step, which keep nothing alive
    backward    without `create_graph` the hooks do nothing; with it they take the gradients of the outputs, run the
                captured graph as plain PyTorch on the inputs of the call, with the same random numbers, and return
                gradients that autograd can differentiate

A backward with `is_grads_batched=True`, as in vectorized Jacobians, is computed so too: plans overwrite gradients in
place, which cannot be done to several at once.

Such a step has no budget. All others run as planned.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxremat.errors import CaptureError
from fxremat.ops.random import devices_of
from fxremat.runtime.call_state import CallState
from fxremat.torch_private import (
    any_batched,
    backward_keeps_graph,
    backward_task,
    is_compiled_backward,
    outside_graphs,
    versions_of,
)

Step = Callable[..., Sequence[Any]]

UNPLANNED = (
    "the backward asks for {what}, which no plan has: this step runs a second time as plain PyTorch, without a budget"
)
DOUBLE = "gradients of gradients (create_graph=True)"
BATCHED = "several gradients at once (is_grads_batched=True)"
KEEPING = (
    "a backward with retain_graph=True keeps what plans free as it runs: %s. One backward of the sum of the losses, or "
    "gradients of outputs alone, take no more"
)
EXCEEDING = KEEPING % "such a step may take up to the saved values more than its budget"
FOLLOWED = KEEPING % "the next call plans for that"
REFUSED = (
    "backward asks for {what}, for which the step runs again as plain PyTorch, but {reason}; use the uncompiled model "
    "for that"
)


@dataclass(frozen=True)
class Rerun:
    """Facts about running a captured graph a second time."""

    draws: bool  # True if the graph draws random numbers
    refusal: str = ""  # the reason why the graph cannot be run a second time; "": it can


class TwiceDifferentiable:
    """A compiled step whose gradients can be differentiated.

    Args:
        step: the compiled step.
        plain: the graph that it was compiled from.
        rerun: whether and how that graph can run again.
        tell: called before it runs again.
        keeps: called with 1 once a backward has kept the graph, and with 2 once two of the same call have.
    """

    def __init__(
        self,
        step: Step,
        plain: Step,
        rerun: Rerun,
        tell: Callable[[], None],
        keeps: Callable[[int], None],
    ) -> None:
        self._step, self.plain, self.rerun, self.tell, self.keeps = step, plain, rerun, tell, keeps
        self.warned = False
        self.kept = 0  # number of backwards of one call that have kept what plans free, 2 at most
        self.devices: set[torch.device] = set()  # of the inputs, which are the same in each call

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if not self.devices:
            self.devices = devices_of(inputs)
        call = _Call(self, inputs)
        outputs = self._step(*inputs)
        trained = [(k, t) for k, t in enumerate(outputs) if isinstance(t, Tensor) and t.grad_fn is not None]
        node = compiled_node(t.grad_fn for _, t in trained)
        if node is not None:
            call.connect(node, inputs)
            for position, output in trained:
                output.register_hook(partial(_outside(), call, position))
        return outputs



@functools.cache
def _outside() -> Callable[[_Call, int, Tensor | None], None]:
    """Return `_Call.take`, which dynamo does not trace where a function that calls `backward()` is compiled."""
    return outside_graphs(_Call.take, "fxremat looks at gradients of outputs")


def compiled_node(nodes: Iterable[Any]) -> Any:
    """Return the autograd node of a compiled step, even behind views that AOTAutograd adds; None if there is none."""
    level = list(nodes)
    for _ in range(4):
        if (found := next(filter(is_compiled_backward, level), None)) is not None:
            return found
        level = [node for above in level for node, _ in above.next_functions if node is not None]
    return None


def _edge_of(x: Tensor) -> tuple[Any, int]:
    """Return the autograd node that a gradient of `x` goes to, and the index of the gradient among those it gets."""
    edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


class _Call:
    """One call of a `TwiceDifferentiable`: weak references to its inputs, and the state of generators and autocast."""

    def __init__(self, step: TwiceDifferentiable, inputs: Sequence[Any]) -> None:
        self.step = step
        self.inputs = [weakref.ref(x) if isinstance(x, Tensor) else x for x in inputs]
        self.state = CallState(step.devices, draws=step.rerun.draws)
        # version counters of the inputs; None for inputs that the forward itself writes to
        self.versions = versions_of(inputs)
        self.node: Callable[[], Any] = lambda: None  # weak reference to the autograd node of the step
        self._hook: Any = None  # hook on that node, set when the first gradient of an output arrives
        self.batched = False  # True if the gradients of the outputs are several each
        self._seen: set[int] = set()  # the backwards with retain_graph=True that have reached an output
        self._kept = 0  # number of those that have run the step's backward
        self.tangents: dict[int, Tensor] = {}  # position of an output -> its gradient

    def connect(self, node: Any, inputs: Sequence[Any]) -> None:
        """Store the autograd node of the step after its forward has run on these inputs."""
        now = versions_of(inputs)
        self.versions = [before if before == after else None for before, after in zip(self.versions, now, strict=True)]
        self.node = weakref.ref(node)

    def _given(self) -> list[Any]:
        """Return the inputs of the forward, with None for inputs that have been freed."""
        return [x() if isinstance(x, weakref.ref) else x for x in self.inputs]

    def take(self, position: int, gradient: Tensor | None) -> None:
        """Store the gradient of an output, if the backward has `create_graph=True` or `is_grads_batched=True`.

        It is None where the output gets none. Outputs that are computed anew, as views may be, outlive the step's node.
        """
        if gradient is None or self.node() is None:
            return
        batched = any_batched([gradient])
        if not (torch.is_grad_enabled() or batched):
            if self.step.kept < 2 and backward_keeps_graph() and backward_task() not in self._seen:
                self._seen.add(backward_task())
                self._count_if_it_runs(backward_task())
            return
        self.batched |= batched
        if not self.tangents:  # set only now, since a hook keeps the gradients of all outputs alive during the backward
            self._hook = self.node().register_hook(self._differentiable)
        self.tangents[position] = gradient

    def _count_if_it_runs(self, task: int) -> None:
        """Count a backward with retain_graph=True once the step's own backward runs in it: it may end at the outputs.

        Args:
            task: the number of the backward.
        """

        def runs(*_: object) -> None:
            hook.remove()
            if backward_task() == task:
                self._kept += 1
                if self._kept > self.step.kept:
                    self.step.kept = self._kept
                    self.step.keeps(self._kept)

        hook = self.node().register_prehook(runs)  # one that runs after the node keeps the gradients of all outputs

    def _differentiable(self, _: Sequence[Tensor | None], __: Sequence[Any]) -> Sequence[Tensor | None]:
        """Return gradients that autograd can differentiate, to replace the planned ones.

        Raises:
            CaptureError: the step cannot run again.
        """
        self._hook.remove()
        edges = self.node().next_functions
        tangents, self.tangents = self.tangents, {}
        inputs = self._inputs_again()
        if not self.step.warned:
            self.step.warned = True
            warnings.warn(UNPLANNED.format(what=BATCHED if self.batched else DOUBLE), stacklevel=2)
        self.step.tell()
        with self.state.restored(), torch.enable_grad():
            given = [_edge_of(x) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs]
            apart = {edge: x.view_as(x) for edge, x in zip(given, inputs, strict=True) if edge}
            outputs = self.step.plain(*(apart[e] if e else x for e, x in zip(given, inputs, strict=True)))
        places = {edge: place for place, edge in reversed([*enumerate(edges)]) if edge[0] is not None}
        gradients: list[Tensor | None] = [None] * len(edges)
        found = torch.autograd.grad(
            [outputs[position] for position in tangents],
            # of views: an input may be computed from another, whose gradient is not to include what passes through it
            [apart.get(edge, GradientEdge(*edge)) for edge in places],
            list(tangents.values()),
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        for place, gradient in zip(places.values(), found, strict=True):
            gradients[place] = gradient
        return tuple(gradients)

    def _inputs_again(self) -> list[Any]:
        """Return the inputs for the second run; inputs that need no gradient are copied, as the step may write to them.
        """
        what = BATCHED if self.batched else DOUBLE
        if self.step.rerun.refusal:
            raise CaptureError(REFUSED.format(what=what, reason=self.step.rerun.refusal))
        given = self._given()
        if any(x is None and y is not None for x, y in zip(given, self.inputs, strict=True)):
            reason = "an input of the model is freed already: hold it until then"
            raise CaptureError(REFUSED.format(what=what, reason=reason))
        now = versions_of(given)
        if any(before not in (None, after) for before, after in zip(self.versions, now, strict=True)):
            raise CaptureError(REFUSED.format(what=what, reason="an input was modified in place after the forward"))
        return [x.clone() if isinstance(x, Tensor) and not x.requires_grad else x for x in given]
