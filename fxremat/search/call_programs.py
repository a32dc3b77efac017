"""Programs (ways to run forward and backward) of one graph of a model that consists of several graphs.

If a graph is a whole training step, only peak and time of a program matter (`search.candidate.Frontier`). If a
step calls several graphs, bytes that one of them saves for its backward are not available to the others in
between. So a program of such a graph has these numbers, with bytes above those at the beginning of the call:

    saved       bytes kept from the forward to the backward, besides inputs and outputs
    forward     the peak of the forward
    backward    the peak of the backward, above what was saved, the outputs and their gradients; gradients that it
                returns are in memory to its end, unless they are added to sums (`CallProgram.backward_adding`)
    copies      further bytes of the backward if gradients arrive with other strides than were traced
    hosted      bytes of saved values that wait on the host, if the program copies any there
    time        seconds of forward and backward
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from fxremat.search.candidate import Candidate, Frontier
from fxremat.search.survey import survey
from fxremat.step.costs import Costs, Link
from fxremat.step.liveness import Memory, Sizes, last_uses, live_bytes
from fxremat.step.program import Order, Program, Role, Transfer
from fxremat.step.step_graph import StepGraph

# assumed bytes of the rest of the step between forward and backward, as multiples of the peak without
# recomputation
PAUSES = (0.0, 0.5, 2.0)
MOST = 48  # number of programs kept for a graph
DEAR = 10.0  # an op that is not to run again counts as this many times the seconds of all ops in a search
FEW = 200  # ops; for larger graphs, ways to cut that are not on the first frontier are not tried for the others
EFFORT = 0.3  # seconds of op-by-op search for each of the `PAUSES`


class Offloading(Protocol):
    """A host to which programs may copy values, and the way to find programs that do."""

    @property
    def link(self) -> Link:
        """The speeds of copies."""

    def extended(self, frontier: Frontier, costs: Costs) -> Frontier:
        """Return the Pareto frontier with candidates added that copy values to the host."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HostCopies:
    """The copies of a program to the host and back, as steps of it, and the seconds that they add."""

    program: Program
    sizes: tuple[int, ...]  # bytes of each value that is copied to the host
    added: tuple[float, float]  # seconds that the copies add to the forward and to the backward
    link: Link

    @classmethod
    def of(cls, candidate: Candidate, costs: Costs, offloading: Offloading | None) -> HostCopies | None:
        """Return the copies that a candidate makes; None if it makes none."""
        if (found := candidate.transfers) is None or offloading is None:
            return None
        order = candidate.order()
        added = max(0.0, found.time - costs.time_of(order.ops))
        waits = (found.waiting - found.waiting_back, found.waiting_back)
        back = added * (waits[1] / found.waiting if found.waiting else 0.5)
        sizes = _copied(found.program, costs.sizes)
        return cls(program=found.program, sizes=sizes, added=(added - back, back), link=offloading.link)

    @property
    def bytes(self) -> int:
        """Bytes that the values occupy on the host."""
        return sum(map(self.link.on_host, self.sizes))

    def at(self, costs: Costs) -> HostCopies:
        """Return the same copies at the sizes that these costs are for; the seconds that they add grow with the bytes.
        """
        sizes = _copied(self.program, costs.sizes)
        factor = sum(sizes) / max(1, sum(self.sizes))
        return replace(self, sizes=sizes, added=(self.added[0] * factor, self.added[1] * factor))


def _key(order: Order, on_host: HostCopies | None = None) -> object:
    return order.ops, order.split, on_host and on_host.program.steps


def _copied(program: Program, sizes: Sizes) -> tuple[int, ...]:
    """Return the bytes of each value that a program copies to the host."""
    leaving = (s for s in program.steps if isinstance(s, Transfer) and s.role is Role.OFFLOAD)
    return tuple(sizes.values[program.version_of[step.reads[0]]] for step in leaving)


