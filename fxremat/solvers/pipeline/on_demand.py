"""Stage configurations on demand: exact ones where they matter, approximate ones elsewhere.

    rough     approximate configurations (programs, with seconds and bytes) of any stage, which are known at once
    exact     configurations that take seconds of search for each stage: computed for stages that a plan may want

Plan with the configurations known so far, compute exact ones of the stages in the plan and of those with a border one
layer away, plan again: a few dozen stages of hundreds become exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fxremat.errors import BudgetTooSmall
from fxremat.solvers.pipeline.model import PipelinePlan, PlannedStage, Way
from fxremat.solvers.pipeline.stage_costs import Ways

ROUNDS = 8  # rounds of planning, at most


@dataclass(eq=False)
class OnDemandCosts:
    """Stage configurations: exact ones for the stages that a plan has asked about, approximate ones for all others."""

    rough: Ways
    exact: Ways
    count: int  # number of layers
    known: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, first: int, last: int) -> Sequence[Way]:
        return self.exact(first, last) if (first, last) in self.known else self.rough(first, last)

    def ask(self, stages: Sequence[PlannedStage], *, around: bool = True) -> bool:
        """Ask for exact configurations of these stages, and of those with a border one layer away if `around`.

        Return whether any of them were not exact before.
        """
        before = len(self.known)
        for stage in stages:
            self.known.add((stage.first, stage.last))
            if around:
                self.known.update(self._around(stage))
        return len(self.known) > before

    def _around(self, stage: PlannedStage) -> Iterator[tuple[int, int]]:
        for first, last in (
            (stage.first - 1, stage.last),
            (stage.first + 1, stage.last),
            (stage.first, stage.last - 1),
            (stage.first, stage.last + 1),
        ):
            if 0 <= first <= last < self.count:
                yield first, last

    def settle(self, planned: Callable[[float], PipelinePlan], memory: float) -> None:
        """Plan for devices of `memory` bytes and ask for exact costs of the plan's stages, until all of them are exact.

        If nothing fits, plan for the least memory: exact configurations may need less than rough ones, or more.
        """
        for _ in range(ROUNDS):
            try:
                plan = planned(memory)
            except BudgetTooSmall as error:
                plan = planned(error.minimum)
            if not self.ask(plan.stages):
                break
