"""What the optimizer's step of a parameter takes: seconds, bytes of state and workspace; measured once a shape."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from fxremat._torch import allocation_trace
from fxremat.cost.measure import quiet_world
from fxremat.linearize.joint import Joint
from fxremat.passes.weights import Unit

RUNS = 3


def units_of(joint: Joint, optimizer: torch.optim.Optimizer) -> list[Unit]:
    """A unit for each parameter that the step updates."""
    known: dict[tuple[Any, ...], tuple[float, int, int]] = {}
    units = []
    for value in joint.updates_of:
        shown = joint.values[value].node.meta["val"]
        key = (tuple(shown.shape), shown.stride(), shown.dtype, shown.device)
        if key not in known:
            known[key] = measure_update(optimizer, shown)
        seconds, state, workspace = known[key]
        units.append(
            Unit(
                value=value,
                bytes=joint.values[value].bytes,
                state_bytes=state,
                workspace=workspace,
                seconds=seconds,
            )
        )
    return units


def measure_update(optimizer: torch.optim.Optimizer, like: torch.Tensor) -> tuple[float, int, int]:
    """Seconds, bytes of state of the parameter's shape, and bytes that the second step (and later ones) allocates."""
    with quiet_world(like.device):
        shell = nn.Parameter(torch.zeros(like.shape, dtype=like.dtype, device=like.device))
        shell.grad = torch.zeros_like(shell)
        made: Any = type(optimizer)
        settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        single = made([shell])
        single.param_groups[0].update(settings)
        single.step()
        with allocation_trace() as trace, torch.profiler.record_function("fxremat_update"):
            single.step()
        level = workspace = 0
        for _, size in trace.allocations():
            level += size
            workspace = max(workspace, level)
        runs = []
        for _ in range(RUNS):
            start = time.perf_counter()
            single.step()
            runs.append(time.perf_counter() - start)
    tensors = [
        s for s in single.state[shell].values() if isinstance(s, torch.Tensor) and s.shape == shell.shape
    ]
    return min(runs), sum(s.nbytes for s in tensors if s.dim()), workspace
