"""A captured step, with the inputs and sizes of the call that it was captured from."""

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
    numbers: Mapping[int, int]  # value of a parameter in the graph -> its index among the optimizer's
    names: Mapping[int, str]  # value of a parameter in the graph -> its name in the model
    settled: frozenset[int] | None  # values that live on the host since an earlier plan; None: nothing is settled


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The peak that a budget in percent refers to, where that is the keep-all peak of the step at other sizes."""

    bytes: int
    of: str  # the sizes whose step has this peak, in words


@dataclass(frozen=True, kw_only=True)
class Step:
    """A captured graph to plan, with the inputs and sizes of the call that it was captured from."""

    graph: Captured
    inputs: Sequence[Any] = ()  # of the captured graph; (): ops that have to be measured run on made-up data
    trained: TrainedParameters | None = None  # what the step updates; None: it updates no weights
    called_with: str = ""  # the sizes of the inputs, for messages
    as_eager: Captured | None = None  # the step as eager PyTorch runs it, where `graph` was prepared for other kernels
    reference: Reference | None = None  # what a budget in percent refers to; None: the peak of keep-all of this step
    ranks: Agreement = ALONE  # the ranks that run the step together; each has its own part of the inputs or weights


def named(trained: TrainedParameters, values: Iterable[int]) -> str:
    """Return the names of parameters in the model, as text for messages; `values` are their values in the graph."""
    names = [trained.names[value] for value in values]
    return f"the parameter {names[0]}" if len(names) == 1 else f"the parameters {', '.join(names)}"
