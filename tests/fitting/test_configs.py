"""Every configuration that comes with fxremat, in a small version: repeated layers, exact bytes, measured peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.cost.devices import Device
from fxremat.cost.estimate import estimate
from fxremat.cost.measure import fresh_as_known
from fxremat.fitting.loaded import Loaded
from fxremat.fitting.loading import SHIPPED
from fxremat.fitting.repeat import NotPeriodic, repeated
from fxremat.fitting.resident import resident_of
from fxremat.fitting.settings import Training
from fxremat.fitting.stacks import shortened
from fxremat.fitting.steps import _ways, step_of
from fxremat.planning.facts import facts_of
from fxremat.search.executions import keep_all_peak
from fxremat.settings import Search
from fxremat.step.costs import Costs
from fxremat.step.step_graph import StepGraph
from tests.fitting.small import SMALL, small, with_data

pytest.importorskip("transformers")

pytestmark = [pytest.mark.usefixtures("torch_ready"), pytest.mark.filterwarnings("ignore")]  # of the libraries

HERE = Device(name="here", flops=5e10, half_flops=5e10, bandwidth=1e10, memory=2**40, cuda=False)
WITHIN = 0.02  # of a measured peak, which the README promises


def named(everyday: tuple[str, ...] = ()) -> list[Any]:
    return [pytest.param(name, marks=[] if name in everyday else pytest.mark.long) for name in SHIPPED]


def canonical(graph: StepGraph) -> tuple[object, ...]:
    """All that a graph consists of but the names of its ops and values, which are numbered as ops use them."""
    number: dict[int, int] = {}

    def seen(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number.setdefault(value, len(number)) for value in values)

    ops = [
        (
            *(op.target, op.key, op.kind, op.backward, op.random, op.anchored, op.sequence),
            *map(seen, (op.reads, op.writes, op.again_reads, op.again_writes)),
            op.overwrites is not None and seen((op.overwrites,)),
            graph.sources[op.index].module,
        )
        for op in graph.ops
    ]
    values = [graph.values[value] for value in number]
    shown = [
        (v.bytes, v.origin, v.producer, v.position, v.type, v.whole, graph.parameters.get(v.index)) for v in values
    ]
    sets = (graph.output_values, graph.kept_outputs, graph.mutated_primals, graph.updates, graph.returned)
    return ops, shown, [sorted(number.get(value, -1) for value in one) for one in sets], graph.forward_count


def captured(model: nn.Module, inputs: Any, costs: str) -> Any:
    return fxremat.capture(model, inputs, costs=costs, dynamic=False, search=Search(seconds=0, progress=False))


def lengthened(loaded: Loaded, model: nn.Module, inputs: Any) -> tuple[StepGraph, Costs]:
    """The step of a model with data, captured with few of its layers, and measured."""
    for found in _ways(loaded):
        with shortened(model, found):
            step = captured(model, inputs, "measure")
        graph, known = step.graph.step, facts_of(step._step, step.options)
        try:
            for stack in found:
                longer = repeated(graph, stack.windows)
                graph, known = longer.graph, longer.costs(known)
        except NotPeriodic:
            continue
        assert len(graph.ops) > len(step.graph.ops)
        return graph, known
    raise AssertionError


def needs_library(name: str) -> None:
    if name in ("flux", "sdxl-unet"):
        pytest.importorskip("diffusers")


def test_every_configuration_has_a_small_version() -> None:
    assert set(SHIPPED) == set(SMALL)
    assert len(SHIPPED) == 12


@pytest.mark.long
@pytest.mark.parametrize("name", SHIPPED)
def test_a_step_with_repeated_layers_is_the_captured_one(name: str) -> None:
    needs_library(name)
    loaded = small(name)
    whole = captured(loaded.model, loaded.inputs, "estimate").graph
    found = step_of(loaded, HERE)
    assert canonical(found.graph) == canonical(whole.step)
    assert found.captured_ops < len(whole.ops)
    real = estimate(whole, HERE, fresh_as_known(whole))
    assert found.costs.seconds == real.seconds
    assert found.costs.sizes.workspace == real.sizes.workspace
    assert sorted(found.costs.sizes.values) == sorted(real.sizes.values)


@pytest.mark.long
@pytest.mark.parametrize("name", SHIPPED)
def test_the_peak_of_the_step_is_the_measured_one(name: str) -> None:
    needs_library(name)
    loaded = small(name)
    model, inputs = with_data(loaded)
    graph, costs = lengthened(loaded, model, inputs)
    predicted = keep_all_peak(graph, costs)
    ours: Any = fxremat.compile(model, mem="100%", search=Search(seconds=0, progress=False))

    def step() -> Any:
        found = ours(**inputs)
        (found if isinstance(found, Tensor) else found.loss).backward()
        return found

    step()
    model.zero_grad()
    measured = peak_bytes(step)
    assert measured <= predicted <= (1 + WITHIN) * measured


@pytest.mark.parametrize("name", named(everyday=("gpt2-xl",)))
def test_weights_gradients_and_state_are_those_of_a_real_model(name: str) -> None:
    needs_library(name)
    loaded = small(name)
    resident = resident_of(loaded, step_of(loaded, HERE), Training(dtype="fp32"), HERE)
    model, inputs = with_data(loaded)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = model(**inputs)
    (found if isinstance(found, Tensor) else found.loss).backward()
    optimizer.step()
    assert resident.parts["weights"] == sum(p.nbytes for p in model.parameters())
    assert resident.parts["buffers"] == sum(b.nbytes for b in model.buffers())
    assert resident.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    state = [value for of in optimizer.state.values() for value in of.values()]
    assert resident.parts["optimizer state"] == sum(value.nbytes for value in state)
