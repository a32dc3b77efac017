"""A program some of whose values are copied to the host and back, with the simulated times of the copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxremat.step.liveness import Memory
from fxremat.step.program import Program, Role


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramWithTransfers:
    """A program with copies to the host and back, its memory, and its simulated times."""

    program: Program
    memory: Memory
    time: float  # seconds of the step
    copying: tuple[float, float]  # seconds of copying to the host, and of copying back
    waiting: float  # seconds for which ops wait for copies
    waiting_back: float  # the part of `waiting` in which ops wait for copies from the host
    bytes: int  # bytes copied to the host
    starts: tuple[float, ...]  # for each execution in the program, the seconds at which it starts
    # (OFFLOAD or PREFETCH, number of the round trip) -> seconds at which the copy starts and ends
    copies: Mapping[tuple[Role, int], tuple[float, float]]

    @property
    def hidden(self) -> tuple[float, float]:
        """The fractions of the seconds of copying during which no op waits: to the host, and back."""
        waits = (self.waiting - self.waiting_back, self.waiting_back)
        out, back = (
            1.0 - min(1.0, wait / c) if c else 1.0 for wait, c in zip(waits, self.copying, strict=True)
        )
        return out, back
