"""Measurements of entire programs, cached with the costs of ops, so that equal programs are not run again.

Programs are equal if they run the same ops, on values of the same layouts, in the same order.
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
    """Return measured numbers for some programs, from the cache if possible; None if they cannot be measured.

    Args:
        what: a name of the measurement, as a part of the cache key.
        count: how many numbers there are.
        measure: called if none are cached; returns the numbers, all above 0, or None if measuring fails.
    """
    device = device_of(programs[0].layout.graph)
    key = f"{what} {' '.join(map(_digest, programs))}"
    known = recall(device, key, count)
    if known is None and (measured := measure()) is not None:
        known = list(measured)
        keep(device, key, known)
    return known


def recall(device: torch.device, key: str, count: int) -> list[float] | None:
    """Return the numbers that were stored under a key; None if there are none, or not `count` of them."""
    return CostCache.of_device(device).numbers(key, count)


def keep(device: torch.device, key: str, numbers: Sequence[float]) -> None:
    """Store numbers, all above 0, under a key, for this process and later ones."""
    cache = CostCache.of_device(device)
    cache.keep(key, numbers)
    cache.save()


def of_ops(graph: StepGraph) -> str:
    """Return a hash of a graph, equal for graphs with the same sequence of ops at the same sizes and layouts."""
    return hashlib.sha256("\n".join(op_keys(graph)).encode()).hexdigest()


def _digest(program: Program) -> str:
    keys = op_keys(program.layout.graph)
    lines = [f"{step.role} {step.reads} {step.writes} {keys[step.op]}" for step in program.executions]
    return hashlib.sha256("\n".join([str(program.split), *lines]).encode()).hexdigest()
