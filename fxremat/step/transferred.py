"""A program whose values travel to the host and back, and the times of its copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxremat.step.liveness import Memory
from fxremat.step.program import Program, Role


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramWithTransfers:
    """A program with transfers, and its times on the simulated clock."""

    program: Program
    memory: Memory
    time: float  # seconds
    copying: tuple[float, float]  # seconds of copying to the host, and back
    waiting: float  # seconds that ops wait for copies
    waiting_back: float  # seconds, part of `waiting`, that ops wait for copies from the host
    bytes: int  # bytes that leave for the host
    starts: tuple[float, ...]  # seconds, of each step
    copies: Mapping[tuple[Role, int], tuple[float, float]]  # (OFFLOAD or PREFETCH, trip) -> seconds of start and end

    @property
    def hidden(self) -> tuple[float, float]:
        """The shares of the copies' seconds that no op waits for: to the host, and back."""
        waits = (self.waiting - self.waiting_back, self.waiting_back)
        out, back = (
            1.0 - min(1.0, wait / c) if c else 1.0 for wait, c in zip(waits, self.copying, strict=True)
        )
        return out, back
