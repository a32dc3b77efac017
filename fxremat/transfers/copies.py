"""Programs with copies to the host and back: ops run one after the other, concurrently with copies in each direction.

    offload, release   a device-to-host copy begins; it has ended, and the value's memory is freed
    prefetch, wait     memory is allocated and a host-to-device copy begins; it has ended, and its first reader may run
    time_copies        runs the clock (`transfers.clock`), which simulates when all this happens
    performed          returns the program with these events as steps, in the order in which they happen

The first four are steps of the program, so memory follows from the order of the steps alone and does not depend
on how fast copies are; only time does. A value that is copied out counts as device memory until its copy ends,
and one that is copied in from the beginning of its copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from fxremat.step.costs import Costs, Link
from fxremat.step.liveness import Memory, live_bytes
from fxremat.step.program import Program, Role, Step, Transfer
from fxremat.step.step_graph import Origin
from fxremat.step.transferred import ProgramWithTransfers
from fxremat.transfers import clock
from fxremat.transfers.clock import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """A copy between host and device of one computed tensor, or of a parameter's optimizer state.

    Each execution of an op makes a new version of its result.
    """

    trip: int  # index of the round trip to the host; a copy out and the copy back share it
    block: int
    # the version (result of one execution) that is copied, or that of the parameter whose optimizer state is
    # copied
    version: int
    size: int  # bytes that are copied
    state: bool = False  # True if the optimizer state of a parameter is copied


@dataclass(frozen=True, kw_only=True)
class CopyOut(HostCopy):
    """A device-to-host copy."""

    # index of the step after which the copy starts; an optimizer update starts the copy of its parameter itself
    starts: int
    leaves: int  # index of the last step that reads the value


@dataclass(frozen=True, kw_only=True)
class CopyIn(HostCopy):
    """A copy from the host to the device, which makes a new version of the value."""

    begins: int  # index of the first step before which the copy may start
    first: int  # index of the first step that reads the value




def need_of(program: Program, memory: Memory) -> Ints:
    """Return the bytes needed at each step.

    The first backward step includes what is needed before it, after the forward.
    """
    need = np.array(memory.during, dtype=np.int64)
    if program.split < need.size:
        need[program.split] = max(need[program.split], memory.at_split)
    return need


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedCopies:
    """A program with copies whose times were simulated, but which are not steps of the program yet."""

    program: Program
    copies_out: Sequence[CopyOut]
    copies_in: Sequence[CopyIn]  # the copies from the host, in the order in which the copied values are first read
    link: Link
    log: clock.Log

    @property
    def peak(self) -> int:
        """The largest bytes at any step."""
        return clock.peak_of(self.log)

    @property
    def copying(self) -> tuple[float, float]:
        """Seconds of copying to the host, and back."""
        out, back = (sum(copy.size for copy in copies) for copies in (self.copies_out, self.copies_in))
        return out / self.link.to_host, back / self.link.from_host

    @property
    def time(self) -> float:
        """Seconds of the training step."""
        return clock.time_of(self.log) + self.link.slowdown * sum(self.copying)

    def performed(self, costs: Costs) -> ProgramWithTransfers:
        """Return the program with the copies as steps. O(steps)."""
        return _Writer(self).written(costs)


def durations(program: Program, costs: Costs) -> Floats:
    """Return the seconds of each step."""
    steps = program.steps
    return np.array([costs.seconds[s.op] if isinstance(s, Step) else s.seconds for s in steps])


def time_copies(
    program: Program,
    copies_out: Sequence[CopyOut],
    copies_in: Sequence[CopyIn],
    need: Ints,
    seconds: Floats,
    link: Link,
    limit: int,
) -> TimedCopies:
    """Simulate when steps and copies of a program run; the program stays within `limit` bytes if possible.

    O(steps + copies_in * steps between start and first reader).

    Args:
        need: bytes at each step, without values that are on the host then; it is overwritten.
        seconds: the `durations` of the program.
    """
    copies_in = sorted(copies_in, key=attrgetter("first"))
    starts, leaves = _field(copies_out, "starts"), _field(copies_out, "leaves")
    out = clock.CopiesOut(
        trips=_field(copies_out, "trip"),
        sizes=_field(copies_out, "size"),
        starts=starts,
        leaves=leaves,
        by_start=np.argsort(starts, kind="stable"),
        by_leave=np.argsort(leaves, kind="stable"),
    )
    back = clock.CopiesIn(*(_field(copies_in, name) for name in ("trip", "size", "begins", "first")))
    log = clock.run(need, seconds, program.split, out, back, (link.to_host, link.from_host), limit)
    return TimedCopies(program=program, copies_out=copies_out, copies_in=copies_in, link=link, log=log)


def _field(copies: Sequence[HostCopy], name: str) -> Ints:
    return np.array([getattr(copy, name) for copy in copies], dtype=np.int64)


class _Writer:
    """Translates simulated events into steps of a program."""

    def __init__(self, timed: TimedCopies) -> None:
        self.timed, self.program = timed, timed.program
        # version (result of one execution) -> the version that was copied back and replaces it
        self.renamed: dict[int, int] = {}
        self.version_of = list(self.program.version_of)
        self.steps: list[Step | Transfer] = []
        self.starts: list[float] = []

    def written(self, costs: Costs) -> ProgramWithTransfers:
        log, split = self.timed.log, 0
        for place in range(clock.events_of(log)):
            if place == clock.split_of(log):
                split = len(self.steps)
            if (step := self._step(*log.events[place].tolist())) is not None:
                self.steps.append(step)
                self.starts.append(float(log.starts[place]))
        if self.program.split == len(self.program.steps):  # no op belongs to the backward
            split = len(self.steps)
        values = self.program.layout.graph.values
        came = range(len(self.program.version_of), len(self.version_of))
        program = replace(
            self.program,
            steps=tuple(self.steps),
            split=split,
            version_of=tuple(self.version_of),
            fetched=frozenset(v for v in came if values[self.version_of[v]].origin is Origin.PRIMAL),
        )
        return ProgramWithTransfers(
            program=program,
            memory=live_bytes(program, costs.sizes),
            time=self.timed.time,
            copying=self.timed.copying,
            waiting=float(log.waited.sum()),
            waiting_back=float(log.waited[1]),
            bytes=sum(copy_out.size for copy_out in self.timed.copies_out),
            starts=tuple(self.starts),
            copies=dict(self._copies()),
        )

    def _step(self, kind: int, number: int) -> Step | Transfer | None:
        """Return the step of the program that a simulated event stands for.

        None for the copy of an updated parameter to the host, which the update starts itself.
        """
        match kind:
            case clock.EXECUTE:
                step = self.program.steps[number]
                return replace(step, reads=tuple(self.renamed.get(v, v) for v in step.reads))
            case clock.OFFLOAD:
                leaving = self.timed.copies_out[number]
                if isinstance(self.program.steps[leaving.starts], Transfer):
                    return None
                return self._transfer(Role.OFFLOAD, leaving, reads=(leaving.version,))
            case clock.RELEASE:
                leaving = self.timed.copies_out[number]
                return self._transfer(Role.RELEASE, leaving, reads=self._now(leaving))
            case clock.PREFETCH:
                coming = self.timed.copies_in[number]
                if not coming.state:
                    self.version_of.append(self.program.version_of[coming.version])
                    self.renamed[coming.version] = len(self.version_of) - 1
                return self._transfer(Role.PREFETCH, coming, writes=self._now(coming))
            case _:
                coming = self.timed.copies_in[number]
                return self._transfer(Role.WAIT, coming, reads=self._now(coming))

    def _now(self, what: HostCopy) -> tuple[int, ...]:
        """Return the latest version of the copied value, as a tuple; () for optimizer state."""
        return () if what.state else (self.renamed.get(what.version, what.version),)

    def _transfer(
        self,
        role: Role,
        what: HostCopy,
        *,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
    ) -> Transfer:
        transfer = Transfer(what.block, role, what.trip, reads, writes)
        if not what.state:
            return transfer
        sign = {Role.PREFETCH: 1, Role.RELEASE: -1}.get(role, 0)
        return replace(transfer, state_of=self.program.version_of[what.version], takes=sign * what.size)

    def _copies(self) -> Iterator[tuple[tuple[Role, int], tuple[float, float]]]:
        """Yield ((OFFLOAD or PREFETCH, number of the round trip), (start, end) in seconds) for each copy."""
        log, heard = self.timed.log, self.timed
        sides: tuple[tuple[Role, Sequence[HostCopy], Floats], ...] = (
            (Role.OFFLOAD, heard.copies_out, log.out),
            (Role.PREFETCH, heard.copies_in, log.back),
        )
        for role, copies, spans in sides:
            for copy, (start, end) in zip(copies, spans.tolist(), strict=True):
                yield (role, copy.trip), (start, end)
