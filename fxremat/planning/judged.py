"""A program in units with what it takes, and what that shows of its ops: how long they take in regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxremat.fusion.units import Units, is_pointwise, ops_of
from fxremat.graphs.accounting import op_keys
from fxremat.graphs.captured import Captured, captured_of
from fxremat.passes.lower_as_one import GROUP
from fxremat.search.candidate import Candidate
from fxremat.step.costs import Costs
from fxremat.step.program import Program

LEAST_SHARE = 0.05  # of its own seconds that an op is taken to need where it is fused with others


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """A program in units with what it takes."""

    candidate: Candidate  # of single ops
    units: Units
    program: Program
    costs: Costs
    peak: int
    single: Costs  # of the ops, one by one

    @property
    def joint(self) -> Captured:
        """The joint graph whose ops are the units."""
        return captured_of(self.program.layout.graph)

    @property
    def slower(self) -> float:
        """How many times as long its ops take, one by one, as each of them once."""
        program, costs = self.candidate.program(), self.single
        return costs.time(program) / costs.time_of(range(len(program.layout.graph.ops)))

    @property
    def seconds_of_units(self) -> dict[int, float]:
        """What each unit takes."""
        timed = zip(self.joint.nodes, self.costs.seconds, strict=True)
        return {node.meta[GROUP]: seconds for node, seconds in timed if GROUP in node.meta}

    @property
    def time(self) -> float:
        """Seconds of all units."""
        return self.costs.time(self.program)


def shares_of(tried: Sequence[Judged], single: Costs, joint: Captured) -> list[float]:
    """How much of its own seconds each op takes in regions: in the program, of those tried, where that is least."""
    found = [_shares_in(judged, single) for judged in tried]
    return [min((shares[key] for shares in found if key in shares), default=1.0) for key in op_keys(joint)]


def _shares_in(judged: Judged, single: Costs) -> dict[str, float]:
    """How much of its own seconds each op takes in the regions of a program, by its key: on average.

    Products, convolutions and attention take what they take alone; what is left of a region's seconds is divided among
    its other ops. In a region that takes longer than its ops, all of them take longer.
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
