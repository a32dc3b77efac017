"""The step to run, op by op: which op runs when, on which version of each value.

A version is a value as computed by one execution of its op; a recomputed value has several. A schedule consists
of operations on blocks; `rematerialize` replays it and records every execution of an op:

    Fck l, Fnone l, Fall l[o]   the ops of block l that compute the values to be stored, if not available already
    B l                         the backward ops of block l, each after the recomputations that it needs

The schedule decides which values can be read. A version is freed right after its last use (see
`step.liveness`), even where the schedule would keep it longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op
from fxremat.errors import InvalidSchedule
from fxremat.step.layout import Layout


class Role(Enum):
    """The kinds of steps in a program: run an op, copy to or from the host, or update a parameter."""

    FORWARD = "forward"  # the first execution of a forward op
    RECOMPUTE = "recompute"  # any later execution of a forward op
    BACKWARD = "backward"
    OFFLOAD = "offload"  # a copy to the host begins
    RELEASE = "release"  # a copy to the host has ended: the tensor may be freed
    PREFETCH = "prefetch"  # memory is allocated for a copy back from the host, which begins
    WAIT = "wait"  # a copy back from the host has ended
    COMPLETE = "complete"  # a collective has ended: its results may be read, its operands freed
    UPDATE = "update"  # the optimizer updates one parameter, whose copy back to the host begins


@dataclass(frozen=True, slots=True)
class Step:
    """One execution of one op."""

    op: int  # index of the op in the step graph
    block: int  # index of the block (run of consecutive ops) that the step belongs to, from 0
    role: Role
    reads: tuple[int, ...]  # indices of the versions that the step reads; a version is the result of one execution
    # indices of the versions (results of one execution) that the step writes, in the order of the op's `writes`
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A step that executes no op: an optimizer update, the end of a collective, or a part of a copy to or from host.

    Copied is either a version of a value, which comes back as another version, or a parameter's optimizer
    state.
    """

    block: int
    role: Role
    trip: int  # number shared by a copy of a version to the host and its copy back
    reads: tuple[int, ...]  # indices of the versions (results of one execution) that the copy or update reads
    writes: tuple[int, ...]
    op: None = None  # always None: no op is executed
    workspace: int = 0  # bytes allocated only while the step runs, besides what it reads and writes
    seconds: float = 0.0  # seconds of the step itself, without waiting for a copy
    state_of: int | None = None  # number of the parameter whose optimizer state is copied, if any
    takes: int = 0  # bytes of optimizer state that are allocated on the device by this step; negative: freed


@dataclass(frozen=True, eq=False)
class Program:
    """All steps of one training step, in execution order; `steps[split:]` is the backward graph.

    A version is a value as computed by one execution of its op: version v belongs to the value `version_of[v]`.
    """

    layout: Layout
    steps: tuple[Step | Transfer, ...]
    split: int
    version_of: tuple[int, ...]
    first: dict[int, int]  # value -> its first version (the result of its first execution), which the graphs return
    repeated: frozenset[int]  # ops that run more than once
    preserved: frozenset[
        int
    ]  # preserved: inputs that the backward reads and the forward overwrites, so that they are copied first
    fetched: frozenset[int] = (
        frozenset()
    )  # fetched: parameters that are copied from the host; unlike other parameters they count as memory
    resident: int = (
        0  # resident: bytes of weights and optimizer state that stay on the device, if the budget covers them
    )

    @property
    def executions(self) -> tuple[Step, ...]:
        """The steps that execute an op, without transfers."""
        return tuple(step for step in self.steps if isinstance(step, Step))

    @property
    def recomputed(self) -> int:
        """The number of steps that execute a forward op a second time or later."""
        return sum(step.role is Role.RECOMPUTE for step in self.steps)


@dataclass(frozen=True, eq=False)
class Order:
    """The ops of a program in execution order, recomputations included, and the block that each of them runs for.

    An op reads the latest version of a value; of values that the caller holds, the first version.
    """

    layout: Layout
    ops: tuple[int, ...]
    blocks: tuple[int, ...]
    split: int

    def program(self) -> Program:
        """Build the program that runs in this order.

        Raises `InvalidSchedule` if an op reads a value that is not computed yet.
        """
        replay = Replay(self.layout)
        pinned = self.layout.graph.pinned
        for position, (op, block) in enumerate(zip(self.ops, self.blocks, strict=True)):
            if position == self.split:
                replay.split = position
            replay.run(op, block, pinned)
        return replay.whole_program()

    def repeats(self, some: Set[int]) -> bool:
        """Tell whether one of these ops runs more than once. O(steps)."""
        ran = [op for op in self.ops if op in some]
        return len(ran) > len(set(ran))


