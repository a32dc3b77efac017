"""One captured step of fixed sizes, with the functions that AOTAutograd calls as its forward and backward.

What a step measures, as the memory of a loss outside the model, may call for another program, which saves other tensors
for the backward. AOTAutograd fixes at compile time how many the forward saves (read in torch 2.11, 2.13, 2.14 and
2.15). So where plans only recompute there are slots for as many as programs usually save; unused slots get an empty
tensor, and the first slot an empty one whose shape tells the number of the program. Then `replan` replaces the program
between two calls without tracing anything, and the backwards of earlier calls run as they began:

    forward    (*primals) -> (*outputs, number, *saved tensors)
    backward   (number, *saved tensors, *tangents) -> gradients
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat.graphs.captured import Captured
from fxremat.graphs.region import runnable
from fxremat.ops.parameters import Weights
from fxremat.planning.step import LargestCall, Step
from fxremat.plans import Plan
from fxremat.runtime.contract import contract_of
from fxremat.runtime.dropped_outputs import DroppedOutputs
from fxremat.runtime.emitted import Emitted, EmittedPrograms
from fxremat.runtime.outer_layouts import OuterLayouts
from fxremat.runtime.unused import Backward, unused_outputs, without
from fxremat.step.program import Program
from fxremat.step.step_graph import Origin
from fxremat.torch_private import any_batched, real_tensors, taking_a_list
from fxremat.transfers.network import communicates

AT_MOST = 4  # number of programs whose generated graphs are kept
MORE = 4  # a program has slots for one in so many more values than backward ops read of the forward


class Fixed:
    """A planned step of fixed sizes.

    Args:
        plan: the plan with which it runs.
        captured: the step as it was planned.
        outputs: what the caller does with those of such calls.
        weights: those that the step updates itself, if any.
        take_layouts: told of this step, its plan, and whether gradients of the outputs lie as traced, whenever that or
            the plan changes.
        largest: the call of which its budget is a percentage; None: the budget is in bytes.
        replaceable: whether another program may replace that of the plan; not if it does more than recompute.
    """

    def __init__(
        self,
        plan: Plan,
        captured: Step,
        outputs: DroppedOutputs,
        weights: Weights | None,
        take_layouts: Callable[[Fixed, Plan, bool], None],
        *,
        largest: LargestCall | None,
        replaceable: bool,
    ) -> None:
        self.plan, self.captured, self.outputs = plan, captured, outputs
        self._weights, self.layouts = weights, OuterLayouts(partial(take_layouts, self))
        self.captured_next: Callable[[], bool] = lambda: False  # tells whether the next call captures it again
        self.largest, self._percent_of = largest, 0
        self.may_take_more()
        self._programs = _Programs.of(plan) if replaceable else None

    def may_take_more(self) -> bool:
        """Tell whether the budget is a percentage of more than when this was last asked, as a larger call has come."""
        grown = self.largest.grown(self._percent_of) if self.largest else 0
        self._percent_of = grown or self._percent_of
        return bool(grown)

    def contract(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return two graphs from which AOTAutograd reads the inputs and outputs of forward and backward."""
        return self._programs.contract() if self._programs else self.plan.graphs

    def replan(self, plan: Plan, captured: Step) -> bool:
        """Run with another plan from the next forward on; return False, and change nothing, if that cannot be."""
        program, fresh = plan.program, plan.costs.fresh
        differs = program.steps != self.plan.program.steps or fresh != self.plan.costs.fresh
        if differs and (self._programs is None or not self._programs.take(program, fresh)):
            return False
        self.plan, self.captured = plan, captured
        self.may_take_more()  # it does now
        return True

    def forward_of(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that runs the forward.

        Args:
            graph: the first graph of `contract`, as AOTAutograd returns it.
        """
        if self._programs is not None:
            return self._programs.forward
        return self._beside_others(runnable(graph), "forward")

    def backward_of(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that runs the backward; the argument is the second graph of `contract`.

        Gradients that depend only on outputs which got no gradient are returned as None.
        """
        captured, programs, weights = self.plan.captured, self._programs, self._weights
        losses, needs = self.plan.loss_places, captured.outputs_needed
        given, outputs = len(captured.tangent_nodes), captured.backward_outputs
        backward_for = programs.backward_for if programs else Backward(graph, captured.tangent_names).of

        def backward(arguments: list[Any]) -> Any:
            self.outputs.begin_backward()
            if weights is None and any_batched(arguments[-given:]):
                return [_zeros(node) for node in outputs]  # a hook replaces them: see `double_backward`
            unused = unused_outputs()
            if not unused:  # instead of gradients that are missing there are zeros
                self.layouts.look(self.plan, arguments[-given:])
            run = self._beside_others(backward_for(unused), "backward")
            if weights is None:
                return without(run(arguments), needs, unused)
            weights.begin()
            weights.check_unscaled([arguments[place] for place in losses])
            with weights.telling_what_is_new():
                return without(run(arguments), needs, unused)

        return taking_a_list(backward)

    def _beside_others(self, run: Callable[[list[Any]], Any], what: str) -> Callable[[list[Any]], Any]:
        """Wrap the function of a forward or backward that communicates, so that it fails if another rank is lost.

        Args:
            what: "forward" or "backward", for messages.
        """
        if not communicates(self.plan.graph):
            return run
        from fxremat.heartbeat import inside_step

        def agreed(arguments: list[Any]) -> Any:
            with inside_step(what):
                return run(arguments)

        return taking_a_list(agreed)


class _Programs:
    """The programs that a step has run with, by number, with slots for what any of them saves for the backward."""

    def __init__(self, captured: Captured, slots: int, emitted: EmittedPrograms) -> None:
        self._captured, self._slots, self._emitted = captured, slots, emitted
        self._all = list[tuple[Program, Set[int]]]()  # all are kept, since a backward may still need any of them
        self._outputs, self._number = len(captured.forward_outputs), 0
        with real_tensors():
            self._empty = torch.empty(0)

    @classmethod
    def of(cls, plan: Plan) -> _Programs | None:
        """Return the program of a plan; None if another one could not take its place."""
        captured = plan.captured
        made = cls(captured, 0, EmittedPrograms(len(captured.forward_outputs), captured.tangent_names, AT_MOST))
        made._slots = max(made._add(plan.program, plan.costs.fresh).tensors, _usually_saved(captured))
        return made if made._takes(made._at(0)) else None

    def take(self, program: Program, fresh: Set[int]) -> bool:
        """Run this program from the next forward on; return False if it saves more than there are slots for."""
        if not self._takes(self._add(program, fresh)):
            self._all.pop()
            return False
        self._number = len(self._all) - 1
        return True

    def forward(self, arguments: list[Any]) -> list[Any]:
        """Run the forward of the program; the list is emptied, so that its tensors can be freed."""
        number = self._number
        program, given = self._at(number), list(arguments)
        arguments.clear()
        results = list(program.forward(given))
        with real_tensors():
            results.insert(self._outputs, torch.empty(0, number))
        return results + [self._empty] * (self._slots - program.tensors)

    def backward_for(self, unused: frozenset[int]) -> Callable[[list[Any]], Any]:
        """Return the function that runs the backward of the program whose forward ran: see `Backward.of`."""

        def run(arguments: list[Any]) -> Any:
            program = self._at(arguments[0].shape[1])
            given = [*arguments[1 : 1 + program.tensors], *arguments[1 + self._slots :]]
            arguments.clear()
            return program.backward.of(unused)(given)

        return run

    def contract(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return two graphs, never run, with the inputs and outputs of forward and backward."""
        return contract_of(self._captured, self._captured.primals, tensors=1 + self._slots)

    def _add(self, program: Program, fresh: Set[int]) -> Emitted:
        self._all.append((program, fresh))
        return self._at(len(self._all) - 1)

    def _at(self, number: int) -> Emitted:
        program, fresh = self._all[number]
        return self._emitted.of(number, lambda: program, fresh)

    def _takes(self, program: Emitted) -> bool:
        only_tensors = not (program.numbers or program.forward_sizes or program.backward_sizes)
        return only_tensors and program.tensors <= self._slots


def _usually_saved(captured: Captured) -> int:
    """Return a number of tensors that programs rarely exceed in what they save for the backward.

    They may save each input, each generator state, and what backward ops read of the forward, or recompute it from
    something else, for which there is some room.
    """
    inputs = sum(value.origin is Origin.PRIMAL for value in captured.values)
    states = sum(op.random and not op.backward for op in captured.ops)
    read = {value for op in captured.ops if op.backward for value in op.reads}
    made = sum(captured.values[value].origin is Origin.FORWARD for value in read)
    return inputs + states + made + made // MORE


def _zeros(node: object) -> torch.Tensor | None:
    """Return zeros, which take no memory, of the shape of a gradient; None for what has none."""
    value = node.meta["val"] if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
