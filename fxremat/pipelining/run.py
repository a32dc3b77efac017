"""Runs the stages of one rank of a pipeline, each compiled with its own budget, on PyTorch's pipeline engine.

stage       consecutive layers -> fxremat.compile(module, mem=the peak of the stage's program)
step        split the batch, run the actions of this rank in the plan's order, losses on the last rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fxremat.errors import FxrematError
from fxremat.heartbeat import lost_peer
from fxremat.options import options_of
from fxremat.pipelining.engine import LeanStage, Step, engine, group_of
from fxremat.pipelining.memory import StageMemory
from fxremat.pipelining.profile import Profile
from fxremat.runtime.module import budget_for_each_call, drop_in, plan_now
from fxremat.solvers.pipeline.model import PipelinePlan


def held_by(profile: Profile, plan: PipelinePlan, number: int) -> StageMemory:
    """Return the memory of stage `number` of a plan, trained in the way that the plan chose for it."""
    stage, last = plan.stages[number], len(plan.stages) - 1
    return StageMemory(
        weights=profile.weight_bytes(stage.first, stage.last),
        entering=profile.input_bytes(stage.first),
        leaving=0 if number == last else profile.input_bytes(stage.last + 1),
        spending=profile.spending_of(stage.first, stage.last, stage.way),
    )


def _compiled(
    profile: Profile, plan: PipelinePlan, number: int, module: nn.Module, group: dist.ProcessGroup | None
) -> LeanStage:
    stage, last = plan.stages[number], len(plan.stages) - 1
    spending = profile.spending_of(stage.first, stage.last, stage.way)
    examples = profile.examples(stage.first, stage.last)
    small = drop_in(module, options_of(mem=spending.budget, **profile.settings))
    budget_for_each_call(small)
    plan_now(small, examples, {})
    return LeanStage(
        _OnTarget(small) if number == last else small,
        number,
        last + 1,
        profile.device,
        profile.entering(stage.first),
        profile.leaving(stage.last),
        group,
    )


class _OnTarget(nn.Module):
    """Wraps the last stage so that it takes the target as a keyword argument, as the engine passes it."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor, target: Tensor | None = None) -> Any:
        return self.stage(*inputs) if target is None else self.stage(*inputs, target)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank:
    """The stages of one rank of a process group; tensors of other ranks are not kept."""

    number: int
    modules: Mapping[int, nn.Module]  # index of a stage in the plan -> its module
    stages: Sequence[LeanStage]
    held: Mapping[int, StageMemory]  # index of a stage in the plan -> its memory
    last: int  # index of the plan's last stage
    run: Step  # a function that runs a step on this rank

    @classmethod
    def of(
        cls, profile: Profile, plan: PipelinePlan, number: int, *, microbatches: int, scale_grads: bool
    ) -> Rank:
        """Compile the stages of this rank and set up the engine."""
        mine = {k: stage for k, stage in enumerate(plan.stages) if stage.device == number}
        modules = {k: profile.module(stage.first, stage.last) for k, stage in mine.items()}
        group = group_of(plan)
        stages = [_compiled(profile, plan, k, module, group) for k, module in modules.items()]
        return cls(
            number=number,
            modules=modules,
            stages=stages,
            held={k: held_by(profile, plan, k) for k in mine},
            last=len(plan.stages) - 1,
            run=engine(stages, plan, microbatches, scale_grads=scale_grads),
        )

    @property
    def is_first(self) -> bool:
        """True if this rank has the first stage, which reads the model's inputs."""
        return 0 in self.modules

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage, which computes the losses."""
        return self.last in self.modules

    def step(self, inputs: Sequence[Tensor], target: Tensor) -> tuple[Tensor, ...]:
        """Run forward and backward of all micro-batches, and add gradients to `.grad`.

        Returns the loss of each micro-batch on the rank of the last stage, () on others.
        """
        given = tuple(inputs) if self.is_first else ()
        try:
            losses = self.run(*given, target=target if self.is_last else None)
        except Exception as error:
            raise self._explained(error) from error.__cause__
        return tuple(loss.detach() for loss in losses)

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error.__cause__, FxrematError):  # a stage raised the error, and the engine wrapped it
            return error.__cause__
        if (text := lost_peer(error)) is None:
            return error
        return FxrematError(
            f"rank {self.number} cannot finish this step: another process of the pipeline has ended or does not "
            f"answer ({text}); end the job and start it again from its last checkpoint"
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers of this rank's stages, with their names in the model."""
        for module in self.modules.values():
            yield from module.named_parameters()
            yield from module.named_buffers()
