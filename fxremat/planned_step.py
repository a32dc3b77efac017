"""The plan of one training step as data, with all figures about it, and without the printing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import fx

from fxremat.chains.chain import Chain
from fxremat.chains.join_schedule import JoinSchedule
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import Timeline, simulate
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.cost.device_memory import DeviceMemory
from fxremat.graphs.captured import Captured, captured_of
from fxremat.host.tier import HostTier
from fxremat.linearize.chain_of import chain_of
from fxremat.passes.lower import Handles, lower
from fxremat.search.candidate import Candidate, Frontier
from fxremat.search.lower_bound import lower_bound
from fxremat.slices.rewrite import SlicedRegion, Slicing
from fxremat.step.costs import Costs, Link, apart
from fxremat.step.liveness import Memory, live_bytes
from fxremat.step.program import Program
from fxremat.step.step_graph import StepGraph
from fxremat.units import format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, kw_only=True)
class WeightBudget:
    """The figures of a step that updates its weights, whose budget covers weights, gradients and optimizer state."""

    handles: Handles  # the inputs of the graphs through which they reach the parameters
    keep_all_peak: int  # bytes of keep-all, with all parameters on the device
    minimum: int  # the least budget
    hosted: frozenset[int] = frozenset()  # values of the parameters that live on the host
    optimizer: str = ""  # the optimizer that updates the parameters, as `ops.parameters.kind_of_optimizer` names it
    later: bool = False  # the parameters are updated in `optimizer.step()`, not in the backward
    step_bytes: int = 0  # the peak of `optimizer.step()` then


@dataclass(frozen=True, kw_only=True, eq=False)
class Compiled:
    """The regions of a step that Inductor compiles, with the program that they make and its costs."""

    chosen: Candidate  # the program in units: compiled regions, and ops that run as they are
    costs: Costs  # seconds and bytes of the units
    regions: int  # the number of compiled regions
    distinct: int  # regions that were compiled; equal ones share their kernels
    ops: int  # executions of ops that are in regions
    seconds: float  # spent on compiling for this plan


class PlannableStep(Protocol):
    """The captured step of a plan, as far as it is used to plan again; `fxremat.CapturedStep` is one."""

    @property
    def sizes(self) -> str:
        """The sizes that may change, as `tokens[1] = 300`; "" where all are fixed."""

    @property
    def resizable_inputs(self) -> frozenset[str]:
        """The names of the inputs whose sizes `at` may set; sizes of other inputs may follow from these."""

    @property
    def plan(self) -> Callable[..., Any]:
        """The method that plans within another budget, or with other options: `plan(mem, **options)`."""

    def least(self) -> int:
        """Return the least budget that works, in bytes."""

    @property
    def at(self) -> Callable[..., Any]:
        """The method that returns the step for inputs of other sizes: `at(tokens=300)`."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlannedStep:
    """The plan of one training step inside a budget: the chosen program, its alternatives, and figures about both.

    Bytes are above what was allocated when forward began; seconds are those of the device it was planned for.
    """

    budget: int  # bytes that the user allows
    chosen: Candidate
    alternatives: Frontier  # the frontier that it was chosen from
    costs: Costs
    device: str
    timed: str  # the source of times: "measured" or "estimated"
    tier: HostTier | None = None  # where values may wait, with offloading
    link: Link | None = None  # the speeds of copies to the tier and back
    weights: WeightBudget | None = None  # where the step updates its weights, and the budget covers them
    step: PlannableStep | None = None  # the step that was planned; None: the plan was read from a file
    slices: tuple[SlicedRegion, ...] = ()  # regions that run in slices
    slicing: Slicing | None = None  # the settings with which these regions were chosen
    not_sliced: tuple[str, ...] = ()  # where slices were asked for: reasons why ops that need much memory have none
    more_slices: bool = False  # further ways to slice were not tried, and may need less memory
    compiled: Compiled | None = None  # where ops run in compiled regions
    not_compiled: str = ""  # where compiled regions were asked for: the reason why there are none
    on_device: DeviceMemory | None = None  # memory of the device that the user named, with all else that it holds
    environment: Mapping[str, Any] | None = None  # device, versions and settings of a plan read from a file; else None
    saved_as: str = ""  # the file that the plan was read from; "": none
    assumed: str = ""  # the assumptions on a device that costs were estimated for

    def __repr__(self) -> str:
        return f"<fxremat plan: {self.headline}>"

    @property
    def running(self) -> Self:
        """This plan with the program that runs: if regions are compiled, each of them is one op of it."""
        if self.compiled is None:
            return self
        chosen = self.compiled.chosen
        alone = Frontier(keep_all=self.alternatives.keep_all, candidates=(chosen,))
        return replace(self, chosen=chosen, costs=self.compiled.costs, alternatives=alone, compiled=None)

    @property
    def op_by_op(self) -> Self:
        """This plan without compiled regions: the program op by op that they were formed in."""
        return replace(self, compiled=None) if self.compiled else self

    @property
    def predicted_peak(self) -> int:
        """The peak in bytes, exact up to the allocator's rounding."""
        return max(self.running.chosen.peak, self.weights.step_bytes if self.weights else 0)

    @property
    def predicted_time(self) -> float:
        """The seconds that one forward and backward take by this plan."""
        return self.running.chosen.time

    @property
    def keep_all_peak(self) -> int:
        """The peak in bytes of the step without recomputation (keep-all), which budgets in percent refer to."""
        return self.weights.keep_all_peak if self.weights else self.alternatives.keep_all.peak

    @property
    def keep_all_time(self) -> float:
        """The seconds of one forward and backward where all is kept and nothing recomputed (keep-all)."""
        return self.alternatives.keep_all.time

    @cached_property
    def minimum(self) -> int:
        """The least budget, in bytes, that this model can be compiled with.

        With slices, reading it for the first time may start a search, which is about as slow as a plan.
        """
        if not (self.more_slices and self.step):
            return self.known_minimum
        return min(self.known_minimum, self.step.least())

    @property
    def known_minimum(self) -> int:
        """The least budget, in bytes, of the programs that were tried for this plan."""
        return self.weights.minimum if self.weights else self.alternatives.minimum

    @property
    def sizes(self) -> str:
        """The sizes that the plan is for and that may change, as `tokens[1] = 300`; "" where all are fixed."""
        return self.step.sizes if self.step else ""

    @property
    def frontier(self) -> tuple[tuple[int, float], ...]:
        """The (peak in bytes, time in seconds) of every plan on offer, fastest first."""
        return tuple((candidate.peak, candidate.time) for candidate in self.alternatives.candidates)

    @property
    def graph(self) -> StepGraph:
        """The step that the plan was made for: forward and backward op by op."""
        return self.chosen.layout.graph

    @property
    def step_graph(self) -> StepGraph:
        """The step as numbers alone, without nodes of torch.fx: `to_json()` writes it."""
        return self.graph.step if isinstance(self.graph, Captured) else self.graph

    def to_networkx(self) -> nx.DiGraph[tuple[str, int]]:
        """Return the step as a graph of networkx: see `StepGraph.to_networkx`."""
        return self.graph.to_networkx()

    @property
    def captured(self) -> Captured:
        """The step with the graph of torch.fx that it was read from."""
        return captured_of(self.graph)

    @cached_property
    def chain(self) -> Chain:
        """The model as a chain of blocks, with the seconds and bytes of each, as the solvers see it."""
        return chain_of(self.chosen.layout, self.costs)

    @property
    def schedule(self) -> Schedule | JoinSchedule:
        """The operations in order, block by block; a refined plan departs from them here and there (see `program`)."""
        return self.chosen.join.schedule if self.chosen.join else self.chosen.schedule

    @cached_property
    def timeline(self) -> Timeline | JoinTimeline:
        """The schedule simulated on the chain, or on the join of its towers: memory during each of its operations."""
        return self.chosen.join or simulate(self.chain, self.chosen.schedule)

    @cached_property
    def lower_bound(self) -> float:
        """The seconds that no choice of what to recompute, op by op, beats within the budget.

        It holds for programs that run the backward in its captured order. For others (towers that take turns), and
        where values may wait on the host, the bound is the time of keep-all.
        """
        if self.chosen.join or self.link:
            return self.costs.time_of(range(len(self.graph.ops))) if self.slices else self.keep_all_time
        computing, communicating = apart(self.graph, self.costs)
        return max(communicating, lower_bound(self.graph, computing, self.budget))

    @cached_property
    def program(self) -> Program:
        """The program that runs, op by op, or unit by unit where regions are compiled."""
        return self.running.chosen.program()

    @cached_property
    def memory(self) -> Memory:
        """The bytes alive during each step of the program."""
        return live_bytes(self.program, self.running.costs.sizes)

    @cached_property
    def graphs(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph that run the plan's program."""
        return lower(
            self.program,
            self.tier.name if self.tier else "",
            self.weights.handles if self.weights else None,
            fresh=self.running.costs.fresh,
        )

    @property
    def loss_places(self) -> tuple[int, ...]:
        """Indices of the losses' gradients among the backward graph's inputs, counted from the end: -1 is the last."""
        graph = self.graph
        count = len(graph.tangents)
        return tuple(place - count for place, value in enumerate(graph.tangents) if value in graph.root_tangents)

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The graph (*inputs) -> (*outputs, *saved); `print_readable()` shows it with its blocks."""
        return self.graphs[0]

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The graph (*saved, *gradients of the outputs) -> gradients of the inputs."""
        return self.graphs[1]

    @cached_property
    def gradient_bytes(self) -> int:
        """The bytes of parameter and input gradients that are alive at the peak; fewer than all that are returned."""
        at = max(range(len(self.memory.during)), key=self.memory.during.__getitem__, default=-1)
        program = self.program
        written = (version for step in program.steps[: at + 1] for version in step.writes)
        alive = {program.version_of[version] for version in written} & program.layout.graph.returned
        return sum(self.running.costs.sizes.values[value] for value in alive)

    @property
    def headline(self) -> str:
        """The plan in a line, for logs."""
        return (
            f"peak {format_bytes(self.predicted_peak)} of {format_bytes(self.budget)} allowed, "
            f"time {format_seconds(self.predicted_time)}, "
            f"{format_ratio(self.predicted_time, self.keep_all_time, '.2f')}x of keeping everything; "
            f"the least budget is {format_bytes(self.known_minimum)}{' or less' if self.more_slices else ''}"
        )
