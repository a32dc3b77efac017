"""What was measured of whole programs, kept with the costs of ops: the same programs are not run for it again.

Programs are the same where they run the same ops, on values of the same layouts, in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from fxremat.cost.cache import CostCache
from fxremat.graphs.accounting import device_of, op_keys
from fxremat.step.program import Program
from fxremat.step.step_graph import StepGraph


def remembered(
    what: str, programs: Sequence[Program], count: int, measure: Callable[[], Sequence[float] | None]
) -> list[float] | None:
    """Numbers that were measured of some programs, here or in an earlier process; None where they cannot be.

    Args:
        what: names the numbers.
        count: of numbers.
        measure: gives them, above 0, where they are not known.
    """
    device = device_of(programs[0].layout.graph)
    key = f"{what} {' '.join(map(_digest, programs))}"
    known = recall(device, key, count)
    if known is None and (measured := measure()) is not None:
        known = list(measured)
        keep(device, key, known)
    return known


def recall(device: torch.device, key: str, count: int) -> list[float] | None:
    """So many numbers that were kept under a key; None where none were, or others."""
    return CostCache.of_device(device).numbers(key, count)


def keep(device: torch.device, key: str, numbers: Sequence[float]) -> None:
    """Keep numbers above 0."""
    cache = CostCache.of_device(device)
    cache.keep(key, numbers)
    cache.save()


def of_ops(graph: StepGraph) -> str:
    """Equal for graphs whose ops cost the same, one by one."""
    return hashlib.sha256("\n".join(op_keys(graph)).encode()).hexdigest()


def _digest(program: Program) -> str:
    keys = op_keys(program.layout.graph)
    lines = [f"{step.role} {step.reads} {step.writes} {keys[step.op]}" for step in program.executions]
    return hashlib.sha256("\n".join([str(program.split), *lines]).encode()).hexdigest()
