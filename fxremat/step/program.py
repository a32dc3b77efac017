"""The rewritten step before it becomes graphs: which op runs when, on which version of each value.

A version is a value as one execution of its op made it; a value that is recomputed has several.

A schedule speaks of blocks; `rematerialize` replays it block by block and writes down every execution of every op:

    Fck l, Fnone l, Fall l[o]   the ops of block l that make what is to be stored and is not available already
    B l                         the backward ops of block l, each right after what it needs and lacks is recomputed

What a schedule stores decides what may be read; what is read decides how long it lives (see `step.liveness`):
a version is freed right after its last use, which may be earlier than the schedule's own bookkeeping asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op, Schedule
from fxremat.errors import InvalidSchedule
from fxremat.step.layout import Layout


class Role(Enum):
    """The kinds of steps of a program."""

    FORWARD = "forward"  # the first execution of a forward op
    RECOMPUTE = "recompute"  # any later execution of a forward op
    BACKWARD = "backward"
    OFFLOAD = "offload"  # a copy to the host begins
    RELEASE = "release"  # that copy has ended: its source may be freed
    PREFETCH = "prefetch"  # memory is allocated, and the copy back begins
    WAIT = "wait"  # the copy back has ended
    COMPLETE = "complete"  # a collective has ended: its results may be read, and its operands freed
    UPDATE = "update"  # the optimizer's step of one parameter; the copy to its home on the host begins


@dataclass(frozen=True, slots=True)
class Step:
    """One execution of one op."""

    op: int  # the op's number in the step graph
    block: int  # the block that it runs for, from 0
    role: Role
    reads: tuple[int, ...]  # versions
    writes: tuple[int, ...]  # versions, in the order of the op's writes


@dataclass(frozen=True, slots=True)
class Transfer:
    """A step that executes no op: an optimizer update, the end of a collective, or part of a copy to the host or back.

    What travels is a version, which comes back as another version of the same value, or the optimizer state of a
    parameter.
    """

    block: int
    role: Role
    trip: int  # the number of the trip: a copy of a version to the host, and the copy back
    reads: tuple[int, ...]  # versions
    writes: tuple[int, ...]
    op: None = None  # no op is executed
    workspace: int = 0  # bytes while it runs, beyond what it reads and writes
    seconds: float = 0.0  # seconds that the step itself takes, without waiting for a copy
    state_of: int | None = None  # the parameter whose optimizer state travels
    takes: int = 0  # bytes of optimizer state that this step allocates on the device; below 0: that it frees


@dataclass(frozen=True, eq=False)
class Program:
    """Every execution of one training step; `steps[split:]` is the backward graph.

    A version is one life of a value: version v, in order of creation, is one of the value `version_of[v]`.
    """

    layout: Layout
    steps: tuple[Step | Transfer, ...]
    split: int
    version_of: tuple[int, ...]
    first: dict[int, int]  # value -> its first version: what the graphs return, whatever is made again later
    repeated: frozenset[int]  # ops that run more than once
    preserved: frozenset[
        int
    ]  # mutated primals that the backward reads: copied before the forward overwrites them
    fetched: frozenset[int] = (
        frozenset()
    )  # versions of primals that live on the host: unlike other primals, they count as memory of the step
    resident: int = (
        0  # bytes of weights and optimizer state that stay on the device, where the budget counts them
    )

    @property
    def executions(self) -> tuple[Step, ...]:
        """The steps that execute an op: all but transfers."""
        return tuple(step for step in self.steps if isinstance(step, Step))

    @property
    def recomputed(self) -> int:
        """Number of steps that execute a forward op again."""
        return sum(step.role is Role.RECOMPUTE for step in self.steps)


@dataclass(frozen=True, eq=False)
class Order:
    """The ops of a program in the order in which they run, and the block that each of them runs for.

    An op reads the latest version of a value, and the first version of what the caller holds.
    """

    layout: Layout
    ops: tuple[int, ...]
    blocks: tuple[int, ...]
    split: int

    def program(self) -> Program:
        """Build the program that runs in this order. Raises `InvalidSchedule` where an op lacks what it reads."""
        replay = Replay(self.layout)
        pinned = self.layout.graph.pinned
        for position, (op, block) in enumerate(zip(self.ops, self.blocks, strict=True)):
            if position == self.split:
                replay.split = position
            replay.run(op, block, pinned)
        return replay.whole_program()


def order_of(layout: Layout, schedule: Schedule) -> Order:
    """Return the order in which a schedule executes ops. O(steps * reads).

    Raises:
        InvalidSchedule: an op of the schedule needs what is not stored when it runs.
    """
    replay = _OrderReplay(layout)
    for op in schedule.ops:
        replay.execute(op)
    replay.check_complete()
    split = len(replay.ops) if replay.split is None else replay.split
    return Order(layout=layout, ops=tuple(replay.ops), blocks=tuple(replay.blocks), split=split)


def rematerialize(layout: Layout, schedule: Schedule) -> Program:
    """Expand a schedule into the program that it executes. O(steps * reads). Raises what `order_of` raises."""
    return order_of(layout, schedule).program()


@dataclass(slots=True)
class Replay:
    """The state of a replay: the current version of each available value, and what the schedule keeps stored."""

    layout: Layout
    steps: list[Step] = field(default_factory=list)
    version_of: list[int] = field(default_factory=list)
    current: dict[int, int] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)  # ops that ran at least once, here or before
    split: int | None = None
    _covers: dict[int, int] = field(default_factory=dict)  # value -> how many stored items hold it
    _stored: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    _repeated: set[int] = field(default_factory=set)
    _waiting: list[int] = field(default_factory=list)  # backward ops that lack a gradient
    _first: dict[int, int] = field(default_factory=dict)

    def give(self, value: int) -> int:
        """Make a new version of a value the current one, and return its number."""
        self.current[value] = version = len(self.version_of)
        self.version_of.append(value)
        self._first.setdefault(value, version)
        return version

    def execute(self, op: Op) -> None:
        """Run one operation of a schedule. Transfers raise `InvalidSchedule`: see `transfers.activations.trips_of`."""
        match op:
            case Forward(block, keep, option):
                self.forward(block - 1, keep, option)
            case Backward(block):
                self.backward(block - 1)
            case Drop(value):
                self.discard(value.kind, value.index - 1)
            case _:
                raise InvalidSchedule(f"{op} needs a host to go to: compile with offload=True")

    def versions_of(self, kind: str, block: int) -> dict[int, int]:
        """Return value -> version for what only this stored item holds; {} for a0, the chain's input.

        An item is kind "a", the output of a block (from 0), or "A", all that its backward reads. Raises
        `InvalidSchedule` if it is not stored.
        """
        if block < 0:
            return {}
        if (kind, block) not in self._stored:
            raise InvalidSchedule(f"Off({kind}{block + 1}): it is not stored")
        values = self._stored[kind, block]
        return {value: self.current[value] for value in sorted(values) if self._covers[value] == 1}

    def restore(self, kind: str, block: int, versions: Mapping[int, int]) -> None:
        """Store an item (see `versions_of`) that was discarded again, with these versions; nothing if it is stored."""
        if (kind, block) not in self._stored:
            self.current |= versions
            self._store((kind, block), versions)

    def forward(self, block: int, keep: Keep, option: int = 0) -> None:
        """Run the forward of a block, and store its output, or with `Keep.ALL` what this option saves for its backward.

        `Keep.NONE` discards the block's input.
        """
        place, graph = self.layout.blocks[block], self.layout.graph
        if keep is Keep.ALL and option >= len(place.saved):
            raise InvalidSchedule(f"block {block + 1} has {len(place.saved)} options, not {option + 1}")
        first = not self._seen(block)
        if first:
            for index in place.forward:  # checks, which return nothing, run once
                if not graph.ops[index].writes:
                    self._run(index, block)
        self._need(self.layout.needs[block, option if keep is Keep.ALL else -1, first], block)
        if keep is Keep.ALL:
            self._store(("A", block), place.saved[option] | place.boundary)
        else:
            self._store(("a", block), place.boundary)
        if keep is Keep.NONE:
            self.discard("a", block - 1)
        self._forget(place.made)

    def backward(self, block: int) -> None:
        """Run the backward of a block, and forget the block's input and what was saved for it.

        An op that reads a gradient which a later backward makes (towers that share weights) waits for that.
        """
        if self.split is None:
            self.split = self._count()
        place = self.layout.blocks[block]
        self._run_ready(place.backward, block)
        if self._waiting:
            self._run_ready((), block)
        self.discard("A", block)
        self.discard("a", block - 1)
        self.discard("a", block)
        self._forget(place.made)

    def _run_ready(self, backward: Iterable[int], block: int) -> None:
        """Run these ops, and backward ops that waited for a gradient; those that still lack one wait on.

        An op that draws random numbers waits for those that draw before it.
        """
        waiting, self._waiting = [*self._waiting, *backward], []
        ops = self.layout.graph.ops
        for index in waiting:
            behind = ops[index].random and any(ops[other].random for other in self._waiting)
            if behind or self._gradients_missing(index):
                self._waiting.append(index)
            else:
                self._run(index, block)

    def _gradients_missing(self, index: int) -> bool:
        return any(value not in self.current for value in self.layout.graph.gradients_read[index])

    def discard(self, kind: str, block: int) -> None:
        """Forget a stored item, "a" or "A" of a block (see `versions_of`); do nothing if it is not stored."""
        for value in self._stored.pop((kind, block), ()):
            self._covers[value] -= 1
            if not self._covers[value]:
                del self._covers[value]
                if value not in self.layout.held:
                    self.current.pop(value, None)

    def whole_program(self) -> Program:
        """Return the recorded program as that of an entire step, which includes inputs that nothing reads."""
        for value in sorted(self.layout.graph.given - self.current.keys()):
            self.give(value)
        return self.program()

    def program(self) -> Program:
        """Return the program recorded so far."""
        self.check_complete()
        split = len(self.steps) if self.split is None else self.split
        late_reads = {self.version_of[version] for step in self.steps[split:] for version in step.reads}
        return Program(
            layout=self.layout,
            steps=tuple(self.steps),
            split=split,
            version_of=tuple(self.version_of),
            first=self._first,
            repeated=frozenset(self._repeated),
            preserved=frozenset(late_reads & self.layout.graph.mutated_primals),
        )

    def check_complete(self) -> None:
        """Raise `InvalidSchedule` if backward ops still wait for a gradient."""
        if self._waiting:
            name = self.layout.graph.ops[self._waiting[0]].name
            raise InvalidSchedule(f"the schedule ends before {name} has the gradients that it reads")

    def _count(self) -> int:
        return len(self.steps)

    def _seen(self, block: int) -> bool:
        return not self.ran.isdisjoint(self.layout.blocks[block].forward)

    def _store(self, item: tuple[str, int], values: Iterable[int]) -> None:
        held = frozenset(values)
        for value in held:
            self._covers[value] = self._covers.get(value, 0) + 1
        self.discard(*item)  # the item as it was stored before, if it was; values that both hold stay
        self._stored[item] = held

    def _forget(self, values: frozenset[int]) -> None:
        for value in self.current.keys() & values:
            if value not in self._covers and value not in self.layout.held:
                del self.current[value]

    def _need(self, wanted: Iterable[int], block: int) -> None:
        """Make the wanted values of a block, in the order of the original forward."""
        for index in self._makers(wanted, block):
            self._run(index, block)

    def _makers(self, wanted: Iterable[int], block: int) -> list[int]:
        """List the ops that make the wanted values of a block, and whatever they lack, in the order of the forward."""
        graph, place = self.layout.graph, self.layout.blocks[block]
        missing: set[int] = set()
        stack = self._missing(wanted)
        while stack:
            producer = graph.values[stack.pop()].producer
            assert producer is not None
            if producer in missing:
                continue
            missing.add(producer)
            op = graph.ops[producer]
            reads = op.again_reads if producer in self.ran else op.reads
            stack += self._missing(reads)
        makers = sorted(missing)
        for index in (makers[0], makers[-1]) if makers else ():
            if not place.forward or index < place.forward[0] or index > place.forward[-1]:
                op = graph.ops[index]
                raise InvalidSchedule(f"block {block + 1} needs {op.name}, which belongs to another block")
        return makers

    def _missing(self, values: Iterable[int]) -> list[int]:
        """List the values that are not available; inputs become available when they are first read."""
        missing = []
        for value in values:
            if value not in self.current:
                if value in self.layout.graph.given:
                    self.give(value)
                else:
                    missing.append(value)
        return missing

    def _run(self, index: int, block: int) -> None:
        op = self.layout.graph.ops[index]
        if missing := self._missing(op.again_reads if index in self.ran else op.reads):
            self._need(missing, block)
        self.run(index, block)

    def run(self, index: int, block: int, pinned: frozenset[int] = frozenset()) -> None:
        """Run one op on the current versions of what it reads; new versions of what it writes become current.

        The first version of a `pinned` value, which the caller of the step holds, stays current.
        """
        op = self.layout.graph.ops[index]
        again = index in self.ran
        wanted, made = (op.again_reads, op.again_writes) if again else (op.reads, op.writes)
        if missing := self._missing(wanted):
            name = self.layout.graph.values[missing[0]].name
            raise InvalidSchedule(f"{op.name} runs before {name}, which it reads")
        reads = tuple([self.current[value] for value in wanted])
        writes = tuple([self.give(value) for value in made])
        self.current |= {value: self._first[value] for value in made if value in pinned}
        role = Role.BACKWARD if op.backward else Role.RECOMPUTE if again else Role.FORWARD
        self.steps.append(Step(index, block, role, reads, writes))
        (self._repeated if again else self.ran).add(index)


@dataclass(slots=True)
class _OrderReplay(Replay):
    """A replay that records the order of ops, and no versions."""

    ops: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = dict.fromkeys(self.layout.graph.given, 0)

    def _count(self) -> int:
        return len(self.ops)

    def _missing(self, values: Iterable[int]) -> list[int]:
        current = self.current
        return [value for value in values if value not in current]

    def _makers(self, wanted: Iterable[int], block: int) -> list[int]:
        """Return the ops that make the wanted values, cached by the wanted and the available values of the block."""
        if block not in self.layout.uniform:
            return Replay._makers(self, wanted, block)
        made = self.layout.blocks[block].made
        key = (block, frozenset(wanted), frozenset(self.current.keys() & made))
        known = self.layout.runs.get(key)
        if known is None:
            known = self.layout.runs[key] = Replay._makers(self, wanted, block)
        return known

    def run(self, index: int, block: int, pinned: frozenset[int] = frozenset()) -> None:
        """Record that an op runs, whose operands are available; what it writes becomes available."""
        op = self.layout.graph.ops[index]
        self.current.update(dict.fromkeys(op.again_writes if index in self.ran else op.writes, 0))
        self.ops.append(index)
        self.blocks.append(block)
        self.ran.add(index)
