"""Pipelines for the tests of their planners: from the vectors, and random ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from fxremat.solvers.pipeline.contiguous import least_memory
from fxremat.solvers.pipeline.model import Layer, Layers, Machines, PlannedStage, Way
from fxremat.solvers.pipeline.stage_costs import Job

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "pipeline.json").read_text())


def kind(*names: str) -> list[Any]:
    found = [vector for vector in VECTORS if vector["kind"] in names]
    return [pytest.param(vector, id=f"{vector['kind']}{number}") for number, vector in enumerate(found)]


def layers_of(chain: dict[str, Any], *, buffers: bool = True) -> Layers:
    """The thesis' simple chain: a layer keeps its input. Without buffers, values take no room at borders."""
    a, delta = chain["a"], chain["delta"]
    return Layers(
        input_bytes=a[0],
        input_grad_bytes=delta[0],
        layers=tuple(
            Layer(
                forward_time=forward,
                backward_time=backward,
                weight_bytes=weight,
                saved_bytes=a[number],
                output_bytes=a[number + 1] if buffers else 0,
                grad_bytes=delta[number + 1] if buffers else 0,
            )
            for number, (forward, backward, weight) in enumerate(
                zip(chain["uF"], chain["uB"], chain["W"], strict=True)
            )
        ),
    )


def job_of(vector: dict[str, Any], devices: int, *, buffers: bool = True) -> Job:
    chain = vector["chain"]
    machines = Machines(
        devices=devices, memory=vector["M"], bandwidth=chain["beta"] or None, copies=chain["C"]
    )
    return Job(layers_of(chain, buffers=buffers), machines)


def stages_of(
    job: Job, stages: Sequence[Sequence[int]], alloc: Sequence[int] | None = None
) -> tuple[PlannedStage, ...]:
    """From pairs of layers, counted from 1, each on a device of its own where none are given."""
    return tuple(
        PlannedStage(
            first=first - 1,
            last=last - 1,
            device=number if alloc is None else alloc[number],
            way=job.keeping_all(first - 1, last - 1),
        )
        for number, (first, last) in enumerate(stages)
    )


def three_ways(layers: Layers) -> Any:
    """The ways of the vectors: keep all, recompute all but the last layer, recompute the first half."""

    def ways(first: int, last: int) -> list[Way]:
        stage = layers.layers[first : last + 1]
        stored = [layer.saved_bytes for layer in stage]
        forward = [layer.forward_time for layer in stage]
        backward = sum(layer.backward_time for layer in stage)

        def way(again: float, kept: float) -> Way:
            return Way(
                forward_time=sum(forward),
                backward_time=backward + again,
                kept_bytes=kept,
                peak_bytes=sum(stored),
            )

        found = [way(0, sum(stored)), way(sum(forward[:-1]), stored[0])]
        if last - first >= 2:
            half = (first + last + 2) // 2 - first  # layers of the first half, as the vectors count them
            found.append(way(sum(forward[:half]), stored[0] + sum(stored[half:])))
        return found

    return ways


@st.composite
def jobs(draw: st.DrawFn, most_layers: int = 7, most_devices: int = 4, ways: bool = True) -> Job:
    """Small whole numbers; the memory is near what is needed."""
    count = draw(st.integers(1, most_layers))
    times, sizes = st.integers(0, 9), st.integers(0, 6)
    layers = Layers(
        input_bytes=draw(sizes),
        input_grad_bytes=0,
        layers=tuple(
            Layer(
                forward_time=draw(times),
                backward_time=draw(st.integers(1, 9)),
                weight_bytes=draw(st.integers(0, 4)),
                saved_bytes=draw(sizes),
                output_bytes=draw(sizes),
                grad_bytes=draw(sizes),
            )
            for _ in range(count)
        ),
    )
    devices = draw(st.integers(1, most_devices))
    machines = Machines(
        devices=devices,
        memory=1,
        bandwidth=draw(st.sampled_from([None, 1, 2, 4])),
        copies=draw(st.sampled_from([1, 2, 3])),
    )
    job = Job(layers, machines, three_ways(layers) if ways and draw(st.booleans()) else None)
    least = least_memory(job)
    more = sum(layer.saved_bytes for layer in layers.layers) * draw(st.integers(-1, 8)) / 8
    return job.with_memory(max(1, least + more))
