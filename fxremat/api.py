"""`compile` and `plan`: a model in, a model that fits out.

backend = Backend(mem, ...)                     what to plan for
module  = Rematerialized(model, backend)        captured at its first training call, then:
          read_joint -> measure -> survey -> choose -> lower -> run        (fxremat.backend)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fxremat.backend import backend_of
from fxremat.errors import FxrematError
from fxremat.plans import Plan
from fxremat.runtime.module import Rematerialized


def compile(  # the name users know from torch.compile
    model: nn.Module, *, mem: int | str, example_inputs: Any = None, solver: str = "auto", **options: Any
) -> Rematerialized:
    """Make training of a model fit into `mem`, with the gradients it has today.

    Args:
        model: any module that torch.compile can capture as one graph. It is not changed.
        mem: the peak of bytes allocated on the model's device during forward and backward, above what was allocated
            when forward began, with every `.grad` None then: an int (bytes), "4GiB", "300MB", "60%" of what keeping
            everything takes, or "auto" (CUDA: what is free).
        example_inputs: plan now, for these inputs: a tuple of positional arguments, a dict of keyword arguments, or
            one tensor. None: plan at the first training call. New shapes are planned when they come.
        solver: "auto", "input_drop", "persistent", "periodic" or "keep_all".
        options: offload (True, or a host tier: values may wait on the host) and host_mem (how much may), cost
            ("measure" or "estimate"), device (for an estimate), loss_bytes (what a loss outside the model takes),
            offload_weights with optimizer (the step updates the weights, which may live on the host, and `mem` covers
            them, their gradients and the optimizer's state), effort, slots, progress: see `fxremat.backend.Backend`.

    Returns:
        a module with the model's parameters and state_dict; `.plan` says what it does. eval() and no_grad() calls run
        the plain model.

    Raises:
        BudgetTooSmall: nothing fits; `.minimum` is what would. At the call that plans.
        CaptureError: the model is not one graph; names the line.
        InvalidBudget: `mem` has another form.
    """
    module = Rematerialized(_checked(model), backend_of(mem=mem, solver=solver, **options))
    if example_inputs is not None:
        module.make_plan(*_split(example_inputs))
    return module


def plan(
    model: nn.Module, example_inputs: Any, *, mem: int | str, solver: str = "auto", **options: Any
) -> Plan:
    """The plan that `compile` would make for these inputs; the model is neither run nor changed.

    Arguments and errors are those of `compile`. With cost="estimate" and device="A100-40GB" no op is run either, so
    that a plan can be made where the device is not.
    """
    module = Rematerialized(_checked(model), backend_of(mem=mem, solver=solver, **options))
    return module.make_plan(*_split(example_inputs))


def _checked(model: object) -> nn.Module:
    if isinstance(model, Rematerialized):
        raise FxrematError("this model is compiled already; compile the original one with the new budget")
    if not isinstance(model, nn.Module):
        raise FxrematError(f"model is a {type(model).__name__}; fxremat compiles torch.nn.Module instances")
    return model


def _split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}
