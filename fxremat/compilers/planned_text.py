"""The whole pass on a graph as text: what `fxremat opt` does."""

from __future__ import annotations

from typing import Unpack

from fxremat.compilers.planning import PassOptions, pass_options, pipeline_of, planned
from fxremat.compilers.reading import read_given
from fxremat.compilers.text import emitted_text, from_text
from fxremat.compilers.whole_step import in_one
from fxremat.plans import Plan


def planned_text(text: str, mem: int | str, **options: Unpack[PassOptions]) -> tuple[Plan, str]:
    """Return the plan of a graph that `to_text` wrote, and the text of its graphs.

    A joint graph becomes two functions, `forward` and `backward`; a full step stays one.

    Raises:
        BudgetTooSmall: no program fits.
        CaptureError: the text is no graph, or a node cannot be planned; names the line or the node.
    """
    read, settings = from_text(text), pass_options(mem, options)
    given = read_given(read.module, read.num_fwd_outputs, pipeline=pipeline_of(settings))
    plan = planned(given, settings)
    if not given.is_joint:
        return plan, emitted_text([("forward", in_one(given, plan))])
    forward, backward = given.with_writes(plan.graphs)
    return plan, emitted_text([("forward", forward.graph), ("backward", backward.graph)])