@dataclass(frozen=True, kw_only=True, eq=False)
class Another:
    """A graph that computes what a captured one computes, with some groups of its ops in slices, or compiled."""

    costs: Costs
    values: Mapping[int, int]  # its inputs and outputs -> those of the captured graph


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardMemory:
    """The bytes of a backward, step by step, and the gradients that it returns."""

    during: NDArray[np.int64]  # bytes during each of its steps, above those at its beginning
    gradients: Mapping[int, tuple[int, int]]  # gradient, as a value -> (last step that reads or writes it, its bytes)
    tangents: Sequence[tuple[int, int]] = ()  # the same of each gradient of an output, which is freed after that step
    _peaks: dict[tuple[frozenset[int], bool], int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        program: Program,
        sizes: Sizes,
        memory: Memory,
        values: Mapping[int, int] | None,
        fetched: Mapping[int, int] = MappingProxyType({}),
    ) -> BackwardMemory:
        """Read the backward of a program.

        Args:
            memory: the bytes of the entire program.
            values: the program's values -> those of the captured graph, for the gradients; None: they are the same.
            fetched: inputs that come from the host before it -> their bytes.
        """
        last, found = last_uses(program.steps[program.split :], len(program.version_of)), {}
        for value in program.layout.graph.returned:
            known = value if values is None else values.get(value)
            if known is not None and (position := last[program.first[value]]) >= 0:
                found[known] = position, sizes.values[value]
        graph = program.layout.graph
        freed = (v for v in graph.tangent_values if v not in graph.held_tangents and last[program.first[v]] >= 0)
        tangents = [(last[program.first[value]], sizes.values[value]) for value in freed]
        during = np.asarray(memory.during[program.split :], dtype=np.int64) - memory.at_split
        for value, size in fetched.items():
            during[: last[program.first[value]] + 1] += size
        return cls(during=during, gradients=found, tangents=tangents)

    def peak(self, added: frozenset[int] = frozenset(), *, holding: bool = False) -> int:
        """Return the peak if the gradients in `added` are freed after the last step that reads or writes them.

        O(steps + gradients) for the first time with these gradients, then O(1).

        Args:
            holding: the caller keeps the gradients of the outputs to the end.
        """
        key = added, holding
        if key not in self._peaks:
            during = self.during.copy()
            for value in added:
                position, size = self.gradients.get(value, (len(during), 0))
                during[position + 1 :] -= size
            for position, size in self.tangents if holding else ():
                during[position + 1 :] += size
            self._peaks[key] = max(0, int(during.max(initial=0)))
        return self._peaks[key]


@dataclass(frozen=True, kw_only=True, eq=False)
class CallProgram:
    """One way to run one of the graphs that a step calls; bytes are above those allocated when the call begins.

    `outputs` and `inputs` are numbers of values in the captured graph.
    """

    order: Order
    on_host: HostCopies | None = None  # the copies of saved values to the host; None: it makes none
    fused: Program | None = None  # the order's ops in compiled groups; None: they run one by one
    another: Another | None = None  # the graph that `program` runs; None: the captured one
    saved: int
    forward: int
    backward: int
    memory: BackwardMemory  # the bytes of the backward, step by step
    time: float  # seconds of forward and backward
    outputs: frozenset[int]  # outputs that the backward reads, which it keeps alive even if the caller drops them
    inputs: frozenset[int] = frozenset()  # inputs that the backward reads; the others may be freed before it begins
    copies: int = 0
    forward_time: float = 0.0  # seconds of the forward

    @cached_property
    def program(self) -> Program:
        """The program, copies to the host included; built when first read, in O(steps)."""
        if self.fused is not None:
            return self.fused
        return self.on_host.program if self.on_host else self.order.program()

    @property
    def key(self) -> object:
        """The order of the ops and the copies to the host, which tell programs of single ops apart."""
        return _key(self.order, self.on_host)

    @property
    def hosted(self) -> int:
        """Bytes of saved values that wait on the host between forward and backward."""
        return self.on_host.bytes if self.on_host else 0

    def backward_adding(self, added: frozenset[int], *, holding: bool = False) -> int:
        """Return `backward` if these gradients are added to sums as they are computed, instead of returned.

        Args:
            added: the gradients, as values of the captured graph.
            holding: the caller keeps the gradients of the outputs to the end.
        """
        return self.backward - self.memory.peak() + self.memory.peak(added, holding=holding)

    def beats(self, other: CallProgram) -> bool:
        """Tell whether this program needs at most the bytes of the other, of each kind, and at most its time."""
        return (
            self.saved <= other.saved
            and self.forward <= other.forward
            and self.backward <= other.backward
            and self.copies <= other.copies
            and self.hosted <= other.hosted
            and self.time <= other.time
        )


