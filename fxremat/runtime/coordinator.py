"""The coordinator of a model that consists of several graphs: it chooses how each call runs, within one budget.

    forward of the model      `step()`: plans if something new was measured, and begins a step
    call of a graph           runs the program planned for it; its saved tensors are kept here, under a token
    backward of a call        found by its token; if its saved tensors were dropped, its forward runs again
    end of the backward       what was measured is stored in the tree of known call sequences (`planning.paths`)

A call that no plan knows runs the program that saves nothing. So the first step shows the least peak, and
measures the memory that belongs to no call, which is the same under any plan. Before each forward and each
backward, the allocated bytes plus those that it needs are compared with the budget; if they exceed it, calls
drop their saved tensors, starting with those whose backward comes last.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from operator import ne
from typing import Any

import torch

from fxremat.errors import BudgetTooSmall
from fxremat.graphs.accounting import assumed_for
from fxremat.graphs.captured import Captured
from fxremat.graphs.handed_in import layout_of
from fxremat.graphs.symbolic import Dims
from fxremat.ops.random import GeneratorStates, devices_of
from fxremat.options import Options
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.planning.limits import Limit
from fxremat.planning.paths import Numbers, PathPlans, WeightsOnHost, is_smaller
from fxremat.planning.step import Step as CapturedGraph
from fxremat.runtime.called_graph import CalledGraph, current
from fxremat.runtime.calls import Call, Output, Step
from fxremat.runtime.emitted import Emitted
from fxremat.runtime.gradient_sums import GradientSums
from fxremat.runtime.hosted_weights import HostedWeights, ResidentWeights
from fxremat.runtime.step_memory import OtherModels, Unmeasured, meter_of
from fxremat.runtime.unused import unused_outputs, without
from fxremat.search.call_programs import CallProgram
from fxremat.search.paths import Node
from fxremat.torch_private import (
    after_backward,
    backward_keeps_graph,
    functions_in_python,
    holds_gradients,
    is_profiled_by_others,
    storage_of,
    storage_watch,
)

log = logging.getLogger(__name__)

SETTLED = 2  # number of consecutive steps with nothing new measured, after which steps are no longer measured
MOST_IN_VAIN = 8  # number of consecutive steps that could not be measured after which measuring is given up
MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an input or an "
    "output of a graph that fxremat runs, whose backward needs it as it was"
)

PROFILED = (
    "a profiler records these steps, so that fxremat cannot measure them: until steps run without it, what is "
    "allocated between the graphs of this model is not planned, and the budget may not hold"
)


class Coordinator:
    """The object that runs all graph calls of a model that consists of several graphs.

    Args:
        model: the name of the model's class.
        broken_at: the source line where the first graph ends, for reports.
        device: the device that the model computes on.
        parameters: returns the model's parameters with their names; "" for an unknown name.
        weights: the parameters that live on the host, if any do.
    """

    def __init__(
        self,
        options: Options,
        model: str,
        broken_at: str,
        device: torch.device,
        parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple,
        weights: HostedWeights | None = None,
    ) -> None:
        on_host = None if weights is None else WeightsOnHost(weights.bytes, weights.held, weights.most_updated)
        self.plans = PathPlans(options, model, broken_at, device, weights=on_host)
        # of the steps that are a part of another compiled model's: other memory is allocated in them between the calls
        self.plans_within = PathPlans(options, model, broken_at, device, within=True, weights=on_host)
        self.device, self._parameters = device, parameters
        self._weights = weights or ResidentWeights()
        self._gradients = options.loss_outside.gradients
        self._told_loss = options.loss_outside.size
        # what the ops of graphs allocate here is not what they take on the device that the user named
        self._elsewhere = options.device is not None and options.device.torch_device.type != device.type
        self._has_loss_outside = False  # of the last step: the model has returned more than numbers
        self._sums = GradientSums(device)
        self.steps = 0  # number of steps that have begun
        self._step: Step | None = None
        self._unsettled, self._in_vain = SETTLED, 0
        self._told_of_profiler = False
        self._ignores_next = False
        self._others = OtherModels()
        self._others.shares, self._others.settle = True, partial(_settle_within, weakref.ref(self))
        self._may_have_litter = True  # tensors of a step that failed, perhaps another model's, may be in cycles

    @property
    def plan(self) -> PlanOfGraphs | None:
        """The plan for the last step's sequence of calls; None before a step was measured exactly, or if none fits.

        A step is measured exactly if nothing is captured in it; after `planning.paths.MOST_IN_VAIN` steps without an
        exact one, what is known is planned with.
        """
        with contextlib.suppress(BudgetTooSmall):  # if nothing fits, the next step raises the error
            self.settle()
        return self.plans.plan or self.plans_within.plan

    def take(self, options: Options) -> None:
        """Plan for another budget from the next call on."""
        self.plans.take(options)
        self.plans_within.take(options)

    def planned_within(self, options: Options) -> PlanOfGraphs | None:
        """Plan the last step's sequence of calls for another budget; None before a step was measured exactly.

        The steps were tried without a loss outside the model: what the user has told of one is added.

        Raises:
            BudgetTooSmall: it does not fit into the budget.
        """
        self.settle()
        if self._told_loss and self._has_loss_outside:
            self._has_loss_outside = False  # it counts once, for however many budgets are asked for
            self.plans.add_loss(self._told_loss)
        self.take(options)
        self._renew()
        return self.plans.plan

    def settle(self) -> None:
        """Plan with what was measured in the last step, if its backward has ended.

        Raises:
            BudgetTooSmall: the step's sequence of calls does not fit into the budget.
        """
        if self._step is not None and self._step.over:
            self._end()
            self._renew()

    def _renew(self) -> None:
        for plans in (self.plans, self.plans_within):
            if plans.within and self._others.has_share:
                continue  # they are planned as the other model's step begins
            before = plans.planned
            try:
                plans.renew()
            except BudgetTooSmall:
                if not self._others.ask_for_room():
                    raise
                plans.begin_anew()
                self._unsettled, self._in_vain = SETTLED, 0
            if plans.planned > before:
                self._others.note_own(replaces=True)

    def settle_within(self, room: Callable[[], int | None]) -> bool:
        """Plan the steps within those of another model; tell whether they may take more than before at some moment.

        Args:
            room: returns the bytes by which they may; None as long as that is not known.
        """
        if self._step is not None and self._step.over:
            self._end()
        before = self.plans_within.planned
        self.plans_within.renew(room)
        if has_planned := self.plans_within.planned > before:
            self._others.note_own(replaces=True)
        return has_planned

    @property
    def has_graphs(self) -> bool:
        """True if a step has called a captured graph."""
        return bool(self.plans.root.children or self.plans_within.root.children)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Within this context, graphs that are called belong to one training step.

        If the backward of the last forward may still run, this forward belongs to the same step.

        Raises:
            BudgetTooSmall: the last step's sequence of calls does not fit into the budget; nothing has run.
        """
        self._weights.begin()
        if self._step is not None and self._step.goes_on:
            self._step.enter()
        else:
            self._begin()
        forward, current.runner = current.runner, self
        before = len(self._step.calls) if self._step is not None else 0
        try:
            yield
        except BaseException:
            self._abandon(before)
            raise
        finally:
            current.runner = forward
        if self._step is not None and not self._step.calls:
            self._end()

    def _begin(self) -> None:
        self._end()
        is_within = self._others.wait()
        if not is_within and self._others.settle_inside(lambda: self.plans.spare):
            # what they take now is measured in a step that takes the least itself, before the rest is used
            self.plans.retreat()
            self._unsettled, self._in_vain = SETTLED, 0
            self.plans.others_changed()
        else:
            self._renew()
        if self._others.have_new_plans():
            self._unsettled, self._in_vain = SETTLED, 0
            for plans in (self.plans, self.plans_within):
                plans.others_changed()
        self.steps += 1
        self._others.steps = self.steps
        ignored, self._ignores_next = self._ignores_next, False
        # what is between calls may depend on data, so that steps 8, 16, 32 and so on are measured again
        again = self.steps > SETTLED and self.steps & (self.steps - 1) == 0
        measured = (self._unsettled > 0 or again) and self._in_vain < MOST_IN_VAIN and not ignored
        if measured and self._may_have_litter:
            self._may_have_litter = False
            gc.collect()  # what Python freed within the step would be subtracted from what the step takes
        meter = meter_of(self.device, peaks=measured)
        if measured and isinstance(meter, Unmeasured) and is_profiled_by_others():
            measured = False  # later steps are measured instead
            if self._unsettled and not self._told_of_profiler:
                self._told_of_profiler = True
                log.warning(PROFILED)
        added = {} if meter.level() is None else {id(p): p.nbytes for p in self._with_gradient}
        plans = self.plans_within if is_within else self.plans
        if is_within and self._others.takes_least:
            plans.take_least()
        self._step = Step(self, plans, plans.root, meter, measured, added)
        self._others.own_step_waits = partial(_waits, weakref.ref(self._step))

    def ignore_step(self) -> None:
        """Do not use measurements of the current step, since it runs ops that no plan contains."""
        if self._step is not None and self._step.measured:
            self._step.measured = False
            self._in_vain += 1

    def ignore_next_step(self) -> None:
        """Do not measure the step that begins next, since a graph that the coordinator does not run has a part in it.
        """
        self._ignores_next = True

    def _abandon(self, before: int) -> None:
        """Free the tensors that the calls of a forward have saved which failed; end the step, if it has no other.

        Args:
            before: the number of calls of earlier forwards of the step.
        """
        if (step := self._step) is None:
            return
        self._may_have_litter = True
        for call in step.calls[before:]:
            call.free()
        if before:
            step.give_up(before)
        else:
            self._step = None
            step.meter.end()

    def leave(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record the end of the model's forward; `outputs` are the outputs that need a gradient.

        Raises:
            BudgetTooSmall: the backward cannot fit, by what is known of it.
        """
        if self._step is not None:
            shown = frozenset(map(storage_of, outputs))
            self._leave(self._step, [(x.numel(), x.dtype) for x in outputs], self._step.apart_from_losses(shown))

    def leave_with_what_is_held(self) -> None:
        """Record the end of the model's forward.

        Its outputs are taken to be graph outputs alive that no other graph read.
        """
        if self._step is not None:
            self._leave(self._step, self._step.outputs_held, self._step.apart_from_losses())

    def _leave(self, step: Step, trained: Sequence[Output], apart: Sequence[Output]) -> None:
        """Record the end of the model's forward.

        Args:
            trained: the outputs that need a gradient.
            apart: those of them that none of the model's losses was computed from.
        """
        self._rest(step)
        if not all(call.node.measured for call in step.calls):
            step.expect_sums()
            step.plans.check_backward(step.nodes, step.gradients_behind)
        losses = [(count, dtype) for count, dtype in trained if count == 1]
        # beside a loss, gradients are expected only for outputs that it was not computed from
        if losses and self._gradients == "loss":
            trained = [*losses, *apart]
        numbers = sum(assumed_for(count, dtype) for count, dtype in trained if count == 1)
        step.outside[step.forwards] = sum(assumed_for(count, dtype) for count, dtype in trained if count > 1)
        self._has_loss_outside = step.outside[step.forwards] > 0
        # a loss, and the gradient that its backward begins with, stay
        step.meter.leave(step.outside[step.forwards] + max(numbers, assumed_for(1, torch.float32)))

    def _rest(self, step: Step) -> None:
        """Record which calls of a step have no backward, as nothing is left that their outputs could get gradients by.
        """
        for call in step.calls:
            if call.is_forgotten and not call.differentiated:
                step.plans.rest(call.node)

    def capturing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which graphs are captured and measured; its allocations do not count for the step."""
        return self._step.meter.paused() if self._step is not None else contextlib.nullcontext()

    def order_of(self, graph: Captured) -> Callable[[], Sequence[int]] | None:
        """Return a function for the order in which a graph's ops are measured, such that they fit into the free memory.

        None: the captured order, as memory is not limited. Of a budget that is not known yet, it is of little memory.
        """
        plans, level = (self._step.plans, self._step.level(0)) if self._step is not None else (self.plans, 0)
        if plans.keeps_all:
            return None
        limit = Limit(known=1 if plans.mem is None else max(1, plans.mem - level), is_relative=plans.is_share)
        return partial(limit.order_of, CapturedGraph(graph=graph))


    def forward(self, graph: CalledGraph, dims: Dims, primals: list[Any]) -> tuple[list[Any], torch.Tensor]:
        """Run the forward of a graph call; return its outputs and the token that stands for its saved tensors.

        Raises:
            BudgetTooSmall: it does not fit into the budget, even if all calls drop their saved tensors.
        """
        step = self._step
        assert step is not None, "a graph was called outside of a step"
        if not graph.knows(dims):
            step.note("sizes")
        at = graph.at(dims)
        begins = not step.calls or step.calls[-1].forward < step.forwards
        node, is_new = step.plans.next(step.node, graph, at, lambda: step.nodes, begins=begins)
        if not (node.measured or step.measured):
            self._unsettled = SETTLED  # later steps measure what the step that captured this call did not
        if is_new:
            self._unsettled = SETTLED
            names = {id(parameter): name for name, parameter in self._parameters()}
            name = graph.name_with(names.get(id(primal)) for primal in primals)
            step.plans.name(node, name, functions_in_python())
        if step.added and not step.calls:
            self._without_freed_gradients(step)
        step.note("forward", node)
        if not node.measured:
            node.assume(step.meter.level(), step.saved, step.calls[-1].node if step.calls else None)
            node.expected = self._gradients_before(step, primals)
        self._keep_values(step, node, [primals[place] for place in graph.overwritten])
        if step.plans.mem is None:
            for earlier in step.calls:
                if earlier.can_let_go:
                    earlier.let_go()
        number = step.plans.number(node, at, step.saved, step.hosted)
        self._make_room(step, node.before, at.programs[number].forward, node)
        random = GeneratorStates(devices_of(primals)) if graph.random else None
        call = Call(step, graph, dims, at, node, number, graph.emitted(number), list(primals), step.forwards, random)
        outputs, saved = self._weights.run_forward(graph, call.emitted, dims, primals)
        token = call.keep(outputs, saved)
        step.calls.append(call)
        step.node = node
        step.note("ran", node)
        return outputs, token

    def _gradients_before(self, step: Step, primals: Sequence[Any]) -> int:
        """Return the bytes of new parameter gradients that are there when the backward of a call begins.

        They are taken to be those of all parameters that neither its inputs nor those of earlier calls contain.
        """
        read = {id(x) for call in step.calls for x in call.primals} | set(map(id, primals))
        without_gradient = (p for _, p in self._parameters() if p.requires_grad and p.grad is None)
        return sum(p.nbytes for p in without_gradient if id(p) not in read and p not in self._weights)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a parameter that lives on the host."""
        return tensor in self._weights

    def with_weights(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the arguments of a graph without a backward, with the weights among them on the device."""
        return self._weights.brought(arguments)

    def keep_values(self, overwritten: Sequence[torch.Tensor]) -> None:
        """Copy what a graph without a backward overwrites, as `forward` does for one that has a backward."""
        if self._step is not None and self._step.calls:
            self._keep_values(self._step, self._step.calls[-1].node, overwritten)

    def _keep_values(self, step: Step, node: Node, overwritten: Sequence[torch.Tensor]) -> None:
        """Copy what a graph call overwrites, for the earlier calls whose backwards read it.

        What they read has to be as it was in their forwards, since they recompute from it. PyTorch's own backward may
        not read it, and then trains such a model.
        """
        written = {storage_of(tensor): tensor for tensor in overwritten}
        copies: dict[int, torch.UntypedStorage] = {}

        def copied(storage: int) -> torch.UntypedStorage:
            if storage not in copies:
                now = written[storage].untyped_storage()
                self._make_room(step, node.before, now.nbytes(), node)
                copies[storage] = now.clone()
            return copies[storage]

        for call in step.calls if written else ():
            for storage in written.keys() & call.storages:
                call.keep_values_of(storage, partial(copied, storage))

    @property
    def _with_gradient(self) -> Iterator[torch.Tensor]:
        return (p for _, p in self._parameters() if p.grad is not None and p not in self._weights)

    def _without_freed_gradients(self, step: Step) -> None:
        """Let a step begin without the gradients that the model has freed before its first graph, by `zero_grad()`."""
        before, step.added = step.added, {id(p): p.nbytes for p in self._with_gradient}
        step.meter.lower_base(sum(before.values()) - sum(step.added.values()))

    def _make_room(self, step: Step, known: int, need: int, node: Node, keep: Call | None = None) -> None:
        """Make graph calls free their saved tensors until `need` more bytes fit; only the call `keep` keeps them.

        Args:
            known: bytes that belong to no call now, as measured in earlier steps.
            node: the call that needs the bytes.

        Raises:
            BudgetTooSmall: they do not fit even then. Not raised for a budget in percent or "min", which grows with
                what the steps need, when the next step begins.
        """
        if (mem := step.plans.mem) is None:
            return
        for call in step.calls:
            if step.level(known) + need <= mem:
                return
            if call is not keep and call.can_let_go:
                self._let_go(call)
        needed, is_known = step.level(known) + need, node.measured or step.meter.level() is not None
        if needed <= mem or not is_known:
            return
        if not step.plans.is_share:
            self._rest(step)
            self._others.ask_for_room()  # of the next steps
            raise step.plans.refusal(step.nodes, node, needed, step.gradients_behind)
        # measure the next steps again, since this step needed more memory than was known
        self._unsettled, self._in_vain = SETTLED, 0

    def _let_go(self, call: Call) -> None:
        """Make a graph call free its saved tensors, and measure the next steps again, since this one needs more memory.
        """
        call.let_go()
        self._unsettled = SETTLED


    def backward(self, call: Call, tangents: list[Any]) -> Sequence[Any]:
        """Run the backward of a call; return the gradients.

        Raises:
            BudgetTooSmall: it does not fit into the budget, even if all other calls drop their saved tensors.
            RuntimeError: a tensor that it reads was changed in place, as autograd raises it.
        """
        step, node = call.step, call.node
        unused, again = unused_outputs(), backward_keeps_graph()
        if not step.in_backward:
            after_backward(partial(self._returned, step))
        self._weights.begin_backward()
        step.reach(call)
        step.note("backward", node)
        call.differentiated = True
        if node.idle:
            self._unsettled, self._in_vain = SETTLED, 0
        step.plans.differentiate(node)
        if step.measured:
            call.look_at_outputs()
        if any(map(ne, map(layout_of, tangents), call.at.layouts)):
            step.plans.stride(node)
        if not call.is_as_saved:
            raise RuntimeError(MODIFIED)
        summed = {} if again else self._summed(call, unused)
        sums = self._sums.of(summed)
        added = frozenset(call.graph.gradients_apart[place] for place in sums)
        if step.measured:
            step.plans.add(node, added)
        elif not node.added <= added:
            self._unsettled, self._in_vain = SETTLED, 0
        if call.can_let_go and not self._fits(call, added) and self._is_less_again(call, added):
            self._let_go(call)
        if call.saved is None:
            emitted, saved = self._run_again(call, added)
        else:
            self._make_room(step, node.back, node.backward(call.program, added), node, call)
            emitted, saved = call.emitted, self._weights.restored(call.saved)
            call.known_need = node.backward(call.program, added) - node.excess
        given = [(storage_watch(x), x.nbytes) for x in tangents if isinstance(x, torch.Tensor)] if step.measured else []
        primals = call.primals
        if not again:
            call.free()
        gradients = call.graph.run_backward(emitted, call.dims, saved, tangents, sums, unused)
        gradients = self._weights.keep(call.graph, without(gradients, call.graph.outputs_needed, unused), primals)
        if step.measured and not again:
            node.free(call.dead_inputs)
            if not holds_gradients():  # in other versions of PyTorch these gradients are counted already
                node.shared = max(node.shared, sum(size for is_alive, size in given if is_alive()))
        step.note("returned", node)
        self._sums.begin({place: x for place, x in summed.items() if place not in sums}, gradients)
        return gradients

    def _summed(self, call: Call, unused: Set[int]) -> dict[int, torch.Tensor]:
        """Return the parameters that get a gradient which may be added to those of other calls, by its index.

        Args:
            unused: the outputs of the call that have no gradient.
        """
        if not unused:
            return call.summed
        needs = call.graph.outputs_needed
        return {place: x for place, x in call.summed.items() if not needs[place] or not needs[place] <= unused}

    def _fits(self, call: Call, added: frozenset[int]) -> bool:
        """Tell whether the backward of a graph call fits if all other calls free their saved tensors.

        Args:
            added: the gradients that it adds to sums.
        """
        if (mem := call.step.plans.mem) is None:
            return True
        others = sum(other.own for other in call.step.calls if other is not call and other.can_let_go)
        return call.step.level(call.node.back) - others + call.node.backward(call.program, added) <= mem

    def _is_less_again(self, call: Call, added: frozenset[int]) -> bool:
        """Tell whether a graph call needs less memory if it frees its saved tensors and reruns its forward."""
        again = min(_need_again(call, added, program) for program in call.at.run_again)
        return again - call.own < call.node.backward(call.program, added)

    def _run_again(self, call: Call, added: frozenset[int]) -> tuple[Emitted, list[Any]]:
        """Run the forward of a graph call again, by the fastest program that fits now, or that of the lowest peak.

        Return its graphs and saved tensors.
        """
        step, node, at, mem = call.step, call.node, call.at, call.step.plans.mem
        need, level = partial(_need_again, call, added), step.level(node.back)
        fitting = (p for p in at.run_again if mem is not None and level + need(p) <= mem)
        program = next(fitting, None) or min(at.run_again, key=need)
        self._make_room(step, node.back, need(program), node, call)
        emitted = call.graph.emitted(at.programs.index(program))
        with call.random.replayed() if call.random else contextlib.nullcontext():
            _, saved = self._weights.run_again(call.graph, emitted, call.dims, call.primals)
        return emitted, saved


    def _returned(self, step: Step) -> None:
        """Record the end of a step's backward."""
        if not step.over:
            step.note("end")
        step.over = True

    def _end(self) -> None:
        """End the last step: add its measurements to the tree of known sequences of calls."""
        step, self._step = self._step, None
        if step is None:
            return
        step.meter.end()
        if not (step.measured and step.over):
            self._in_vain += step.measured
            step.plans.took(step.nodes)
            return
        step.measured = False
        for call in step.calls:
            if not call.differentiated:
                step.plans.rest(call.node)
        numbers, exact = _measured(step)
        for found in numbers.values() if self._elsewhere else ():
            found.pop("excess", None)
        smaller = {call.node for call in step.calls if is_smaller(call.at, call.node)}
        grown = step.plans.learn(numbers, exact=exact, smaller=smaller)
        step.plans.took(step.nodes)
        if exact:
            self._in_vain = 0
            self._unsettled = max(int(grown), self._unsettled - 1, int(step.plans.awaits_sizes))
        else:
            self._in_vain += 1


def _settle_within(reference: weakref.ref[Coordinator], room: Callable[[], int | None]) -> bool:
    coordinator = reference()
    return coordinator is not None and coordinator.settle_within(room)


def _waits(reference: weakref.ref[Step]) -> bool:
    """Tell whether the backward of a step may still come."""
    return (step := reference()) is not None and step.goes_on


def _need_again(call: Call, added: frozenset[int], program: CallProgram) -> int:
    """Return the bytes that rerunning a call's forward by `program`, and then its backward, need.

    Args:
        added: the gradients that the backward adds to sums.
    """
    made = sum(call.at.outputs.values())
    return max(program.forward, program.saved + made + call.node.backward(program, added))


def _measured(step: Step) -> tuple[dict[Node, Numbers], bool]:
    """Return the numbers measured for each call of a step, and whether all of them are exact."""
    numbers: dict[Node, Numbers] = {}
    spared, calls = step.spared, {call.node: call for call in step.calls}
    first = next(place for place, moment in enumerate(step.moments) if moment.kind == "forward")
    ahead = [moment.border.peak for moment in step.moments[: first + 1]]
    exact = step.moments[-1].kind == "end" and None not in ahead
    for moment, following in zip(step.moments, [*step.moments[1:], None], strict=True):
        level = moment.border.level
        exact &= level is not None
        if moment.node is None or level is None:
            continue
        here = numbers.setdefault(moment.node, {})
        if moment.kind == "forward":
            here["before"] = level - moment.saved
            if moment is step.moments[first]:
                here["ahead"] = max((peak for peak in ahead if peak is not None), default=0)
        elif moment.kind == "backward":
            call = calls[moment.node]
            here["back"] = level - moment.saved + spared[moment.node][0] - call.kept_alone
            peak = following.border.peak if following is not None else None
            if peak is not None and (need := call.known_need) is not None:
                here["excess"] = max(0, peak - level - need)
        elif following is not None and following.border.level is not None:
            peak = following.border.peak
            exact &= peak is not None
            if following.kind == "end" and step.plans.within:
                peak = 0  # the backward of another model, whose budget bounds it
            most = max(level, following.border.level, peak or 0)
            if moment.kind == "ran":
                here["after"] = most - moment.saved
                continue
            # the peak occurs before autograd has added new gradients to existing ones
            before, total = spared[moment.node]
            here["behind"] = max(most + before, following.border.level + total) - moment.saved
    return numbers, exact
