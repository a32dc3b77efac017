"""Towers: parts of a forward that share no value and only meet near its end (a siamese network, two encoders).

    join op    an op that reads from two parts, each of which did at least SHARE of the forward's work
    trunk      the join ops, and all ops that depend on them

Solvers see towers and trunk as a Join, whose branches are the towers. Values that leave a tower are kept from
forward to backward in any case, so blocks of one tower need nothing from another, and may run in any order
relative to its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxremat.chains.chain import Chain, Join
from fxremat.chains.join_schedule import JoinSchedule, On
from fxremat.chains.schedule import Backward, Forward, Op, Schedule
from fxremat.linearize.crossings import Crossing
from fxremat.linearize.lay_out import lay_out
from fxremat.step.layout import Layout
from fxremat.step.step_graph import StepGraph

# a part with less than this fraction of the forward's seconds is no tower, but an input stem or an embedding
SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class Towers:
    """The ops of each tower (parts of the forward that share no value): tower k ends with op ends[k].

    The trunk, all ops after the towers meet, comes last.
    """

    ends: tuple[int, ...]
    carried: frozenset[int]  # the values that leave the towers

    def lay_out(self, graph: StepGraph, crossing: Crossing) -> Layout:
        """Cut the graph into blocks, each within one parallel branch (tower) or within the ops after the branches."""
        return lay_out(graph, [*crossing.cuts(self.carried), *self.ends], self.carried)

    def parts(self, layout: Layout) -> list[range]:
        """Return the range of blocks of each parallel branch (tower), then that of the blocks after them (trunk)."""
        last = {block.forward[-1]: number + 1 for number, block in enumerate(layout.blocks)}
        bounds = [0, *(last[end] for end in self.ends), len(layout.blocks)]
        return [range(low, high) for low, high in pairwise(bounds)]


def join_of(chain: Chain, parts: Sequence[range]) -> Join:
    """Split the chain of a layout at the towers' ends into a join: one branch for each tower, and the trunk."""
    pieces = [Chain(blocks=chain.blocks[part.start : part.stop], input_bytes=0) for part in parts]
    return Join(branches=tuple(pieces[:-1]), trunk=pieces[-1])


def on_the_layout(schedule: JoinSchedule, parts: Sequence[range]) -> Schedule:
    """Translate a join's schedule to the layout's blocks, in execution order.

    Forwards of towers run one after the other, in the captured order, so that dropouts draw the same numbers,
    and towers that share a BatchNorm update its statistics in the same order.
    """
    # for type checkers: the loss is one of the ops in the trunk here, so there is no `Loss` step to drop
    steps = [step for step in schedule.ops if isinstance(step, On)]
    turn = next(place for place, step in enumerate(steps) if isinstance(step.op, Backward))
    steps[:turn] = sorted(steps[:turn], key=lambda step: (step.branch - 1) % len(parts))
    # the trunk (the ops after the parallel branches) is branch 0 of the join, but the last element of `parts`
    return Schedule(tuple(_shifted(step.op, parts[step.branch - 1].start) for step in steps))


def _shifted(op: Op, by: int) -> Op:
    match op:
        case Forward(block, keep, option):
            return Forward(block + by, keep, option)
        case Backward(block):
            return Backward(block + by)
        case _:
            return type(op)(type(op.value)(op.value.kind, op.value.index + by))


def find_towers(graph: StepGraph, crossing: Crossing, seconds: Sequence[float]) -> Towers | None:
    """Return the towers of a forward (branches that run one after the other, then meet); None if there are not two.

    Args:
        seconds: seconds of each op, by number.
    """
    tower_of, trunk = _components(graph, seconds)
    first: dict[int, int] = {}
    for op, tower in tower_of.items():
        first[tower] = min(op, first.get(tower, op))
    order = sorted(first, key=first.__getitem__)
    if len(order) < 2:
        return None
    foreign = [op for op, tower in tower_of.items() if tower != order[-1]] + sorted(trunk)
    beyond = [
        op for op in foreign if op > first[order[-1]]
    ]  # ops after the parallel branches (towers), and ops that belong to an earlier branch
    if not beyond:
        return None
    ends = tuple(start - 1 for start in [*(first[tower] for tower in order[1:]), min(beyond)])
    for tower, start, end in zip(order, (first[tower] for tower in order), ends, strict=True):
        inside = sum(seconds[op] for op, home in tower_of.items() if home == tower and start <= op <= end)
        if inside < SHARE * sum(seconds[: graph.forward_count]):
            return None
    return Towers(ends=ends, carried=frozenset().union(*(crossing.at[end] for end in ends)))


def _components(graph: StepGraph, seconds: Sequence[float]) -> tuple[dict[int, int], set[int]]:
    """Return op -> parallel branch, named by one of its ops, and the set of ops after the branches."""
    enough = SHARE * sum(seconds[: graph.forward_count])
    parent: dict[int, int] = {}
    work: dict[int, float] = {}
    trunk: set[int] = set()
    made_by = {value: op.index for op in graph.forward_ops if not op.anchored for value in op.writes}

    def root(op: int) -> int:
        while parent[op] != op:
            op = parent[op]
        return op

    for op in graph.forward_ops:
        if op.anchored:
            continue
        makers = {made_by[value] for value in op.again_reads if value in made_by}
        roots = sorted({root(maker) for maker in makers - trunk})
        heavy = [part for part in roots if work[part] >= enough]
        if makers & trunk or len(heavy) > 1:
            trunk.add(op.index)
            continue
        home = heavy[0] if heavy else roots[0] if roots else op.index
        parent[op.index] = parent[home] = home
        for part in roots:
            parent[part] = home
        work[home] = sum(work[part] for part in roots) + seconds[op.index]
    towers = {op: root(op) for op in parent}
    return {op: tower for op, tower in towers.items() if work[tower] >= enough}, trunk
