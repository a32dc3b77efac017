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
from fxremat.fitting.repeat import NotPeriodic, Repeated, repeated
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


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedModel:
    """A captured training step, and how often its layers repeat; it has costs only for a device."""

    captured: Captured
    stacks: tuple[Repeated, ...] = ()  # graphs that grow: each has one more stack of layers at its full depth

    def on(self, device: Device) -> EstimatedStep:
        """Return the whole step with the estimated costs of a device."""
        graph, costs = self.captured.step, estimate(self.captured, device, fresh_as_known(self.captured))
        for longer in self.stacks:
            graph, costs = longer.graph, longer.costs(costs)
        return EstimatedStep(
            graph=graph,
            costs=costs,
            captured_ops=len(self.captured.ops),
            assumed=assumptions(self.captured, device),
        )


def captured_for(loaded: Loaded, device: Device) -> CapturedModel:
    """Capture the training step of a model as it runs on devices of the same kind, such as all CUDA devices.

    Where the model's layers are known to be equal, a few of them are captured, and repeated as often as the model has
    them. Runs some 4 s for a decoder of any depth, and a second more for each 100 ops of a layer.

    Raises:
        CaptureError: the model is not one graph.
    """
    for found in _ways(loaded):
        try:
            with shortened(loaded.model, found):
                captured = _captured(loaded, device)
            return CapturedModel(captured=captured, stacks=tuple(_repeated(captured.step, found)))
        except NotPeriodic as error:
            log.info("stacks of layers cannot be shortened so far: %s", error)
    return CapturedModel(captured=_captured(loaded, device))


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


def _repeated(graph: StepGraph, found: tuple[Stack, ...]) -> Iterator[Repeated]:
    for stack in found:
        longer = repeated(graph, stack.windows)
        graph = longer.graph
        yield longer


def _captured(loaded: Loaded, device: Device) -> Captured:
    try:
        step = capture(
            loaded.model, loaded.inputs, costs=device, dynamic=False, search=Search(seconds=0, progress=False)
        )
    except FxrematError as error:
        raise type(error)(f"{loaded.name}: {error}") from error
    return step.graph

