"""Plan a graph given as text, and return the rewritten graph as text, as the command `fxremat opt` does."""

from __future__ import annotations

from typing import Unpack

from torch import fx

from fxremat.compilers.planning import PassOptions, PlanningPass, pass_options
from fxremat.compilers.text import emitted_text, from_text
from fxremat.compilers.whole_step import in_one
from fxremat.plans import Plan


def planned_text(text: str, mem: int | str, **options: Unpack[PassOptions]) -> tuple[Plan, str]:
    """Return the plan of a graph that `to_text` wrote, and the text of its planned graphs.

    A joint graph becomes two functions, `forward` and `backward`; a graph of a full step stays one.

    Raises:
        BudgetTooSmall: no program fits.
        CaptureError: the text is not a graph, or a node cannot be planned; the error names the line or the node.
    """
    read = from_text(text)
    given, plan = PlanningPass(pass_options(mem, options)).read_and_plan(read.module, read.num_fwd_outputs)
    if not given.is_joint:
        one = fx.GraphModule(read.module, in_one(given, plan))
        return plan, emitted_text([("forward", one.graph)])
    forward, backward = given.with_writes(plan.graphs)
    return plan, emitted_text([("forward", forward.graph), ("backward", backward.graph)])
