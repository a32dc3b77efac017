"""One factor between the sum of the ops' times and the time of a whole step, from running the planned graphs.

The graphs are functional (AOTAutograd applies updates outside of them), so they run on made-up tensors of the right
shapes without touching the model. The run itself stays inside the budget; on CUDA it is left out where the made-up
parameters would not fit. The factor is cached with the costs.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fxremat._torch import boxed
from fxremat.cost.blocks import chain_of
from fxremat.cost.cache import CostCache
from fxremat.cost.measure import quiet_world, real_value
from fxremat.cost.table import device_of, op_key
from fxremat.linearize.joint import Joint, Origin

if TYPE_CHECKING:
    from fxremat.plans import Plan

RUNS = 3


def calibrate(plan: Plan) -> Plan:
    """The plan with all its times multiplied by measured over predicted time. Costs a few steps, once."""
    joint = plan.chosen.layout.joint
    device = device_of(joint)
    cache = CostCache.of_device(device)
    digest = hashlib.sha256("\n".join(op_key(op.node) for op in joint.ops).encode()).hexdigest()
    known = cache.numbers(f"factor {digest}")
    if known is None:
        seconds = _run(plan, joint, device)
        if seconds is None:
            return plan
        known = [seconds / plan.predicted_time]
        cache.keep(f"factor {digest}", known)
        cache.save()
    return _scaled(plan, known[0])


def _scaled(plan: Plan, factor: float) -> Plan:
    def scale(prospect: Any) -> Any:
        return replace(prospect, time=prospect.time * factor)

    prospects = replace(
        plan.prospects,
        keep_all=scale(plan.prospects.keep_all),
        frontier=tuple(scale(prospect) for prospect in plan.prospects.frontier),
    )
    costs = plan.costs.scaled(factor)
    chosen = replace(scale(plan.chosen), chain=chain_of(plan.chosen.layout, costs))
    return replace(plan, chosen=chosen, prospects=prospects, costs=costs)


def _run(plan: Plan, joint: Joint, device: torch.device) -> float | None:
    """Seconds of one step of the planned graphs; None where there is no room for it."""
    inputs = sum(value.bytes for value in joint.values if value.origin is Origin.PRIMAL)
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 1.2 * (inputs + plan.predicted_peak):
        return None
    forward, backward = plan.graphs
    returned = len(joint.forward_outputs)
    with quiet_world(device):
        primals = [_input(node) for node in joint.primals]
        tangents = [_input(node) for node in joint.tangents]
        runs = [
            _step(boxed(forward), boxed(backward), primals, tangents, returned, device) for _ in range(RUNS)
        ]
    return min(runs)


def _input(node: Any) -> Any:
    """Made-up data of small magnitude: weights whose activations neither vanish nor explode."""
    value = real_value(node)
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1:
        value.sub_(value.mean()).mul_((12 / max(1, value[0].numel())) ** 0.5)
    return value


def _step(
    forward: Any, backward: Any, primals: list[Any], tangents: list[Any], returned: int, device: torch.device
) -> float:
    start = time.perf_counter()
    results = list(forward(list(primals)))
    saved = results[returned:]
    del results[returned:]
    arguments = [*saved, *tangents]
    del saved
    gradients = backward(arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    del gradients, results
    return seconds
