"""Programs cut into units (regions that Inductor compiles, and single ops), with measured costs and peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxremat.fusion.units import Units, is_pointwise, ops_of
from fxremat.graphs.accounting import op_keys
from fxremat.graphs.captured import Captured, captured_of
from fxremat.passes.lower_as_one import GROUP
from fxremat.planned_step import WeightBudget
from fxremat.search.candidate import Candidate
from fxremat.step.costs import Costs
from fxremat.step.program import Program
from fxremat.step.transferred import ProgramWithTransfers

LEAST_SHARE = 0.05  # an op fused with others counts with at least this fraction of its seconds by itself


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """A program (order of executed ops) divided into compiled regions and single ops, with measured costs and peak."""

    candidate: Candidate  # the op-by-op program that was cut into the units
    units: Units
    program: Program
    costs: Costs
    peak: int  # bytes
    single: Costs  # costs of the ops when they run one by one
    transfers: ProgramWithTransfers | None = None  # `program` with its copies to the host, if it makes any
    weights: WeightBudget | None = None  # the figures of its updates of weights, if it makes any
    by_torch: float | None = None  # the share of `TorchPartition.phases`, if torch partitioned the graph

    @property
    def fused(self) -> Candidate:
        """The program in units as a candidate, before copies to the host."""
        return self.candidate.in_units(self.program, self.peak, self.costs.time(self.program))

    @property
    def joint(self) -> Captured:
        """The joint forward-backward graph in which each compiled region counts as one op."""
        return captured_of(self.program.layout.graph)

    @property
    def slower(self) -> float:
        """The seconds of the program run op by op, with its recomputations, over those of each op run once."""
        program, costs = self.candidate.program(), self.single
        return costs.time(program) / costs.time_of(range(len(program.layout.graph.ops)))

    @property
    def seconds_of_units(self) -> dict[int, float]:
        """Index of a unit (compiled region or single op) -> its seconds."""
        timed = zip(self.joint.nodes, self.costs.seconds, strict=True)
        return {node.meta[GROUP]: seconds for node, seconds in timed if GROUP in node.meta}

    @property
    def time(self) -> float:
        """The seconds of the whole program, those in which it waits for copies included."""
        return self.transfers.time if self.transfers else self.costs.time(self.program)


def shares_of(tried: Sequence[Judged], single: Costs, joint: Captured) -> list[float]:
    """Return for each op its seconds inside a compiled region / its seconds by itself; 1.0 where that is not known.

    The least ratio over all measured programs counts.
    """
    found = [_shares_in(judged, single) for judged in tried]
    return [min((shares[key] for shares in found if key in shares), default=1.0) for key in op_keys(joint)]


def _shares_in(judged: Judged, single: Costs) -> dict[str, float]:
    """Return seconds inside compiled regions / seconds alone for the ops of one program, averaged by op key.

    Matrix products, convolutions and attention count as long as when they run alone; the rest of a region's
    seconds is divided among its other ops. In a region that is slower than its ops one by one, all its ops get
    the same ratio.
    """
    program, joint = judged.candidate.program(), captured_of(judged.candidate.layout.graph)
    shares: dict[str, list[float]] = {}
    for place, taken in judged.seconds_of_units.items():
        unit = judged.units[place]
        if not unit.compiled:
            continue
        ops = ops_of(program, unit)
        alone = single.time_of(ops)
        fused = {op for op in ops if is_pointwise(joint.nodes[op])}
        together = single.time_of(op for op in ops if op in fused)
        left = max(LEAST_SHARE, (taken - alone + together) / together) if together else 1.0
        for op in ops:
            share = taken / alone if taken > alone else left if op in fused else 1.0
            shares.setdefault(joint.ops[op].key, []).append(share)
    return {key: sum(found) / len(found) for key, found in shares.items()}