def call_programs(
    graph: StepGraph,
    costs: Costs,
    *,
    effort: float = EFFORT,
    offloading: Offloading | None = None,
    once: frozenset[int] = frozenset(),
) -> tuple[CallProgram, ...]:
    """Return the Pareto-optimal ways to run one of the graphs that a step calls, fastest first; at most `MOST`.

    Programs are searched for under three assumptions on the memory that the rest of the step takes between
    forward and backward. For each program found, one that saves nothing, and recomputes all that its backward
    needs, is added.

    Args:
        offloading: the host to which programs may copy values; None: they may not.
        once: forward ops that are not to run again.
    """
    found: dict[object, CallProgram] = {}
    first: Frontier | None = None
    searched = costs if not once else replace(costs, seconds=_dear(costs.seconds, once))
    for pause in PAUSES:
        keep_all = first.keep_all.peak if first else 0
        outside = replace(searched, sizes=replace(costs.sizes, outside=int(pause * keep_all), root=0))
        frontier = survey(graph, outside, effort=effort, known=first if len(graph.ops) > FEW else None)
        first = first or frontier
        further = offloading.extended(frontier, outside).candidates if offloading is not None else ()
        for candidate in (frontier.keep_all, *frontier.candidates, *further):
            order, on_host = candidate.order(), HostCopies.of(candidate, searched, offloading)
            if not order.repeats(once) and (key := _key(order, on_host)) not in found:
                found[key] = judged(order, costs, on_host=on_host)
    for program in unbeaten(found.values()):
        order = saving_nothing(program.order, once)
        if (key := _key(order)) not in found:
            found[key] = judged(order, costs)
    return tuple(thinned(unbeaten(found.values())))


def _dear(seconds: Sequence[float], once: Set[int]) -> tuple[float, ...]:
    """Return the seconds of ops with those of `once` raised so far that a search avoids to run them again."""
    price = DEAR * sum(seconds)
    return tuple(second + (price if op in once else 0.0) for op, second in enumerate(seconds))


def least_of(programs: Iterable[CallProgram]) -> CallProgram:
    """Return the program that saves the fewest bytes for the backward; of several, the one with the lowest peak."""
    return min(programs, key=lambda p: (p.saved, max(p.forward, p.backward), p.time))


def judged(
    order: Order,
    costs: Costs,
    copies: Sequence[int] = (),
    held: int = 0,
    *,
    on_host: HostCopies | None = None,
    fused: Program | None = None,
    another: Another | None = None,
    built: Program | None = None,
    fetched: Mapping[int, int] = MappingProxyType({}),
) -> CallProgram:
    """Return the program that runs ops in `order`, with its bytes and seconds. O(steps).

    Args:
        costs: those of the graph that the program runs.
        copies: for each op of that graph, the bytes of copies of gradients into the traced strides; (): there are none.
        held: bytes that autograd holds during the backward.
        on_host: its copies to the host; None: it makes none.
        fused: the order's ops in compiled groups; None: they run one by one.
        another: what the graph that the program runs is to the captured graph; None: it is the captured graph.
        built: the program of all this, where it has been built before.
        fetched: inputs that live on the host, and come to the device for the forward, and again for the backward ->
            their bytes. Not with `another`.
    """
    program = built or fused or (on_host.program if on_host else order.program())
    graph = program.layout.graph
    sizes = replace(costs.sizes, outside=0, root=0)
    out, back = on_host.added if on_host else (0.0, 0.0)
    memory = live_bytes(program, sizes)
    tangents = sum(sizes.values[value] for value in graph.tangent_values)
    made = kept_outputs(graph)
    read_late = {program.version_of[version] for step in program.steps[program.split :] for version in step.reads}
    outputs, inputs = read_late & made, read_late & graph.given
    before: Sequence[int] = memory.during[: program.split]
    if fetched:
        before = _with_inputs(program, before, fetched, inputs)
    working = BackwardMemory.of(program, sizes, memory, another.values if another else None, fetched)
    backward = working.peak()
    if another is not None:
        outputs = {another.values[value] for value in outputs}
        inputs = {another.values[value] for value in inputs & another.values.keys()}
    return CallProgram(
        order=order,
        on_host=on_host,
        fused=fused,
        another=another,
        saved=max(0, memory.at_split - tangents - sum(sizes.values[value] for value in made)),
        forward=max(before, default=0),
        backward=backward + held,
        memory=working,
        copies=_with_copies(program, sizes, copies) - backward if any(copies) else 0,
        time=costs.time(program) + out + back,
        forward_time=costs.time_of(s.op for s in program.steps[: program.split] if s.op is not None) + out,
        outputs=frozenset(outputs),
        inputs=frozenset(inputs),
    )


def _with_inputs(
    program: Program, during: Sequence[int], fetched: Mapping[int, int], saved: Set[int]
) -> Sequence[int]:
    """Return the bytes of a forward, step by step, with inputs that come before it, and are freed after their last use.

    Args:
        fetched: these inputs -> their bytes.
        saved: inputs that the forward hands on to the backward, so that they are in memory to its end.
    """
    last, found = last_uses(program.steps[: program.split], len(program.version_of)), np.asarray(during, dtype=np.int64)
    for value, size in fetched.items():
        end = len(found) if value in saved else last[program.first[value]] + 1
        found[:end] += size
    return [*map(int, found)]


