"""PipeDream's partition, a baseline: stages balanced by seconds, with a guess of what they save.

    slowest[p, i]   least time of the slowest of p stages and of the copies between them, for layers i..

    stage i..j      is assumed to keep as many micro-batches as there are stages from it to the end:
                    copies * weights + p * kept  <=  M, with no buffers and no copies in the count

Its stages then run by 1F1B* (`fixed`), which shows what they really need: often a far longer period. Narayanan et al.,
PipeDream (2019), as compared with in section 7.3.3 of A. Shilova's thesis (2021). O(devices * layers^2).
"""

from __future__ import annotations

from math import inf

from fxremat.errors import BudgetTooSmall
from fxremat.solvers.pipeline.contiguous import Partition
from fxremat.solvers.pipeline.fixed import shortest_tick
from fxremat.solvers.pipeline.model import PlannedStage
from fxremat.solvers.pipeline.stage_costs import Job

Best = tuple[float, int]  # (seconds of the slowest stage or copy, last layer of the first stage)


def pipedream(job: Job) -> tuple[Partition, float]:
    """Return PipeDream's partition with its real period, and the period that PipeDream assumes.

    Raises:
        BudgetTooSmall: PipeDream assumes that nothing fits, or nothing does. `.minimum` is the number of bytes that
            one micro-batch at a time needs with its stages, or with those it would choose if memory were unlimited.
    """
    stages, believed = _balanced(job, job.machines.memory)
    if not stages:
        stages, _ = _balanced(job, inf)
        least = max(job.fixed(s.first, s.last) + s.way.bytes(1) for s in stages)
        raise BudgetTooSmall(
            minimum=int(-(-least // 1)), budget=int(job.machines.memory), note="PipeDream sees no partition"
        )
    return Partition(stages=stages, tick=shortest_tick(job, stages), skip=0), believed


def best_of_targets(job: Job) -> Partition | None:
    """Return the best of PipeDream's partitions for many assumed memory sizes, each run by 1F1B*; None if none fits.

    This is more than PipeDream does by itself: A. Shilova's thesis (2021) picks from many memory sizes in
    chapter 6.
    """
    found: list[Partition] = []
    for target in (*(job.machines.memory * 2 ** (step / 4) for step in range(-12, 17)), inf):
        stages, _ = _balanced(job, target)
        if not stages or any(stages == partition.stages for partition in found):
            continue
        try:
            found.append(Partition(stages=stages, tick=shortest_tick(job, stages), skip=0))
        except BudgetTooSmall:
            continue
    return min(found, key=lambda partition: partition.period, default=None)


def _balanced(job: Job, memory: float) -> tuple[tuple[PlannedStage, ...], float]:
    """Return the stages whose slowest is fastest in PipeDream's model, and its seconds; ((), inf) if nothing fits."""
    count = job.count
    table: list[list[Best]] = [[(inf, -1)] * count + [(0.0, -1)]]
    for p in range(1, job.machines.devices + 1):
        table.append([_first_stage(job, p, i, table[p - 1], memory) for i in range(count)] + [(inf, -1)])
    devices = min(range(1, len(table)), key=lambda p: table[p][0][0])
    believed = table[devices][0][0]
    if believed == inf:
        return (), inf
    stages, first = [], 0
    for device in range(devices):
        last = table[devices - device][first][1]
        stages.append(PlannedStage(first=first, last=last, device=device, way=job.keeping_all(first, last)))
        first = last + 1
    return tuple(stages), believed


def _first_stage(job: Job, p: int, i: int, after: list[Best], memory: float) -> Best:
    """Return the best (seconds of the slowest stage, last layer of the first stage) for p stages from layer i on."""
    best: Best = (inf, -1)
    for j in range(i, job.count):
        way = job.keeping_all(i, j)
        if job.weights(i, j) + p * way.kept_bytes > memory:
            break
        copying = job.copying(j) if j + 1 < job.count else 0.0
        best = min(best, (max(way.seconds, copying, after[j + 1][0]), j))
    return best
