"""Runs all planners of pipelines and returns the best plan, with a lower bound on its time.

    contiguous   exact over contiguous allocations, what their stages recompute, and k-periodic 1F1B* schedules
    madpipe      one device has many stages; schedules by modulo scheduling             (`madpipe`, `modulo`)
    short        all allocations, if there are few layers                               (`moves`)
    moves        random changes of the best of these plans, as far as the effort goes   (`moves`)

The period T is the time between two micro-batches once the pipeline is full. With a given number of
micro-batches a step lasts slots * T + the time of one micro-batch, so that a longer period with fewer
micro-batches in flight may be faster: the fastest step wins among the plans found so far, contiguous plans for
longer periods, and the plans that moves make of the best of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxremat.errors import BudgetTooSmall, FxrematError, InvalidChain
from fxremat.solvers.pipeline.contiguous import Partition, Placer, best_partition, least_memory
from fxremat.solvers.pipeline.fixed import ticks
from fxremat.solvers.pipeline.groups import elements_of, scheduled
from fxremat.solvers.pipeline.madpipe import best_madpipe
from fxremat.solvers.pipeline.model import Layers, Machines, PipelinePlan
from fxremat.solvers.pipeline.modulo import Pattern, best_pattern
from fxremat.solvers.pipeline.moves import best_of_all, improved
from fxremat.solvers.pipeline.period_bound import lower_bound
from fxremat.solvers.pipeline.stage_costs import Job, Ways, step_seconds
from fxremat.solvers.pipeline.tasks import planned

EFFORT = 10.0  # default seconds of search
_TRY = 1e-3  # approximate seconds of one random change of a plan
_FEWEST = 300  # minimum number of random changes if the number of micro-batches is given
_NEAR = 1e-3  # relative difference below which a period counts as equal to its lower bound
_LONGER = 60  # number of longer periods tried if the number of micro-batches is given


def plan_pipeline(
    layers: Layers,
    machines: Machines,
    *,
    options: Ways | None = None,
    microbatches: int | None = None,
    effort: float = EFFORT,
) -> PipelinePlan:
    """Return the plan with the shortest period or, if `microbatches` is given, with the fastest step.

    Args:
        layers: the chain; with the fastest times if `options` says how stages recompute.
        options: the configurations of a stage first..last; None: everything is kept.
        microbatches: the number of micro-batches of a step; None: unlimited, so that only the period counts.
        effort: seconds of search in addition to the exact contiguous plan, about; 0 returns that plan.

    Raises:
        BudgetTooSmall: no plan fits; `.minimum` is the least number of bytes for which a contiguous one does.
        InvalidChain: the layers take no time.

    >>> from fxremat.solvers.pipeline.model import Layer
    >>> sizes = {"weight_bytes": 1, "saved_bytes": 1, "output_bytes": 0, "grad_bytes": 0}
    >>> layers = [Layer(forward_time=cost, backward_time=cost, **sizes) for cost in (0.5, 1.0, 0.5)]
    >>> machines = Machines(devices=2, memory=9, bandwidth=None, copies=1)
    >>> plan = plan_pipeline(Layers(input_bytes=0, input_grad_bytes=0, layers=layers), machines)
    >>> plan.period, [stage.device for stage in plan.stages]
    (2.0, [0, 1, 0])
    """
    if microbatches is not None and microbatches < 1:
        raise FxrematError(f"microbatches is {microbatches}; a step has at least one")
    if not effort >= 0:
        raise FxrematError(f"effort is {effort!r}; it is a number of seconds, 0 or more")
    if not any(layer.forward_time or layer.backward_time for layer in layers.layers):
        raise InvalidChain("no layer takes any time, so that every plan has the period 0; give their seconds")
    job = Job(layers, machines, options)
    bound = lower_bound(job)
    found = list(_plans(job, bound, effort if microbatches is None else effort / 2))
    if not found:
        raise BudgetTooSmall(
            minimum=least_memory(job),
            budget=int(machines.memory),
            note="that is of contiguous allocations; no other was found to fit either",
        )
    if microbatches is None:
        return min(found, key=lambda plan: plan.period)
    seconds = min(step_seconds(plan, microbatches) for plan in found)
    found += _for_a_short_step(job, bound, microbatches, seconds)
    if effort > 0:
        found += _moved_for_a_short_step(job, found, bound, microbatches, effort / 2)
    return min(found, key=lambda plan: step_seconds(plan, microbatches))


def _moved_for_a_short_step(
    job: Job, found: Sequence[PipelinePlan], bound: float, microbatches: int, effort: float
) -> Iterator[PipelinePlan]:
    """Yield plans found by randomly changing the plan with the fastest step, and the one with the shortest period."""
    starts = {
        id(plan): plan
        for plan in (
            min(found, key=lambda plan: step_seconds(plan, microbatches)),
            min(found, key=lambda plan: plan.period),
        )
    }
    for plan in starts.values():
        pattern = Pattern.of(plan)
        tries = max(_FEWEST, int(effort / _TRY / len(starts)))
        better = improved(job, pattern, tries=tries, floor=bound, microbatches=microbatches)
        if better is not pattern:
            yield _planned(job, better, bound, "moves")


def _plans(job: Job, bound: float, effort: float) -> Iterator[PipelinePlan]:
    """Yield a plan from each planner that finds a shorter period than the planners before it."""
    best: Pattern | None = None
    try:
        partition = best_partition(job)
        plan = _scheduled(job, partition, bound)
        yield plan
        best = best_pattern(job, partition.stages, below=partition.tick * (1 + 1e-3), skip=partition.skip)
        # modulo scheduling is better if copies in one direction take no time, and so need no link
        if best is not None and best.period < plan.period:
            yield _planned(job, best, bound, "modulo")
    except BudgetTooSmall:
        plan = None
    period = plan.period if plan else float("inf")
    if effort == 0 or period <= bound * (1 + _NEAR):
        return
    for by, pattern in (
        ("all allocations", best_of_all(job, below=period, floor=bound)),
        ("madpipe", best_madpipe(job, low=bound, below=period)),
    ):
        if pattern is not None and (best is None or pattern.period < best.period):
            best = pattern
            yield _planned(job, pattern, bound, by)
    if best is not None:
        better = improved(job, best, tries=int(effort / _TRY), floor=bound)
        if better.period < best.period:
            yield _planned(job, better, bound, "moves")


def _scheduled(job: Job, partition: Partition, bound: float) -> PipelinePlan:
    skip = partition.skip or None
    return scheduled(job, partition.stages, partition.tick, skip=skip, bound=bound, by="contiguous")


def _planned(job: Job, pattern: Pattern, bound: float, by: str) -> PipelinePlan:
    skip = pattern.skip or None
    return planned(job, pattern.stages, pattern.starts, pattern.tick, skip=skip, bound=bound, by=by)


def _for_a_short_step(job: Job, bound: float, microbatches: int, seconds: float) -> Iterator[PipelinePlan]:
    """Yield contiguous plans for increasing periods, while a step may still be faster than `seconds`."""
    placer = Placer(job)
    shortest = placer.best()
    if shortest is None:
        return
    longest = min(placer.longest, seconds / max(1, microbatches - 1))
    known = set()
    for number in range(_LONGER + 1):
        tick = shortest.tick * max(1.0, longest / shortest.tick) ** (number / _LONGER)
        stages = placer.stages(tick * (1 + 1e-9))
        if stages is None or stages in known:
            continue
        known.add(stages)
        for shorter in ticks(elements_of(job, stages)):
            plan = scheduled(job, stages, shorter, skip=None, bound=bound, by="contiguous")
            if job.fits(max(plan.memory)):
                yield plan
