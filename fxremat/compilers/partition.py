"""A partition function that plans within a budget, for AOTAutograd, AutoParallel and torch_xla."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from torch import fx

from fxremat.compilers.planning import PassOptions, PlanningPass, pass_options
from fxremat.torch_private import boxed, is_step_of_region


class Partitioner(PlanningPass):
    """A partition function: it takes a joint graph and returns a forward and a backward graph. See `partitioner`."""

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward (*inputs) -> (*outputs, *saved) and the backward (*saved, *tangents) -> gradients.

        Raises:
            BudgetTooSmall: no program fits.
            CaptureError: the graph cannot be planned; the error names the node.
        """
        if is_step_of_region(joint, joint_inputs):
            return self._all_kept(joint, num_fwd_outputs)
        given, plan = self.read_and_plan(joint, num_fwd_outputs)
        return given.with_writes(plan.graphs)

    def _all_kept(self, region: fx.GraphModule, num_fwd_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return forward and backward of a region without recomputation; it is planned as a part of the step."""
        options = replace(self.options, mem="100%", costs="estimate", never_again=(), keep=())
        given, plan = PlanningPass(options, "for compilers").read_and_plan(region, num_fwd_outputs)
        return given.with_writes(plan.graphs)


def partitioner(mem: int | str, **options: Unpack[PassOptions]) -> Partitioner:
    """Return a partition function for AOTAutograd that keeps, recomputes and offloads within the budget `mem`.

        plan_within = fxremat.passes.partitioner("4GiB", costs="H100")
        joint = aot_export_joint_with_descriptors(stack, model, inputs)
        run = aot_compile_joint_with_descriptors(
            joint, partition_fn=plan_within, fw_compiler=as_emitted, bw_compiler=as_emitted
        )
        print(plan_within.plan)

    The joint graph is not changed. Nothing runs during planning, unless costs="measure". The predicted peak is
    that of the two graphs if they run unchanged, and free values after their last use, as with `as_emitted`.

    Args:
        mem: the budget, in any form that `fxremat.compile` takes.
        options: as those of `fxremat.plan`; costs are estimates for the device that the graph is on, or for another.

    Raises:
        InvalidBudget, FxrematError: an option has an invalid value.
    """
    return Partitioner(pass_options(mem, options))


def as_emitted(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> Any:
    """Return a function that runs the graph's ops one by one, and frees each value after its last use."""
    return boxed(gm)
