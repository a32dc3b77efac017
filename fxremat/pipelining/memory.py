"""Computes the peak memory of each device of a pipeline during a step, with copies between devices.

    always         weights of the device's stages, and their gradients
    F (forward)    during it: bytes saved by other micro-batches in flight + the peak of this forward;
                   after it: + what this micro-batch saves
    B (backward)   during it: bytes saved by other micro-batches in flight + the peak of this backward;
                   after it: - what this micro-batch saved, except a loss, and - its input
    RECV           + a buffer for a stage's input or gradient, until its backward is done
    gradient       + the gradient that is being sent to the previous stage, until the next one is sent

The peak is exact but for the order in which copies arrive. Between two stages on one device nothing is copied:
the output of one is the input of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxremat.pipelining.engine import Action
from fxremat.pipelining.profile import Spending
from fxremat.solvers.pipeline.model import PipelinePlan


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The bytes of a pipeline stage: weights, input, output, and what its forward and backward need."""

    weights: int  # bytes of one copy of the weights
    entering: int  # bytes of the input of one micro-batch; 0 for the first stage
    leaving: int  # bytes of the output of one micro-batch; 0 for the last stage
    spending: Spending


def most_bytes(
    plan: PipelinePlan, stages: Sequence[StageMemory], actions: Sequence[Sequence[Action]]
) -> tuple[int, ...]:
    """Return the peak bytes of each device during a step in which it runs its `actions` in order."""
    return tuple(_Device(plan, stages, number).most(works) for number, works in enumerate(actions))


@dataclass
class _Device:
    plan: PipelinePlan
    stages: Sequence[StageMemory]
    number: int

    def most(self, actions: Sequence[Action]) -> int:
        mine = [held for held, stage in zip(self.stages, self.plan.stages) if stage.device == self.number]
        base = int(self.plan.machines.copies * sum(held.weights for held in mine))
        live, peak = 0, 0
        on_its_way: set[int] = set()  # stages whose latest gradient may still be in flight to the previous stage
        for action in actions:
            held = self.stages[action.stage]
            spending, first = held.spending, action.stage == 0
            match action.kind:
                case "RECV_F":
                    live += held.entering
                case "RECV_B":
                    live += held.leaving
                case "F":
                    peak = max(peak, live + spending.forward_peak)
                    live += spending.kept
                case "B":  # the received gradient is counted in the backward's own peak
                    live -= spending.kept + held.leaving
                    peak = max(peak, live + spending.backward_peak)
                    if action.stage == len(self.stages) - 1:
                        live += spending.returned
                    if self._is_here(action.stage - 1):
                        live += held.entering  # the gradient stays on this device, for the previous stage
                    elif not first and action.stage in on_its_way:
                        live -= held.entering  # the input is freed; one gradient leaves and the next one is allocated
                    elif not first:
                        on_its_way.add(action.stage)  # the input is freed, and a gradient of equal size is allocated
            peak = max(peak, live)
        return base + peak

    def _is_here(self, stage: int) -> bool:
        return stage >= 0 and self.plan.stages[stage].device == self.number
