"""Costs of compiled regions, measured where a walk through the step reaches them (`cost.walk`), within a budget.

A region empties the list of its inputs, and frees or overwrites those that die there. To be timed, it runs several
times on copies of these, if they fit beside what is alive. Else it only runs as in a step, once wherever a walk reaches
it, so that measuring takes no more memory than training: the first run warms it up, the second shows its peak, and the
next ones its seconds. Equal regions count as one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fxremat.cost.metering import cost_of_call, note_allocations, peak_of, seconds_of
from fxremat.device import Ability, kind_of
from fxremat.graphs.region import Region, laid_out
from fxremat.step.costs import OpCost

WALKS = 5  # a region that cannot have copies of its inputs runs this many times
UNTIMED = 2  # the first of these runs warms it up, and the next one shows its peak; then it is timed


class RegionRaises(Exception):
    """A region has raised when its inputs were gone; it runs op by op from now on, and the walk has to begin anew."""


@dataclass
class _Runs:
    """The runs of equal regions as in a step, so far."""

    count: int = 0
    peak: int = 0  # bytes of the last run for the peak, above its start
    seconds: list[float] = field(default_factory=list)  # of the runs after those


class RegionCosts:
    """Runs the regions of one step in walks, and measures those whose cost is not known.

    Args:
        limit: bytes that the step may take beside its inputs meanwhile; None: any number.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._device, self._limit = device, limit
        self._runs: dict[str, _Runs] = {}  # by the key of a region

    def run(self, region: Region, inputs: list[Any]) -> Any:
        """Run a region, and return its result.

        Args:
            inputs: a list with the only references to those inputs that die; it is emptied.

        Raises:
            RegionRaises: the region has raised.
        """
        return self._guarded(region, partial(region.run, inputs))

    def measured(self, key: str, region: Region, inputs: list[Any], alive: int) -> tuple[OpCost | None, Any]:
        """Run a region as `run` does; return its cost, or None if it has to run again for that, and its result.

        Args:
            key: equal for equal regions.
            alive: bytes that the step has allocated, with the inputs.

        Raises:
            RegionRaises: the region has raised.
        """
        region.compile()
        runs = self._runs.setdefault(key, _Runs())
        copies = sum(x.untyped_storage().nbytes() for place, x in enumerate(inputs) if place in region.dying)
        if self._limit is None or (runs.count and alive + copies + runs.peak <= self._limit):
            return on_copies(region, inputs, self._device)
        if runs.count < UNTIMED:
            runs.peak, result = self._peak(region, inputs)
        else:
            seconds, result = self._timed(region, inputs)
            runs.seconds.append(seconds)
        runs.count += 1
        if runs.count < WALKS:
            return None, result
        seconds = statistics.median(runs.seconds)
        return cost_of_call(seconds, runs.peak, result, self._device, new=False), result

    def _peak(self, region: Region, inputs: list[Any]) -> tuple[int, Any]:
        """Run a region as in a step; return its peak in bytes above its start, and its result."""
        held = list[Any]()

        def take() -> None:
            inputs.reverse()
            while inputs:  # one after the other, so that only one of them exists twice
                x = inputs.pop()
                held.append(_copy_of(x) if len(held) in region.dying else x)

        if kind_of(self._device).recorded:
            note_allocations(take, self._device)  # the size of freed memory is known only if its allocation was seen
        else:
            held = inputs
        peak, result = self._guarded(region, lambda: peak_of(partial(region.run, held), self._device))
        return peak, result

    def _timed(self, region: Region, inputs: list[Any]) -> tuple[float, Any]:
        """Run a region as in a step; return its seconds, and its result."""
        kind = kind_of(self._device)
        if not kind.can(Ability.TIMING):
            began = time.perf_counter()
            result = self.run(region, inputs)
            return time.perf_counter() - began, result
        start, end = (kind.event(self._device, timed=True) for _ in range(2))
        start.record()
        result = self.run(region, inputs)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result

    def _guarded(self, region: Region, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:
            if region.given_up:  # it ran op by op already
                raise
            region.give_up(f"{type(error).__name__}: {error}")
            raise RegionRaises from error


def on_copies(region: Region, inputs: list[Any], device: torch.device) -> tuple[OpCost, Any]:
    """Measure a region on copies of the inputs that die; return its cost and its result.

    As in a step, it has the only references to these, so that it can free them. If it raises, it runs op by op from
    then on.

    Args:
        inputs: stay as they are.
    """
    held: list[Any] = []

    def hold() -> None:
        held[:] = [_copy_of(x) if place in region.dying else x for place, x in enumerate(inputs)]

    def run() -> Any:
        return region.run(held)

    hold()
    try:
        run()
    except Exception as error:
        region.give_up(f"{type(error).__name__}: {error}")
    hold()
    seconds = seconds_of(run, device, prepare=hold)
    note_allocations(hold, device)  # the profiler knows the size of freed memory only if it has seen the allocation
    peak, result = peak_of(run, device)
    return cost_of_call(seconds, peak, result, device, new=False), result


def _copy_of(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, or, if a stride is 0, one with memory for each element."""
    return x.clone() if 0 in x.stride() else laid_out(x, x.stride())
