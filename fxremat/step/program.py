"""The step to run, op by op: which op runs when, on which version of each value.

A version is a value as computed by one execution of its op; a recomputed value has several. The order of ops comes
from a schedule of blocks (`step.order`) or from a search; `Recorder` numbers the versions. A version is freed right
after its last use (see `step.liveness`), even where a schedule would keep it longer.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import Enum

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
        recorder = Recorder(self.layout)
        recorder.follow(self.ops, self.blocks)
        return recorder.whole_program(self.split)

    def repeats(self, some: Set[int]) -> bool:
        """Tell whether one of these ops runs more than once. O(steps)."""
        ran = [op for op in self.ops if op in some]
        return len(ran) > len(set(ran))


@dataclass(slots=True)
class Recorder:
    """Records the steps of a program as ops run, and numbers the versions of values.

    Args:
        layout: the step as a chain of blocks.
        ran: ops that ran at least once; those that ran before the program begins, at first.
    """

    layout: Layout
    ran: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    version_of: list[int] = field(default_factory=list)
    current: dict[int, int] = field(default_factory=dict)  # value -> its latest version, which ops read
    _first: dict[int, int] = field(default_factory=dict)
    _repeated: set[int] = field(default_factory=set)

    def give(self, value: int) -> int:
        """Add a version of a value (the result of one more execution), make it the current one, and return its number.
        """
        self.current[value] = version = len(self.version_of)
        self.version_of.append(value)
        self._first.setdefault(value, version)
        return version

    def run(self, index: int, block: int) -> None:
        """Run one op on the current versions of its operands; its results become the current versions.

        Of a value that the caller of the step keeps, the first version stays current; of an output that it drops before
        the backward, as long as the forward runs.

        Raises:
            InvalidSchedule: an operand is not computed yet.
        """
        graph = self.layout.graph
        op, again = graph.ops[index], index in self.ran
        wanted, made = (op.again_reads, op.again_writes) if again else (op.reads, op.writes)
        for value in wanted:
            if value not in self.current:
                if value not in graph.given:
                    raise InvalidSchedule(f"{op.name} runs before {graph.values[value].name}, which it reads")
                self.give(value)
        reads = tuple([self.current[value] for value in wanted])
        writes = tuple([self.give(value) for value in made])
        kept = graph.pinned if len(self.ran) >= graph.forward_count else graph.pinned | graph.dropped_outputs
        self.current |= {value: self._first[value] for value in made if value in kept}
        role = Role.BACKWARD if op.backward else Role.RECOMPUTE if again else Role.FORWARD
        self.steps.append(Step(index, block, role, reads, writes))
        (self._repeated if again else self.ran).add(index)

    def follow(self, ops: Sequence[int], blocks: Sequence[int]) -> None:
        """Run the ops of an order that are not recorded yet, each for the block at its place in `blocks`."""
        done = len(self.steps)
        for index, block in zip(ops[done:], blocks[done:], strict=True):
            self.run(index, block)

    def whole_program(self, split: int) -> Program:
        """Return the recorded program of an entire step, with inputs that no op reads added."""
        for value in sorted(self.layout.graph.given - self.current.keys()):
            self.give(value)
        return self.program(split)

    def program(self, split: int) -> Program:
        """Return the program recorded so far, whose backward begins with step `split`."""
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
