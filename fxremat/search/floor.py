"""The moment at which a program's memory is largest, and what fills it: the reason why no smaller budget works.

    floor = floor_of(frontier.candidates[-1].program(), costs)
    str(floor)    "mm_4 (backward of blocks.3.up, net.py:31 in forward: x = self.up(x)) runs with 3.1 MiB of gradients
                   to return, 1.2 MiB of kept values and 96.0 KiB of workspace"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxremat.step.costs import Costs
from fxremat.step.kinds import MemoryKind, bytes_by_kind
from fxremat.step.liveness import Sizes, live_bytes
from fxremat.step.program import Program, Role
from fxremat.step.step_graph import StepGraph
from fxremat.units import format_bytes

_NAMES = {
    MemoryKind.WEIGHTS: "weights and their state",
    MemoryKind.KEPT: "kept values",
    MemoryKind.TEMPORARY: "values of the forward",
    MemoryKind.RECOMPUTED: "recomputed values",
    MemoryKind.OFFLOADED: "values on their way to or from the host",
    MemoryKind.RESULTS: "gradients to return",
    MemoryKind.GRADIENTS: "gradients on their way",
    MemoryKind.OUTSIDE: "gradients and temporaries of the loss",
    MemoryKind.WORKSPACE: "workspace",
}
LOSS_RUNS = "the loss outside the model runs"
_MOST = 3  # this many kinds of memory are named in the text
_WORTH = 0.01  # kinds with less than this fraction of the bytes are not named


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The moment at which a program's memory is largest."""

    bytes: int  # the peak, in bytes
    moment: str  # the op that runs at the peak, and its source line
    kinds: tuple[tuple[MemoryKind, int], ...]  # bytes of each kind of memory, largest first

    def __str__(self) -> str:
        kinds = [(kind, size) for kind, size in self.kinds[:_MOST] if size >= _WORTH * self.bytes]
        *others, last = [f"{format_bytes(size)} of {_NAMES[kind]}" for kind, size in kinds]
        return f"{self.moment} with {', '.join(others)}{' and ' if others else ''}{last}"


def floor_of(program: Program, costs: Costs) -> Floor:
    """Return the moment at which a program's memory is largest; the first, if there are several. O(steps)."""
    memory = live_bytes(program, costs.sizes)
    if memory.at_split == memory.peak:
        rest = memory.at_split - loss_bytes(program.layout.graph, costs.sizes)
        kinds = {MemoryKind.OUTSIDE: memory.at_split - rest, MemoryKind.KEPT: rest}
        return Floor(bytes=memory.peak, moment=LOSS_RUNS, kinds=_sorted(kinds))
    place = max(range(len(memory.during)), key=memory.during.__getitem__)
    kinds = {kind: series[place] for kind, series in bytes_by_kind(program, costs.sizes).items()}
    return Floor(bytes=memory.peak, moment=f"{op_at(program, place)} runs", kinds=_sorted(kinds))


def op_at(program: Program, place: int) -> str:
    """Return the name of the op that a program runs as its step `place`, with its module and source line."""
    step = program.steps[place]
    if step.op is None:
        return f"the {step.role.value} of a tensor"
    graph = program.layout.graph
    name, source = graph.ops[step.op].name, graph.sources[step.op]
    where = ", ".join(part for part in (source.module, str(source.frame or "")) if part)
    if where and step.role is Role.BACKWARD:
        where = f"backward of {where}"
    return f"{name} ({where})" if where else name


def loss_bytes(graph: StepGraph, sizes: Sizes) -> int:
    """Return the bytes of a loss outside the model between forward and backward, or of the gradients that it passes in.
    """
    if graph.dropped_outputs:
        return sizes.of_loss
    tangents = sum(sizes.values[value] for value in graph.tangent_values) + sizes.root
    return max(tangents, sizes.outside)


def _sorted(kinds: Mapping[MemoryKind, int]) -> tuple[tuple[MemoryKind, int], ...]:
    found = sorted(kinds.items(), key=lambda entry: entry[1], reverse=True)
    return tuple((kind, size) for kind, size in found if size) or tuple(found[:1])
