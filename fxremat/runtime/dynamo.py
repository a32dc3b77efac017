"""The dynamo backend: torch.compile captures, AOTAutograd differentiates, our partition function plans and rewrites.

torch.compile(model, backend="fxremat", options={"mem": "4GiB"})
fxremat.compile(model, mem="4GiB")                                     the same, as a drop-in module
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat.budget import bytes_of
from fxremat.cost.calibrate import calibrate
from fxremat.cost.estimate import Device, estimate
from fxremat.cost.link import measure_link, typical_size
from fxremat.cost.measure import measure, trust_known_layouts
from fxremat.cost.updates import units_of, with_own_sizes
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidBudget
from fxremat.host.tiers import default_tier
from fxremat.linearize.chain_of import chain_of
from fxremat.ops.weights import Weights, check_unscaled
from fxremat.options import Options, options_of
from fxremat.passes.lower import Handles
from fxremat.passes.normalize import normalize
from fxremat.passes.numbers import refuse_symbols
from fxremat.plans import Plan, Whole
from fxremat.progress import bars, planning
from fxremat.runtime.auxiliary_outputs import BesideLoss, check_runs_again, outputs_beside_loss
from fxremat.runtime.devices import check_devices
from fxremat.runtime.parts import Part
from fxremat.runtime.unused import telling_unused, unused_outputs, without
from fxremat.search.floor import floor_of
from fxremat.search.frontier import Prospect, Prospects, order_for_measuring, survey
from fxremat.search.frontier_cache import remembered
from fxremat.step.costs import Costs, Link, device_of
from fxremat.step.joint import Joint, inputs_of, read_joint, with_updates_inside
from fxremat.torch_private import (
    aot_backend,
    boxed,
    compiled_frame,
    device_name,
    differentiate_as_eager,
    graph_break_after,
    never_donate,
    parameter_name,
)
from fxremat.transfers.offloading import with_offloading, with_schedules
from fxremat.transfers.weight_updates import best_within, resident_peak
from fxremat.units import Percent

KEPT_PLANS = 8  # of the latest, that can still be read


class PlannedOnly(Exception):
    """Raised in place of the first forward when only the plan was asked for."""


class Backend:
    """Plans every joint graph that dynamo captures.

    Attributes:
        plans: the latest plans, newest last; older ones go on running, but cannot be read any more.
        only_plan: leave the first forward with `PlannedOnly`.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.plans: deque[Plan] = deque(maxlen=KEPT_PLANS)
        self.only_plan = False
        self.weights: Weights | None = None
        self.hosted: frozenset[int] = frozenset()  # the optimizer's numbers of parameters that live on the host
        self._names: list[str | None] = []  # of the captured graph's inputs, where they are parameters
        self._inputs: Sequence[Any] = ()  # what the graph that is being compiled was called with

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile one captured graph, as dynamo asks. Raises `CaptureError` for sizes that are not fixed."""
        outputs = outputs_beside_loss(module)
        if outputs.expected or outputs.beside:
            refuse_symbols(module.graph, "example_value")
        if self.options.only_loss and outputs.beside:
            return BesideLoss(module, outputs, self._differentiate, inputs)
        return self._differentiate(module, inputs)

    def _differentiate(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, again: bool = False
    ) -> Callable[..., Any]:
        self._inputs = inputs
        outputs = outputs_beside_loss(module)
        trained = sorted((*outputs.expected, *outputs.beside))
        made: list[Plan] = []  # of this graph, from its partition to the compilation of its backward
        self._names = [parameter_name(node) for node in module.graph.nodes if node.op == "placeholder"]
        backend = aot_backend(
            fw_compiler=self._forward_compiler,
            bw_compiler=lambda graph, _: self._backward(graph, made.pop()),
            inference_compiler=lambda graph, _: boxed(graph),
            partition_fn=partial(self._partition, made=made, again=again),
        )
        try:
            with differentiate_as_eager():
                compiled: Callable[..., Any] = backend(module, inputs)
        finally:
            self._inputs = ()  # dynamo holds on to backends, and the model is not theirs to keep
        return telling_unused(compiled, trained) if len(trained) > 1 else compiled

    def prepare_weights(self, tensors: Iterable[torch.Tensor]) -> Weights | None:
        """The optimizer's parameters, where the step updates them; the model computes where these tensors are."""
        optimizer = self.options.optimizer
        if optimizer is not None and self.weights is None:
            devices = [tensor.device for tensor in tensors]
            device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
            self.weights = Weights(optimizer, self.options.tier or default_tier(device), device)
        return self.weights

    def _forward_compiler(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        never_donate()
        run = boxed(graph)

        def forward(arguments: list[Any]) -> Any:
            if self.only_plan:
                raise PlannedOnly
            return run(arguments)

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward

    def _backward(self, graph: fx.GraphModule, plan: Plan) -> Callable[..., Any]:
        run, weights = boxed(graph), self.weights
        losses, needs = plan.loss_places, plan.joint.outputs_needed
        if weights is None and len(plan.joint.tangents) < 2:
            return run

        def backward(arguments: list[Any]) -> Any:
            unused = unused_outputs()
            if weights is None:
                return without(run(arguments), needs, unused)
            weights.begin()
            check_unscaled([arguments[place] for place in losses])
            with weights.telling_what_is_new():
                return without(run(arguments), needs, unused)

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward

    def _partition(
        self,
        module: fx.GraphModule,
        _: Sequence[Any],
        *,
        num_fwd_outputs: int,
        made: list[Plan],
        again: bool,
        **__: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = self._with_updates(read_joint(normalize(module), num_fwd_outputs))
        if again:
            check_runs_again(joint)
        check_devices(joint)
        plan = self.plan(joint)
        made[:] = [plan]
        self.plans.append(plan)
        return plan.graphs

    def plan(self, joint: Joint) -> Plan:
        """The whole way from a joint graph to a plan, told of in the log. Raises `BudgetTooSmall`."""
        what = f"{len(joint.ops)} ops within {self.options.mem}"
        with bars(shown=self.options.progress), planning(what) as planned:
            plan = self._plan(joint)
            planned(plan.headline)
        return plan

    def _plan(self, joint: Joint) -> Plan:
        options = self.options
        costs = self._costs(joint)
        settings: dict[str, Any] = {
            "solver": options.solver,
            "slots": options.slots,
            "effort": options.effort,
        }
        if options.offloads_by_chain:
            settings |= {"solver": "auto", "effort": 0.0}
        prospects = remembered(joint, costs, settings, partial(survey, **settings))
        budget = bytes_of(options.budget, prospects.keep_all.peak, device_of(joint))
        measured = options.cost == "measure"
        hosted = options.offload or options.offload_weights
        plan = Plan(
            budget=budget,
            chosen=prospects.nearest(budget) if hosted else self._within(budget, prospects, costs),
            prospects=prospects,
            costs=costs,
            device=device_name(device_of(joint)) if measured else str(self._estimated_device(joint)),
            timed=f"{options.cost}d",
        )
        plan = calibrate(plan, self._inputs) if measured else plan
        if options.offload_weights:
            return self._trained(plan, joint)
        return self._offloaded(plan, joint) if options.offload else plan

    def _within(self, budget: int, prospects: Prospects, costs: Costs) -> Prospect:
        """The fastest prospect that fits. Raises `BudgetTooSmall`, with the op that needs the least budget."""
        try:
            return prospects.within(budget)
        except BudgetTooSmall as error:
            reason = str(floor_of(prospects.frontier[-1].program(), costs))
            raise self._in_the_users_terms(error, prospects.keep_all.peak, reason) from None

    def _in_the_users_terms(self, error: BudgetTooSmall, whole: int, reason: str = "") -> BudgetTooSmall:
        """The error in percent of keeping everything, where the budget is in percent."""
        asked = self.options.budget
        share = asked.of_keep_all if isinstance(asked, Percent) else None
        return error.explained(share=share, whole=whole, reason=reason)

    def _with_updates(self, joint: Joint) -> Joint:
        """The joint graph, with the updates inside where the user wants them there."""
        if self.options.optimizer is None:
            return joint
        trained = set(self._parameters(joint))
        if not trained:
            raise FxrematError("none of the optimizer's parameters is one of the model's")
        if written := sorted(trained & joint.mutated_primals):
            raise FxrematError(
                f"forward writes to {self._called(joint, written)}, which offload_weights updates inside the step (an "
                "Embedding with max_norm does, and clamping in forward): write to it after optimizer.step(), or give "
                "it to another optimizer than the one that fxremat.compile takes"
            )
        return with_updates_inside(joint, trained)

    def _called(self, joint: Joint, values: Iterable[int]) -> str:
        """The names of parameters in the model, for messages."""
        places = {joint.value_of[node]: place for place, node in enumerate(inputs_of(joint))}
        names = [self._names[places[value]] or joint.values[value].name for value in values]
        return f"the parameter {names[0]}" if len(names) == 1 else f"the parameters {', '.join(names)}"

    def _parameters(self, joint: Joint) -> dict[int, int]:
        """The optimizer's parameters among the graph's inputs (in the order of its primals), with their numbers."""
        optimizer = self.options.optimizer
        assert optimizer is not None
        everyone = (p for group in optimizer.param_groups for p in group["params"])
        numbers = {id(parameter): number for number, parameter in enumerate(everyone)}
        return {
            joint.value_of[node]: numbers[id(given)]
            for node, given in zip(inputs_of(joint), self._inputs, strict=False)
            if id(given) in numbers and given.shape == node.meta["val"].shape
        }

    def _trained(self, plan: Plan, joint: Joint) -> Plan:
        """The plan for a step that updates its weights, some of which live on the host."""
        options = self.options
        assert options.optimizer is not None
        weights = self.prepare_weights([joint.values[value].node.meta["val"] for value in joint.updates_of])
        assert weights is not None
        numbers = self._parameters(joint)
        link = measure_link(weights.tier, device_of(joint), typical_size(joint))
        costs = with_own_sizes(joint, plan.costs)
        units = units_of(joint, options.optimizer, costs)
        budget, everything = plan.budget, resident_peak(plan.prospects.keep_all, units, costs)
        if isinstance(options.budget, Percent):
            budget = int(everything * options.budget.of_keep_all / 100)
        settled = None
        if self.plans:  # for other shapes: what lives on the host is settled
            settled = frozenset(v for v in joint.updates_of if numbers[v] in self.hosted)
            if shown := sorted(unit.value for unit in units if unit.stays and unit.value in settled):
                raise FxrematError(
                    f"forward returns a view of {self._called(joint, shown)}, which lives on the host since the plan "
                    "for other inputs; plan with these inputs first, example_inputs=..., or return a copy"
                )
        try:
            trained = best_within(
                plan.prospects,
                units,
                costs,
                link,
                budget,
                settled=settled,
                values_too=bool(options.offload),
                host_mem=options.host_limit,
            )
        except BudgetTooSmall as error:
            raise self._in_the_users_terms(error, everything) from None
        self.hosted |= {numbers[value] for value in trained.choice.hosted}
        chosen = replace(trained.prospect, chain=chain_of(trained.prospect.layout, costs))
        handles = Handles(name=weights.name, numbers=numbers)
        whole = Whole(handles=handles, keep_all_peak=everything, minimum=trained.minimum)
        return replace(
            plan, budget=budget, chosen=chosen, costs=costs, tier=weights.tier, link=link, weights=whole
        )

    def _offloaded(self, plan: Plan, joint: Joint) -> Plan:
        """The plan for the same budget where values may wait on the host."""
        options, device = self.options, device_of(joint)
        tier = options.tier or default_tier(device)
        if options.cost == "measure":
            link = measure_link(tier, device, typical_size(joint))
        else:
            speed = self._estimated_device(joint).link
            link = Link(to_host=speed, from_host=speed)
        if options.offloads_by_chain:
            prospects = with_schedules(
                plan.prospects, plan.costs, link, options.solver, options.slots, options.host_limit
            )
        else:
            prospects = with_offloading(plan.prospects, plan.costs, link, options.host_limit)
        try:
            chosen = self._within(plan.budget, prospects, plan.costs)
        except BudgetTooSmall as error:
            raise self._which_limit(error, plan, link) from None
        chosen = replace(chosen, chain=chain_of(chosen.layout, plan.costs))
        return replace(plan, chosen=chosen, prospects=prospects, tier=tier, link=link)

    def _which_limit(self, error: BudgetTooSmall, plan: Plan, link: Link) -> BudgetTooSmall:
        """The error, with the host's limit named where that is what binds."""
        if self.options.host_limit is None:
            return error
        free = with_offloading(plan.prospects, plan.costs, link).minimum
        if free > error.budget:
            return error
        note = f"host_mem={self.options.host_mem!r} is what binds: with more of it, {free} bytes would do"
        return error.explained(note=note)

    def _costs(self, joint: Joint) -> Costs:
        options = self.options
        if options.cost == "estimate":
            trust_known_layouts(joint)
            costs = estimate(joint, self._estimated_device(joint))
        else:
            rough = Device.named(device_of(joint).type)
            order = partial(order_for_measuring, joint, rough, options.budget)
            costs = measure(joint, self._inputs, order=order)
        if options.loss_size is None:
            return costs
        return replace(costs, sizes=replace(costs.sizes, outside=options.loss_size))

    def _estimated_device(self, joint: Joint) -> Device:
        return Device.named(self.options.device or device_of(joint).type)


def fxremat(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The entry point of `torch.compile(model, backend="fxremat", options={"mem": ...})`.

    Options are those of `Options`; "mem" is required. The model has to be one graph, since each graph would take the
    whole budget: `CaptureError` names the line where a second one that needs gradients begins.
    """
    given = dict(options or {})
    if mode is not None:
        raise FxrematError(
            f'mode={mode!r} belongs to another backend; fxremat takes options={{"mem": "4GiB"}}'
        )
    if "mem" not in given:
        raise InvalidBudget('the fxremat backend needs a budget: torch.compile(..., options={"mem": "4GiB"})')
    backend = Backend(options_of(**given))
    part = Part(settings=options, frame=compiled_frame(), broken_at=graph_break_after(module))
    part.refuse_if_second(inputs)
    return part.marking(backend(module, inputs))
