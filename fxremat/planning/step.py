"""A captured step, and what is known of the call that it was captured from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxremat.agreement import ALONE, Agreement
from fxremat.graphs.captured import Captured
from fxremat.ops.parameters import Weights


@dataclass(frozen=True, kw_only=True)
class TrainedParameters:
    """The optimizer's parameters in a captured graph, where the step updates them."""

    weights: Weights
    optimizer: torch.optim.Optimizer
    numbers: Mapping[int, int]  # parameter's value -> its place among the optimizer's
    names: Mapping[int, str]  # parameter's value -> its name in the model
    settled: frozenset[int] | None  # values that live on the host since an earlier plan; None: nothing is settled


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a budget in percent refers to, where that is not keeping everything in the step itself."""

    bytes: int
    of: str  # the sizes whose step takes that, in words


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is planned: a captured graph, and what is known of the call that it was captured from."""

    graph: Captured
    inputs: Sequence[Any] = ()  # what the captured graph was called with; (): what has to run runs on made-up data
    trained: TrainedParameters | None = None  # where the step updates its weights
    called_with: str = ""  # the sizes of the inputs, for messages
    as_eager: Captured | None = None  # what eager PyTorch would run, where `graph` was prepared for other kernels
    reference: Reference | None = None
    ranks: Agreement = ALONE  # those that run the step together, each its part


def named(trained: TrainedParameters, values: Iterable[int]) -> str:
    """Name parameters as the model does, for messages."""
    names = [trained.names[value] for value in values]
    return f"the parameter {names[0]}" if len(names) == 1 else f"the parameters {', '.join(names)}"
