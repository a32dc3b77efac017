"""Plans for a `StepGraph` from any framework: ops and values given as numbers, without a torch.fx graph.

Such a step cannot be run here. A plan for it states the order of its ops: `plan.program.steps`, or
`plan.save(path)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, cast

from fxremat.cost.devices import Device
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.graphs.captured import Captured
from fxremat.options import Options, StepOptions, changed_options
from fxremat.planning.captured_step import CapturedStep
from fxremat.plans import Plan
from fxremat.search.candidate import Frontier
from fxremat.search.refine import Ladder
from fxremat.search.survey import survey
from fxremat.step.costs import Costs
from fxremat.step.liveness import Sizes
from fxremat.step.step_graph import Op, StepGraph
from fxremat.units import Bytes, Least, Percent

TYPICAL = "A100"  # the device whose memory bandwidth gives the seconds of ops if the user states none


class NumberedStep(CapturedStep):
    """A captured step that consists of numbers alone: ops, the bytes of the values they read and write, and seconds.

    Args:
        seconds: returns the seconds of an op; None: estimated from the bytes that it reads and writes.
    """

    def __init__(self, graph: StepGraph, options: Options, seconds: Callable[[Op], float] | None = None) -> None:
        self._graph, self._options = graph, options
        self._costs = costs_of_numbers(graph, options.device, seconds)
        self._ladder: Ladder | None = None

    @property
    def options(self) -> Options:
        """The options of the step's plans."""
        return self._options

    @property
    def graph(self) -> Captured:
        """The `StepGraph`; unlike other captured graphs it has no nodes of torch.fx."""
        return cast(Captured, self._graph)

    def plan(self, mem: int | str | None = None, **options: Unpack[StepOptions]) -> Plan:
        """Plan the step within a budget: see `CapturedStep.plan`."""
        settings = self._options
        if mem is not None or options:
            settings = changed_options(settings, mem=mem, **options)
        frontier, budget = self._within(settings)
        return Plan(
            budget=budget,
            chosen=frontier.within(budget),
            alternatives=frontier,
            costs=self._costs,
            device=str(settings.device or self._graph.device),
            timed="estimated",
        )

    def least(self) -> int:
        """Return the least budget that works, in bytes."""
        try:
            return self.plan(1).budget
        except BudgetTooSmall as error:
            return error.minimum

    def _within(self, settings: Options) -> tuple[Frontier, int]:
        """Return the Pareto frontier, searched up to the budget, and the budget in bytes."""
        search = settings.search
        if self._ladder is None:
            found = survey(self._graph, self._costs, solver=settings.solver, slots=search.slots, effort=search.seconds)
            self._ladder = Ladder(given=found)
        match settings.budget:
            case Bytes(count):
                budget = count
            case Percent(share):
                budget = int(self._ladder.given.keep_all.peak * share / 100)
            case Least():
                budget = self._ladder.given.minimum
            case _:
                raise FxrematError('mem="auto" is what a device has free; a step of numbers is on none: give bytes')
        self._ladder = self._ladder.to(budget, self._costs, effort=search.seconds)
        return self._ladder.frontier(budget), budget


def costs_of_numbers(graph: StepGraph, device: Device | None, seconds: Callable[[Op], float] | None) -> Costs:
    """Return the costs of a step graph; without `seconds`, ops take as long as reading and writing their values."""
    target = device or Device.named(TYPICAL)
    sizes = [value.bytes for value in graph.values]

    def by_bytes(op: Op) -> float:
        return target.launch + sum(sizes[value] for value in {*op.reads, *op.writes}) / target.bandwidth

    told = seconds or by_bytes
    return Costs(
        seconds=tuple(_checked(op, told(op)) for op in graph.ops),
        sizes=Sizes(values=sizes, workspace=[0] * len(graph.ops)),
    )


def _checked(op: Op, seconds: Any) -> float:
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
        raise FxrematError(f"costs: {op.name} is said to take {seconds!r}; it is seconds, 0 or more")
    return float(seconds)
