"""The plan of one training step as data, with figures derived from it; printing is in other modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import fx

from fxremat.chains.chain import Chain
from fxremat.chains.join_schedule import JoinSchedule
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import Timeline, simulate
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.cost.device_memory import DeviceMemory
from fxremat.cost.layouts import Strides
from fxremat.graphs.accounting import as_traced
from fxremat.graphs.captured import Captured, captured_of, places_of
from fxremat.host.tier import HostTier
from fxremat.linearize.chain_of import chain_of
from fxremat.passes.compress import Compression
from fxremat.passes.lower import Handles, lower
from fxremat.search.candidate import Candidate, Frontier
from fxremat.search.lower_bound import lower_bound
from fxremat.slices.rewrite import SlicedRegion, Slicing
from fxremat.step.costs import Costs, Link, apart
from fxremat.step.liveness import Memory, Sizes, last_uses, live_bytes, retained_peak
from fxremat.step.program import Program
from fxremat.step.reserved import AllocatorState
from fxremat.step.step_graph import StepGraph
from fxremat.transfers.activations import most_on_host
from fxremat.units import format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, kw_only=True)
class WeightBudget:
    """Figures of a plan whose backward also updates the weights, and whose budget covers all memory of the weights.

    That is the weights, their gradients, and the optimizer's state.
    """

    handles: Handles  # the graph inputs through which the step accesses the parameters
    keep_all_peak: int  # peak bytes without any recomputation and with all parameters on the device
    minimum: int  # smallest budget in bytes that works
    hosted: frozenset[int] = frozenset()  # values of the graph that are parameters stored on the host
    optimizer: str = ""  # the optimizer that updates the parameters, as `ops.parameters.kind_of_optimizer` names it
    later: bool = False  # the parameters are updated in `optimizer.step()`, not in the backward
    step_bytes: int = 0  # the peak of `optimizer.step()` then


@dataclass(frozen=True, kw_only=True, eq=False)
class Compiled:
    """The groups of ops ("regions") of a step that Inductor compiles, with the order in which they run, and costs."""

    chosen: Candidate  # the order of ops that runs; each compiled region counts as one op
    costs: Costs  # seconds and bytes of the compiled regions and of the ops between them
    regions: int  # the number of compiled regions
    distinct: int  # number of different compiled regions; equal regions share kernels
    ops: int  # number of op executions inside of compiled regions
    seconds: float  # seconds spent on compiling for this plan
    by_torch: bool = False  # whether torch's partitioner decided what is recomputed, as in `torch.compile`


@dataclass(frozen=True, kw_only=True)
class Means:
    """A way to make a step fit that the planner considered, and what it would give; see `Options.exact`."""

    name: str  # "recomputing", "offloading", "slices", "compiled kernels", "weights on the host", ...
    chosen: bool = False
    slowdown: float | None = None  # seconds, as a multiple of recomputing nothing; None: nothing fits, or not tried
    peak: int | None = None  # bytes; None like `slowdown`
    least: int | None = None  # bytes of the least budget that works, where nothing fits; else None
    why_not: str = ""  # the reason why it was not tried; "": it was

    def __str__(self) -> str:
        if self.why_not:
            return f"{self.name}: {self.why_not}"
        if self.slowdown is None or self.peak is None:
            return f"{self.name}: {format_bytes(self.least or 0)} at least"
        return f"{self.name}: {self.slowdown:.2f}x in {format_bytes(self.peak)}{', chosen' if self.chosen else ''}"


class PlannableStep(Protocol):
    """A captured step as `PlannedStep` uses it to plan again; `fxremat.CapturedStep` is one."""

    @property
    def sizes(self) -> str:
        """The symbolic input sizes and their values, such as `tokens[1] = 300`; "": all sizes are fixed."""

    @property
    def resizable_inputs(self) -> frozenset[str]:
        """Names of the inputs whose sizes `at` can set; sizes of other inputs may be derived from these."""

    @property
    def plan(self) -> Callable[..., Any]:
        """The method `plan(mem, **options)`, which plans the step within another budget or with other options."""

    def least(self) -> int:
        """Return the smallest budget that works, in bytes."""

    @property
    def at(self) -> Callable[..., Any]:
        """The method `at(tokens=300)`, which returns the step for inputs of other sizes."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlannedStep:
    """The plan of one training step within a budget: the chosen program, its alternatives, and figures about both.

    A program is the order in which ops run, recomputations included. Bytes are above what was allocated when
    the forward began; seconds are those of the device that the plan is for.
    """

    budget: int  # bytes that the step may use
    reserving: bool = False  # True: `budget` limits the bytes that the device's allocator reserves
    chosen: Candidate
    alternatives: Frontier  # the Pareto frontier (peak, time) that `chosen` was picked from
    costs: Costs
    device: str
    timed: str  # where the seconds are from: "measured" or "estimated"
    tier: HostTier | None = None  # the host storage for offloaded tensors; None: nothing is offloaded
    link: Link | None = None  # speeds of copies to the tier and back; None: nothing is offloaded
    # figures of a plan whose budget also covers the weights that the step updates; None for other plans
    weights: WeightBudget | None = None
    step: PlannableStep | None = None  # the step that was planned; None: the plan was read from a file
    slices: tuple[SlicedRegion, ...] = ()  # groups of ops that run in slices of the batch or sequence
    slicing: Slicing | None = None  # the settings that `slices` were chosen with
    not_sliced: tuple[str, ...] = ()  # if slices were requested: reasons why ops that need much memory are not sliced
    compression: Compression | None = None  # which values are stored in fewer bytes; None: all are stored as they are
    more_ways: bool = False  # True: some ways to slice or compress were not tried, and might need less memory
    compiled: Compiled | None = None  # the groups of ops that Inductor compiles; None: there are none
    not_compiled: str = ""  # if compiled regions were requested and there are none: the reason
    means: tuple[Means, ...] = ()  # what the planner chose from, if the user let it choose; what was chosen is in it
    # memory of the device that the user named, including parameters, inputs and optimizer state
    on_device: DeviceMemory | None = None
    environment: Mapping[str, Any] | None = None  # device, versions and settings of a plan read from a file; else None
    saved_as: str = ""  # path of the file that the plan was read from; "": it was not read from a file
    assumed: str = ""  # what was assumed about the device that costs were estimated for
    retained: int = 0  # number of backwards of a call that the plan has room for, besides the last: `retained_peak`
    # key of a call (`cost.layouts.key_of`) -> strides of its results, measured, with which the step was traced
    layouts: Mapping[str, Strides] = field(default_factory=dict)
    # PyTorch's caching allocator when the plan was made; None: the device has none, or the plan is from a file
    allocator: AllocatorState | None = None

    def __repr__(self) -> str:
        return f"<fxremat plan: {self.headline}>"

    @property
    def running(self) -> Self:
        """This plan with the program that really runs: each compiled region counts as one op."""
        if self.compiled is None:
            return self
        chosen = self.compiled.chosen
        alone = Frontier(keep_all=self.alternatives.keep_all, candidates=(chosen,))
        return replace(self, chosen=chosen, costs=self.compiled.costs, alternatives=alone, compiled=None)

    @property
    def op_by_op(self) -> Self:
        """This plan with the program before compilation, in which each op of a compiled region runs by itself."""
        return replace(self, compiled=None) if self.compiled else self

    @property
    def predicted_peak(self) -> int:
        """Predicted peak in bytes, exact except for the allocator's rounding."""
        return max(self._peak_of(self.running.chosen), self.weights.step_bytes if self.weights else 0)

    @cached_property
    def predicted_reserved(self) -> int | None:
        """Predicted bytes that PyTorch's allocator takes from the device during a step; None: not known.

        They are above those that it had when the plan was made and could not give back, and include what is reserved
        and not allocated. They are known for CUDA devices, without copies to the host, communication and compiled
        regions.
        """
        if self.allocator is None or self.weights or self.compiled:
            return None
        return self.allocator.reserved_by(self.program, self.costs)

    @property
    def predicted_time(self) -> float:
        """Predicted seconds of one forward and backward."""
        return self.running.chosen.time

    @property
    def keep_all_peak(self) -> int:
        """Peak bytes of the step without any recomputation, which budgets in percent refer to."""
        if self.weights:
            return self.weights.keep_all_peak
        return self._peak_of(self.alternatives.keep_all)

    @property
    def on_host(self) -> int:
        """The most bytes of activations that wait on the host at a time."""
        copies = self.chosen.transfers
        return most_on_host(copies.program, self.costs, self.link) if copies and self.link else 0

    def _peak_of(self, candidate: Candidate) -> int:
        if not self.retained or candidate.layout.graph is not self.graph:  # then the costs are not its own
            return candidate.peak
        return retained_peak(candidate.program(), self.costs.sizes, self.retained)

    @property
    def keep_all_time(self) -> float:
        """Seconds of one forward and backward without any recomputation."""
        return self.alternatives.keep_all.time

    @cached_property
    def minimum(self) -> int:
        """Smallest budget, in bytes, with which this step can run.

        Where slices or compression might need less, the first access starts a search, which takes about as long as
        a plan.
        """
        if not (self.more_ways and self.step):
            return self.known_minimum
        return min(self.known_minimum, self.step.least())

    @property
    def known_minimum(self) -> int:
        """Smallest budget, in bytes, that any program tried for this plan needs."""
        if self.weights:
            return self.weights.minimum
        return min(map(self._peak_of, (*self.alternatives.candidates, self.running.chosen)))

    @property
    def sizes(self) -> str:
        """The symbolic input sizes of the plan and their values, such as `tokens[1] = 300`; "": all sizes are fixed."""
        return self.step.sizes if self.step else ""

    @property
    def frontier(self) -> tuple[tuple[int, float], ...]:
        """(peak in bytes, time in seconds) of each alternative plan, fastest first."""
        return tuple((candidate.peak, candidate.time) for candidate in self.alternatives.candidates)

    @property
    def graph(self) -> StepGraph:
        """The graph of the step, forward and backward, that the plan was made for."""
        return self.chosen.layout.graph

    @property
    def step_graph(self) -> StepGraph:
        """The graph of the step as plain data, without fx nodes; `to_json()` writes it."""
        return self.graph.step if isinstance(self.graph, Captured) else self.graph

    def to_networkx(self) -> nx.DiGraph[tuple[str, int]]:
        """Return the graph of the step as a networkx graph: see `StepGraph.to_networkx`."""
        return self.graph.to_networkx()

    @property
    def captured(self) -> Captured:
        """The step together with the fx graph that it was read from."""
        return captured_of(self.graph)

    @cached_property
    def chain(self) -> Chain:
        """The step as a chain of blocks (runs of consecutive ops), with seconds and bytes, as the chain solvers see it.
        """
        return chain_of(self.chosen.layout, self.costs)

    @property
    def schedule(self) -> Schedule | JoinSchedule:
        """The forwards and backwards of blocks, in order.

        If the plan was improved op by op, what runs (`program`) differs from it in places.
        """
        return self.chosen.join.schedule if self.chosen.join else self.chosen.schedule

    @cached_property
    def timeline(self) -> Timeline | JoinTimeline:
        """Simulation of `schedule` on the chain of blocks, or on joining chains: the memory during each operation."""
        return self.chosen.join or simulate(self.chain, self.chosen.schedule)

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound on the seconds of a step within the budget, whichever ops are recomputed.

        It holds for programs that run the backward in its captured order. For other orders (chains that join
        and run interleaved), and if tensors may be offloaded, it is the time of the step without recomputation.
        """
        if self.chosen.join or self.link:
            return self.costs.time_of(range(len(self.graph.ops))) if self.slices else self.keep_all_time
        computing, communicating = apart(self.graph, self.costs)
        return max(communicating, lower_bound(self.graph, computing, self.budget))

    @cached_property
    def program(self) -> Program:
        """The ops that run, in order, with recomputations; each compiled region is one op."""
        return self.running.chosen.program()

    @cached_property
    def memory(self) -> Memory:
        """The bytes allocated during each execution of an op."""
        return live_bytes(self.program, self.running.costs.sizes)

    def peak_with_loss(self, peak: int, held: int) -> int:
        """Return the predicted peak in bytes if a loss outside the model allocates `peak` bytes and keeps `held`.

        Args:
            peak: the most bytes between forward and backward, with the gradients that the loss passes in.
            held: bytes that stay allocated while the backward runs.
        """
        sizes = self.running.costs.sizes
        between = live_bytes(self.program, replace(sizes, outside=peak)).at_split
        return max(between, self.predicted_peak + max(0, held - sizes.root))

    def peak_with(self, sizes: Sizes) -> int:
        """Return the predicted peak in bytes with other sizes of the loss than those that the plan expects."""
        return self.predicted_peak + live_bytes(self.program, sizes).peak - self.memory.peak

    def keep_all_peak_with(self, sizes: Sizes | None = None, dropped: Set[int] | None = None) -> int:
        """Return the peak in bytes without any recomputation, if the loss or the caller does otherwise than expected.

        Args:
            sizes: those with another loss; None: the expected ones.
            dropped: the outputs that the caller drops before the backward; None: the expected ones.
        """
        expected, program = self.costs.sizes, self.alternatives.keep_all.program()
        other = program if dropped is None else self._dropping(program, dropped)
        return self.keep_all_peak + live_bytes(other, sizes or expected).peak - live_bytes(program, expected).peak

    def peak_dropping(self, places: Set[int], sizes: Sizes | None = None) -> int:
        """Return the predicted peak in bytes if the caller drops these outputs of the model before the backward.

        Args:
            sizes: those with another loss; None: the expected ones.
        """
        dropping = self._dropping(self.program, places)
        return retained_peak(dropping, sizes or self.running.costs.sizes, self.retained)

    def _dropping(self, program: Program, places: Set[int]) -> Program:
        graph = self.running.captured
        layout = replace(program.layout, graph=replace(graph.step, dropped_outputs=graph.values_at(places)))
        return replace(program, layout=layout)

    def unread_outputs(self) -> frozenset[int]:
        """Return which outputs of the model the backward does not read, so that the caller alone holds them."""
        program, graph = self.program, self.running.captured
        last = last_uses(program.steps, len(program.version_of))
        made = {value: program.first[value] for value in graph.kept_outputs if value in program.first}
        return places_of(graph, {value for value, version in made.items() if last[version] < program.split})

    def peak_without_copies(self) -> int:
        """Return the predicted peak in bytes if gradients that a loss outside hands in are not copied."""
        return retained_peak(self.program, self.sizes_without_copies(), self.retained)

    def sizes_without_copies(self) -> Sizes:
        """Return the sizes of the running program's values and workspaces if those gradients are not copied."""
        return as_traced(self.running.captured, self.running.costs).sizes

    @cached_property
    def graphs(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward graph and the backward graph that the plan is lowered to."""
        return lower(
            self.program,
            self.tier.name if self.tier else "",
            self.weights.handles if self.weights else None,
            fresh=self.running.costs.fresh,
        )

    @property
    def loss_places(self) -> tuple[int, ...]:
        """Indices of the losses' gradients among the backward graph's inputs, from the end: -1 is the last input."""
        graph = self.graph
        count = len(graph.tangents)
        return tuple(place - count for place, value in enumerate(graph.tangents) if value in graph.root_tangents)

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The lowered forward graph, (*inputs) -> (*outputs, *saved); `print_readable()` shows it with its blocks."""
        return self.graphs[0]

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The lowered backward graph, (*saved, *gradients of the outputs) -> gradients of the inputs."""
        return self.graphs[1]

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of parameter and input gradients that are allocated at the peak; gradients computed later do not count.
        """
        at = max(range(len(self.memory.during)), key=self.memory.during.__getitem__, default=-1)
        program = self.program
        written = (version for step in program.steps[: at + 1] for version in step.writes)
        alive = {program.version_of[version] for version in written} & program.layout.graph.returned
        return sum(self.running.costs.sizes.values[value] for value in alive)

    @property
    def headline(self) -> str:
        """A one-line summary of the plan, for logs."""
        return (
            f"peak {format_bytes(self.predicted_peak)} of {format_bytes(self.budget)} allowed, "
            f"time {format_seconds(self.predicted_time)}, "
            f"{format_ratio(self.predicted_time, self.keep_all_time, '.2f')}x of keeping everything; "
            f"the least budget is {format_bytes(self.known_minimum)}{' or less' if self.more_ways else ''}"
        )
