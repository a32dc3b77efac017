"""A program whose collectives run concurrently with its ops, and the times of the link that they use."""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.step.liveness import Memory
from fxremat.step.program import Program


@dataclass(frozen=True, kw_only=True)
class Communication:
    """One execution of a collective."""

    name: str  # the op's name
    op: int  # the op's number in the step graph
    begins: float  # seconds, on the link
    ends: float
    waited: float  # seconds that ops wait for it


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramWithCommunication:
    """A program in which collectives are started, and waited for later."""

    program: Program
    memory: Memory
    time: float  # seconds
    starts: tuple[float, ...]  # seconds, of each step
    collectives: tuple[Communication, ...]  # in the order in which the link runs them

    @property
    def seconds(self) -> float:
        """Seconds that the link is busy."""
        return sum(one.ends - one.begins for one in self.collectives)

    @property
    def hidden(self) -> float:
        """Share of the seconds that the link is busy for which no op waits; 1.0 if it never is busy."""
        if not self.seconds:
            return 1.0
        return 1.0 - min(1.0, sum(one.waited for one in self.collectives) / self.seconds)
