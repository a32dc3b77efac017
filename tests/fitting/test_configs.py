"""Every configuration that comes with fxremat, in a small version: repeated layers, exact bytes, measured peaks."""

from __future__ import annotations

import json
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
from fxremat.fitting.loading import CONFIGS, SHIPPED, load
from fxremat.fitting.repeat import NotPeriodic, repeated
from fxremat.fitting.resident import resident_of
from fxremat.fitting.settings import Training
from fxremat.fitting.stacks import shortened
from fxremat.fitting.steps import _ways, captured_for
from fxremat.planning.facts import facts_of
from fxremat.search.executions import keep_all_peak
from fxremat.settings import Search
from fxremat.step.costs import Costs
from fxremat.step.step_graph import StepGraph
from tests.fitting.small import SMALL, small, with_data

pytest.importorskip("transformers")

pytestmark = [pytest.mark.usefixtures("torch_ready"), pytest.mark.filterwarnings("ignore")]  # of the libraries

HERE = Device(name="here", flops=5e10, half_flops=5e10, bandwidth=1e10, memory=2**40, cuda=False)
PARAMETERS = {  # of the public models, tied ones once
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "falcon-7b": 6_921_720_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "llama-2-13b": 13_015_864_320,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "opt-1.3b": 1_315_758_080,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "qwen-2.5-0.5b": 494_032_768,
    "qwen-2.5-32b": 32_763_876_352,
    "qwen-2.5-7b": 7_615_616_512,
    "qwen-3-0.6b": 596_049_920,
    "qwen-3-14b": 14_768_307_200,
    "qwen-3-32b": 32_762_123_264,
    "qwen-3-4b": 4_022_468_096,
    "smollm2-1.7b": 1_711_376_384,
    "t5-large": 737_668_096,
    "tinyllama-1.1b": 1_100_048_384,
    "vit-b": 86_567_656,
    "vit-l": 304_326_632,
    "whisper-small": 241_734_912,
}
WITHIN = 0.02  # of a measured peak, which the README promises


def named(everyday: tuple[str, ...] = ()) -> list[Any]:
    return [pytest.param(name, marks=[] if name in everyday else pytest.mark.long) for name in SMALL]


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


def test_every_kind_of_model_has_a_small_version() -> None:
    kinds = {name: json.loads((CONFIGS / f"{name}.json").read_text()).get("model_type", name) for name in SHIPPED}
    assert set(SMALL) <= set(SHIPPED)
    assert {kinds[name] for name in SMALL} == set(kinds.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "gpt2" else pytest.mark.long) for name in PARAMETERS]
)
def test_a_configuration_has_the_parameters_of_its_public_model(name: str) -> None:
    model = load(name, None, Training(), {}).model
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_step_with_repeated_layers_is_the_captured_one(name: str) -> None:
    needs_library(name)
    loaded = small(name)
    whole = captured(loaded.model, loaded.inputs, "estimate").graph
    found = captured_for(loaded, HERE).on(HERE)
    assert canonical(found.graph) == canonical(whole.step)
    assert found.captured_ops < len(whole.ops)
    real = estimate(whole, HERE, fresh_as_known(whole))
    assert found.costs.seconds == real.seconds
    assert found.costs.sizes.workspace == real.sizes.workspace
    assert sorted(found.costs.sizes.values) == sorted(real.sizes.values)


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
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
    resident = resident_of(loaded, captured_for(loaded, HERE).on(HERE), Training(dtype="fp32"), HERE)
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


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_layr": 2}, "config changes 'n_layr', did you mean 'n_layer'?"),
        ({"n_head": 7}, "gpt2-medium: no model can be made of these settings"),
        ({"n_layer": "x"}, "cannot read this configuration"),
    ],
)
def test_settings_that_make_no_model_are_told_in_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(fxremat.FxrematError) as raised:
        fxremat.fits("gpt2-medium", on="H200", config=changes)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_size_that_the_inputs_do_not_have_is_refused() -> None:
    with pytest.raises(fxremat.FxrematError, match="the inputs of gpt2-medium have no image"):
        fxremat.fits("gpt2-medium", on="H200", config={"n_layer": 2}, image=64)
