"""The step of a model without data: equal layers are captured a few times, and repeated in the captured graph."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from fxremat.api import capture
from fxremat.cost.devices import Device
from fxremat.cost.estimate import assumptions, estimate
from fxremat.cost.measure import fresh_as_known
from fxremat.errors import FxrematError
from fxremat.fitting.loaded import Loaded
from fxremat.fitting.repeat import NotPeriodic, repeated
from fxremat.fitting.stacks import CAPTURED, Stack, shortened, stacks
from fxremat.graphs.captured import Captured
from fxremat.settings import Search
from fxremat.step.costs import Costs
from fxremat.step.step_graph import StepGraph

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class EstimatedStep:
    """Forward and backward of a model as numbers, with estimated costs."""

    graph: StepGraph
    costs: Costs
    captured_ops: int  # the ops of the graph that was captured; fewer than those of the step if layers were repeated
    assumed: str  # what the estimate assumes of the device's kernels

    @property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that get a gradient."""
        named, returned = self.graph.parameters, self.graph.returned
        return frozenset(named[value] for value in returned if value in named)


def step_of(loaded: Loaded, device: Device) -> EstimatedStep:
    """Capture the training step of a model for a device.

    Where the model's layers are known to be equal, a few of them are captured, and repeated as often as the model has
    them. Runs some 4 s for a decoder of any depth, and a second more for each 100 ops of a layer.

    Raises:
        CaptureError: the model is not one graph.
    """
    for found in _ways(loaded):
        try:
            return _repeated(loaded, device, found)
        except NotPeriodic as error:
            log.info("stacks of layers cannot be shortened so far: %s", error)
    graph = _captured(loaded, device)
    costs = _costs(graph, device)
    return EstimatedStep(
        graph=graph.step, costs=costs, captured_ops=len(graph.ops), assumed=assumptions(graph, device)
    )


def _ways(loaded: Loaded) -> Iterator[tuple[Stack, ...]]:
    """Yield the ways to shorten the stacks of a model, those that leave most out first."""
    if not loaded.layers_known:
        return
    tried: list[tuple[Stack, ...]] = [()]
    for mixed in (True, False):
        for captured in CAPTURED if loaded.library != "diffusers" else CAPTURED[-1:]:  # theirs differ at both ends
            found = stacks(loaded.model, captured, mixed=mixed)
            if found not in tried:
                tried.append(found)
                yield found


def _repeated(loaded: Loaded, device: Device, found: tuple[Stack, ...]) -> EstimatedStep:
    with shortened(loaded.model, found):
        captured = _captured(loaded, device)
    graph, costs = captured.step, _costs(captured, device)
    for stack in found:
        longer = repeated(graph, stack.windows)
        graph, costs = longer.graph, longer.costs(costs)
    return EstimatedStep(
        graph=graph, costs=costs, captured_ops=len(captured.ops), assumed=assumptions(captured, device)
    )


def _captured(loaded: Loaded, device: Device) -> Captured:
    try:
        step = capture(
            loaded.model, loaded.inputs, costs=device, dynamic=False, search=Search(seconds=0, progress=False)
        )
    except FxrematError as error:
        raise type(error)(f"{loaded.name}: {error}") from error
    return step.graph


def _costs(graph: Captured, device: Device) -> Costs:
    return estimate(graph, device, fresh_as_known(graph))
