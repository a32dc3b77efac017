"""Costs of the optimizer's update of parameters: seconds, bytes of state and workspace, measured for each shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fxremat.cost.measure import quiet_world
from fxremat.cost.metering import peak_of, seconds_of
from fxremat.errors import FxrematError
from fxremat.graphs.accounting import held
from fxremat.graphs.captured import Captured
from fxremat.host.tier import span_bytes
from fxremat.step.costs import Costs, ParameterUpdate
from fxremat.torch_private import unprofiled, without_memory


def units_of(
    joint: Captured,
    optimizer: torch.optim.Optimizer,
    costs: Costs,
    *,
    numbers: Mapping[int, int],
    later: bool = False,
) -> list[ParameterUpdate]:
    """Return the measured cost of the update of each parameter that the step updates.

    Args:
        numbers: value of a parameter -> its index among the optimizer's parameters.
        later: updates run in `optimizer.step()`, and the backward adds up gradients.
    """
    known: dict[tuple[Any, ...], tuple[float, int, int]] = {}
    group_of = [place for place, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    units = []
    for value in joint.updates_of:
        shown = joint.shown[value].meta["val"]
        group = group_of[numbers[value]]
        key = (tuple(shown.shape), shown.stride(), shown.dtype, shown.device, group)
        if key not in known:
            known[key] = unprofiled(partial(measure_update, optimizer, shown, group))
        seconds, state, workspace = known[key]
        size = costs.sizes.values[value]
        unit = ParameterUpdate(
            value=value,
            bytes=size,
            state_bytes=state,
            workspace=workspace,
            seconds=seconds,
            stays=value in joint.output_values,
        )
        if later:
            unit = unit.in_the_optimizers_step
        units.append(unit)
    return units


def units_of_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> list[ParameterUpdate]:
    """Return the measured cost of the update in `optimizer.step()` of each parameter of an optimizer, on a device.

    The `value` of each is the parameter's index in the optimizer.
    """
    units = list[ParameterUpdate]()
    known: dict[tuple[Any, ...], ParameterUpdate] = {}
    for place, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            key = tuple(parameter.shape), parameter.stride(), parameter.dtype, place
            if key not in known:
                like = without_memory(parameter, device)
                seconds, state, workspace = unprofiled(partial(measure_update, optimizer, like, place))
                known[key] = ParameterUpdate(
                    value=0,
                    bytes=held(span_bytes(parameter), device),
                    state_bytes=state,
                    workspace=workspace,
                    seconds=seconds,
                )
            units.append(replace(known[key].in_the_optimizers_step, value=len(units)))
    return units


def with_own_sizes(joint: Captured, costs: Costs) -> Costs:
    """Return the costs with the size of each updated parameter taken from its own layout, not from its storage.

    A parameter may be a view of a larger storage, but on the host it gets memory of its own.
    """
    sizes = list(costs.sizes.values)
    for value in joint.updates_of:
        shown = joint.shown[value].meta["val"]
        sizes[value] = held(span_bytes(shown), shown.device)
    return replace(costs, sizes=replace(costs.sizes, values=tuple(sizes)))


def measure_update(optimizer: torch.optim.Optimizer, like: torch.Tensor, group: int = 0) -> tuple[float, int, int]:
    """Measure the optimizer's update of a parameter with this layout, in the group with this index.

    Returns:
        seconds; bytes of the state tensors that have the parameter's shape; the peak of a second update in bytes.

    Raises:
        FxrematError: the optimizer raises an error.
    """
    with quiet_world(like.device):
        shell = nn.Parameter(torch.zeros(like.shape, dtype=like.dtype, device=like.device))
        shell.grad = torch.zeros_like(shell)
        made: Any = type(optimizer)
        settings = {key: value for key, value in optimizer.param_groups[group].items() if key != "params"}
        single = made([shell])
        single.param_groups[0].update(settings)
        try:
            single.step()
        except Exception as error:
            raise FxrematError(f"{made.__name__} cannot update a parameter of {tuple(like.shape)}: {error}") from error
        workspace, _ = peak_of(single.step, like.device)
        seconds = seconds_of(single.step, like.device)
    state = (s for s in single.state[shell].values() if isinstance(s, torch.Tensor) and s.dim())
    return seconds, sum(held(s.nbytes, like.device) for s in state if s.shape == shell.shape), workspace
