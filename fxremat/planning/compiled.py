"""Compile the ops of an op-by-op plan in groups with Inductor, where that fits and is faster.

    candidates    op-by-op programs (orders of ops with recomputations), fastest first; some exceed the budget, since
                  compiled groups may need less memory
    units         each program is cut into units: groups of ops to compile (regions), and single ops. `CUTS` has two
                  ways: by what Inductor can fuse, and by block. Regions that would gain little are left as single ops
    judged        regions are compiled and measured on the step's real values; peak and time of a program follow from
                  those of its units

A program in regions is chosen by measured peak and time, and only after one run of the step stayed within the
budget. If none fits, or none is faster, the op-by-op plan stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt
from time import monotonic

from fxremat.cost.calibrate import costs_of_phases, has_room, peak_of_step, seconds_of_steps
from fxremat.cost.measure import known_costs, measure
from fxremat.cost.remembered import keep, of_ops, recall
from fxremat.cost.updates import units_of, with_own_sizes
from fxremat.device import kind_of
from fxremat.errors import BudgetTooSmall
from fxremat.fusion.joint import fused_program
from fxremat.fusion.units import (
    Unit,
    Units,
    alone,
    by_block,
    by_phase,
    is_pointwise,
    ops_of,
    pointwise,
    unit_bytes,
    worth_compiling,
)
from fxremat.graphs.accounting import device_of, op_keys
from fxremat.graphs.captured import (
    Captured,
    captured_of,
    inputs_across,
    with_updates_inside,
    without_updates_inside,
)
from fxremat.graphs.region import Kernels, Region, compile_all, regions_of
from fxremat.ops.decompositions import DECOMPOSITIONS
from fxremat.ops.seeded import ALWAYS_COMPILED
from fxremat.options import Options
from fxremat.planned_step import Compiled, WeightBudget
from fxremat.planning.facts import with_loss
from fxremat.planning.frontier_cache import NO_GRAPH, key_of
from fxremat.planning.judged import Judged, shares_of
from fxremat.planning.step import Step
from fxremat.planning.stored import read, write
from fxremat.planning.surveys import ABOVE, searched_again
from fxremat.planning.whole_graphs import WholeGraphs
from fxremat.plans import Plan
from fxremat.progress import progress
from fxremat.search.candidate import Candidate, Frontier, exchanged
from fxremat.settings import Inductor
from fxremat.step.costs import Link
from fxremat.step.liveness import Sizes, live_bytes
from fxremat.step.program import Program
from fxremat.step.step_graph import StepGraph
from fxremat.transfers.activations import least_size
from fxremat.transfers.offloading import Source
from fxremat.transfers.weight_updates import best_within
from fxremat.units import format_seconds

log = logging.getLogger(__name__)
TRIES = 4  # for each way to form groups of ops (`CUTS`), maximum number of programs that are compiled and measured
# search again, with measured region times, if a program takes more than this times the seconds of each op run
# once
WORTH_IT = 1.02
# try the next of the `CUTS` if a program in regions takes more than this times the seconds of the op-by-op
# program
FASTER = 0.99
SLOWER = 1.1  # a region that takes more than this times the summed seconds of its ops runs op by op
# regions slower than `SLOWER` run op by op if this saves at least this fraction of the program's seconds
WORTH_APART = 0.005
LITTLE = 0.003  # nothing is compiled if compiling every region would save at most this fraction of a step's seconds
STEPS = 10_000  # compiling regions has to pay off within this many training steps
COMPILING = 0.05  # estimated seconds to compile one op; 0.02 to 0.1 were measured on two cores
# seconds of compiling allowed for the second of the `CUTS`; or half the seconds spent compiling so far, if more
QUICK = 5.0
PHASES = 2  # forward and backward: where each is one region, steps are measured instead of regions
# regions are not tried if whole graphs take at most this times the seconds of the op-by-op program
CLEARLY = 0.9
# unless the user asks for it, phases are compiled whole on a CPU only if ops that fuse take this fraction of a step
PROMISING = 0.1
ACROSS = 0.2  # fraction of the seconds of ops that fuse which fusing across regions is expected to save
NOTHING_FITS = "no program in regions fits"
LITTLE_GAINED = "regions that fit would gain little, or nothing"

Cut = Callable[[Program, Sizes, int], Units]
CUTS: tuple[Cut, ...] = (pointwise, lambda program, _, __: by_block(program))


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The chosen program as stored on disk for later processes, without its graph."""

    candidate: Candidate
    units: Units  # compiled regions and single ops, in order; () if the program runs op by op
    seconds: float
    why: str  # the reason why nothing is compiled; unused if something is
    by_torch: float | None = None  # the share of `TorchPartition.phases`, if torch partitioned the graph


