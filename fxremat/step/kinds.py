"""The memory of a program by purpose: at every step, the bytes of each kind, which add up to `live_bytes`.

    kept         forward values that stay allocated for the backward, or for the caller
    temporary    forward values that are freed before the backward begins
    recomputed   forward values that were computed again
    offloaded    forward values that are copied to the host: before they have left, and after they have come back
    gradients    gradients of intermediate values, and those that the caller passes to the backward
    results      gradients of parameters and inputs, which the step returns
    weights      parameters and optimizer state, if the budget covers them; copies of inputs that are overwritten
    outside      memory of a loss that is computed outside the model
    workspace    bytes that kernels allocate while they run, and saved states of the random generator
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import accumulate

from fxremat.step.liveness import Sizes, lives, seed_lives
from fxremat.step.program import Program, Role, Step, Transfer
from fxremat.step.step_graph import Origin


class MemoryKind(Enum):
    """The purposes of allocated bytes, in the order in which pictures stack them."""

    WEIGHTS = "weights"
    KEPT = "kept"
    TEMPORARY = "temporary"
    RECOMPUTED = "recomputed"
    OFFLOADED = "offloaded"
    RESULTS = "results"
    GRADIENTS = "gradients"
    OUTSIDE = "outside"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Life:
    """Bytes that are allocated from step `first` to step `last` of a program, both included."""

    kind: MemoryKind
    first: int
    last: int  # index of a step; the number of steps if the bytes are still allocated after the last one
    bytes: int
    value: int | None = None  # index of the value that is stored in these bytes, if any
    op: int | None = None  # index of the op that uses these bytes as workspace or to save its random state
    state: bool = False  # True if the bytes are optimizer state of the parameter `value`


def lives_of(program: Program, sizes: Sizes) -> list[Life]:
    """List all allocations of a program; at each step their bytes add up to `live_bytes`. O(steps).

    If an op writes its result over an input, the storage counts as the result from then on. A compiled region
    may free several of its inputs before it allocates its results.
    """
    count, versions = len(program.steps), _Versions.of(program, sizes)
    found = {
        version: Life(versions.kind(version), versions.birth(version), last, size, program.version_of[version])
        for version, (last, size) in enumerate(versions.lives)
        if last >= versions.birth(version)
    }
    others = [
        Life(MemoryKind.WEIGHTS, 0, count, program.resident),
        Life(MemoryKind.OUTSIDE, program.split, count, sizes.root),
    ]
    others += _optimizer_states(program)
    for op, (first, last) in seed_lives(program).items() if sizes.seed else ():
        others.append(Life(MemoryKind.WORKSPACE, first, last, sizes.seed, op=op))
    for place, step in enumerate(program.steps):
        extra = step.workspace if isinstance(step, Transfer) else sizes.workspace[step.op]
        for replaced in versions.replaced(step):
            if extra >= 0:
                break
            life = found[replaced]
            itself = replaced in step.writes
            found[replaced] = replace(life, first=place + 1) if itself else replace(life, last=place - 1)
            extra += life.bytes
        others.append(Life(MemoryKind.WORKSPACE, place, place, extra, op=step.op))
    return [life for life in (*found.values(), *others) if life.bytes and life.last >= life.first]


def _optimizer_states(program: Program) -> Iterator[Life]:
    """Yield the optimizer states of parameters on the host, for the time that they are on the device for an update."""
    came: dict[int | None, int] = {}
    for place, step in enumerate(program.steps):
        if isinstance(step, Transfer) and step.takes > 0:
            came[step.state_of] = place
        elif isinstance(step, Transfer) and step.takes < 0:
            yield Life(MemoryKind.WEIGHTS, came.pop(step.state_of), place, -step.takes, step.state_of, state=True)


def bytes_by_kind(program: Program, sizes: Sizes) -> dict[MemoryKind, tuple[int, ...]]:
    """Return for each kind of memory its bytes during each step; the kinds add up to `live_bytes(...).during`.

    O(steps).
    """
    count = len(program.steps)
    change = {kind: [0] * (count + 1) for kind in MemoryKind}
    for life in lives_of(program, sizes):
        change[life.kind][min(life.first, count)] += life.bytes
        change[life.kind][min(life.last + 1, count)] -= life.bytes
    return {kind: tuple(accumulate(change[kind][:-1])) for kind in MemoryKind}


def host_bytes(program: Program, sizes: Sizes) -> tuple[int, ...]:
    """Return the bytes of forward values on the host during each step, from the end of the copy out to the copy back.
    """
    change = [0] * len(program.steps)
    for place, step in enumerate(program.steps):
        if isinstance(step, Transfer) and step.role in (Role.RELEASE, Role.PREFETCH):
            values = [program.version_of[v] for v in (*step.reads, *step.writes)]
            size = sum(sizes.values[v] for v in values if program.layout.graph.values[v].origin is Origin.FORWARD)
            change[place] += size if step.role is Role.RELEASE else -size
    return tuple(accumulate(change))


@dataclass(frozen=True)
class _Versions:
    """The versions of a program's values: each execution of an op makes a new version of its results."""

    program: Program
    # (index of the last step that uses it, bytes) of each version, which is the result of one execution
    lives: Sequence[tuple[int, int]]
    writer: Mapping[int, int]  # version (result of one execution) -> index of the step that computes it
    leaving: frozenset[int]  # versions (results of one execution) that are copied to the host and freed on the device

    @classmethod
    def of(cls, program: Program, sizes: Sizes) -> _Versions:
        writer = {version: place for place, step in enumerate(program.steps) for version in step.writes}
        leaving = {v for step in program.steps if step.role is Role.RELEASE for v in step.reads}
        return cls(program, lives(program, sizes), writer, frozenset(leaving))

    def birth(self, version: int) -> int:
        """Return the index of the step that computes a version (the result of one execution).

        For inputs, return the index of the first step at which they are allocated.
        """
        if version in self.writer:
            return self.writer[version]
        return self.program.split if self._origin(version) is Origin.TANGENT else 0

    def kind(self, version: int) -> MemoryKind:
        """Return the kind of memory that the tensor with this version number (the result of one execution) counts as.
        """
        match self._origin(version):
            case Origin.PRIMAL:
                return MemoryKind.WEIGHTS
            case Origin.TANGENT:
                return MemoryKind.GRADIENTS
            case Origin.BACKWARD:
                returned = self.program.version_of[version] in self.program.layout.graph.returned
                return MemoryKind.RESULTS if returned else MemoryKind.GRADIENTS
        role = self.program.steps[self.writer[version]].role
        if role is Role.RECOMPUTE:
            return MemoryKind.RECOMPUTED
        if role is Role.PREFETCH or version in self.leaving:
            return MemoryKind.OFFLOADED
        return MemoryKind.KEPT if self.lives[version][0] >= self.program.split else MemoryKind.TEMPORARY

    def replaced(self, step: Step | Transfer) -> list[int]:
        """Return the versions whose storage a step may reuse, since it is the last to read them, largest first.

        A version is the result of one execution.

        The step's own results follow, since a compiled region may allocate them only after its peak.
        """
        if not step.writes:
            return []
        place = self.writer[step.writes[0]]
        ending = [version for version in step.reads if self.lives[version][0] == place]
        largest_first = partial(sorted, key=lambda version: -self.lives[version][1])
        return [*largest_first(ending), *largest_first(step.writes)]

    def _origin(self, version: int) -> Origin:
        return self.program.layout.graph.values[self.program.version_of[version]].origin
