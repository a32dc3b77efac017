"""Ways of stages that are exact where they matter, and rough elsewhere.

    rough     of any stage at once
    exact     takes seconds for each stage: asked for where a plan may want it

Plan with what is known, ask for the stages of the plan and those with a border one layer away, plan again: a few dozen
stages are asked for, of hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fxremat.errors import BudgetTooSmall
from fxremat.solvers.pipeline.model import PipelinePlan, PlannedStage, Way
from fxremat.solvers.pipeline.stage_costs import Ways

ROUNDS = 8  # of asking, at most


@dataclass(eq=False)
class OnDemandCosts:
    """The exact ways of the stages that were asked for, rough ones of all others."""

    rough: Ways
    exact: Ways
    count: int  # of layers
    known: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, first: int, last: int) -> Sequence[Way]:
        return self.exact(first, last) if (first, last) in self.known else self.rough(first, last)

    def ask(self, stages: Sequence[PlannedStage], *, around: bool = True) -> bool:
        """Have exact ways of these stages, and those around them, from now on; False where all had them already."""
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
        """Ask along the plans for this memory, until one has nothing to ask for.

        Where nothing fits, along those that take least: exact ways may take less than rough ones, or more.
        """
        for _ in range(ROUNDS):
            try:
                plan = planned(memory)
            except BudgetTooSmall as error:
                plan = planned(error.minimum)
            if not self.ask(plan.stages):
                break
