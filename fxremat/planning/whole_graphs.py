"""Programs of a step with its forward and its backward compiled whole: `WholeGraphs`.

    torch's     what torch's partitioner keeps, all of it or less. The largest share that can be expected to fit is
                tried first: where nothing has to be given up, that is what `torch.compile` runs
    searched    the fastest order of captured ops, by the seconds that ops take inside of the program before
    traffic     where torch cannot partition the graph: the order whose kernels read and write the fewest bytes

What a phase needs inside cannot be predicted op by op: steps are run, and their peaks are measured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from fxremat.cost.measure import UNBOUNDED
from fxremat.errors import FxrematError
from fxremat.fusion.joint import fused_program
from fxremat.fusion.min_cut import least_traffic
from fxremat.fusion.torch_partition import TorchPartition, TwoPhases
from fxremat.fusion.units import Units, by_phase, is_pointwise
from fxremat.graphs.region import Kernels
from fxremat.options import Options
from fxremat.planning.judged import Judged, shares_of
from fxremat.planning.step import Step
from fxremat.planning.wishes import run_once
from fxremat.plans import Plan
from fxremat.search.candidate import Candidate
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Order, Program

log = logging.getLogger(__name__)
TRIES = 3  # maximum number of searched programs that are compiled for a budget
TRIES_OF_TORCH = 2  # maximum number of programs of torch's partitioner that are compiled beside the first
PARTITIONS = 3  # maximum number of shares for which torch partitions the graph before the first program is compiled
# after a program that takes some bytes too many, one is tried that takes this many times as many fewer
CLOSER = 1.02
# another program is compiled only if it can be faster than one that fits by this factor, or the one found is slower
CLOSE = 1.02
GUESS = 0.3  # seconds of a pointwise op inside of a phase over its seconds by itself, before any were measured


class Judge(Protocol):
    """Compiles the units of a program that are not compiled yet, and measures it."""

    def __call__(
        self, candidate: Candidate, units: Units, fused: Program | None = None, *, by_torch: float | None = None
    ) -> Judged: ...


class Searched(Protocol):
    """Searches programs with the seconds of each op multiplied by its factor, up to a peak of bytes op by op."""

    def __call__(self, shares: Sequence[float], peak: int | None = None) -> Sequence[Candidate]: ...


class WholeGraphs:
    """Programs of one step with forward and backward compiled whole, and measured.

    Args:
        plan: the step's plan op by op.
        step: the step.
        options: what the user set.
        kernels: the settings to compile with.
        judge: measures a program.
        searched: finds programs op by op.
    """

    def __init__(
        self, plan: Plan, step: Step, options: Options, kernels: Kernels, judge: Judge, searched: Searched
    ) -> None:
        self._plan, self._step, self._options, self._kernels = plan, step, options, kernels
        self._judge, self._searched = judge, searched
        self._partitions: dict[float, TwoPhases | None] = {}  # by share, as torch partitions the graph
        self._torchs: dict[float, Judged | None] = {}  # the same, compiled and measured

    def within(self, budget: int) -> list[Judged]:
        """Return programs that take at most `budget` bytes: none, or a few that compete.

        The first tried is torch's. If it recomputes to fit, or takes more, a program is searched with the seconds that
        ops take inside of it; if that is slow, torch's partitioner may keep less.
        """
        if self._phases(1.0) is None:
            found = [self._of_least_traffic(budget), self._keeping_all(budget)]
        elif (share := self._share_within(budget)) is None:
            found = [guessed := self._judged(self._guessed(budget))]
            found.append(self._faster(guessed, budget))
        else:
            found = [first := self.by_torch(share)]
            if first is not None and (share < 1 or first.peak > budget):
                found.append(ours := self._faster(first, budget))
                if first.peak > budget and (ours is None or ours.time > CLOSE * first.time):
                    found.append(self._less_by_torch(share, budget))
        return [one for one in found if one is not None and one.peak <= budget]

    def as_torch_within(self, budget: int) -> Judged | None:
        """Return the fastest program of torch's partitioner that is likely to fit, if it does; it alone is compiled."""
        share = self._share_within(budget, by_ops=True)
        judged = None if share is None else self.by_torch(share)
        return judged if judged is not None and judged.peak <= budget else None

    def by_torch(self, share: float) -> Judged | None:
        """Return the program that torch's partitioner makes where it may keep this share of what it keeps at most.

        None where the step is not two regions, or torch cannot partition it.
        """
        if share not in self._torchs and (phases := self._phases(share)) is not None:
            candidate = self._running(phases.order)
            fused = fused_program(candidate.program(), phases.units, self._kernels, phases.emitted)
            try:
                self._torchs[share] = self._judge(candidate, phases.units, fused, by_torch=share)
            except FxrematError as error:  # a region with ops that have to be compiled is not
                log.warning("the way in which torch partitions the graph is not tried: %s", error)
                self._torchs[share] = None
        return self._torchs.get(share)

    def _less_by_torch(self, share: float, budget: int) -> Judged | None:
        """Return the first program that fits where torch's partitioner may keep less and less; None if none does."""
        for _ in range(TRIES_OF_TORCH):
            judged = self.by_torch(share)
            if judged is None or judged.peak >= UNBOUNDED:
                return None
            share = self._lower(share, judged.peak - budget)
            if share <= 0:
                return None
            judged = self.by_torch(share)
            if judged is not None and judged.peak <= budget:
                return judged
        return None

    def _share_within(self, budget: int, *, by_ops: bool = False) -> float | None:
        """Return the largest share found with which torch's partition is likely to fit; None if there is none.

        What the forward saves fits then; if `by_ops`, so does the order of captured ops with torch's recomputations.
        """
        share = 1.0
        for _ in range(PARTITIONS):
            phases = self._phases(share) if share > 0 else None
            if phases is None or not phases.saved:
                return None
            peak = self._running(phases.order).peak if by_ops else 0
            above = max(phases.saved, peak) - budget
            if above <= 0:
                return share
            share = self._lower(share, above)
        return None

    def _lower(self, share: float, bytes_: int) -> float:
        """Return the share with which these bytes fewer are saved than with this one."""
        most, now = self._phases(1.0), self._phases(share)
        assert most
        assert now
        return min(share, now.saved / most.saved) - CLOSER * bytes_ / most.saved

    def _phases(self, share: float) -> TwoPhases | None:
        if share not in self._partitions:
            self._partitions[share] = None if self._step.trained is not None else self._partition.phases(share)
        return self._partitions[share]

    @cached_property
    def _partition(self) -> TorchPartition:
        return TorchPartition(self._plan.captured, self._known, self._run_once)

    @cached_property
    def _known(self) -> Order:
        return self._plan.chosen.without_transfers.order()

    @cached_property
    def _run_once(self) -> frozenset[int]:
        return run_once(self._plan.captured, self._options.wishes)

    def _faster(self, first: Judged | None, budget: int) -> Judged | None:
        """Return a searched program that fits; None if there is none, or none that can beat a first one that fits.

        How many bytes a program takes less compiled than op by op is known from the program before.

        Args:
            first: a program that was measured, whose seconds the search goes by.
        """
        if first is None or first.peak >= UNBOUNDED:
            return None
        allowed = first.candidate.peak - int(CLOSER * (first.peak - budget))
        shares = shares_of([first], self._plan.costs, self._plan.captured)
        candidates, tried = self._searched(shares, max(allowed, 1)), [first.candidate]
        for _ in range(TRIES):
            candidate = _fastest_of(candidates, allowed)
            slow = first.peak <= budget and CLOSE * candidate.time > first.time
            if slow or any(candidate is one for one in tried):
                return None
            judged = self._judged(candidate)
            if judged.peak <= budget:
                return judged
            if judged.peak >= UNBOUNDED:
                return None
            tried.append(candidate)
            allowed = min(allowed, candidate.peak) - int(CLOSER * (judged.peak - budget))
        return None

    def _guessed(self, budget: int) -> Candidate:
        """Return the fastest program op by op where pointwise ops take `GUESS` times the seconds that they take."""
        nodes = self._plan.captured.nodes
        shares = [GUESS if is_pointwise(node) else 1.0 for node in nodes]
        return _fastest_of(self._searched(shares, budget), budget)

    def _of_least_traffic(self, budget: int) -> Judged | None:
        """Return the program whose kernels read and write the fewest bytes, or a searched one if that does not fit."""
        judged = self._judged(self._running(least_traffic(self._plan.captured, self._known, self._run_once)))
        return judged if judged.peak <= budget else self._faster(judged, budget)

    def _keeping_all(self, budget: int) -> Judged | None:
        """Return the program that recomputes nothing, if that fits op by op and is of the step as captured."""
        keep_all = self._plan.alternatives.keep_all
        fits = keep_all.layout.graph is self._plan.graph and keep_all.peak <= budget
        return self._judged(keep_all) if fits else None

    def _running(self, order: Order) -> Candidate:
        """Return the program that runs ops in this order, with its peak and its seconds op by op."""
        program, costs = order.program(), self._plan.costs
        peak, time = live_bytes(program, costs.sizes).peak, costs.time(program)
        return self._plan.chosen.without_transfers.refined_to(order, peak, time)

    def _judged(self, candidate: Candidate) -> Judged:
        return self._judge(candidate, by_phase(candidate.program()))


def _fastest_of(candidates: Sequence[Candidate], peak: int) -> Candidate:
    """Return the fastest program of at most `peak` bytes op by op, or the one that takes least."""
    return next((one for one in candidates if one.peak <= peak), candidates[-1])
