"""Stage configurations that a chain solver finds, and plans that use them.

    configuration   the stage's blocks as a chain of their own, solved for several budgets; the part of a schedule
                    before its first backward is the stage's forward; what is stored then is kept per micro-batch
    on demand       for the stages of the best contiguous plan so far and those around them (`on_demand`), a few times;
                    then once more for the stages of the best plan of all

Computing them for all stages would take minutes; `of_chain` lists simpler configurations for all of them at once.
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

BUDGETS = 6  # budgets that each stage is solved for, evenly from the peak of keep-all to the least that works
SLOTS = 100  # steps of memory of the chain solver


def plan_chain(
    chain: Chain, machines: Machines, *, microbatches: int | None = None, effort: float = EFFORT
) -> PipelinePlan:
    """Return the best plan for a chain whose stages may recompute; arguments and errors as of `plan_pipeline`."""
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
    """Return configurations of the stage of blocks first..last (from 0), each of a schedule that a chain solver found.

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
        except BudgetTooSmall:  # slots round sizes up
            continue
    return ways


def way_of(stage: Chain, schedule: Schedule) -> Way:
    """Return the configuration of a stage that follows a schedule; weight gradients are counted elsewhere."""
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
