"""From a plan of single ops to one whose ops run in regions that Inductor compiles: the fastest that fits.

    candidates    programs of single ops, fastest first: some above the budget too, since regions may need less
    units         each cut into regions, by block or by what can be fused; a guess of its peak compiles nothing
    judged        regions compiled and measured on the step's real values, peak and time exact at the level of units

What is taken fits by measured figures, and the step has run once within the budget before it is trained with. Where no
program in regions fits, or none is faster, the plan of single ops stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from fxremat.cost.calibrate import calibration, peak_of_step
from fxremat.cost.measure import known_costs, measure
from fxremat.fusion.joint import Kernels, fused_program
from fxremat.fusion.units import Unit, Units, alone, by_block, pointwise, unit_bytes
from fxremat.options import Options
from fxremat.passes.lower_as_one import GROUP
from fxremat.planned_step import Compiled
from fxremat.planning.captured import CapturedStep
from fxremat.planning.searched import ABOVE, with_loss
from fxremat.plans import Plan
from fxremat.progress import progress
from fxremat.search.candidate import Candidate
from fxremat.step.costs import Costs
from fxremat.step.joint import Joint
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Program
from fxremat.step.region import regions_of

log = logging.getLogger(__name__)
TRIES = 6  # programs whose regions are compiled, at most
SLOWER = 1.02  # times what its ops take: a region that takes more runs op by op

Cut = Callable[[Program], Units]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Judged:
    """A program in units with what it takes."""

    candidate: Candidate  # of single ops
    units: Units
    kernels: Kernels
    program: Program
    costs: Costs
    peak: int
    compiling: float  # seconds

    @property
    def joint(self) -> Joint:
        """The joint graph whose ops are the units."""
        return self.program.layout.joint

    @property
    def time(self) -> float:
        """Seconds of all units."""
        return self.costs.time(self.program)


def with_compiled_kernels(plan: Plan, step: CapturedStep, options: Options) -> Plan:
    """The plan with its ops in regions, where that fits and is faster."""
    found = _fastest(plan, step, options)
    if found is None:
        log.warning("no program in compiled regions fits: this step runs op by op")
        return plan
    found = _with_slow_regions_apart(found, plan, step, options)
    factor = calibration(found.program, found.costs, step.inputs, step.ranks)
    time = factor * found.time
    if time >= plan.predicted_time:
        log.info("compiled regions would take %.3g s, single ops %.3g s", time, plan.predicted_time)
        return plan
    regions = regions_of(found.joint.module.graph)
    compiled = Compiled(
        chosen=found.candidate.in_units(found.program, found.peak, time),
        costs=found.costs.scaled(factor),
        regions=len(regions),
        distinct=len(set(regions)),
        ops=sum(region.count for region in regions),
        seconds=found.compiling,
    )
    return replace(plan, compiled=compiled)


def _fastest(plan: Plan, step: CapturedStep, options: Options) -> _Judged | None:
    """The fastest program in units that fits, as far as programs of single ops are ordered by their time."""
    kernels = Kernels(settings=options.inductor or {}, decompositions={})
    sizes, tries, compiling = plan.costs.sizes, 0, 0.0
    cuts: dict[str, Cut] = {
        "block": by_block,
        "pointwise": lambda program: pointwise(program, sizes, plan.budget),
    }
    limits = dict.fromkeys(cuts, plan.budget)
    within = [c for c in plan.alternatives.candidates if c.peak <= ABOVE * plan.budget]
    for candidate in within:
        program = candidate.program()
        for name, cut in cuts.items():
            units = cut(program)
            guess = max(unit_bytes(program, sizes, units))
            if guess > limits[name]:
                continue
            if tries == TRIES:
                return None
            tries += 1
            judged = _judged(candidate, units, kernels, step, options, compiling)
            compiling = judged.compiling
            if judged.peak <= plan.budget and _runs_within(judged, plan.budget, step):
                return judged
            limits[name] = guess - max(1, judged.peak - plan.budget)
    return None


def _judged(
    candidate: Candidate,
    units: Units,
    kernels: Kernels,
    step: CapturedStep,
    options: Options,
    compiling: float,
) -> _Judged:
    """Compile and measure what is new of a program in units."""
    fused = fused_program(candidate.program(), units, kernels)
    joint = fused.layout.joint
    new = [region for region in dict.fromkeys(regions_of(joint.module.graph)) if not region.is_compiled]
    for region in progress(new, "compiling regions"):
        compiling += region.compile()
    costs = with_loss(measure(joint, step.inputs), options)
    peak = live_bytes(fused, costs.sizes).peak
    log.debug("a program of %d bytes takes %d in %d units", candidate.peak, peak, len(units))
    return _Judged(
        candidate=candidate,
        units=units,
        kernels=kernels,
        program=fused,
        costs=costs,
        peak=peak,
        compiling=compiling,
    )


def _runs_within(judged: _Judged, budget: int, step: CapturedStep) -> bool:
    """Whether the step, run once on its real inputs, stays within the budget; tells of it where it does not."""
    peak = peak_of_step(judged.program, judged.costs, step.inputs)
    if peak is None or peak <= budget:
        return True
    log.warning(
        "a program in compiled regions took %d bytes for %d foreseen: a smaller one is taken", peak, judged.peak
    )
    return False


def _with_slow_regions_apart(judged: _Judged, plan: Plan, step: CapturedStep, options: Options) -> _Judged:
    """The program with those regions op by op that take longer than their ops, if it still fits, and is faster."""
    program, single = judged.candidate.program(), known_costs(plan.joint)
    taken = {op.node.meta.get(GROUP): judged.costs.seconds[op.index] for op in judged.joint.ops}
    units: list[Unit] = []
    for place, unit in enumerate(judged.units):
        ops = [op for position in unit.steps if (op := program.steps[position].op) is not None]
        slow = unit.compiled and taken[place] > SLOWER * single.time_of(ops)
        units += alone(program, unit.steps) if slow else [unit]
    if len(units) == len(judged.units):
        return judged
    apart = _judged(judged.candidate, tuple(units), judged.kernels, step, options, judged.compiling)
    return apart if apart.peak <= plan.budget and apart.time < judged.time else judged
