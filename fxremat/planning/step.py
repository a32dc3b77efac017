"""The input of planning: a captured graph with the inputs and sizes of the call that it was captured from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxremat.agreement import ALONE, Agreement
from fxremat.cost.layouts import Strides
from fxremat.graphs.captured import Captured
from fxremat.ops.parameters import Weights
from fxremat.units import Budget, Percent


@dataclass(frozen=True, kw_only=True)
class TrainedParameters:
    """The parameters that an optimizer updates within a captured step."""

    weights: Weights
    optimizer: torch.optim.Optimizer
    numbers: Mapping[int, int]  # number of a parameter's value in the graph -> index of the parameter in the optimizer
    names: Mapping[int, str]  # number of a parameter's value in the graph -> name of the parameter in the model
    # numbers of the parameters that an earlier plan moved to the host; None if there was no earlier plan
    settled: frozenset[int] | None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The peak that a budget in percent refers to, if it is the peak at other input sizes than the step's own."""

    bytes: int
    of: str  # the sizes that have this peak, as text


GROWN = 1.01  # calls are planned anew once budgets in percent are of more by this factor


@dataclass
class LargestCall:
    """The largest call of a model so far, among those that differ in their sizes alone; budgets in percent refer to it.
    """

    reference: Reference | None = None
    assumed: Reference | None = None  # that call, with the loss that was assumed before it was measured
    among: Mapping[object, LargestCall] = field(default_factory=dict, repr=False)  # those of all calls of the model

    def with_more(self, bytes: int, budget: Budget) -> Reference | None:
        """Return the model's largest call so far, whatever it did, if a budget in percent of it is more than `bytes`.

        A step that is smaller than earlier ones, since layers were frozen for instance, may take as much as they did.
        So may one whose loss takes less than was assumed.
        """
        calls = [call for each in (self, *self.among.values()) for call in (each.reference, each.assumed) if call]
        largest = max(calls, key=lambda each: each.bytes, default=None)
        if largest is None or not isinstance(budget, Percent) or largest.bytes * budget.of_keep_all / 100 < bytes + 1:
            return None
        return largest

    def grown(self, known: int) -> int:
        """Return the bytes of the largest call if they exceed `known` by more than 1 %; 0: they do not."""
        return self.reference.bytes if self.reference and self.reference.bytes > GROWN * known else 0

    def or_larger(self, other: Reference) -> Reference:
        """Return the larger one of the largest call so far and another call."""
        return self.reference if self.reference and self.reference.bytes > other.bytes else other

    def note(self, other: Reference) -> None:
        """Remember another call if it is larger."""
        self.reference = self.or_larger(other)

    def correct(self, measured: int, assumed: int) -> None:
        """Take into account that a call whose loss was measured takes `measured` bytes, not `assumed`."""
        if self.reference is not None:
            self.assumed = self.assumed or self.reference
            self.reference = replace(self.reference, bytes=self.reference.bytes * measured // assumed)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A captured training step to be planned, with the inputs and sizes of the call that it was captured from."""

    graph: Captured
    inputs: Sequence[Any] = ()  # arguments of the captured graph; (): ops that have to be measured run on made-up data
    # the parameters that the step updates; None: the step only returns gradients
    trained: TrainedParameters | None = None
    called_with: str = ""  # the sizes of the inputs as text, for messages
    # the step's graph as eager PyTorch runs it, if `graph` was prepared for other kernels; else None
    as_eager: Captured | None = None
    # the peak that a budget in percent refers to; None: this step's own peak without recomputation
    reference: Reference | None = None
    # measured strides of results that the graph was traced with: see `PlannedStep.layouts`
    layouts: Mapping[str, Strides] = field(default_factory=dict)
    ranks: Agreement = ALONE  # the ranks that plan and run the step together
    # an order of the ops, with recomputations, that takes little memory at other sizes; None: not known
    order: Sequence[int] | None = None


def named(trained: TrainedParameters, values: Iterable[int]) -> str:
    """Name parameters in a message; `values` are the numbers of their values in the graph."""
    names = [trained.names[value] for value in values]
    return f"the parameter {names[0]}" if len(names) == 1 else f"the parameters {', '.join(names)}"
