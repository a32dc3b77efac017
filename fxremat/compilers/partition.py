"""A partition function of AOTAutograd that plans: `partition_fn` of AOTAutograd, AutoParallel and torch_xla."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from torch import fx

from fxremat.compilers.planning import PassOptions, PlanningPass, pass_options
from fxremat.torch_private import boxed


class Partitioner(PlanningPass):
    """A partition function: joint graph in, forward and backward graph out. `partitioner` makes it."""

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward (*inputs) -> (*outputs, *saved) and the backward (*saved, *tangents) -> gradients.

        Raises:
            BudgetTooSmall: no program fits.
            CaptureError: the graph cannot be planned; names the node.
        """
        given, plan = self.read_and_plan(joint, num_fwd_outputs)
        return given.with_writes(plan.graphs)


def partitioner(mem: int | str, **options: Unpack[PassOptions]) -> Partitioner:
    """Return a partition function for AOTAutograd, which keeps, recomputes and offloads within `mem`.

        plan_within = fxremat.passes.partitioner("4GiB", costs="H100")
        joint = aot_export_joint_with_descriptors(stack, model, inputs)
        run = aot_compile_joint_with_descriptors(
            joint, partition_fn=plan_within, fw_compiler=as_emitted, bw_compiler=as_emitted
        )
        print(plan_within.plan)

    The joint graph is not changed. Nothing runs while it is planned, unless costs="measure" asks for that. The peak is
    the predicted one where the two graphs run as they are, and free values after their last use, as with `as_emitted`.

    Args:
        mem: the budget, in any form that `fxremat.compile` takes.
        options: as those of `fxremat.plan`; costs are estimates for the device that the graph is on, or for another.

    Raises:
        InvalidBudget, FxrematError: an option has a value that it cannot have.
    """
    return Partitioner(pass_options(mem, options))


def as_emitted(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> Any:
    """Compile a graph to what it says: its ops run one by one, and each value is freed after its last use."""
    return boxed(gm)
