"""Finds ways to train stages by solving each stage as a chain of its own, and plans that use them.

    way             a schedule of the stage's chain for some budget; the ops before its first backward are the
                    stage's forward, and what is stored then is kept for each micro-batch
    on demand       for the stages of the best contiguous plan so far and those around them (`on_demand`), a few times;
                    then once more for the stages of the best plan of all

Solving all stages would take minutes; `of_chain` lists simpler ways for all of them at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Forward, Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall
from fxremat.solvers import solve
from fxremat.solvers.pipeline.best_plan import EFFORT, plan_pipeline
from fxremat.solvers.pipeline.model import Machines, PipelinePlan, Way
from fxremat.solvers.pipeline.of_chain import layers_of, ways_of
from fxremat.solvers.pipeline.on_demand import OnDemandCosts
from fxremat.solvers.pipeline.stage_costs import step_seconds

# number of budgets for each stage, evenly spaced from the peak without recomputation to the least that works
BUDGETS = 6
SLOTS = 100  # number of memory levels in the chain solver's table


def plan_chain(
    chain: Chain, machines: Machines, *, microbatches: int | None = None, effort: float = EFFORT
) -> PipelinePlan:
    """Return the best plan for a chain whose stages may recompute; arguments and errors are those of `plan_pipeline`.
    """
    simple = ways_of(chain)
    ways = OnDemandCosts(
        rough=simple,
        exact=cache(lambda first, last: [*simple(first, last), *solved_ways(chain, first, last)]),
        count=len(chain.blocks),
    )
    layers = layers_of(chain)

    def planned(memory: float, effort: float = 0.0) -> PipelinePlan:
        room = replace(machines, memory=memory)
        return plan_pipeline(layers, room, options=ways, microbatches=microbatches, effort=effort)

    def seconds(plan: PipelinePlan) -> float:
        return plan.period if microbatches is None else step_seconds(plan, microbatches)

    ways.settle(planned, machines.memory)
    found = planned(machines.memory, effort)
    if ways.ask(found.stages):
        found = min(found, planned(machines.memory, effort), key=seconds)
    return found


def solved_ways(chain: Chain, first: int, last: int, solver: str = "persistent") -> list[Way]:
    """Return ways to train the stage of blocks first..last (indices from 0): what a chain solver recomputes.

    It solves the stage's chain for `BUDGETS` budgets.
    """
    blocks = tuple(replace(block, weight_grad_bytes=0) for block in chain.blocks[first : last + 1])
    stage = Chain(
        input_bytes=chain.output_sizes[first], input_grad_bytes=chain.grad_sizes[first], blocks=blocks
    )
    most = simulate(stage, solve(stage, 2**52, solver="keep_all")).peak
    try:
        solve(stage, 0, solver=solver, slots=SLOTS)
    except BudgetTooSmall as error:
        least = error.minimum
    else:
        least = most
    ways = []
    for number in range(BUDGETS):
        budget = most - (most - least) * number // (BUDGETS - 1)
        try:
            ways.append(way_of(stage, solve(stage, budget, solver=solver, slots=SLOTS)))
        except BudgetTooSmall:  # possible since sizes are rounded up to slots
            continue
    return ways


def way_of(stage: Chain, schedule: Schedule) -> Way:
    """Return the seconds and bytes of training a stage by a schedule; weight gradients are counted elsewhere."""
    timeline = simulate(stage, schedule)
    turn = next(place for place, op in enumerate(schedule.ops) if isinstance(op, Backward))
    final = len(stage.blocks)
    option = next(
        op.option for op in reversed(schedule.ops[:turn]) if isinstance(op, Forward) and op.block == final
    )
    working = stage.grad_sizes[final - 1] + stage.blocks[-1].choices[option].backward_scratch
    forward = timeline.ends[turn - 1]
    return Way(
        forward_time=forward,
        backward_time=timeline.time - forward,
        kept_bytes=timeline.memory[turn] - stage.phase_sizes[final] - working,
        peak_bytes=timeline.peak,
    )
