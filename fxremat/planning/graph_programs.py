"""The programs of one captured graph of several: the ways to run it, among which a plan chooses at each call.

    single ops    orders of ops with recomputations, also with copies of what is saved to the host
    slices        the same of the graph with its largest ops in slices, where the user allows that
    packed        the same of the graph with masks and the like stored as bits, where that saves much
    compiled      a few of the orders of single ops, with forward and backward compiled by Inductor

Slices and compiled kernels are for one size: graphs whose sizes change run single ops.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import fx

from fxremat.cost.at_sizes import SizedCosts
from fxremat.cost.calibrate import calibration, costs_of_phases
from fxremat.cost.measure import measure
from fxremat.fusion.joint import fused_program
from fxremat.fusion.min_cut import least_traffic
from fxremat.fusion.torch_partition import TorchPartition
from fxremat.fusion.units import by_phase
from fxremat.graphs.accounting import apart_from_copies, device_of, held_beside_copies
from fxremat.graphs.captured import Captured, captured_of, inputs_across
from fxremat.graphs.region import regions_of
from fxremat.host.default import default_tier
from fxremat.host.tier import HostTier
from fxremat.ops.seeded import ALWAYS_COMPILED
from fxremat.options import Options
from fxremat.planning import stored
from fxremat.planning.choosing import link_to
from fxremat.planning.compiled import PHASES, compile_new, kernels_of
from fxremat.planning.compressed import ways_to_pack
from fxremat.planning.facts import facts_of
from fxremat.planning.frontier_cache import NO_GRAPH
from fxremat.planning.in_slices import ways_to_slice
from fxremat.planning.step import Step
from fxremat.planning.wishes import run_once, staying
from fxremat.search.call_programs import (
    Another,
    AtOtherSizes,
    CallProgram,
    call_programs,
    judged,
    kept_outputs,
    least_of,
    thinned,
    unbeaten,
)
from fxremat.search.candidate import Frontier
from fxremat.search.survey import kept
from fxremat.settings import Search
from fxremat.step.costs import Costs, Link
from fxremat.step.program import Order
from fxremat.step.step_graph import StepGraph
from fxremat.transfers.offloading import with_offloading

log = logging.getLogger(__name__)

SHARE = 0.1  # each graph may be searched for this fraction of the seconds that the user allows
REMEMBERED = 64  # programs are cached for this many graphs

_known: OrderedDict[object, Sequence[CallProgram]] = OrderedDict()


@dataclass(frozen=True, kw_only=True)
class SizedPrograms:
    """The programs (ways to run forward and backward) of one graph, at certain input sizes."""

    programs: Sequence[CallProgram]
    # single ops without recomputation, to which budgets in percent refer; with all inputs on the device
    keep_all: CallProgram
    outputs: Mapping[int, int]  # bytes of each output that the graph allocates, by value
    gradients: int  # total bytes of the gradients that the graph's backward returns
    inputs: Mapping[int, int]  # bytes of each input, by value
    largest: int  # bytes of the largest tensor that the graph's ops allocate
    layouts: Sequence[tuple[int, ...]]  # strides that the gradients of the graph's outputs had when it was traced

    @property
    def run_again(self) -> Sequence[CallProgram]:
        """The programs for a call that runs again just before its backward: those that copy nothing to the host."""
        return [program for program in self.programs if not program.on_host]

    @classmethod
    def of(
        cls,
        graph: Captured,
        sized: SizedCosts,
        programs: Sequence[CallProgram],
        keep_all: CallProgram,
        fetched: Mapping[int, int] = MappingProxyType({}),
    ) -> SizedPrograms:
        """Return these programs, with the bytes of inputs, outputs and gradients at the sizes that the costs are for.

        Args:
            fetched: the inputs that live on the host -> their bytes. Gradients of theirs do not stay on the device.
        """
        bytes_of = sized.costs.sizes.values
        at = partial(AtOtherSizes, costs=sized.costs, copies=sized.copies, held=sized.held)
        found = at(programs, fetched=fetched)
        return cls(
            programs=found,
            keep_all=found[0] if programs[0] is keep_all and not fetched else at([keep_all])[0],
            inputs={value: bytes_of[value] for value in map(graph.value_of.get, graph.primals) if value is not None},
            largest=sized.largest,
            layouts=sized.layouts,
            outputs={value: bytes_of[value] for value in kept_outputs(graph)},
            gradients=max(0, sum(bytes_of[value] for value in graph.returned) - sum(fetched.values())),
        )


def _held(graph: Captured) -> int:
    return held_beside_copies(graph, device_of(graph))


@dataclass(frozen=True)
class _Host:
    """The host, as a place to which the programs of one graph may copy values."""

    link: Link
    limit: int | None  # bytes that may be there at a time; None: no limit
    staying: frozenset[int]  # values that are not copied there

    @classmethod
    def of(cls, graph: Captured, tier: HostTier | None, options: Options) -> _Host | None:
        if tier is None:
            return None
        return cls(link_to(tier, graph, options), options.host_limit, staying(graph, options.kept))

    def extended(self, frontier: Frontier, costs: Costs) -> Frontier:
        return with_offloading(frontier, replace(costs, staying=self.staying), self.link, self.limit)


def tier_of(options: Options, device: torch.device) -> HostTier | None:
    """Return the storage on the host to which graphs may copy activations; None: they may not."""
    return (options.tier or default_tier(device)) if options.offloads else None


def programs_of(
    step: Step,
    costs: Costs,
    options: Options,
    tier: HostTier | None = None,
    *,
    resizable: bool = False,
    order_of: Callable[[Captured], Callable[[], Sequence[int]] | None] = lambda _: None,
) -> tuple[Sequence[CallProgram], CallProgram]:
    """Return the programs of a graph, fastest first, and the one of single ops that recomputes nothing.

    Those of single ops come from a cache if an equal graph had the same costs. `SizedPrograms.of` adapts their byte
    counts to the graph's sizes.

    Args:
        costs: the costs of the graph's ops.
        tier: the storage on the host to which programs may copy activations; None: they may not.
        resizable: True if the graph is to run at other sizes too, as only single ops can.
        order_of: returns a function for the order in which the ops of a rewritten graph are measured: see `facts_of`.
    """
    alone = _of_single_ops(step.graph, costs, options, tier)
    keep_all = alone[0]
    if resizable:
        return alone, keep_all
    if options.compiles:
        others = list(_compiled(step, alone, options))
        required = any(node.target in ALWAYS_COMPILED for node in step.graph.nodes)
        alone = () if required else alone
    else:
        others = list(_rewritten(step, options, keep_all, tier, order_of))
    return (tuple(thinned(unbeaten([*alone, *others]))) if others else alone), keep_all


def _of_single_ops(
    graph: Captured, costs: Costs, options: Options, tier: HostTier | None
) -> Sequence[CallProgram]:
    """Return the programs of a graph that run single ops, fastest first: the first recomputes nothing."""
    return programs_of_single_ops(graph, apart_from_copies(graph, costs)[0], options, tier)


def programs_of_single_ops(
    graph: Captured, costs: Costs, options: Options, tier: HostTier | None
) -> Sequence[CallProgram]:
    """Return programs of a graph that run single ops, fastest first, searched for with these costs, from a cache.

    Those that copy nothing to the host are kept on disk, for later processes.

    Args:
        costs: without copies of gradients into the traced strides; at other sizes than the graph's, perhaps.
    """
    search = _Search.of(graph, costs, options, tier)
    if (key := search.key) not in _known:
        _known[key] = search.programs(graph.step)
        if len(_known) > REMEMBERED:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return _known[key]


@dataclass(frozen=True)
class Orders:
    """The orders of the programs of a graph, without the graph, as they are kept on disk."""

    orders: tuple[Order, ...]

    @classmethod
    def of(cls, programs: Iterable[CallProgram]) -> Orders:
        """Return the orders of programs that copy nothing to the host."""
        return cls(_on([program.order for program in programs], NO_GRAPH))


def _on(orders: Iterable[Order], graph: StepGraph) -> tuple[Order, ...]:
    """Return orders of ops of a graph that is equal to theirs; those with one layout have one again."""
    layouts = {id(order.layout): order.layout for order in orders}
    own = {number: replace(layout, graph=graph) for number, layout in layouts.items()}
    return tuple(replace(order, layout=own[id(order.layout)]) for order in orders)


@dataclass(frozen=True)
class _Search:
    """A search for the programs of a graph that run single ops."""

    digest: str  # of the graph
    device: torch.device
    costs: Costs
    options: Search
    host: _Host | None
    once: frozenset[int]

    @classmethod
    def of(cls, graph: Captured, costs: Costs, options: Options, tier: HostTier | None) -> _Search:
        host, once = _Host.of(graph, tier, options), run_once(graph, options.wishes)
        return cls(graph.digest, device_of(graph), costs, options.search, host, once)

    @property
    def key(self) -> tuple[object, ...]:
        """All that the result depends on."""
        sizes = tuple(self.costs.sizes.values), tuple(self.costs.sizes.workspace)
        return self.digest, self.costs.seconds, sizes, self.options, tuple(sorted(self.once)), self.host

    def programs(self, graph: StepGraph) -> Sequence[CallProgram]:
        """Return the programs that are on disk, judged with the costs; where there are none, search for them.

        Args:
            graph: the graph, or an equal one, that the programs run.
        """
        key = repr(self.key)
        known = stored.read(self.device, key, Orders) if self.host is None else None
        if known is not None:
            return tuple(judged(order, self.costs) for order in _on(known.orders, graph))
        effort = SHARE * self.options.seconds
        found = call_programs(graph, self.costs, effort=effort, offloading=self.host, once=self.once)
        if self.host is None:
            stored.write(self.device, key, Orders.of(found))
        return found


def _another(graph: Captured, base: Captured, costs: Costs) -> Another:
    """Return what a rewritten graph is to the captured one, `base`.

    Inputs, outputs and gradients correspond by their places.
    """
    both = (one.forward_outputs + one.backward_outputs for one in (graph, base))
    nodes = [(a, b) for a, b in zip(*both, strict=True) if isinstance(a, fx.Node) and isinstance(b, fx.Node)]
    outputs = {graph.value_of[a]: base.value_of[b] for a, b in nodes if a in graph.value_of and b in base.value_of}
    return Another(costs=costs, values=inputs_across(graph, base) | outputs)


def _rewritten(
    step: Step,
    options: Options,
    keep_all: CallProgram,
    tier: HostTier | None,
    order_of: Callable[[Captured], Callable[[], Sequence[int]] | None],
) -> Iterator[CallProgram]:
    """Yield the programs of the graph with its largest ops in slices, in a few ways, and with what it saves packed."""
    peak = max(keep_all.forward, keep_all.backward)
    sliced = (found.joint for found in ways_to_slice(step.graph, peak, options))
    packed = ((graph, step.graph) for graph in ways_to_pack(step.graph, peak, options))
    for graph, like in (*((graph, None) for graph in sliced), *packed):
        costs = facts_of(replace(step, graph=graph), options, order_of(graph), like)
        as_traced, copies = apart_from_copies(graph, costs)
        another, search = _another(graph, step.graph, costs), _Search.of(graph, as_traced, options, tier)
        for one in search.programs(graph):
            yield judged(one.order, as_traced, copies, _held(graph), on_host=one.on_host, another=another)


def as_in_a_step(step: Step, costs: Costs) -> Costs:
    """Return the costs with the seconds that single ops take one after the other, as those of compiled ones are taken.
    """
    return costs.scaled(calibration(kept(step.graph, costs).keep_all.program(), costs, step.inputs))


def _compiled(step: Step, alone: Sequence[CallProgram], options: Options) -> Iterator[CallProgram]:
    """Yield programs with forward and backward compiled.

    They are what `torch.compile` runs, and two of the orders of single ops: the one that takes the least memory, and
    one in the middle by the bytes that they save. Where torch cannot partition the graph, they are more of these
    orders, and the one with the least memory traffic. Bytes and seconds are those of steps that have run.
    """
    graph, kernels, once = step.graph, kernels_of(options), run_once(step.graph, options.wishes)
    by_bytes = sorted(alone, key=lambda one: one.saved)
    fastest, least, half, most = (
        replace(one.order, layout=replace(one.order.layout, graph=graph))
        for one in (alone[0], least_of(alone), by_bytes[len(by_bytes) // 2], by_bytes[-1])
    )
    orders, phases = [least, half], TorchPartition(graph, fastest, once).phases()
    if phases is None:
        orders += [fastest, most, least_traffic(graph, fastest, once)]
    distinct = {(order.ops, order.split): order for order in orders}.values()
    programs = [order.program() for order in distinct]
    fused = [fused_program(program, by_phase(program), kernels) for program in programs]
    ways = [*zip(distinct, fused, strict=True)]
    if phases is not None:
        program = phases.order.program()
        ways.append((phases.order, fused_program(program, phases.units, kernels, phases.emitted)))
    compile_new([captured_of(program.layout.graph) for _, program in ways])
    for order, program in ways:
        joint = captured_of(program.layout.graph)
        whole = len(regions_of(joint.module.graph)) == PHASES
        own = costs_of_phases(program, step.inputs, apart=True) if whole else measure(joint, step.inputs)
        as_traced, copies = apart_from_copies(joint, own)
        another = _another(joint, graph, own)
        yield judged(order, as_traced, copies, _held(joint), fused=program, another=another)
