"""The dynamo backend: torch.compile captures, AOTAutograd differentiates, our partition function plans and rewrites.

torch.compile(model, backend="fxremat", options={"mem": "4GiB"})
fxremat.compile(model, mem="4GiB")                                     the same, as a drop-in module
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat import kernels
from fxremat.cost.devices import Device
from fxremat.errors import FxrematError, InvalidBudget
from fxremat.host.default import default_tier
from fxremat.ops.parameters import Weights, check_unscaled
from fxremat.options import Options, options_of
from fxremat.passes.normalize import normalize
from fxremat.passes.numbers import refuse_symbols
from fxremat.planning import CapturedStep, TrainedParameters, named, plan_step
from fxremat.plans import Plan
from fxremat.runtime.auxiliary_outputs import AuxiliaryOutputs, auxiliary_outputs_of, check_runs_again
from fxremat.runtime.capture_errors import refuse_without_gradients
from fxremat.runtime.devices import check_devices
from fxremat.runtime.parts import Part
from fxremat.runtime.target_kernels import kernels_of
from fxremat.runtime.unused import telling_unused, unused_outputs, without
from fxremat.step.joint import Joint, inputs_of, read_joint, with_updates_inside
from fxremat.torch_private import (
    aot_backend,
    boxed,
    compiled_frame,
    differentiate_as_eager,
    graph_break_after,
    is_state,
    never_donate,
    parameter_name,
)

log = logging.getLogger(__name__)
KEPT_PLANS = 8  # of the latest, that can still be read
MANY_SIZES = 3  # combinations of input sizes, at which a warning tells what each costs


class PlannedOnly(Exception):
    """Raised in place of the first forward when only the plan was asked for."""


class Backend:
    """Plans every joint graph that dynamo captures.

    Attributes:
        plans: the latest plans, newest last; older ones go on running, but cannot be read any more.
        only_plan: leave the first forward with `PlannedOnly`.
        target: the device whose kernels are captured in the place of a CPU's, where plans are only looked at.
    """

    def __init__(self, options: Options, target: Device | None = None) -> None:
        kernels.begin()
        self.options = options
        self.target = target
        self.plans: deque[Plan] = deque(maxlen=KEPT_PLANS)
        self.only_plan = False
        self.weights: Weights | None = None
        self.hosted: frozenset[int] = frozenset()  # the optimizer's numbers of parameters that live on the host
        self._called_with: set[str] = set()  # the sizes of inputs that were planned for
        self._names: list[str | None] = []  # of the captured graph's inputs, where they are parameters
        self._inputs: Sequence[Any] = ()  # what the graph that is being compiled was called with

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile one captured graph, as dynamo asks. Raises `CaptureError` for sizes that are not fixed."""
        outputs = auxiliary_outputs_of(module)
        if outputs.expected or outputs.beside:
            refuse_symbols(module.graph, "example_value")
        if self.options.only_loss and outputs.beside:
            return AuxiliaryOutputs(module, outputs, self._differentiate, inputs)
        return self._differentiate(module, inputs)

    def _differentiate(
        self, module: fx.GraphModule, inputs: Sequence[Any], *, again: bool = False
    ) -> Callable[..., Any]:
        self._inputs, began = inputs, time.monotonic()
        outputs = auxiliary_outputs_of(module)
        trained = sorted((*outputs.expected, *outputs.beside))
        made: list[Plan] = []  # of this graph, from its partition to the compilation of its backward
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._names = [parameter_name(node) for node in placeholders]
        called_with = _sizes(zip(placeholders, inputs, strict=False))
        backend = aot_backend(
            fw_compiler=self._forward_compiler,
            bw_compiler=lambda graph, _: self._backward(graph, made.pop()),
            inference_compiler=lambda graph, _: boxed(graph),
            partition_fn=partial(self._partition, made=made, again=again, called_with=called_with),
        )
        try:
            with differentiate_as_eager(), self._kernels(inputs):
                compiled: Callable[..., Any] = backend(module, inputs)
        finally:
            self._inputs = ()  # dynamo holds on to backends, and the model is not theirs to keep
        if self.plans and not self.only_plan:
            self._warn_of_many(called_with, time.monotonic() - began)
        return telling_unused(compiled, trained) if len(trained) > 1 else compiled

    def _warn_of_many(self, called_with: str, seconds: float) -> None:
        """Log, once, what each further combination of input sizes will cost."""
        few = len(self._called_with) < MANY_SIZES
        self._called_with.add(called_with)
        if few and len(self._called_with) == MANY_SIZES:
            log.warning(
                "this model was planned for %d combinations of input sizes, the last in %.1f s; every new one is "
                "captured and planned when it comes: pad inputs to a few sizes, and drop the last, smaller batch",
                MANY_SIZES,
                seconds,
            )

    def _kernels(self, inputs: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """The target's kernels, for a step that is captured on a CPU."""
        elsewhere = all(tensor.device.type == "cpu" for tensor in inputs if isinstance(tensor, torch.Tensor))
        if self.target is None or not (self.target.cuda and elsewhere):
            return contextlib.nullcontext()
        return kernels_of(self.target)

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
        called_with: str,
        **__: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = read_joint(normalize(module), num_fwd_outputs)
        refuse_without_gradients(joint)
        joint, trained = self._with_updates(joint)
        if again:
            check_runs_again(joint)
        check_devices(joint)
        step = CapturedStep(joint=joint, inputs=self._inputs, trained=trained, called_with=called_with)
        plan = plan_step(step, self.options)
        if trained and plan.weights:
            self.hosted |= {trained.numbers[value] for value in plan.weights.hosted}
        made[:] = [plan]
        self.plans.append(plan)
        return plan.graphs

    def _with_updates(self, joint: Joint) -> tuple[Joint, TrainedParameters | None]:
        """The joint graph with the optimizer's updates inside, where the user wants them there."""
        optimizer = self.options.optimizer
        if optimizer is None:
            return joint, None
        numbers = self._parameters(joint, optimizer)
        if not numbers:
            raise FxrematError("none of the optimizer's parameters is one of the model's")
        weights = self.prepare_weights([joint.values[value].node.meta["val"] for value in numbers])
        assert weights is not None
        hosted = frozenset(value for value, number in numbers.items() if number in self.hosted)
        places = {joint.value_of[node]: place for place, node in enumerate(inputs_of(joint))}
        trained = TrainedParameters(
            weights=weights,
            optimizer=optimizer,
            numbers=numbers,
            names={value: self._names[places[value]] or joint.values[value].name for value in numbers},
            settled=hosted if self.plans else None,
        )
        if written := sorted(numbers.keys() & joint.mutated_primals):
            raise FxrematError(
                f"forward writes to {named(trained, written)}, which offload_weights updates inside the step (an "
                "Embedding with max_norm does, and clamping in forward): write to it after optimizer.step(), or give "
                "it to another optimizer than the one that fxremat.compile takes"
            )
        return with_updates_inside(joint, set(numbers)), trained

    def _parameters(self, joint: Joint, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        """The optimizer's parameters among the graph's inputs (in the order of its primals), with their numbers."""
        everyone = (p for group in optimizer.param_groups for p in group["params"])
        numbers = {id(parameter): number for number, parameter in enumerate(everyone)}
        return {
            joint.value_of[node]: numbers[id(given)]
            for node, given in zip(inputs_of(joint), self._inputs, strict=False)
            if id(given) in numbers and given.shape == node.meta["val"].shape
        }


def _sizes(given: Iterable[tuple[fx.Node, Any]]) -> str:
    """The shapes of the inputs that are not the model's state."""
    shapes = [x.shape for node, x in given if isinstance(x, torch.Tensor) and not is_state(node)]
    return ", ".join("x".join(map(str, shape)) or "1" for shape in shapes)


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
