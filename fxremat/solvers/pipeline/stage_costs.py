"""Costs of stages, and of the copies between them, as all pipeline planners look them up.

    stage i..j    ways to train it: seconds, bytes saved per micro-batch, bytes of the micro-batch being computed;
                  copies * weights of i..j, and the buffers of the borders that it shares with other devices
    border j      between layers j and j + 1: seconds to copy the output and its gradient, bytes of both buffers
    memory        copies * weights + sum over stages of the bytes in flight + buffers on both sides

A. Shilova, Memory Saving Strategies for Deep Neural Network Training (thesis, 2021), section 7.1.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from fxremat.solvers.pipeline.model import Layers, Machines, PipelinePlan, Way

ROUNDING = 1e-9  # relative difference below which numbers count as equal
Ways = Callable[[int, int], Sequence[Way]]  # (first layer, last layer) of a stage -> ways to train it


@dataclass(frozen=True)
class Job:
    """Layers to train on several devices, and the ways in which each stage can be trained."""

    layers: Layers
    machines: Machines
    options: Ways | None = None  # None: stages recompute nothing

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.layers.layers)

    def ways(self, first: int, last: int) -> tuple[Way, ...]:
        """Return ways to train a stage (what is recomputed), fastest first; each has less memory than all faster ones.

        It saves less, or its peak is lower.
        """
        if (first, last) not in self._known:
            options = [self.keeping_all(first, last)] if self.options is None else self.options(first, last)
            self._known[first, last] = undominated(options)
        return self._known[first, last]

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[Way, ...]]:
        return {}

    def keeping_all(self, first: int, last: int) -> Way:
        """Return the way to train a stage that recomputes nothing."""
        forward, backward, saved = (
            sums[last + 1] - sums[first] for sums in (self._forward, self._backward, self._saved)
        )
        return Way(
            forward_time=forward,
            backward_time=backward,
            kept_bytes=max(0.0, saved),
            peak_bytes=max(0.0, saved),
        )

    @cached_property
    def _forward(self) -> list[float]:
        return _sums([layer.forward_time for layer in self.layers.layers])

    @cached_property
    def _backward(self) -> list[float]:
        return _sums([layer.backward_time for layer in self.layers.layers])

    @cached_property
    def _saved(self) -> list[float]:
        return _sums([layer.saved_bytes for layer in self.layers.layers])

    @cached_property
    def _weights(self) -> list[float]:
        return _sums([layer.weight_bytes for layer in self.layers.layers])

    @property
    def seconds(self) -> float:
        """Seconds of one micro-batch on one device, without recomputation."""
        return self._forward[-1] + self._backward[-1]

    def weights(self, first: int, last: int) -> float:
        """Return the bytes of all copies of a stage's weights."""
        return self.machines.copies * (self._weights[last + 1] - self._weights[first])

    def buffer(self, border: int) -> float:
        """Return the bytes of buffers that each of two devices has for the copies after layer `border`."""
        return self.layers.layers[border].output_bytes + self.layers.layers[border].grad_bytes

    def fixed(self, first: int, last: int) -> float:
        """Return the bytes of a stage that do not depend on the micro-batches in flight: weights and buffers."""
        borders = [border for border in (first - 1, last) if 0 <= border < self.count - 1]
        return self.weights(first, last) + sum(map(self.buffer, borders))

    def forth(self, border: int) -> float:
        """Return the seconds of copying the output of layer `border` to the next device."""
        speed = self.machines.bandwidth
        return 0.0 if speed is None else self.layers.layers[border].output_bytes / speed

    def back(self, border: int) -> float:
        """Return the seconds of copying the gradient of the output of layer `border` back to the layer's device."""
        speed = self.machines.bandwidth
        return 0.0 if speed is None else self.layers.layers[border].grad_bytes / speed

    def copying(self, border: int) -> float:
        """Return the seconds for which one micro-batch occupies the link after layer `border`, in both directions."""
        return self.forth(border) + self.back(border)

    def fits(self, size: float) -> bool:
        """Tell whether a device has enough memory for `size` bytes."""
        return size <= self.machines.memory * (1 + ROUNDING)

    def with_memory(self, memory: float) -> Job:
        """Return the same job on devices with `memory` bytes."""
        job = replace(self, machines=replace(self.machines, memory=memory))
        job.__dict__["_known"] = self._known
        return job


def undominated(ways: Sequence[Way]) -> tuple[Way, ...]:
    """Return the ways, fastest first, without those that another one equals or beats in time and in both memories."""
    chosen: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.seconds, way.kept_bytes, way.peak_bytes)):
        if not any(o.kept_bytes <= way.kept_bytes and o.bytes(1) <= way.bytes(1) for o in chosen):
            chosen.append(way)
    return tuple(chosen)


def _sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def step_seconds(plan: PipelinePlan, microbatches: int) -> float:
    """Return the seconds from the first forward to the last backward of a step with `microbatches` micro-batches."""
    ends = [
        start + stage.way.backward_time
        for start, stage in zip(plan.backward_starts, plan.stages, strict=True)
    ]
    return plan.slot(microbatches - 1) * plan.tick + max(ends) - min(plan.forward_starts)
