"""Step graphs as JSON: they come back as they were, and the saved ones are those of the models."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given

from fxremat import FxrematError
from fxremat.step.step_graph import StepGraph
from tests.dags import estimated
from tests.joints import joints
from tests.saved_steps import NAMES, captured_now, saved


def is_equal(one: StepGraph, other: StepGraph) -> bool:
    return all(getattr(one, each.name) == getattr(other, each.name) for each in fields(StepGraph))


@given(joints())
def test_a_graph_comes_back_from_json(graph: StepGraph) -> None:
    assert is_equal(StepGraph.from_json(graph.to_json()), graph)


@pytest.mark.parametrize("name", ["gpt", "shared_pair"])
def test_a_graph_of_a_model_comes_back_from_json(name: str) -> None:
    graph = saved(name).graph
    again = StepGraph.from_json(graph.to_json())
    assert is_equal(again, graph)
    assert again.digest == graph.digest


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"is": "StepGraph"}', '{"is": "Op", "index": 1}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(FxrematError, match=r"no step graph as StepGraph\.to_json writes it"):
        StepGraph.from_json(text)


def test_an_unknown_class_is_not_called() -> None:
    content = json.loads(saved("four_layers").graph.to_json())
    content["ops"][0]["is"] = "Popen"
    with pytest.raises(FxrematError, match="Popen is none of its classes"):
        StepGraph.from_json(json.dumps(content))


@pytest.mark.usefixtures("torch_ready")
def test_a_captured_step_is_written_without_its_nodes() -> None:
    captured = captured_now("four_layers")
    graph = StepGraph.from_json(captured.to_json())
    assert type(graph) is StepGraph
    assert is_equal(graph, captured.step)


@pytest.mark.usefixtures("torch_ready")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "four_layers" else pytest.mark.long) for name in NAMES]
)
def test_saved_steps_are_those_of_the_models(name: str) -> None:
    """After a change of capture or estimates, `python -m tests.saved_steps` writes them anew."""
    captured = captured_now(name)
    if captured.holds_gradients != saved(name).graph.holds_gradients:
        pytest.skip("torch 2.11 holds gradients that are handed in, and so do steps that are captured there")
    assert captured.digest == saved(name).graph.digest
    assert estimated(captured) == saved(name).costs
