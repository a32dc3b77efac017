"""The bytes that a program makes PyTorch's caching allocator reserve: its allocations in order, replayed on a model.

    at the beginning    copies of inputs that the step overwrites
    a step              its results, then its workspace; the workspace is freed, then what no later step reads
    between the halves  gradients that autograd passes in, and what a loss outside the model takes

Parameters and inputs are there before the step. What the step returns stays. An op that overwrites an operand takes
over its block. The workspace of an op is one allocation, although an op may make several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fxremat.step.caching_allocator import OWN_SEGMENT, ROUND_SEGMENT, SMALL, Block, CachingAllocator, Segment
from fxremat.step.costs import Costs
from fxremat.step.liveness import Sizes, lives
from fxremat.step.program import Program, Step, Transfer


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation, a free, or a block that goes over to another value."""

    key: int  # what it is that is allocated: a version, or a number below 0
    bytes: int = 0  # bytes to allocate; 0: it is freed
    of: int | None = None  # the key whose block this one takes over, without an allocation


STEPS = 4  # that are replayed on segments of fixed sizes
_WORKSPACE, _OUTSIDE, _ROOT = -1, -2, -3
_FROM_LAST = {"aten.native_dropout.default"}  # ops that allocate their results from the last to the first
_ONE_BY_ONE = {"aten.convolution_backward.default"}  # ops that need their workspace for each result by itself


@dataclass(frozen=True, kw_only=True)
class AllocatorState:
    """The caching allocator of a device at the beginning of a step."""

    expandable: bool  # the setting `expandable_segments`
    segments: tuple[Segment, ...] = ()  # what it has of the driver; what is free there may be given back first

    @property
    def returnable(self) -> int:
        """The bytes that it can give back to the driver now."""
        allocator = CachingAllocator(expandable=self.expandable, segments=self.segments)
        before = allocator.reserved
        allocator.release()
        return before - allocator.reserved

    def reserved_by(self, program: Program, costs: Costs, at_most: int | None = None) -> int | None:
        """Return the bytes that a step makes it reserve beyond those that it cannot give back at the beginning.

        Of segments of fixed sizes later steps find others free than the first one does, and may need more: some are
        replayed. None: not known. That is the case for copies to the host and communication, which use streams of their
        own. O(steps log steps).

        Args:
            at_most: end when more bytes than this are reserved; what is returned is then a part of them.
        """
        found = allocations(program, costs)
        if found is None:
            return None
        allocator = CachingAllocator(expandable=self.expandable, segments=self.segments)
        allocator.release()
        before = allocator.reserved
        for _ in range(1 if self.expandable else STEPS):
            for most in replayed(found, allocator):
                if at_most is not None and most - before > at_most:
                    return most - before
        return allocator.reserved - before


def replayed(events: Iterable[Event], allocator: CachingAllocator) -> Iterator[int]:
    """Replay events on an allocator, then free what is left; yield the bytes that are reserved after each allocation.
    """
    blocks: dict[int, Block] = {}
    for event in events:
        if event.of is not None:
            blocks[event.key] = blocks.pop(event.of)
        elif event.bytes:
            blocks[event.key] = allocator.allocate(event.bytes)
            yield allocator.reserved
        else:
            allocator.free(blocks.pop(event.key))
    for block in blocks.values():
        allocator.free(block)


def allocations(program: Program, costs: Costs) -> list[Event] | None:
    """Return the allocations and frees of a step, in the order in which lowered graphs make them; None: not known."""
    ops = program.layout.graph.ops
    if any(isinstance(step, Transfer) or ops[step.op].communicates for step in program.steps):
        return None
    return list(_Events(program, costs).all())


class _Events:
    """Makes the events of one program."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.graph, self.sizes = program, program.layout.graph, costs.sizes
        self.fresh = costs.fresh
        self.alive: set[int] = set()
        found = lives(program, self.sizes)
        self.bytes = [_as_asked(size, self.sizes) for _, size in found]
        self.ends: dict[int, list[int]] = defaultdict(list)
        for version, (last, _) in enumerate(found):
            self.ends[last].append(version)
        outputs = (program.first[value] for value in self.graph.dropped_outputs if value in program.first)
        # the outputs that the caller drops after the loss, and that nothing reads later
        self.dropped = {version for version in outputs if found[version][0] < program.split}

    def all(self) -> Iterator[Event]:
        """Yield the events of the step."""
        program = self.program
        for value in sorted(program.preserved):
            yield from self._born(program.first[value])
        for position, step in enumerate(program.steps):
            assert isinstance(step, Step)
            if position == program.split:
                yield from self._between()
            yield from self._ran(step)
            for version in self.ends[position]:
                if version in self.alive and version not in self.dropped:
                    self.alive.remove(version)
                    yield Event(version)
        if program.split == len(program.steps):
            yield from self._between()

    def _born(self, version: int) -> Iterator[Event]:
        if self.bytes[version]:
            self.alive.add(version)
            yield Event(version, self.bytes[version])

    def _ran(self, step: Step) -> Iterator[Event]:
        op = self.graph.ops[step.op]
        workspace = self.sizes.workspace[step.op]
        taken = None
        if op.overwrites is not None and step.op not in self.fresh:
            workspace += self.sizes.values[op.writes[0]]
            taken = next(v for v in step.reads if self.program.version_of[v] == op.overwrites)
        results = tuple(reversed(step.writes)) if op.target in _FROM_LAST else step.writes
        beside = self._asked_beside(workspace, results)
        for version in results:
            if taken is not None and taken in self.alive:
                self.alive.remove(taken)
                self.alive.add(version)
                yield Event(version, of=taken)
            else:
                yield from self._born(version)
            if beside > 0 and (op.target in _ONE_BY_ONE or version == results[-1]):
                yield from _for_a_moment(beside)
        if beside > 0 and not results:
            yield from _for_a_moment(beside)

    def _asked_beside(self, workspace: int, results: tuple[int, ...]) -> int:
        """Return a workspace without the rests of blocks of results, which were measured with it if they stay unsplit.

        A result that gets a segment of its own has what that was rounded up by.
        """
        size = _as_asked(workspace, self.sizes)
        if not self.sizes.unsplit:
            return size
        rests = (-self.bytes[version] % ROUND_SEGMENT for version in results if self.bytes[version] >= OWN_SEGMENT)
        return size - sum(rest for rest in rests if rest <= SMALL)

    def _between(self) -> Iterator[Event]:
        graph, sizes = self.graph, self.sizes
        if dropped := sorted(self.dropped & self.alive):
            yield Event(_OUTSIDE, sizes.of_loss)
            for version in dropped:
                self.alive.remove(version)
                yield Event(version)
            yield Event(_OUTSIDE)
        brought = sizes.root + sum(sizes.values[value] for value in graph.tangent_values)
        if sizes.outside > brought and not dropped:
            yield Event(_OUTSIDE, sizes.outside - brought)
        for value in graph.tangent_values:
            if value in self.program.first:
                yield from self._born(self.program.first[value])
        if sizes.root:
            yield Event(_ROOT, sizes.root)
        if sizes.outside > brought and not dropped:
            yield Event(_OUTSIDE)


def _for_a_moment(size: int) -> Iterator[Event]:
    yield Event(_WORKSPACE, size)
    yield Event(_WORKSPACE)


def _as_asked(size: int, sizes: Sizes) -> int:
    """Return a size without what is counted for the rest of a block that the allocator may leave unsplit."""
    return size - sizes.unsplit if sizes.unsplit and size > sizes.unsplit else size
