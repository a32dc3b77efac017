"""The functions `compile`, `plan`, `compare`, `capture` and `profile`, which take a model.

options = options_of(mem=..., ...)              the settings of a plan
module  = drop_in(model, options)               the model that users train; it is captured at its first training call:
          read_joint -> measure -> survey -> choose -> lower -> run        (fxremat.runtime.dynamo)
          at other sizes: evaluate known programs -> choose -> run         (fxremat.runtime.sized)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, Unpack

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxremat.compilers.planning import pass_options, pipeline_of, step_of
from fxremat.compilers.reading import NO_MARKS, is_marked, read_given
from fxremat.cost.device_memory import bytes_of_inputs, memory_of
from fxremat.cost.devices import Device
from fxremat.errors import BudgetTooSmall, CaptureError, FxrematError
from fxremat.options import CompileOptions, Options, PlanOptions, options_of
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.planning.captured_step import CapturedStep
from fxremat.planning.limits import stated
from fxremat.planning.numbered import NumberedStep
from fxremat.plans import Plan
from fxremat.profiles import Profile, profile_of
from fxremat.runtime.module import Rematerialized, captured, drop_in, plan_now, plans_by_running
from fxremat.runtime.shapes_alone import Call, refuse_without_data, with_fakes
from fxremat.runtime.target_casts import casts_of
from fxremat.settings import Loss, Search
from fxremat.step.step_graph import StepGraph
from fxremat.torch_private import has_data
from fxremat.units import Auto
from fxremat.what_if import Comparison, Devices, Estimate, compared, distinct_devices, estimate_of_graphs

One = TypeVar("One")  # what is found of a model that is one graph
Several = TypeVar("Several")  # and of several


def compile(  # users know the name from torch.compile
    model: nn.Module,
    mem: int | str | None = None,
    *,
    example_inputs: Any = None,
    solver: str = "auto",
    **options: Unpack[CompileOptions],
) -> Rematerialized:
    """Return a module that trains `model` within a memory budget, with unchanged gradients.

    Args:
        model: any module that torch.compile can capture, as one graph or several. It is not changed.
        mem: the peak of bytes allocated on the model's device during forward and backward, above what was allocated
            when the forward began with every `.grad` None: an int (bytes), "4GiB", "300MB", "60%" of the peak
            without any recomputation, or "auto" (on CUDA: the free memory). Not required if `plan` or `device_mem`
            is passed.
        example_inputs: plan now, for these inputs: a tuple of positional arguments, a dict of keyword arguments, or
            one tensor. None: plan at the first training call. Inputs of other sizes are planned when they are passed.
        solver: "auto", or the name of a solver in docs/solvers.md.
        options: see `fxremat.options.Options`.
            device_mem  instead of `mem`: what the whole training process may have on the device
            exact       True or False: the planner chooses among recomputation, the host, slices and compiled kernels
            plan        a plan saved by `plan.save`, or its path; it is used instead of planning
            dynamic     which input sizes may change, as in torch.compile, or their ranges: docs/shapes.md
            offload     whether activations (Offload(weights=True): also parameters) may be stored on the host
            slices      whether groups of ops may run in slices of the batch or sequence: docs/slices.md
            backend     "inductor" compiles groups of ops: docs/kernels.md
            optimizer   the optimizer that the step runs, if parameters may be on the host, or whose state
                        `device_mem` counts
            costs       "measure" runs ops to measure them; "estimate" does not
            loss        bytes that a loss outside the model allocates
            search      limits of the search for plans
            method      the method that training calls, if it is not `forward`
            fullgraph   True: raise if the model is not one graph. False: docs/graphs.md
            count       "reserved": `mem` limits what the allocator reserves: docs/gpu.md
            compress    "int8" or "fp8" also rounds what the backward reads; False packs nothing: docs/compression.md
            never_again forward ops that are never recomputed, as patterns of module names or functions of nodes
            keep        ops that are never recomputed, and whose results are never offloaded

    Returns:
        an instance of the model's class that shares the model's state; `.plan` is the plan (None before planning).
        Calls in eval mode or under no_grad() run the plain model.

    Raises:
        BudgetTooSmall: no plan fits; `.minimum` is the least budget that works. Raised when the plan is made.
        CaptureError: the model is not one graph, and an option requires that; the message names the line.
        InvalidBudget: `mem` has an invalid form, or neither `mem` nor `plan` is passed.
        PlanMismatch: `plan` belongs to another step, device or PyTorch, and `mem` is not passed.
    """
    module = drop_in(_checked(model), options_of(mem=mem, solver=solver, **options))
    if example_inputs is not None:
        refuse_without_data(model, "a compiled step runs")
        plan_now(module, *_split(example_inputs))
    if module._fxremat.backend.options.stepping is None:
        module._fxremat.watch()
    return module


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    mem: int | str | None = None,
    solver: str = "auto",
    **options: Unpack[PlanOptions],
) -> Plan | PlanOfGraphs:
    """Return the plan that `compile` would make for these inputs; the model is not changed, nor run if it is one graph.

    Arguments and errors are those of `compile`. With costs="estimate", or for a device that this machine lacks
    (costs="H200"; docs/what-if.md tells what is assumed of it), single ops do not run either. The model's
    parameters and buffers, and the inputs, may then be meta tensors or fake tensors.

    Only a run shows which graphs a model consists of that is not one (docs/graphs.md): a few steps of it run where it
    is, after which buffers, gradients and random generators are as before. A warning in the log says so, and the plan
    is a `PlanOfGraphs`. Without data, with fullgraph=True, weights on the host or another method than `forward`, it
    is a `CaptureError`.
    """
    return _plan(_checked(model), _split(example_inputs), mem=mem, solver=solver, **options)


def compare(
    model: nn.Module,
    example_inputs: Any,
    devices: Devices,
    *,
    mem: int | str,
    solver: str = "auto",
    **options: Unpack[PlanOptions],
) -> Comparison:
    """Estimate the plans of a step for several devices; the model is not changed, nor run if it is one graph.

        fxremat.compare(model, (x,), ["A100", "H200"], mem="auto")       does it fit, and how fast is it?

    A model of several graphs runs a few steps for each device, as for `plan`.

    Args:
        devices: names of known devices, or `fxremat.Device`s; `fxremat devices` lists the known ones.
        mem: the budget on each device; "auto": the memory that is left there.
        model, example_inputs, solver, options: as those of `plan`, except for `costs`.

    Raises:
        BudgetTooSmall: no plan fits into a budget given in bytes or percent.
        CaptureError: the model is several graphs, and cannot run, as for `plan`.
        FxrematError: `devices` is empty, or contains an unknown name.
    """
    if "costs" in options:
        raise FxrematError("compare estimates for its devices; leave costs out")
    model, call, different = _checked(model), _split(example_inputs), distinct_devices(devices)
    settings = [options_of(mem=mem, solver=solver, costs=device, **options) for device in different]

    def of_several() -> Comparison | None:
        found: list[Estimate] = []
        for device, options_there in zip(different, settings, strict=True):
            plans = _plans_of_several(model, call, options_there, tells=not found)
            if plans is None or (estimate := estimate_of_graphs(device, mem, plans)) is None:
                return None
            found.append(estimate)
        return Comparison(estimates=tuple(found))

    plan_for = partial(_plan_of_one, model, call, solver=solver, **options)
    search = options.get("search", Search())
    return _of_one_or_several(lambda: compared(different, mem, plan_for, search), of_several, model, call, settings[0])


def capture(
    model: nn.Module | StepGraph,
    example_inputs: Any = None,
    *,
    num_fwd_outputs: int | None = None,
    mem: int | str | None = None,
    solver: str = "auto",
    **options: Unpack[PlanOptions],
) -> CapturedStep:
    """Capture forward and backward of a model as one graph, and measure its ops; the model is neither run nor changed.

        step = fxremat.capture(model, (x,))
        step.frontier                        time of a step for each amount of memory
        plan = step.plan("60%")              nothing is captured or measured again
        step.at(tokens=300).plan("60%")      for other input sizes, if captured with dynamic=...

    An fx graph that contains a backward is not captured again: the graph of a full step, whose backward nodes are
    marked (see `fxremat.passes.step_pass`), or, with `num_fwd_outputs`, a joint graph of AOTAutograd. Costs are then
    estimated, unless costs="measure" is passed. An fx graph of a forward alone is treated as a model. A `StepGraph`,
    such as one that another framework wrote as JSON, can be planned but not run; `costs` is then a function of an op.

    Args:
        model, example_inputs, options: as those of `plan`; the step's plans take them from here.
        num_fwd_outputs: for a joint graph: the number of its outputs that belong to the forward.
        mem: the budget of `step.plan()`; 100 % unless it or `device_mem` is given.

    Raises:
        CaptureError: the model is not one graph (the message names the line); a graph has a node that cannot be
            planned (the message names it); or it has no backward, and no example inputs are given.
    """
    if mem is None and options.get("device_mem") is None:
        mem = "100%"
    if isinstance(model, StepGraph):
        seconds: Any = options.pop("costs", None)
        told = seconds if callable(seconds) else None
        given = {"costs": seconds or "estimate"} if told is None else {}
        return NumberedStep(model, pass_options(mem, {"solver": solver, **options, **given}), told)
    if isinstance(model, fx.GraphModule) and (num_fwd_outputs is not None or is_marked(model.graph)):
        settings = pass_options(mem, {"solver": solver, **options})
        read = read_given(model, num_fwd_outputs, pipeline=pipeline_of(settings))
        return step_of(read, settings, example_inputs or ())
    if num_fwd_outputs is not None:
        raise CaptureError(f"num_fwd_outputs is for a joint graph, a torch.fx.GraphModule; model is {_kind(model)}")
    if example_inputs is None:
        raise CaptureError(NO_MARKS if isinstance(model, fx.GraphModule) else "capturing calls the model: pass inputs")
    named, settings = _checked(model), options_of(mem=mem, solver=solver, **options)
    with with_fakes(named, _split(example_inputs), settings) as call:
        return _capture(named, call, settings)


def profile(
    model: nn.Module,
    example_inputs: Any,
    *,
    costs: str | Device = "measure",
    loss: int | str | Loss | None = None,
    search: Search | None = None,
) -> Profile:
    """Find where the memory of a training step without a budget goes, and what would save most.

    The step is captured for these input sizes, and its ops are measured as `plan` does it; the model is neither
    run nor changed. It takes about as long as three plans, each of `search.seconds`: recomputation, offloading
    and slices are tried on the captured step.

    Args:
        model: any module that torch.compile can capture as one graph, in training mode.
        example_inputs: a tuple of positional arguments, a dict of keyword arguments, or one tensor.
        costs, loss, search: as those of `plan`.

    Raises:
        CaptureError: the model is not one graph; the message names the line.
    """
    call = _split(example_inputs)
    plan = _plan_of_one(
        _checked(model), call, mem="100%", dynamic=False, costs=costs, loss=loss, search=search or Search()
    )
    return profile_of(plan)


def _plan(model: nn.Module, call: Call, **options: Any) -> Plan | PlanOfGraphs:
    settings = options_of(**options)

    def of_several() -> PlanOfGraphs | None:
        plans = _plans_of_several(model, call, settings)
        return plans(settings.mem) if plans else None

    return _of_one_or_several(lambda: _plan_of_one(model, call, **options), of_several, model, call, settings)


def _of_one_or_several(
    of_one: Callable[[], One], of_several: Callable[[], Several | None], model: nn.Module, call: Call, settings: Options
) -> One | Several:
    """Return what is found of a model as one graph; of one that is not, and that may run, what is found by running it.
    """
    try:
        return of_one()
    except CaptureError as error:
        one_graph = settings.fullgraph or settings.needs_one_graph or settings.hosts_weights
        one_graph = one_graph or settings.method != "forward"  # which may run a backward and an optimizer
        if one_graph or not all(has_data(x) for x in _tensors(model, call)):
            raise
        refused = error
    try:
        if (found := of_several()) is None:
            raise refused
        return found
    finally:
        del refused  # an error that its own frames refer to keeps what they hold until it is collected


def _plans_of_several(
    model: nn.Module, call: Call, settings: Options, *, tells: bool = True
) -> Callable[[int | str | None], PlanOfGraphs | None] | None:
    """Run a model of several graphs; return a function that plans it for a budget, on the device that settings name.

    None if no part of the model could be captured. `tells`: whether the log tells that steps run.
    """
    elsewhere, memory = _elsewhere(model, call, settings), None
    if settings.device is not None and settings.device_mem is None:
        inputs = bytes_of_inputs(pytree.tree_leaves(call), settings.device)
        memory = replace(memory_of(model, inputs, settings.device, settings.optimizer), waiting=0)
        if isinstance(settings.budget, Auto):
            stated(memory)
    with casts_of(elsewhere) if elsewhere else contextlib.nullcontext():
        within = plans_by_running(model, settings, *call, tells=tells)
    if within is None or memory is None:
        return within

    def on_device(mem: int | str | None) -> PlanOfGraphs | None:
        is_auto = isinstance(replace(settings, mem=mem).budget, Auto)
        try:
            found = within(max(1, memory.auto) if is_auto else mem)
        except BudgetTooSmall as error:
            raise error.explained(note=memory.shortage(error.minimum)) if is_auto else error from None
        return replace(found, on_device=memory) if found else None

    return on_device


def _plan_of_one(model: nn.Module, call: Call, **options: Any) -> Plan:
    settings = options_of(**options)
    try:
        with with_fakes(model, call, settings) as inputs:
            return _capture(model, inputs, settings).plan()
    except BudgetTooSmall as error:
        if (hosted := settings.with_weights_on_host(error.means, model.parameters())) is None:
            raise
        small = error.explained()
    try:
        with with_fakes(model, call, hosted) as inputs:
            return _capture(model, inputs, hosted).plan()
    except BudgetTooSmall:
        raise
    except FxrematError as refused:
        raise small.without_weights(refused) from None


def _capture(model: nn.Module, call: Call, settings: Options) -> CapturedStep:
    elsewhere = _elsewhere(model, call, settings)
    with casts_of(elsewhere) if elsewhere else contextlib.nullcontext():
        return captured(drop_in(model, settings, settings.device), *call)


def _elsewhere(model: nn.Module, call: Call, settings: Options) -> Device | None:
    """Return the device that the user named, if all tensors of a model and its inputs are on the CPU; else None."""
    return settings.device if all(tensor.device.type == "cpu" for tensor in _tensors(model, call)) else None


def _tensors(model: nn.Module, call: Call) -> list[torch.Tensor]:
    """Return the tensors of a model and its inputs."""
    every = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(call))
    return [tensor for tensor in every if isinstance(tensor, torch.Tensor)]


def _checked(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise FxrematError(f"model is {_kind(model)}; fxremat compiles torch.nn.Module instances")
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    if isinstance(model, Rematerialized):
        raise FxrematError("this model is compiled already; compile the original one with the new budget")
    if isinstance(model, torch.jit.ScriptModule):
        raise FxrematError("model is a TorchScript module, which cannot be captured; compile the module it was made of")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        kind = type(model).__name__
        raise FxrematError(
            f"{kind} goes around the compiled model: write {kind}(fxremat.compile(model, mem=...)); or, to average "
            "gradients inside of the budget, fxremat.compile(fxremat.fully_shard(model, replicate=True), mem=...)"
        )
    if isinstance(model, fx.GraphModule) and (node := _backward_in(model.graph)) is not None:
        raise FxrematError(
            f"the graph computes gradients already ({node.name}): fxremat would differentiate it again. Give the "
            "model, or the graph of its forward"
        )
    lazy = [name for name, parameter in model.named_parameters() if isinstance(parameter, nn.UninitializedParameter)]
    if lazy:
        raise FxrematError(
            f"the parameter {lazy[0]} has no sizes yet (nn.Lazy modules get them at the first call): call the model "
            "once before compiling it"
        )
    for name, part in model.named_modules():
        if isinstance(part, Rematerialized):
            raise FxrematError(
                f"the part {name!r} of this model is compiled already, with a budget of its own; compile either the "
                "whole or that part"
            )
    return model


def _kind(model: object) -> str:
    name = type(model).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _backward_in(graph: fx.Graph) -> fx.Node | None:
    """Return the first node of a graph that is a backward op or a tangent; None for the graph of a forward."""
    return next((node for node in graph.nodes if _is_of_backward(node)), None)


def _is_of_backward(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return node.name.startswith("tangents")
    return isinstance(node.target, torch._ops.OpOverload) and "backward" in node.target.name()


def _split(example_inputs: Any) -> Call:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
