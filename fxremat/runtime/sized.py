"""One captured step for many input sizes: before each forward, a program is chosen for the sizes of the call.

    capture     a joint graph with symbolic sizes, and two graphs that are never run, from which AOTAutograd reads the
                inputs and outputs of forward and backward
    call        sizes -> number of a program -> its forward, which saves sizes and number for the backward
    backward    number -> the backward of the same program, whatever was planned in between

Graphs are generated once for each program (an order of ops), and run at all sizes for which that program is
chosen. AOTAutograd fixes at compile time how many tensors and numbers the forward saves (read in torch 2.11 and
2.13). So there are slots for as many as any program saves; unused slots get an empty tensor or 0:

    forward    (*primals, symbolic numbers among them) -> (*outputs, *saved tensors, *saved numbers)
    backward   (*saved numbers, *saved tensors, *tangents) -> gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx

from fxremat.errors import FxrematError
from fxremat.graphs.captured import Captured
from fxremat.graphs.nodes import is_number
from fxremat.graphs.symbolic import Dims, Numbers, SymbolicGraph
from fxremat.options import Options
from fxremat.planning.sizes import PlansOfSizes
from fxremat.plans import Plan
from fxremat.runtime.contract import contract_of
from fxremat.runtime.dropped_outputs import DroppedOutputs
from fxremat.runtime.emitted import Emitted, EmittedPrograms
from fxremat.runtime.outer_layouts import OuterLayouts
from fxremat.runtime.unused import unused_outputs, without
from fxremat.search.candidate import Candidate
from fxremat.step.program import Order
from fxremat.step.step_graph import Origin
from fxremat.torch_private import any_batched, real_tensors, taking_a_list

BATCHED = (
    "is_grads_batched=True computes several gradients at once, which a plan for changing sizes cannot: give "
    "dynamic=False, or use the uncompiled model"
)

AT_MOST = 8  # number of programs whose generated graphs are kept
KEPT = 8  # number of plans that are kept, to compare them with what calls at their sizes take
MOST_SIZES = 10_000  # number of combinations of sizes for which the chosen program is remembered
REMEMBERED = 256  # number of combinations of sizes for which computed numbers are cached
AS_GOOD = 1.01  # a program with existing graphs is preferred to a faster one without, up to this ratio of times
# the ratio used instead of AS_GOOD when the graphs of only one more program can be kept: that place is reserved
# for the program without recomputation
GOOD_ENOUGH = 1.03


@dataclass(frozen=True)
class _Slots:
    """Numbers of tensors and of Python numbers that AOTAutograd passes from forward to backward, enough for any plan.
    """

    tensors: int
    numbers: int

    @classmethod
    def of(cls, joint: Captured) -> _Slots:
        """Count the slots for a joint graph: one for each input, forward value and generator state of a random op."""
        given = (Origin.PRIMAL, Origin.FORWARD)
        shown = [joint.shown[value.index].meta.get("val") for value in joint.values if value.origin in given]
        numbers = sum(map(is_number, shown))
        random = sum(op.random and not op.backward for op in joint.ops)
        return cls(tensors=len(shown) - numbers + random, numbers=numbers)


class Sized:
    """A captured step with symbolic sizes, which provides the functions that AOTAutograd calls.

    Args:
        graph: the joint graph with symbolic sizes.
        plans: makes the plan for the sizes of a call.
        as_called: returns the arguments of the forward in the order in which dynamo captured the model's inputs.
        described: returns the sizes of arguments in that order as text, for messages.
        outputs: what the caller does with those of such calls.
        take_layouts: called with this step, its plan at the sizes of a call, and whether gradients of the outputs lie
            as traced there, whenever that changes.
        plan_with: plans with a function that gets the options to plan with, where another returns the step.
        on_plan: called with every new plan.
    """

    def __init__(
        self,
        graph: SymbolicGraph,
        plans: PlansOfSizes,
        *,
        as_called: Callable[[Sequence[Any]], Sequence[Any]],
        described: Callable[[Sequence[Any]], str],
        outputs: DroppedOutputs,
        take_layouts: Callable[[Sized, Plan, bool], None],
        plan_with: Callable[[Callable[[Options], Plan], Callable[[], Captured]], Plan],
        on_plan: Callable[[Plan], None],
    ) -> None:
        self._graph, self._plans = graph, plans
        self._as_called, self._described, self._on_plan = as_called, described, on_plan
        self.outputs, self._symbolic = outputs, plans.symbolic
        self.layouts, self._plan_with = OuterLayouts(partial(take_layouts, self)), plan_with
        self._outputs = len(self._symbolic.forward_outputs)
        self._slots = _Slots.of(self._symbolic)
        self._orders: list[Order] = []  # programs by number; all are kept, since a backward may still need any of them
        self._number_of: dict[object, int] = {}
        self._chosen: dict[Dims, int] = {}  # sizes that tensors depend on -> number of the chosen program
        self._percent_of = 0  # the bytes of which the budget was a percentage when these were chosen
        self.plan: Plan | None = None  # of the last forward; None if it was made before `KEPT` others
        self._plans_at: dict[Dims, Plan] = {}  # the last plans, by the sizes that tensors depend on
        self._emitted = EmittedPrograms(self._outputs, self._symbolic.tangent_names, AT_MOST)
        self._numbers: Callable[[Dims], Numbers] = lru_cache(maxsize=REMEMBERED)(graph.numbers)
        with real_tensors():
            self._empty = torch.empty(0)

    def forward_of(self, _: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that AOTAutograd calls as the forward, instead of the first graph of `contract`."""
        return self.forward

    def backward_of(self, _: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that AOTAutograd calls as the backward, instead of the second graph of `contract`."""
        return taking_a_list(self.backward)

    def forward(self, arguments: list[Any]) -> list[Any]:
        """Run the forward with the program for the arguments' sizes.

        The list is emptied, so that its tensors can be freed.
        """
        dims = self._dims(arguments)
        shaping = self._graph.shaping_of(dims)
        self._follow_largest()
        number = self._chosen.get(shaping)
        if number is None:
            number = self.choose(arguments)
        self.plan = self._plans_at.get(shaping)
        numbers = self._numbers(dims)
        program = self._program(number)
        places = self._graph.places
        given = [argument for place, argument in enumerate(arguments) if place not in places]
        given += [numbers.of(size) for size in program.forward_sizes]
        arguments.clear()
        results = list(program.forward(given))
        end = self._outputs + program.tensors
        saved_numbers = results[end:]
        del results[end:]
        results += [self._empty] * (self._slots.tensors - program.tensors)
        saved_numbers += [0] * (self._slots.numbers - program.numbers)
        return [*results, *dims, number, *saved_numbers]

    def backward(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the backward of the program whose forward ran; the list is emptied, so that its tensors can be freed."""
        self.outputs.begin_backward()
        if any_batched(arguments[-len(self._symbolic.tangents) :]):
            raise FxrematError(BATCHED)
        unused = unused_outputs()
        count = len(self._graph.places)
        dims = tuple(int(argument) for argument in arguments[:count])
        plan = self._plans_at.get(self._graph.shaping_of(dims))
        if plan is not None and not unused:  # instead of gradients that are missing there are zeros
            self.layouts.look(plan, arguments[-len(self._symbolic.tangents) :])
        program, numbers = self._program(int(arguments[count])), self._numbers(dims)
        tensors = count + 1 + self._slots.numbers
        given = [numbers.of(size) for size in program.backward_sizes]
        given += arguments[count + 1 : count + 1 + program.numbers]
        given += arguments[tensors : tensors + program.tensors]
        given += arguments[tensors + self._slots.tensors :]
        arguments.clear()
        return without(program.backward.of(unused)(given), self._symbolic.outputs_needed, unused)

    def choose(self, arguments: Sequence[Any]) -> int:
        """Plan for the sizes of these arguments, and return the number of the program that is chosen for them.

        Raises:
            BudgetTooSmall: no program fits; nothing has run, and the step is unchanged.
        """
        dims, inputs = self._dims(arguments), self._as_called(arguments)
        described = self._described(inputs)

        def plan_with(options: Options) -> Plan:
            if options.loss_seen is not self._plans.loss_seen:
                self._plans.take(options)
            return self._plans.plan(dims, inputs=inputs, called_with=described, choose=self._as_emitted)

        plan = self.outputs.fitting(
            lambda: self._plan_with(plan_with, lambda: self._graph.at(dims)),
            self._symbolic,
            self._plans.drop,
            in_percent=self._plans.in_percent,
        )
        order = plan.chosen.order()
        if _key(order) not in self._number_of:
            self._number_of[_key(order)] = len(self._orders)
            symbolic = replace(self._symbolic, dropped_outputs=order.layout.graph.dropped_outputs)
            self._orders.append(replace(order, layout=replace(order.layout, graph=symbolic)))
        self._follow_largest()
        if len(self._chosen) >= MOST_SIZES:
            self._chosen.clear()
        number = self._chosen[self._graph.shaping_of(dims)] = self._number_of[_key(order)]
        if len(self._plans_at) >= KEPT:
            self._plans_at.pop(next(iter(self._plans_at)))
        self._plans_at[self._graph.shaping_of(dims)] = plan
        self._emitted.never_overwriting(plan.costs.fresh)
        self._on_plan(plan)
        return number

    def _follow_largest(self) -> None:
        """Plan all sizes anew, when they come, if a budget in percent is of more now, since a larger call came."""
        if grown := self._plans.grown(self._percent_of):
            self._percent_of = grown
            self._chosen.clear()

    def plan_anew(self, options: Options) -> None:
        """Plan with these options at the next call of each combination of sizes; backwards that wait stay as they are.
        """
        self._plans.take(options)
        self._plans.drop(self.outputs.places)
        self._chosen.clear()

    def contract(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return two graphs, never run, from which AOTAutograd reads the inputs and outputs of forward and backward."""
        placeholders = self._graph.module.graph.find_nodes(op="placeholder")
        given = [node for node in placeholders if node not in self._symbolic.tangent_nodes]
        slots, sizes = self._slots, self._graph.inputs
        return contract_of(self._symbolic, given, tensors=slots.tensors, sizes=sizes, numbers=1 + slots.numbers)

    def _dims(self, arguments: Sequence[Any]) -> Dims:
        return tuple(int(arguments[place]) for place in self._graph.places)

    def _as_emitted(self, fitting: Sequence[Candidate]) -> Candidate:
        """Return the fastest candidate, or one nearly as fast whose graphs exist already.

        If the fastest recomputes nothing, it is always returned.

        Args:
            fitting: the candidates that fit, fastest first.
        """
        if len(fitting[0].order().ops) == len(self._symbolic.ops):
            return fitting[0]
        most = (AS_GOOD if len(self._emitted) < AT_MOST - 1 else GOOD_ENOUGH) * fitting[0].time
        near = (candidate for candidate in fitting if candidate.time <= most)
        emitted = (c for c in near if self._number_of.get(_key(c.order())) in self._emitted)
        return next(emitted, fitting[0])

    def _program(self, number: int) -> Emitted:
        """Return the graphs generated for the program with index `number`."""
        program = self._emitted.of(number, self._orders[number].program)
        assert program.tensors <= self._slots.tensors, "more tensors are saved than there are"
        assert program.numbers <= self._slots.numbers, "more numbers are saved than there are"
        return program


def _key(order: Order) -> object:
    return order.ops, order.split, order.layout.graph.dropped_outputs
