"""Lower bounds on the period of any pipeline plan, contiguous or not, k-periodic or not.

    load        the seconds of all stages at their fastest, divided by the number of devices
    layer       the maximum over layers of the seconds of the fastest stage that contains the layer
    Little      (Little's law) if nothing is recomputed: a layer keeps its bytes from its forward to its backward, which
                is at least the seconds of all layers from it on; multiplied by the rate, that is the average memory it
                occupies, and all devices together have no more than all of their memory:
                T >= sum of saved(l) * U(l..) / (devices * M - copies * weights)
"""

from __future__ import annotations

from itertools import accumulate
from math import inf

from fxremat.solvers.pipeline.stage_costs import Job


def lower_bound(job: Job) -> float:
    """Return a lower bound in seconds on the time per micro-batch of any plan; infinite if nothing can fit.

    It examines O(layers^2) stages.
    """
    fastest = _fastest(job)
    bound = max(_load(job, fastest), _slowest_layer(job, fastest))
    return bound if job.options is not None else max(bound, _little(job))


def _fastest(job: Job) -> list[list[float]]:
    """Return the seconds of each stage at its fastest, as [first layer][last layer]."""
    return [
        [
            min((way.seconds for way in job.ways(i, j)), default=inf) if i <= j else inf
            for j in range(job.count)
        ]
        for i in range(job.count)
    ]


def _load(job: Job, fastest: list[list[float]]) -> float:
    least = [0.0]
    for j in range(job.count):
        least.append(min(least[i] + fastest[i][j] for i in range(j + 1)))
    return least[-1] / job.machines.devices


def _slowest_layer(job: Job, fastest: list[list[float]]) -> float:
    """Return the maximum over layers of the seconds of the fastest stage that contains the layer."""
    around = [row[:] for row in fastest]
    for i in range(job.count):
        for j in range(job.count - 1, -1, -1):
            if i > 0:
                around[i][j] = min(around[i][j], around[i - 1][j])
            if j + 1 < job.count:
                around[i][j] = min(around[i][j], around[i][j + 1])
    return max(around[layer][layer] for layer in range(job.count))


def _little(job: Job) -> float:
    layers = job.layers.layers
    after = list(accumulate(layer.forward_time + layer.backward_time for layer in reversed(layers)))[::-1]
    held = sum(layer.saved_bytes * seconds for layer, seconds in zip(layers, after, strict=True))
    room = job.machines.devices * job.machines.memory - job.weights(0, job.count - 1)
    if held == 0:
        return 0.0
    return held / room * (1 - 1e-9) if room > 0 else inf
