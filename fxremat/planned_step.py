"""What is planned for one training step, and everything one may want to know about it, without the printing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

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


@dataclass(frozen=True, kw_only=True)
class WeightBudget:
    """What the budget of a step refers to that updates its weights."""

    handles: Handles  # of the parameters, in the graphs
    keep_all_peak: int  # bytes with everything on the device
    minimum: int  # the least budget
    hosted: frozenset[int] = frozenset()  # values of the parameters that live on the host
    optimizer: str = ""  # that updates them, as `ops.parameters.kind_of_optimizer` names it


@dataclass(frozen=True, kw_only=True, eq=False)
class Compiled:
    """A step whose ops are taken together into regions, which Inductor compiles, and what these take."""

    chosen: Candidate  # in units: regions, and ops that run as they are
    costs: Costs  # of the units
    regions: int
    distinct: int  # that were compiled; equal ones share their kernels
    ops: int  # executions of ops that are in regions
    seconds: float  # that compiling took, for this plan


class PlannableStep(Protocol):
    """The captured step that a plan is of, which can be planned again: `fxremat.CapturedStep`."""

    @property
    def sizes(self) -> str:
        """The sizes that may change, as `tokens[1] = 300`; "" where all are fixed."""

    @property
    def resizable_inputs(self) -> frozenset[str]:
        """The names of the inputs that have such sizes; those of others may follow from them."""

    @property
    def plan(self) -> Callable[..., Any]:
        """Plan within another budget, or with other options: `plan(mem, **options)`."""

    def least(self) -> int:
        """Return the least budget that works, in bytes."""

    @property
    def at(self) -> Callable[..., Any]:
        """Return the step for inputs of other sizes: `at(tokens=300)`."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlannedStep:
    """One training step inside a budget.

    Bytes are above what was allocated when forward began; seconds are those of the device it was planned for.
    """

    budget: int  # bytes that the user allows
    chosen: Candidate
    alternatives: Frontier  # what else there was to choose from
    costs: Costs
    device: str
    timed: str  # how times were found: "measured" or "estimated"
    tier: HostTier | None = None  # where values may wait, with offloading
    link: Link | None = None  # how fast they get there and back
    weights: WeightBudget | None = None  # where the step updates its weights, and the budget covers them
    step: PlannableStep | None = None  # that was planned; None: it was read from a file
    slices: tuple[SlicedRegion, ...] = ()  # regions that run in slices
    slicing: Slicing | None = None  # with which they were chosen
    not_sliced: tuple[str, ...] = ()  # why ops that need much are whole, where slices were asked for
    more_slices: bool = False  # further ways to slice were not needed, and may need less
    compiled: Compiled | None = None  # where ops run in compiled regions
    not_compiled: str = ""  # why they do not, where that was asked for
    on_device: DeviceMemory | None = None  # what else the device holds that it was planned for by name
    environment: Mapping[str, Any] | None = None  # that it was made in, where it was read from a file
    saved_as: str = ""  # the file that it was read from
    assumed: str = ""  # what was taken for granted of a device that the step was not captured on

    def __repr__(self) -> str:
        return f"<fxremat plan: {self.headline}>"

    @property
    def running(self) -> Self:
        """The plan of what runs: of units, where these are compiled, with joint graph and costs of their own."""
        if self.compiled is None:
            return self
        chosen = self.compiled.chosen
        alone = Frontier(keep_all=self.alternatives.keep_all, candidates=(chosen,))
        return replace(self, chosen=chosen, costs=self.compiled.costs, alternatives=alone, compiled=None)

    @property
    def op_by_op(self) -> Self:
        """The plan of single ops that one of compiled units was made of."""
        return replace(self, compiled=None) if self.compiled else self

    @property
    def predicted_peak(self) -> int:
        """Bytes, exact up to the allocator's rounding."""
        return self.running.chosen.peak

    @property
    def predicted_time(self) -> float:
        """Seconds of one forward and backward."""
        return self.running.chosen.time

    @property
    def keep_all_peak(self) -> int:
        """Bytes at the peak when everything is kept: what percentages refer to."""
        return self.weights.keep_all_peak if self.weights else self.alternatives.keep_all.peak

    @property
    def keep_all_time(self) -> float:
        """Seconds of one forward and backward when everything is kept."""
        return self.alternatives.keep_all.time

    @cached_property
    def minimum(self) -> int:
        """The least budget, in bytes, that this model can be compiled with.

        With slices, it may have to be searched for when it is first asked for, which takes about as long as a plan.
        """
        if not (self.more_slices and self.step):
            return self.known_minimum
        return min(self.known_minimum, self.step.least())

    @property
    def known_minimum(self) -> int:
        """The least budget, in bytes, of what was looked at for this plan."""
        return self.weights.minimum if self.weights else self.alternatives.minimum

    @property
    def sizes(self) -> str:
        """The sizes that the plan is for and that may change, as `tokens[1] = 300`; "" where all are fixed."""
        return self.step.sizes if self.step else ""

    @property
    def frontier(self) -> tuple[tuple[int, float], ...]:
        """(peak in bytes, time in seconds) of every plan on offer, fastest first."""
        return tuple((candidate.peak, candidate.time) for candidate in self.alternatives.candidates)

    @property
    def graph(self) -> StepGraph:
        """Forward and backward op by op, which it was made for."""
        return self.chosen.layout.graph

    @property
    def captured(self) -> Captured:
        """The same with the graph of torch.fx that it was read from."""
        return captured_of(self.graph)

    @cached_property
    def chain(self) -> Chain:
        """The model as a chain of blocks."""
        return chain_of(self.chosen.layout, self.costs)

    @property
    def schedule(self) -> Schedule | JoinSchedule:
        """What runs, in order, block by block; a refined plan departs from it here and there (see `program`)."""
        return self.chosen.join.schedule if self.chosen.join else self.chosen.schedule

    @cached_property
    def timeline(self) -> Timeline | JoinTimeline:
        """The schedule simulated on the chain, or on the join of its towers: memory during each of its operations."""
        return self.chosen.join or simulate(self.chain, self.chosen.schedule)

    @cached_property
    def lower_bound(self) -> float:
        """Seconds that no choice of what to recompute, op by op, beats within the budget.

        Of programs that run the backward in its captured order; of others (towers that take turns), and where values
        may wait on the host, it is only known that they take no less than keeping everything.
        """
        if self.chosen.join or self.link:
            return self.costs.time_of(range(len(self.graph.ops))) if self.slices else self.keep_all_time
        computing, communicating = apart(self.graph, self.costs)
        return max(communicating, lower_bound(self.graph, computing, self.budget))

    @cached_property
    def program(self) -> Program:
        """What runs, op by op, or unit by unit where these are compiled."""
        return self.running.chosen.program()

    @cached_property
    def memory(self) -> Memory:
        """Bytes alive during each step of the program."""
        return live_bytes(self.program, self.running.costs.sizes)

    @cached_property
    def graphs(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph."""
        return lower(
            self.program,
            self.tier.name if self.tier else "",
            self.weights.handles if self.weights else None,
            fresh=self.running.costs.fresh,
        )

    @property
    def loss_places(self) -> tuple[int, ...]:
        """The places of the losses' gradients among the backward graph's inputs, counted from their end."""
        graph = self.graph
        count = len(graph.tangents)
        return tuple(place - count for place, value in enumerate(graph.tangents) if value in graph.root_tangents)

    @property
    def forward_graph(self) -> fx.GraphModule:
        """(*inputs) -> (*outputs, *saved); `print_readable()` shows it with its blocks."""
        return self.graphs[0]

    @property
    def backward_graph(self) -> fx.GraphModule:
        """(*saved, *gradients of the outputs) -> gradients of the inputs."""
        return self.graphs[1]

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of parameter and input gradients that are there at the peak; `modules` has all that are returned."""
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
