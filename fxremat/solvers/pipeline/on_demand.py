"""Computes exact ways to train stages only for those stages that plans may want; uses estimates for all others.

    rough     estimated ways (what is recomputed, with seconds and bytes) of any stage, available at once
    exact     ways that take seconds of search for each stage

Plan with the ways known so far, compute exact ones for the stages of the plan and for those with a border one
layer away, and plan again: a few dozen stages of hundreds become exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fxremat.errors import BudgetTooSmall
from fxremat.solvers.pipeline.model import PipelinePlan, PlannedStage, Way
from fxremat.solvers.pipeline.stage_costs import Ways

ROUNDS = 8  # maximum number of rounds of planning


@dataclass(eq=False)
class OnDemandCosts:
    """Ways to train stages (what is recomputed): exact for the stages passed to `ask`, estimated for all others."""

    rough: Ways
    exact: Ways
    count: int  # number of layers
    known: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, first: int, last: int) -> Sequence[Way]:
        return self.exact(first, last) if (first, last) in self.known else self.rough(first, last)

    def ask(self, stages: Sequence[PlannedStage], *, around: bool = True) -> bool:
        """Use exact ways of training for these stages and, if `around`, for those with a border one layer away.

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
        """Plan for devices of `memory` bytes until all stages of the plan have exact costs.

        If nothing fits, plan for the least memory that does: exact ways may need less than estimated ones, or
        more.
        """
        for _ in range(ROUNDS):
            try:
                plan = planned(memory)
            except BudgetTooSmall as error:
                plan = planned(error.minimum)
            if not self.ask(plan.stages):
                break