def _with_copies(program: Program, sizes: Sizes, copies: Sequence[int]) -> int:
    """Return the peak in bytes of a backward that copies gradients into the traced strides."""
    workspace = tuple(map(sum, zip(sizes.workspace, copies, strict=True)))
    memory = live_bytes(program, replace(sizes, workspace=workspace))
    return max(0, max(memory.during[program.split :], default=0) - memory.at_split)


def kept_outputs(graph: StepGraph) -> frozenset[int]:
    """Return the forward outputs that the graph's own ops make, so inputs that are returned do not count."""
    return graph.kept_outputs - graph.given


def saving_nothing(order: Order, once: Set[int] = frozenset()) -> Order:
    """Return an order that saves nothing: its backward recomputes all the forward values that it reads.

    The forward is the captured one. In the backward, ops come in the given order, and forward ops are left out
    whose results are not read later. O(ops).

    Args:
        once: forward ops that are not to run again; their results are saved.
    """
    graph = order.layout.graph
    pinned, wanted, kept = graph.pinned, set[int](), list[int]()
    for number in reversed(order.ops):
        op = graph.ops[number]
        if op.backward:
            wanted |= set(op.reads)
            kept.append(number)
        elif number not in once and not wanted.isdisjoint(value for value in op.again_writes if value not in pinned):
            wanted -= set(op.again_writes)
            wanted |= set(op.again_reads)
            kept.append(number)
    forward = tuple(range(graph.forward_count))
    ops = (*forward, *reversed(kept))
    block = order.blocks[0] if order.blocks else 0
    return replace(order, ops=ops, blocks=(block,) * len(ops), split=len(forward))


def unbeaten(programs: Iterable[CallProgram]) -> list[CallProgram]:
    """Return the programs that no other program beats in bytes of each kind and in time, fastest first."""
    found: list[CallProgram] = []
    for program in sorted(programs, key=lambda p: (p.time, p.hosted, p.saved, p.backward, p.forward)):
        if not any(other.beats(program) for other in found):
            found.append(program)
    return found


def thinned(programs: list[CallProgram], most: int = MOST) -> list[CallProgram]:
    """Return at most `most` of the programs, in the same order; the fastest and those with the fewest bytes are kept.
    """
    if len(programs) <= most:
        return programs
    ends = {
        0,
        *(
            min(range(len(programs)), key=lambda place: of(programs[place]))
            for of in (
                lambda p: (p.saved, p.backward),
                lambda p: p.saved + p.backward,
                lambda p: p.forward,
                lambda p: p.backward,
                lambda p: (p.hosted, p.saved, p.backward),
            )
        ),
    }
    rest = [place for place in range(len(programs)) if place not in ends]
    step = len(rest) / (most - len(ends))
    ends |= {rest[int(place * step)] for place in range(most - len(ends))}
    return [programs[place] for place in sorted(ends)]


class AtOtherSizes(Sequence[CallProgram]):
    """The programs for a graph with the same ops at other sizes: same orders of ops, new bytes and seconds.

    Each is judged when it is first looked at, since most calls need only one. Programs of another graph, which has one
    size, stay as they are.
    """

    def __init__(
        self,
        programs: Sequence[CallProgram],
        costs: Costs,
        copies: Sequence[int] = (),
        held: int = 0,
        fetched: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._programs = programs
        self._costs, self._copies, self._held, self._fetched = costs, copies, held, fetched
        self._judged: dict[int, CallProgram] = {}

    def __len__(self) -> int:
        return len(self._programs)

    @overload
    def __getitem__(self, place: int) -> CallProgram: ...

    @overload
    def __getitem__(self, place: slice) -> list[CallProgram]: ...

    def __getitem__(self, place: int | slice) -> CallProgram | list[CallProgram]:
        numbers = range(len(self))[place]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        if numbers not in self._judged:
            self._judged[numbers] = self._moved(self._programs[numbers])
        return self._judged[numbers]

    def _moved(self, program: CallProgram) -> CallProgram:
        if program.another is not None:
            more = sum(self._fetched.values())
            return replace(program, forward=program.forward + more, backward=program.backward + more)
        return judged(
            program.order,
            self._costs,
            self._copies,
            self._held,
            on_host=program.on_host.at(self._costs) if program.on_host else None,
            built=program.program,
            fetched=self._fetched,
        )
