"""A program whose collectives run concurrently with its ops, with their simulated times on the network link."""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.step.liveness import Memory
from fxremat.step.program import Program


@dataclass(frozen=True, kw_only=True)
class Communication:
    """One execution of a collective, with its simulated times."""

    name: str  # name of the op
    op: int  # the op's number in the step graph
    begins: float  # seconds from the start of the step to the beginning of the collective's transfer
    ends: float
    waited: float  # seconds for which ops wait for the collective's result


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramWithCommunication:
    """A program in which each collective is started at one step and waited for at a later one."""

    program: Program
    memory: Memory
    time: float  # seconds of the step
    starts: tuple[float, ...]  # for each execution in the program, the seconds at which it starts
    collectives: tuple[Communication, ...]  # the collectives, in the order in which they use the network

    @property
    def seconds(self) -> float:
        """Seconds that the link is busy."""
        return sum(one.ends - one.begins for one in self.collectives)

    @property
    def hidden(self) -> float:
        """The fraction of the link's busy seconds during which no op waits for it; 1.0 if it is never busy."""
        if not self.seconds:
            return 1.0
        return 1.0 - min(1.0, sum(one.waited for one in self.collectives) / self.seconds)
