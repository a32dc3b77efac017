"""A captured training step as an object for users: planning it again needs no further capture or measurement.

    step = fxremat.capture(model, (x,))
    step.frontier                          peak memory and time of every available plan
    plan = step.plan("60%")
    step.plan("40%", offload=True)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Self, Unpack

from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.graphs.captured import Captured
from fxremat.options import Options, StepOptions, changed_options
from fxremat.planning import plan
from fxremat.planning.step import Step
from fxremat.plans import Plan
from fxremat.profiles import Profile, profile_of
from fxremat.show.frontier import FrontierTable
from fxremat.units import format_bytes


class CapturedStep(ABC):
    """Forward and backward of one call of a model, captured as one graph, from which plans are made."""

    @property
    def sizes(self) -> str:
        """The input sizes that may change, as text such as `tokens[1] = 300`; "" if all sizes are fixed."""
        return ""

    @property
    def resizable_inputs(self) -> frozenset[str]:
        """The names of the inputs whose sizes may change; the sizes of other inputs may follow from them."""
        return frozenset()

    @property
    @abstractmethod
    def options(self) -> Options:
        """The options that the step was captured with, which are the defaults of its plans."""

    @property
    @abstractmethod
    def graph(self) -> Captured:
        """The captured forward and backward, op by op; its `to_networkx()` gives a networkx graph."""

    @abstractmethod
    def plan(self, mem: int | str | None = None, **options: Unpack[StepOptions]) -> Plan:
        """Plan the step within a memory budget; nothing is captured or measured again.

        Args:
            mem: the budget in any form that `fxremat.compile` takes; None: the budget given to `capture`.
            options: options of `fxremat.plan` to change from those of `capture`. Options that decide what is captured
                cannot change: `method`, `dynamic`, `backend`, whether weights may live on the host, which outputs get
                gradients.

        Raises:
            BudgetTooSmall: no plan fits; `.minimum` is the least budget that works.
            InvalidBudget: `mem` has another form.
            FxrematError: an option has an invalid value, or cannot change after the capture.
        """

    @abstractmethod
    def least(self) -> int:
        """Return the least budget that works, in bytes; this takes as long as making a plan."""

    def at(self, **sizes: object) -> Self:
        """Return the same step for other input sizes, if it was captured with sizes that may change; see `Plan.at`.

        Raises:
            FxrematError: all sizes of the step are fixed, or a named input has no size that may change.
        """
        raise FxrematError(
            f"this step is of fixed sizes ({', '.join(sizes)} cannot change): capture it with dynamic=True, or with "
            "dynamic={'tokens': {1: (16, 512)}}"
        )

    @property
    def frontier(self) -> FrontierTable:
        """The (peak in bytes, time in seconds) of every available plan, fastest first; it prints as a table."""
        return self.plan("100%").frontier

    def profile(self) -> Profile:
        """Find which values take the memory of the step when nothing is recomputed, and what would save most of it.

        Recomputation, offloading and running in slices are tried, which takes as long as making about three
        plans.
        """
        return profile_of(self.plan("100%"))

    def __repr__(self) -> str:
        made = max((value.bytes for value in self.graph.values if value.producer is not None), default=0)
        sizes = f" at {self.sizes}" if self.sizes else ""
        largest = f"the largest value has {format_bytes(made)}"
        return f"<fxremat captured step of {self.graph.model}{sizes}: {len(self.graph.ops)} ops, {largest}>"


class FixedStep(CapturedStep):
    """A captured training step all of whose input sizes are fixed."""

    def __init__(self, step: Step, options: Options) -> None:
        self._step, self._options = step, options

    @property
    def options(self) -> Options:
        """The options that the step was captured with."""
        return self._options

    @property
    def graph(self) -> Captured:
        """The captured forward and backward, op by op."""
        return self._step.graph

    def plan(self, mem: int | str | None = None, **options: Unpack[StepOptions]) -> Plan:
        """Plan the step within a budget: see `CapturedStep.plan`."""
        settings = self._options
        if mem is not None or options:
            settings = changed_options(settings, mem=mem, **options)
        without_inputs = FixedStep(replace(self._step, inputs=()), settings)
        return replace(plan(self._step, settings), step=without_inputs, layouts=self._step.layouts)

    def least(self) -> int:
        """Return the least budget that works, in bytes."""
        try:
            return plan(self._step, changed_options(self._options, mem=1)).minimum
        except BudgetTooSmall as error:
            return error.minimum
