"""Ops that run once: by wish, by marks of the model's author, and decisions on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import fxremat
from fxremat.errors import FxrematError
from fxremat.planning.wishes import run_once
from fxremat.plans import Plan
from tests.compilers.models import case, joint_graph

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.2, progress=False)


def repeated(plan: Plan) -> set[str]:
    return {plan.captured.nodes[op].name for op in plan.program.repeated}


def captured(name: str, **options: Any) -> Any:
    return fxremat.capture(joint_graph(case(name)), num_fwd_outputs=1, search=QUICK, **options)


def is_gelu_or_matmul(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.addmm.default, torch.ops.aten.relu.default)


@pytest.mark.long
def test_what_is_not_to_run_again_does_not_at_any_budget() -> None:
    free, bound = captured("gpt"), captured("gpt", never_again=is_gelu_or_matmul)
    names = {op.name for op, node in zip(free.graph.ops, free.graph.nodes, strict=True) if is_gelu_or_matmul(node)}
    assert names & repeated(free.plan("min"))
    assert bound.least() > free.least()
    everything = bound.plan("100%")
    for mem in ("min", "80%", "70%"):
        plan = bound.plan(mem)
        assert repeated(plan)
        assert not names & repeated(plan)
        assert plan.predicted_time < 1.5 * everything.predicted_time  # what the search is told does not show
        assert "as predicted" in str(plan.check())
        for candidate in plan.alternatives.candidates:
            ops = candidate.order().ops
            assert not names & {plan.captured.nodes[op].name for op in ops if ops.count(op) > 1}


def test_patterns_mean_modules_and_what_is_in_them() -> None:
    step = fxremat.capture(case("gpt").model, (case("gpt").x,), costs="estimate", search=QUICK, never_again="blocks.1")
    plan = step.plan("min")
    modules = {plan.graph.sources[op].module for op in plan.program.repeated}
    assert modules
    assert not any(module == "blocks.1" or module.startswith("blocks.1.") for module in modules)
    with pytest.raises(FxrematError, match=r"no op of the forward belongs to a module '\*.router'; some modules"):
        step.plan("min", never_again=["*.router"])
    for wrong in (3, ""):
        with pytest.raises(FxrematError, match=f"never_again has {wrong!r}; a wish is a pattern of modules"):
            step.plan("min", never_again=[wrong])


def test_modules_of_a_graph_that_notes_none_are_those_of_its_parameters() -> None:
    graph = captured("resnet").graph
    modules = [source.module for source in graph.sources]
    assert {"stem", "blocks.0.0", "blocks.2.5", "head"} <= set(modules)
    of = {op.target: module for op, module in zip(graph.ops, modules, strict=True) if not op.backward}
    assert of["aten.relu.default"].startswith("blocks.")
    plan = captured("gpt", never_again="blocks.1").plan("min")
    assert repeated(plan)
    assert not [op for op in plan.program.repeated if plan.graph.sources[op].module.startswith("blocks.1")]


def test_what_is_kept_is_not_offloaded_either() -> None:
    joint = joint_graph(case("gpt"))

    def hosted(**options: Any) -> set[str]:
        plan = fxremat.capture(joint, num_fwd_outputs=1, search=QUICK, offload=True, **options).plan("75%")
        moved = {plan.program.version_of[v] for s in plan.program.steps if s.op is None for v in s.reads}
        return {plan.graph.values[value].name for value in moved}

    away = hosted()
    assert away
    name = min(away)
    with pytest.raises(FxrematError, match="keep says what stays on the device, and solver='pofo' moves"):
        hosted(keep="blocks.0", solver="pofo")
    assert name not in hosted(keep=lambda node: node.name == name or any(user.name == name for user in node.users))


def test_marks_of_the_author_are_wishes() -> None:
    joint = joint_graph(case("gpt"))
    marked = [node for node in joint.graph.nodes if node.target is torch.ops.aten.addmm.default][:6]
    for node in marked:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    plan = fxremat.capture(joint, num_fwd_outputs=1, search=QUICK).plan("min")
    assert repeated(plan)
    assert not {node.name for node in marked} & repeated(plan)


def test_decisions_out_of_floats_run_once_on_cuda() -> None:
    graph = captured("experts").graph
    assert run_once(graph, ()) == frozenset()  # a CPU's kernels repeat their bits
    object.__setattr__(graph, "device", "cuda:0")
    once = {graph.nodes[op].name for op in run_once(graph, ())}
    assert {"topk"} <= once
    assert not {name for name in once if name.startswith(("tanh", "addmm", "mul"))}


@pytest.mark.parametrize(("dropout", "expected"), [(0.5, ["recurrent_with_dropout"]), (0.0, [])])
def test_dropout_of_cudnn_runs_once(dropout: float, expected: list[str]) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.LSTM(8, 8, 2, dropout=dropout)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0].sum()  # type: ignore[no-any-return]

    graph: Any = fxremat.capture(Layer(), (torch.randn(3, 4, 8),), costs="estimate", search=QUICK).graph
    assert run_once(graph, ()) == frozenset()
    object.__setattr__(graph, "device", "cuda:0")
    assert [graph.nodes[op].name for op in run_once(graph, ())] == expected


def test_masks_that_select_are_decisions_and_those_that_multiply_are_not() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            gate = (y > 0) * y  # multiplies
            rows = (y.sum(-1) > 0).long()  # selects
            return gate[rows].sum()

    graph: Any = fxremat.capture(Masked(), (torch.randn(4, 8),), costs="estimate", search=QUICK).graph
    object.__setattr__(graph, "device", "cuda:0")
    once = [graph.nodes[op] for op in run_once(graph, ())]
    assert [str(node.target) for node in once] == ["aten.gt.Scalar"]
    assert once[0].meta["val"].dim() == 1


@pytest.mark.parametrize("option", ["never_again", "costs"])
def test_an_error_of_a_function_that_was_given_is_told_with_its_line(option: str) -> None:
    def broken(node: fx.Node) -> bool:
        raise ValueError(f"nothing is known of {node.name}")

    model = fxremat.compile(torch.nn.Linear(4, 4), "100%", search=QUICK, **{option: broken})
    told = rf"{option}.*broken raised ValueError at .*test_wishes.py:\d+: nothing is known of"
    with pytest.raises(FxrematError, match=told):
        model(torch.ones(2, 4))
