"""The dynamo backend: torch.compile captures, AOTAutograd differentiates, our partition function plans and rewrites.

torch.compile(model, backend="fxremat", options={"mem": "4GiB"})
fxremat.compile(model, mem="4GiB")                                     the same, as a drop-in module
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat._torch import aot_backend, boxed, device_name, differentiate_as_eager, parameter_name
from fxremat.cost.blocks import chain_of
from fxremat.cost.calibrate import calibrate
from fxremat.cost.estimate import Device, estimate
from fxremat.cost.link import measure_link, typical_size
from fxremat.cost.measure import measure
from fxremat.cost.table import Costs, device_of
from fxremat.cost.updates import units_of, with_own_sizes
from fxremat.errors import BudgetTooSmall, FxrematError, InvalidBudget
from fxremat.linearize.joint import Joint, inputs_of, read_joint, with_updates_inside
from fxremat.memo import remembered
from fxremat.offloading import with_offloading, with_schedules
from fxremat.passes.lanes import Link
from fxremat.passes.weights import Handles
from fxremat.planner import Prospects, survey
from fxremat.plans import Plan, Whole
from fxremat.refine.search import EFFORT
from fxremat.runtime.beside_loss import BesideLoss, check_runs_again, outputs_beside_loss
from fxremat.runtime.host import HostTier, default_tier
from fxremat.runtime.weights import Weights, check_optimizer, check_unscaled
from fxremat.solvers.registry import SOLVERS
from fxremat.training import best_within, resident_peak
from fxremat.units import Auto, Budget, Bytes, Percent, parse_budget, parse_bytes

AUTO_MARGIN = 0.05  # share of the free memory that mem="auto" leaves alone


class PlannedOnly(Exception):
    """Raised in place of the first forward when only the plan was asked for."""


@dataclass
class Backend:
    """Plans every joint graph that dynamo captures; `plans` holds them in order, the latest last.

    Args:
        mem: the budget, in any of the forms of `fxremat.compile`.
        solver: "auto", "input_drop", "persistent", "periodic" or "keep_all"; with offload=True also "pofo",
            "offload_dp", "autocapper", and what else `fxremat.solve` knows that offloads.
        cost: "measure" runs every distinct op; "estimate" counts flops and bytes for `device`.
        device: with cost="estimate", the name of a known device, or a `fxremat.cost.estimate.Device`.
        slots: steps of memory in the dynamic programs.
        loss_bytes: what a loss outside the model allocates between forward and backward, in the forms of a size. None:
            nothing where the model returns its loss, else three times the bytes of its outputs.
        effort: seconds, about, that "auto" takes to improve on schedules of blocks op by op; 0: it does not.
        only_loss: where the model returns its loss, expect no gradient for what the loss is computed from. If one comes
            after all, that step runs as plain PyTorch, outside of the budget, and the next is planned for it.
            False: plan for it from the start.
        offload: let values wait on the host: True (pinned memory for a CUDA device, else files), or a tier of
            `fxremat.runtime.host`, such as fxremat.FileTier("/fast/disk").
        offload_weights: let parameters live on the host: True or a tier, as for `offload`. `mem` then covers them,
            their gradients and the optimizer's state as well, and each backward is a step of `optimizer`. Parameters
            may start on the CPU where all else is on the device.
        optimizer: of the model's parameters: SGD, Adam, AdamW, or another that treats each element by itself.
        host_mem: what may wait there at a time, in the forms of a size. None: whatever the plan wants.
        progress: show a bar while measuring, where stderr is a terminal.
    """

    mem: int | str
    solver: str = "auto"
    cost: str = "measure"
    device: str | Device | None = None
    slots: int = 500
    loss_bytes: int | str | None = None
    only_loss: bool = True
    progress: bool = True
    effort: float = EFFORT
    offload: bool | HostTier = False
    host_mem: int | str | None = None
    offload_weights: bool | HostTier = False
    optimizer: torch.optim.Optimizer | None = None
    plans: list[Plan] = field(default_factory=list)
    only_plan: bool = False

    def __post_init__(self) -> None:
        self.budget = parse_budget(self.mem)
        if self.cost not in ("measure", "estimate"):
            raise FxrematError(f'cost is {self.cost!r}; it is "measure" or "estimate"')
        if self.device is not None and self.cost == "measure":
            raise FxrematError(
                'device goes with cost="estimate"; measured costs are those of the model\'s device'
            )
        if not isinstance(self.offload, bool | HostTier):
            raise FxrematError(
                f"offload is {self.offload!r}; it is True, False or a host tier such as FileTier()"
            )
        if self.host_mem is not None and not (self.offload or self.offload_weights):
            raise FxrematError(
                "host_mem limits what is offloaded; it goes with offload=True or offload_weights"
            )
        if bool(self.offload_weights) != (self.optimizer is not None):
            raise FxrematError(
                "offload_weights and optimizer go together: the step then updates the parameters itself"
            )
        if self.optimizer is not None:
            check_optimizer(self.optimizer)
        tiers = [tier for tier in (self.offload, self.offload_weights) if isinstance(tier, HostTier)]
        if len(tiers) == 2 and tiers[0] is not tiers[1]:
            raise FxrematError("offload and offload_weights go through one tier; give both the same")
        if self.offload_weights and self._offloads_by_chain:
            raise FxrematError(
                f'solver={self.solver!r} places transfers of activations alone; with offload_weights use "auto"'
            )
        self.weights: Weights | None = None
        self.hosted: frozenset[int] = (
            frozenset()
        )  # the optimizer's numbers of parameters that live on the host
        self.host_bytes = None if self.host_mem is None else parse_bytes(self.host_mem)

    def fresh(self) -> Backend:
        """The same settings, and no plans."""
        return replace(self, plans=[])

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile one captured graph, as dynamo asks."""
        if self.only_loss and (outputs := outputs_beside_loss(module)).beside:
            return BesideLoss(module, outputs, self._differentiate, inputs)
        return self._differentiate(module, inputs)

    def _differentiate(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, again: bool = False
    ) -> Callable[..., Any]:
        self._inputs = inputs
        self._names = [parameter_name(node) for node in module.graph.nodes if node.op == "placeholder"]
        backend = aot_backend(
            fw_compiler=self._forward_compiler,
            bw_compiler=self._backward_compiler,
            inference_compiler=lambda graph, _: boxed(graph),
            partition_fn=partial(self._partition, again=again),
        )
        try:
            with differentiate_as_eager():
                compiled: Callable[..., Any] = backend(module, inputs)
        finally:
            self._inputs = ()  # dynamo holds on to backends, and the model is not theirs to keep
        return compiled

    def prepare_weights(self, tensors: Iterable[torch.Tensor]) -> Weights | None:
        """The optimizer's parameters, where the step updates them; the model computes where these tensors are."""
        if self.optimizer is not None and self.weights is None:
            devices = [tensor.device for tensor in tensors]
            device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
            chosen = (tier for tier in (self.offload_weights, self.offload) if isinstance(tier, HostTier))
            tier = next(chosen, None) or default_tier(device)
            self.weights = Weights(self.optimizer, tier, device)
        return self.weights

    def _forward_compiler(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        run = boxed(graph)

        def forward(arguments: list[Any]) -> Any:
            if self.only_plan:
                raise PlannedOnly
            return run(arguments)

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward

    def _backward_compiler(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        run = boxed(graph)
        if self.weights is None:
            return run
        weights, losses = self.weights, self.plans[-1].loss_places

        def backward(arguments: list[Any]) -> Any:
            weights.begin()
            check_unscaled([arguments[place] for place in losses])
            with weights.telling_what_is_new():
                return run(arguments)

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward

    def _partition(
        self, module: fx.GraphModule, _: Sequence[Any], *, num_fwd_outputs: int, again: bool, **__: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = self._with_updates(read_joint(module, num_fwd_outputs))
        if again:
            check_runs_again(joint)
        plan = self.plan(joint)
        self.plans.append(plan)
        return plan.graphs

    def plan(self, joint: Joint) -> Plan:
        """The whole way from a joint graph to a plan."""
        costs = self._costs(joint)
        settings: dict[str, Any] = {"solver": self.solver, "slots": self.slots, "effort": self.effort}
        if self._offloads_by_chain:
            settings |= {"solver": "auto", "effort": 0.0}
        prospects = remembered(joint, costs, settings, partial(survey, **settings))
        budget = bytes_of(self.budget, prospects, device_of(joint))
        device = (
            device_name(device_of(joint)) if self.cost == "measure" else str(self._estimated_device(joint))
        )
        plan = Plan(
            budget=budget,
            chosen=prospects.nearest(budget)
            if self.offload or self.offload_weights
            else prospects.within(budget),
            prospects=prospects,
            costs=costs,
            device=device,
            timed=f"{self.cost}d",
        )
        plan = calibrate(plan) if self.cost == "measure" else plan
        if self.offload_weights:
            return self._trained(plan, joint)
        return self._offloaded(plan, joint) if self.offload else plan

    def _with_updates(self, joint: Joint) -> Joint:
        """The joint graph, with the updates inside where the user wants them there."""
        if self.optimizer is None:
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
        assert self.optimizer is not None
        everyone = (p for group in self.optimizer.param_groups for p in group["params"])
        numbers = {id(parameter): number for number, parameter in enumerate(everyone)}
        return {
            joint.value_of[node]: numbers[id(given)]
            for node, given in zip(inputs_of(joint), self._inputs, strict=False)
            if id(given) in numbers and given.shape == node.meta["val"].shape
        }

    def _trained(self, plan: Plan, joint: Joint) -> Plan:
        """The plan for a step that updates its weights, some of which live on the host."""
        assert self.optimizer is not None
        weights = self.prepare_weights([joint.values[value].node.meta["val"] for value in joint.updates_of])
        assert weights is not None
        numbers = self._parameters(joint)
        link = measure_link(weights.tier, device_of(joint), typical_size(joint))
        costs = with_own_sizes(joint, plan.costs)
        units = units_of(joint, self.optimizer, costs)
        budget, everything = plan.budget, resident_peak(plan.prospects.keep_all, units, costs)
        if isinstance(self.budget, Percent):
            budget = int(everything * self.budget.of_keep_all / 100)
        settled = None
        if self.plans:  # for other shapes: what lives on the host is settled
            settled = frozenset(v for v in joint.updates_of if numbers[v] in self.hosted)
            if shown := sorted(unit.value for unit in units if unit.stays and unit.value in settled):
                raise FxrematError(
                    f"forward returns a view of {self._called(joint, shown)}, which lives on the host since the plan "
                    "for other inputs; plan with these inputs first, example_inputs=..., or return a copy"
                )
        trained = best_within(
            plan.prospects,
            units,
            costs,
            link,
            budget,
            settled=settled,
            values_too=bool(self.offload),
            host_mem=self.host_bytes,
        )
        self.hosted |= {numbers[value] for value in trained.choice.hosted}
        chosen = replace(trained.prospect, chain=chain_of(trained.prospect.layout, costs))
        handles = Handles(name=weights.name, numbers=numbers)
        whole = Whole(handles=handles, keep_all_peak=everything, minimum=trained.minimum)
        return replace(
            plan, budget=budget, chosen=chosen, costs=costs, tier=weights.tier, link=link, weights=whole
        )

    def _offloaded(self, plan: Plan, joint: Joint) -> Plan:
        """The plan for the same budget where values may wait on the host."""
        device = device_of(joint)
        tier = self.offload if isinstance(self.offload, HostTier) else default_tier(device)
        if self.cost == "measure":
            link = measure_link(tier, device, typical_size(joint))
        else:
            speed = self._estimated_device(joint).link
            link = Link(to_host=speed, from_host=speed)
        if self._offloads_by_chain:
            prospects = with_schedules(
                plan.prospects, plan.costs, link, self.solver, self.slots, self.host_bytes
            )
        else:
            prospects = with_offloading(plan.prospects, plan.costs, link, self.host_bytes)
        try:
            chosen = prospects.within(plan.budget)
        except BudgetTooSmall as error:
            raise self._which_limit(error, plan, link) from None
        chosen = replace(chosen, chain=chain_of(chosen.layout, plan.costs))
        return replace(plan, chosen=chosen, prospects=prospects, tier=tier, link=link)

    @property
    def _offloads_by_chain(self) -> bool:
        """Whether the solver is one of chains that places transfers itself."""
        return bool(self.offload) and self.solver in SOLVERS and SOLVERS[self.solver].transfers

    def _which_limit(self, error: BudgetTooSmall, plan: Plan, link: Link) -> BudgetTooSmall:
        """The error, with the host's limit named where that is what binds."""
        if self.host_bytes is None:
            return error
        free = with_offloading(plan.prospects, plan.costs, link).minimum
        if free > error.budget:
            return error
        note = f"host_mem={self.host_mem!r} is what binds: with more of it, {free} bytes would do"
        return BudgetTooSmall(error.minimum, error.budget, note=note)

    def _costs(self, joint: Joint) -> Costs:
        if self.cost == "estimate":
            costs = estimate(joint, self._estimated_device(joint))
        else:
            costs = measure(joint, progress=self.progress)
        if self.loss_bytes is None:
            return costs
        return replace(costs, sizes=replace(costs.sizes, outside=parse_bytes(self.loss_bytes)))

    def _estimated_device(self, joint: Joint) -> Device:
        return Device.named(self.device or device_of(joint).type)


def backend_of(**options: Any) -> Backend:
    """A backend from a user's options. Raises `FxrematError` for one that there is not."""
    known = [setting.name for setting in fields(Backend) if setting.name not in ("plans", "only_plan")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise FxrematError(f"unknown option {', '.join(unknown)}; there are {', '.join(known)}")
    return Backend(**options)


def bytes_of(budget: Budget, prospects: Prospects, device: torch.device) -> int:
    """What a budget means for this model on this device, in bytes."""
    match budget:
        case Bytes(count):
            return count
        case Percent(share):
            return int(prospects.keep_all.peak * share / 100)
        case Auto():
            return free_bytes(device)


def free_bytes(device: torch.device) -> int:
    """What a CUDA device has free now, the allocator's own reserve included, less a margin."""
    if device.type != "cuda":
        raise InvalidBudget(
            f'mem="auto" reads the free memory of a CUDA device, and this model is on {device.type}; '
            'give bytes, such as mem="4GiB", or a share, such as mem="60%"'
        )
    free, _ = torch.cuda.mem_get_info(device)
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((free + reserve) * (1 - AUTO_MARGIN))


def fxremat(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The entry point of `torch.compile(model, backend="fxremat", options={"mem": ...})`.

    Options are those of `Backend`; "mem" is required.
    """
    options = dict(options or {})
    if mode is not None:
        raise FxrematError(
            f'mode={mode!r} belongs to another backend; fxremat takes options={{"mem": "4GiB"}}'
        )
    if "mem" not in options:
        raise InvalidBudget('the fxremat backend needs a budget: torch.compile(..., options={"mem": "4GiB"})')
    return backend_of(**options)(module, inputs)