@dataclass(slots=True)
class Replay:
    """The state while a schedule is simulated: the current version of each value, and the items that are stored.

    A version is the result of one execution of the op that computes the value.
    """

    layout: Layout
    steps: list[Step] = field(default_factory=list)
    version_of: list[int] = field(default_factory=list)
    current: dict[int, int] = field(default_factory=dict)
    ran: set[int] = field(default_factory=set)  # ops that ran at least once
    split: int | None = None
    # value -> number of stored block outputs and save sets that contain the value
    _covers: dict[int, int] = field(default_factory=dict)
    _stored: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    _repeated: set[int] = field(default_factory=set)
    _waiting: list[int] = field(default_factory=list)  # backward ops that wait for a gradient which is not computed yet
    _first: dict[int, int] = field(default_factory=dict)

    def give(self, value: int) -> int:
        """Add a version of a value (the result of one more execution), make it the current one, and return its number.
        """
        self.current[value] = version = len(self.version_of)
        self.version_of.append(value)
        self._first.setdefault(value, version)
        return version

    def execute(self, op: Op) -> None:
        """Run one operation of a schedule, except copies, which raise `InvalidSchedule`.

        `transfers.activations.trips_of` runs schedules with copies.
        """
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
        """Return value -> version for the values that no other stored item contains; {} for the chain's input.

        An item is ("a", block), the output of a block, or ("A", block), all that its backward reads; blocks
        count from 0. Raises `InvalidSchedule` if the item is not stored.
        """
        if block < 0:
            return {}
        if (kind, block) not in self._stored:
            raise InvalidSchedule(f"Off({kind}{block + 1}): it is not stored")
        values = self._stored[kind, block]
        return {value: self.current[value] for value in sorted(values) if self._covers[value] == 1}

    def restore(self, kind: str, block: int, versions: Mapping[int, int]) -> None:
        """Store a discarded block output or save set again, with these versions of its values.

        Do nothing if it is stored. `versions_of` describes the arguments.
        """
        if (kind, block) not in self._stored:
            self.current |= versions
            self._store((kind, block), versions)

    def forward(self, block: int, keep: Keep, option: int = 0) -> None:
        """Run the forward of a block, and store its output; with `Keep.ALL`, the values of a save option instead.

        `Keep.NONE` also discards the block's input.
        """
        place, graph = self.layout.blocks[block], self.layout.graph
        if keep is Keep.ALL and option >= len(place.saved):
            raise InvalidSchedule(f"block {block + 1} has {len(place.saved)} options, not {option + 1}")
        first = not self._seen(block)
        if first:
            for index in place.forward:  # ops without outputs, such as assertions, run only once
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
        """Run the backward of a block, then discard the block's input and the values saved for it.

        An op that reads a gradient which a later backward computes (parts of the model share weights) waits for
        it.
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
        """Run these backward ops, and ops that waited before, unless gradients that they read are still missing.

        Random ops keep their order: one waits while an earlier one does.
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
        """Discard the stored output ("a") or save set ("A") of a block; do nothing if it is not stored."""
        for value in self._stored.pop((kind, block), ()):
            self._covers[value] -= 1
            if not self._covers[value]:
                del self._covers[value]
                if value not in self.layout.held:
                    self.current.pop(value, None)

    def whole_program(self) -> Program:
        """Return the recorded program of an entire step, with inputs that no op reads added."""
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
        # replaces an output or save set that is stored already; values in both the old and the new one stay
        self.discard(*item)
        self._stored[item] = held

    def _forget(self, values: frozenset[int]) -> None:
        for value in self.current.keys() & values:
            if value not in self._covers and value not in self.layout.held:
                del self.current[value]

    def _need(self, wanted: Iterable[int], block: int) -> None:
        """Compute the wanted values of a block by running ops in forward order."""
        for index in self._makers(wanted, block):
            self._run(index, block)

    def _makers(self, wanted: Iterable[int], block: int) -> list[int]:
        """List the ops, in forward order, that compute the wanted values of a block and all missing inputs of these."""
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
        """Run one op on the current versions (latest results) of its operands; its results become the current versions.

        The first version of a `pinned` value, which the caller of the step keeps, stays current.
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