def with_compiled_kernels(plan: Plan, step: Step, options: Options) -> Plan:
    """Return the plan with ops in compiled regions if that fits and is faster, else the op-by-op plan with the reason.
    """
    search = _Search(plan, replace(step, graph=plan.captured), options)
    return search.chosen_before() or search.chosen()


def compiles_whole_graphs(graph: StepGraph, options: Options) -> bool:
    """Tell whether the user wants forward and backward compiled whole on the device of this step."""
    return options.compiles and (options.inductor or Inductor()).compiles_whole_graphs(
        in_triton=kind_of(device_of(graph)).in_triton
    )


class _Search:
    """The search for the fastest program in compiled regions, starting from one op-by-op plan."""

    def __init__(self, plan: Plan, step: Step, options: Options) -> None:
        self._plan, self._step, self._options = plan, step, options
        self._kernels = kernels_of(options)
        self._single = plan.costs  # seconds and bytes of each op when it runs by itself
        self._budget = plan.budget  # bytes; lowered if a program allocates more than was predicted
        # for each op: its seconds inside compiled regions / its seconds as an uncompiled op; None until
        # measured
        self._shares: Sequence[float] | None = None
        self._tried: list[Judged] = []  # programs in compiled regions that were measured so far
        self._gaining = False  # True once some program would be faster in compiled regions than op by op
        self._compiling = 0.0  # seconds spent compiling so far

    def chosen_before(self) -> Plan | None:
        """Return the plan that an earlier search stored on disk; None if there is none, or it does not fit."""
        known = read(device_of(self._plan.graph), self._key, _Chosen, Unit)
        if known is None:
            return None
        candidate = exchanged(self._plan.graph)(known.candidate)
        if known.by_torch is not None:
            judged = self._whole_graphs.by_torch(known.by_torch)
        else:
            judged = self._fitting(self._judged(candidate, known.units)) if known.units else self.op_by_op
        if judged is None or judged.peak > self._plan.budget or (known.units and not self._runs_within(judged)):
            return None
        return self.plan_of(judged, known.seconds, known.why)

    def chosen(self) -> Plan:
        """Return the plan of the fastest program that fits, in compiled regions or op by op, and store the choice.

        A program in regions is run once first: if it allocates more than the budget, a smaller one is searched
        for.
        """
        plan = self._plan
        for _ in range(TRIES):
            whole = self.whole()
            alone = [self.op_by_op] if self._fits_op_by_op else []
            enough = whole and (not alone or min(one.time for one in whole) <= CLEARLY * self.op_by_op.time)
            in_regions = [] if enough else self.in_regions()
            whole += self.as_torch()
            rivals = [*whole, *in_regions, *alone]
            if not rivals:
                return replace(plan, not_compiled=NOTHING_FITS)
            times = [*(judged.time for judged in whole), *self._seconds(in_regions, alone)]
            best = min(range(len(rivals)), key=times.__getitem__)
            chosen, seconds = rivals[best], times[best]
            if not chosen.units or self._runs_within(chosen):
                compiled = times[: len(times) - len(alone)]
                why = f"in regions it would take {format_seconds(min(compiled))}" if compiled else LITTLE_GAINED
                self._keep(chosen, seconds, why)
                return self.plan_of(chosen, seconds, why)
            self._budget = min(self._budget, chosen.peak - 1)
        return replace(plan, not_compiled=NOTHING_FITS)

    def _seconds(self, in_regions: Sequence[Judged], alone: Sequence[Judged]) -> list[float]:
        """Return the seconds of a step with each program, in the order `[*in_regions, *alone]`.

        Predicted and timed seconds are both off by some percent, so their geometric mean is returned. Whole
        steps are timed only once for a graph: how much slower steps in regions were than predicted, relative to
        the op-by-op step, is stored on disk, and later predictions are multiplied by it.

        Args:
            in_regions: programs whose ops run in compiled regions.
            alone: the op-by-op program in a list, or () if it does not fit.
        """
        rivals, key, device = [*in_regions, *alone], self._key_of_ops("factor"), device_of(self._plan.graph)
        foreseen = [rival.time for rival in rivals]
        if self._plan.weights is not None:  # running a step would update them
            return foreseen
        known = recall(device, key, 1)
        if known is None and in_regions and alone:
            programs, costs = [rival.program for rival in rivals], [rival.costs for rival in rivals]
            seconds = seconds_of_steps(programs, costs, self._step.inputs, self._tier)
            log.debug("seconds of steps in regions, and of single ops: %s; foreseen: %s", seconds, foreseen)
            if seconds is None:
                return foreseen
            between = [sqrt(took * expected) for took, expected in zip(seconds, foreseen, strict=True)]
            longer = [time / expected for time, expected in zip(between, foreseen, strict=True)]
            keep(device, key, [min(longer[:-1]) / longer[-1]])
            return between
        factor = 1.0 if known is None else known[0]
        return [*(factor * rival.time for rival in in_regions), *(rival.time for rival in alone)]

    def _key_of_ops(self, what: str) -> str:
        """Return the key that stores a measurement of this graph's ops in compiled regions, the same for all budgets.
        """
        return f"{what} {self._kernels.configuration} {of_ops(self._plan.graph)}"

    def _keep(self, judged: Judged, seconds: float, why: str) -> None:
        """Store the chosen program on disk, where `chosen_before` finds it."""
        candidate = exchanged(NO_GRAPH)(judged.candidate)
        how = judged.by_torch
        chosen = _Chosen(candidate=candidate, units=judged.units, seconds=seconds, why=why, by_torch=how)
        write(device_of(self._plan.graph), self._key, chosen)

    @cached_property
    def _calibration(self) -> float:
        """The measured seconds of an entire step, divided by the summed seconds of its ops measured one by one.

        Measured seconds of single compiled regions are multiplied by it.
        """
        ops = range(len(self._plan.graph.ops))
        return self._single.time_of(ops) / known_costs(self._plan.captured).time_of(ops)

    @cached_property
    def _key(self) -> str:
        """The key under which the chosen program is stored: a digest of the graph, costs, budget and options."""
        options, of = self._options, (self._kernels.configuration, self._plan.budget, self._plan.chosen.peak)
        sought = (options.search.seconds, options.search.slots)
        hosted = (self._plan.link, options.host_limit)
        whole = (options.inductor or Inductor()).whole_graphs
        settings = ("in regions, or whole", whole, *of, options.solver, *sought, options.loss_outside.size, *hosted)
        return repr(key_of(self._plan.graph, self._single, settings))

    def whole(self) -> list[Judged]:
        """Return programs that fit, with forward and backward compiled whole, if the user wants that."""
        wanted = self._wants_whole and self._plan.link is None
        return self._whole_graphs.within(self._budget) if wanted else []

    def as_torch(self) -> list[Judged]:
        """Return the program of torch's partitioner that fits best, if it may gain, and the user leaves that open."""
        asked = self._wants_whole or (self._options.inductor or Inductor()).whole_graphs is not None
        if asked or self._plan.link is not None or not self._may_gain_whole:
            return []
        judged = self._whole_graphs.as_torch_within(self._budget)
        return [] if judged is None else [judged]

    @cached_property
    def _wants_whole(self) -> bool:
        return compiles_whole_graphs(self._plan.graph, self._options)

    @cached_property
    def _may_gain_whole(self) -> bool:
        """True if ops that fuse take much of a step, so that fusing across regions may pay off compiling all ops again.
        """
        ops = range(len(self._plan.graph.ops))
        fusing = sum(self._single.seconds[op] for op in ops if is_pointwise(self._plan.captured.nodes[op]))
        pays = COMPILING * len(ops) <= STEPS * ACROSS * fusing
        return pays and fusing >= PROMISING * self._single.time_of(ops)

    @cached_property
    def _whole_graphs(self) -> WholeGraphs:
        options, judge, searched = self._options, self._judged, self._candidates_with
        return WholeGraphs(self._plan, self._step, options, self._kernels, judge, searched)

    def in_regions(self) -> list[Judged]:
        """Return the programs in compiled regions whose steps are to be timed: one or two, or none if none fits.

        The first time for a graph, the seconds of ops inside regions are measured and stored, the search is
        repeated with them, and both programs compete. Later searches, whatever the budget, start from the
        stored seconds.
        """
        joint, known = self._plan.captured, self._plan.alternatives.candidates
        key = self._key_of_ops("shares")
        self._shares = recall(device_of(joint), key, len(joint.ops))
        if self._shares is not None:
            again = self._candidates_with(self._shares)
            found = self.fastest(again)
            if found is None and again is not known and self._gaining:
                found = self.fastest(known)
            return [] if found is None else [found]
        found = self.fastest(known)
        if found is None:
            return []
        self._shares = shares_of(self._tried, self._single, joint)
        keep(device_of(joint), key, self._shares)
        corrected = self.fastest(self._candidates_with(self._shares)) if found.slower > WORTH_IT else None
        return [found] if corrected is None or corrected.units == found.units else [found, corrected]

    def _candidates_with(self, shares: Sequence[float], peak: int | None = None) -> Sequence[Candidate]:
        """Search for programs again, with the seconds of an op multiplied by its factor in `shares` if that is below 1.

        Args:
            peak: the bytes op by op for which programs are improved; None: the budget.
        """
        plan, single = self._plan, self._single
        if min(shares) >= 1:
            return plan.alternatives.candidates
        seconds = tuple(second * min(1.0, share) for second, share in zip(single.seconds, shares, strict=True))
        costs = replace(single, seconds=seconds)
        found = [one.without_transfers for one in plan.alternatives.candidates if one.layout.graph is plan.graph]
        keep_all = plan.alternatives.keep_all
        if keep_all.layout.graph is not plan.graph:  # that of the step as captured, where this one runs in slices
            keep_all = max(found, key=lambda one: one.peak)
        known = Frontier(keep_all=keep_all, candidates=tuple(found))
        return searched_again(known, costs, peak or plan.budget, self._options).candidates

    def fastest(self, candidates: Iterable[Candidate]) -> Judged | None:
        """Return the fastest program in compiled regions that fits; None if none does.

        Candidates are tried in increasing op-by-op time. For each of the `CUTS` the first that fits is taken,
        and the faster of these is returned.
        """
        joint, largest = self._plan.graph, inf if self._plan.link else ABOVE * self._budget
        near = [one.without_transfers for one in candidates if one.peak <= largest and one.layout.graph is joint]
        if self._plan.weights is not None:  # faster ones leave no room for the weights
            seconds = self._single.time(self._plan.chosen.without_transfers.program())
            near = [one for one in near if self._single.time(one.program()) >= seconds * (1 - LITTLE)]
        found: list[Judged] = []
        for cut in CUTS:
            needed = cut is CUTS[0] or not (found or self._fits_op_by_op)
            most = inf if needed else max(QUICK, self._compiling / 2)
            if (judged := self._fastest_cut(near, cut, most)) is not None:
                found.append(judged)
                if judged.time <= FASTER * self.op_by_op.time:
                    break
        return min(found, key=lambda judged: judged.time, default=None)

    def _fastest_cut(self, candidates: Sequence[Candidate], cut: Cut, most: float) -> Judged | None:
        """Return the first candidate that fits when it is cut into regions by `cut`; None if none does.

        None is also returned if compiling would take more than `most` seconds. At most `TRIES` candidates are
        compiled.
        """
        budget, sizes, tries = self._budget, self._single.sizes, 0
        for candidate, program, units, saved in self._in_units(candidates, cut):
            alone = self._plan.link is None  # no value can leave for the host
            if alone and max(unit_bytes(program, sizes, units)) > budget:
                continue
            fused = self._fused(program, units)
            if alone and live_bytes(fused, known_costs(captured_of(fused.layout.graph)).sizes).peak > budget:
                continue
            seconds = _seconds_of_compiling(fused)
            if seconds > most:  # other candidates, cut in the same way, would take about as long to compile
                return None
            if seconds > STEPS * saved:
                continue
            if tries == TRIES:
                return None
            tries += 1
            judged = self._fitting(self._judged(candidate, units, fused))
            if judged.peak <= budget:
                return self._with_slow_regions_apart(judged)
        return None

    def _fitting(self, judged: Judged) -> Judged:
        """Return the program with as many values on the host as makes it fit; as it is if it fits, or none may leave.
        """
        link, budget = self._plan.link, self._budget
        if link is None or judged.transfers:
            return judged
        if self._plan.weights is not None:
            return self._with_weights(judged, self._plan.weights, link)
        if judged.peak <= budget:
            return judged
        source = Source.of(judged.fused, judged.costs, least_size(self._plan.keep_all_peak))
        ways = source.within(budget, link, self._options.host_limit, inf)
        best = min(ways, key=lambda way: way.time, default=None)
        if best is None:
            return judged
        result = best.performed(judged.costs)
        return replace(judged, program=result.program, peak=result.memory.peak, transfers=result)

    def _with_weights(self, judged: Judged, known: WeightBudget, link: Link) -> Judged:
        """Return the program with updates of weights, and with as little on the host as makes it fit.

        Args:
            known: the figures of the op-by-op plan.
        """
        trained, joint = self._step.trained, judged.joint
        assert trained is not None
        there = inputs_across(self._plan.captured, joint)
        costs = with_own_sizes(joint, judged.costs)
        numbers = {there[value]: number for value, number in trained.numbers.items()}
        units = units_of(joint, trained.optimizer, costs, numbers=numbers, later=known.later)
        settled = None if trained.settled is None else frozenset(there[value] for value in trained.settled)
        alone = judged.fused
        try:
            best = best_within(
                Frontier(keep_all=alone, candidates=(alone,)),
                units,
                costs,
                link,
                self._budget,
                settled=settled,
                values_too=self._options.offloads,
                host_mem=self._options.host_limit,
            )
        except BudgetTooSmall as error:
            return replace(judged, peak=error.minimum)
        result, here = best.candidate.transfers, {other: value for value, other in there.items()}
        assert result is not None
        weights = replace(
            known,
            handles=replace(known.handles, numbers=numbers),
            minimum=min(known.minimum, best.minimum),
            hosted=frozenset(here[value] for value in best.choice.hosted),
            step_bytes=best.step_bytes,
        )
        return replace(
            judged, program=result.program, costs=costs, peak=best.peak, transfers=result, weights=weights
        )

    def _fused(self, program: Program, units: Units) -> Program:
        """Return the program with each unit as one op; the graph of its units updates the same weights."""
        if self._step.trained is None:
            return fused_program(program, units, self._kernels)
        free = without_updates_inside(self._plan.captured)
        fused = fused_program(
            replace(program, layout=replace(program.layout, graph=free)), units, self._kernels
        )
        joint = captured_of(fused.layout.graph)
        there = inputs_across(self._plan.captured, joint)
        updated = with_updates_inside(joint, {there[value] for value in self._plan.captured.updates_of})
        return replace(fused, layout=replace(fused.layout, graph=updated))

    def _in_units(
        self, candidates: Iterable[Candidate], cut: Cut
    ) -> Iterator[tuple[Candidate, Program, Units, float]]:
        """Yield candidates with their compiled groups of ops, and an upper bound on the seconds that these save.

        Each candidate comes first with only those regions compiled that gain much, then with all of them.
        Candidates that cannot become faster than the op-by-op program are left out, if that program fits.
        """
        least = LITTLE * self._single.time_of(range(len(self._plan.graph.ops)))
        single = self.op_by_op.time if self._fits_op_by_op else inf
        for candidate in candidates:
            program = candidate.program()
            seconds = self._single.time(program)
            gaining = [step.op for step in program.executions if self._shares is None or self._shares[step.op] < 1]
            if single - seconds + self._gain(gaining) < least:
                continue
            units = cut(program, self._single.sizes, self._plan.budget)
            for some in dict.fromkeys((worth_compiling(program, units, self._names, self._gain, least), units)):
                gained = sum(self._gain(ops_of(program, unit)) for unit in some if unit.compiled)
                saved = single - seconds + gained
                if saved >= least:
                    self._gaining = True
                    yield candidate, program, some, saved

    def _gain(self, ops: Sequence[int]) -> float:
        """Return an upper bound on the seconds saved by compiling these ops together.

        It is the sum of their seconds without the slowest. Once seconds of ops inside compiled groups are
        measured, the saving is computed from them, and may be negative.
        """
        joint, single = self._plan.captured, self._single
        if self._shares is not None:
            return sum(single.seconds[op] * (1 - self._shares[op]) for op in ops)
        fused = [single.seconds[op] for op in ops if is_pointwise(joint.nodes[op])]
        return sum(fused) - max(fused, default=0.0)

    @property
    def _tier(self) -> str:
        """The name of the host tier; "": nothing may leave."""
        return self._plan.tier.name if self._plan.tier else ""

    @cached_property
    def _names(self) -> Sequence[str]:
        """A key for each op; ops with equal keys have equal costs."""
        return op_keys(self._plan.graph)

    @property
    def _fits_op_by_op(self) -> bool:
        """True if running every op by itself fits into the budget.

        Ops that have to be compiled may exceed the plan's peak then.
        """
        return self.op_by_op.peak <= self._plan.budget

    @cached_property
    def op_by_op(self) -> Judged:
        """The program of the op-by-op plan; ops that exist only in compiled form are compiled one by one."""
        plan, program = self._plan, self._plan.chosen.program()
        if any(node.target in ALWAYS_COMPILED for node in plan.captured.nodes):
            candidate = plan.chosen.without_transfers
            steps = candidate.program().steps
            return self._fitting(self._judged(candidate, alone(candidate.program(), range(len(steps)))))
        return Judged(
            candidate=plan.chosen,
            units=(),
            program=program,
            costs=plan.costs,
            peak=plan.chosen.peak,
            single=plan.costs,
            transfers=plan.chosen.transfers,
        )

    def plan_of(self, judged: Judged, time: float, why: str) -> Plan:
        """Return the plan that runs the program `judged`.

        Args:
            time: the seconds of a step.
            why: the reason why ops run one by one, which the plan states if the program has no compiled region.
        """
        regions = regions_of(judged.joint.module.graph)
        if not regions:
            return replace(self._plan, not_compiled=why)
        candidate = replace(judged.candidate, time=self._single.time(judged.candidate.program()))
        time = judged.time if judged.transfers else time  # the copies' times are simulated with it
        compiled = Compiled(
            chosen=candidate.in_units(judged.program, judged.peak, time, judged.transfers),
            costs=judged.costs.scaled(time / judged.time),
            regions=len(regions),
            distinct=len({region.digest for region in regions}),
            ops=sum(region.count for region in regions),
            seconds=self._compiling,
            by_torch=judged.by_torch is not None,
        )
        return replace(self._plan, chosen=candidate, compiled=compiled, weights=judged.weights)

    def _judged(
        self, candidate: Candidate, units: Units, fused: Program | None = None, *, by_torch: float | None = None
    ) -> Judged:
        """Compile and measure those compiled groups of a program that are new.

        Return the program with its costs and peak.

        Args:
            fused: the program with each unit as one op, if it was made already.
            by_torch: the share of `TorchPartition.phases` that it was made with, if it was.
        """
        fused = fused or self._fused(candidate.program(), units)
        joint = captured_of(fused.layout.graph)
        began = monotonic()
        compile_new([joint])
        self._compiling += monotonic() - began
        if units == by_phase(candidate.program()) and len(regions_of(joint.module.graph)) == PHASES:
            costs = costs_of_phases(fused, self._step.inputs)
        else:
            costs = measure(joint, self._step.inputs, limit=self._budget).scaled(self._calibration)
        costs = with_loss(joint, costs, self._options)
        peak = live_bytes(fused, costs.sizes).peak
        log.debug(
            "a program of %d bytes and %.4g s takes %d bytes and %.4g s in %d units",
            *(candidate.peak, candidate.time, peak, costs.time(fused), len(units)),
        )
        self._tried.append(
            Judged(
                candidate=candidate,
                units=units,
                program=fused,
                costs=costs,
                peak=peak,
                single=self._single,
                by_torch=by_torch,
            )
        )
        return self._tried[-1]

    def _runs_within(self, judged: Judged) -> bool:
        """Tell whether one run of the step on its real inputs stays within the budget; log if it does not.

        If the device has too little free memory for the run, the predicted peak is trusted, and so it is where running
        the step would update weights.
        """
        if self._plan.weights is not None:
            return True
        step = judged.program, judged.costs, self._step.inputs
        peak = peak_of_step(*step, self._tier)
        if not has_room(*step) if peak is None else peak <= self._plan.budget:
            return True
        took = "could not be run" if peak is None else f"took {peak} bytes for {judged.peak} foreseen"
        log.warning("a program in compiled regions %s: a smaller one is looked for", took)
        return False

    def _with_slow_regions_apart(self, judged: Judged) -> Judged:
        """Return the program with compiled groups that are slower than their ops split up, if that fits and is faster.
        """
        program = judged.candidate.program()
        taken = judged.seconds_of_units
        units, saved = list[Unit](), 0.0
        for place, unit in enumerate(judged.units):
            ops = ops_of(program, unit)
            more = taken.get(place, 0.0) - self._single.time_of(ops) if unit.compiled else 0.0
            slow = more > (SLOWER - 1) * self._single.time_of(ops)
            saved += more if slow else 0.0
            units += alone(program, unit.steps) if slow else [unit]
        if saved <= WORTH_APART * judged.time:
            return judged
        apart = self._fitting(self._judged(judged.candidate, tuple(units)))
        return apart if apart.peak <= self._budget and apart.time < judged.time else judged


def kernels_of(options: Options) -> Kernels:
    """Return the settings with which regions are compiled."""
    config = (options.inductor and options.inductor.config) or {}
    return Kernels(settings=config, decompositions=DECOMPOSITIONS, required=ALWAYS_COMPILED)


def compile_new(graphs: Iterable[Captured]) -> None:
    """Compile those regions of joint graphs that are not compiled yet; log if Inductor cannot compile some."""
    new = list({region.digest: region for graph in graphs for region in _new_regions(graph)}.values())
    left = [region for region in progress(compile_all(new), "compiling regions", total=len(new)) if region.given_up]
    if left:
        log.warning("%d of %d regions do not compile: %s", len(left), len(new), left[0].given_up.splitlines()[0])


def _seconds_of_compiling(program: Program) -> float:
    """Estimate the seconds to compile those regions of a program that are not compiled yet."""
    ops: int = sum(region.count for region in _new_regions(captured_of(program.layout.graph)))
    return COMPILING * ops


def _new_regions(joint: Captured) -> list[Region]:
    """Return the regions of a joint graph that are not compiled yet, without duplicates."""
    distinct = {region.digest: region for region in regions_of(joint.module.graph)}
    return [region for region in distinct.values() if not region.is_compiled]
