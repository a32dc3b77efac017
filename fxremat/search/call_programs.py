"""Programs (ways to run forward and backward) of one graph of a model that consists of several graphs.

If a graph is a whole training step, only peak and time of a program matter (`search.candidate.Frontier`). If a
step calls several graphs, bytes that one of them saves for its backward are not available to the others in
between. So a program of such a graph has these numbers, with bytes above those at the beginning of the call:

    saved       bytes kept from the forward to the backward, besides inputs and outputs
    forward     the peak of the forward
    backward    the peak of the backward, above what was saved, the outputs and their gradients
    copies      further bytes of the backward if gradients arrive with other strides than were traced
    time        seconds of forward and backward
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxremat.search.survey import survey
from fxremat.step.costs import Costs
from fxremat.step.layout import Layout
from fxremat.step.liveness import Sizes, live_bytes
from fxremat.step.program import Order, Program
from fxremat.step.step_graph import StepGraph

# assumed bytes of the rest of the step between forward and backward, as multiples of the peak without
# recomputation
PAUSES = (0.0, 0.5, 2.0)
MOST = 48  # number of programs kept for a graph
EFFORT = 0.3  # seconds of op-by-op search for each of the `PAUSES`


@dataclass(frozen=True, kw_only=True, eq=False)
class CallProgram:
    """One way to run one of the graphs that a step calls; bytes are above those allocated when the call begins."""

    order: Order
    saved: int
    forward: int
    backward: int
    time: float  # seconds of forward and backward
    outputs: frozenset[int]  # outputs that the backward reads, which it keeps alive even if the caller drops them
    inputs: frozenset[int] = frozenset()  # inputs that the backward reads; the others may be freed before it begins
    copies: int = 0
    forward_time: float = 0.0  # seconds of the forward

    def beats(self, other: CallProgram) -> bool:
        """Tell whether this program needs at most the bytes of the other, of each kind, and at most its time."""
        return (
            self.saved <= other.saved
            and self.forward <= other.forward
            and self.backward <= other.backward
            and self.copies <= other.copies
            and self.time <= other.time
        )


def call_programs(graph: StepGraph, costs: Costs, *, effort: float = EFFORT) -> tuple[CallProgram, ...]:
    """Return the Pareto-optimal ways to run one of the graphs that a step calls, fastest first; at most `MOST`.

    Programs are searched for under three assumptions on the memory that the rest of the step takes between
    forward and backward. For each program found, one that saves nothing, and recomputes all that its backward
    needs, is added.
    """
    found: dict[object, CallProgram] = {}
    keep_all = 0
    for pause in PAUSES:
        outside = replace(costs, sizes=replace(costs.sizes, outside=int(pause * keep_all), root=0))
        frontier = survey(graph, outside, effort=effort)
        keep_all = keep_all or frontier.keep_all.peak
        for candidate in (frontier.keep_all, *frontier.candidates):
            _add(found, candidate.order(), costs)
    for program in unbeaten(found.values()):
        _add(found, saving_nothing(program.order), costs)
    kept = thinned(unbeaten(found.values()))
    return tuple(kept)


def least_of(programs: Iterable[CallProgram]) -> CallProgram:
    """Return the program that saves the fewest bytes for the backward; of several, the one with the lowest peak."""
    return min(programs, key=lambda p: (p.saved, max(p.forward, p.backward), p.time))


def _add(found: dict[object, CallProgram], order: Order, costs: Costs) -> None:
    key = order.ops, order.split
    if key not in found:
        found[key] = judged(order, costs)


def judged(order: Order, costs: Costs, copies: Sequence[int] = (), held: int = 0) -> CallProgram:
    """Return the program that runs ops in `order`, with its bytes and seconds. O(steps).

    Args:
        copies: for each op, the bytes of copies of gradients into the traced strides; (): there are none.
        held: bytes that autograd holds during the backward.
    """
    graph = order.layout.graph
    sizes = replace(costs.sizes, outside=0, root=0)
    program = order.program()
    memory = live_bytes(program, sizes)
    tangents = sum(sizes.values[value] for value in graph.tangent_values)
    made = kept_outputs(graph)
    read_late = {program.version_of[version] for step in program.steps[program.split :] for version in step.reads}
    before, after = memory.during[: program.split], memory.during[program.split :]
    backward = max(0, max(after, default=0) - memory.at_split)
    return CallProgram(
        order=order,
        saved=max(0, memory.at_split - tangents - sum(sizes.values[value] for value in made)),
        forward=max(before, default=0),
        backward=backward + held,
        copies=_with_copies(program, sizes, copies) - backward if any(copies) else 0,
        time=costs.time_of(order.ops),
        forward_time=costs.time_of(order.ops[: order.split]),
        outputs=frozenset(read_late & made),
        inputs=frozenset(read_late & graph.given),
    )


def _with_copies(program: Program, sizes: Sizes, copies: Sequence[int]) -> int:
    """Return the peak in bytes of a backward that copies gradients into the traced strides."""
    workspace = tuple(map(sum, zip(sizes.workspace, copies, strict=True)))
    memory = live_bytes(program, replace(sizes, workspace=workspace))
    return max(0, max(memory.during[program.split :], default=0) - memory.at_split)


def kept_outputs(graph: StepGraph) -> frozenset[int]:
    """Return the forward outputs that the graph's own ops make, so inputs that are returned do not count."""
    return graph.kept_outputs - graph.given


def saving_nothing(order: Order) -> Order:
    """Return an order that saves nothing: its backward recomputes all the forward values that it reads.

    The forward is the captured one. In the backward, ops come in the given order, and forward ops are left out
    whose results are not read later. O(ops).
    """
    graph = order.layout.graph
    pinned, wanted, kept = graph.pinned, set[int](), list[int]()
    for number in reversed(order.ops):
        op = graph.ops[number]
        if op.backward:
            wanted |= set(op.reads)
            kept.append(number)
        elif not wanted.isdisjoint(value for value in op.again_writes if value not in pinned):
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
    for program in sorted(programs, key=lambda p: (p.time, p.saved, p.backward, p.forward)):
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
            )
        ),
    }
    rest = [place for place in range(len(programs)) if place not in ends]
    step = len(rest) / (most - len(ends))
    ends |= {rest[int(place * step)] for place in range(most - len(ends))}
    return [programs[place] for place in sorted(ends)]


def moved(
    programs: Iterable[CallProgram], graph: StepGraph, costs: Costs, copies: Sequence[int] = (), held: int = 0
) -> Iterator[CallProgram]:
    """Yield the programs for a graph with the same ops at other sizes: same orders of ops, new bytes and seconds."""
    layouts: dict[int, Layout] = {}
    for program in programs:
        old = program.order.layout
        layout = layouts.setdefault(id(old), replace(old, graph=graph))
        yield judged(replace(program.order, layout=layout), costs, copies, held)
