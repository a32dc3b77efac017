"""The pass on graphs of full steps: one graph in, one graph out, with the same results inside the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxremat
from benchmarks import meter
from fxremat.errors import CaptureError
from fxremat.passes import as_emitted, step_pass
from fxremat.step.step_graph import StepGraph
from fxremat.torch_private import copied, graph_module
from tests.compilers.models import EVERY_DAY, case, full_step, inputs_of

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.2, progress=False)


def run(graph: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        return list(as_emitted(fx.GraphModule(graph, copied(graph.graph)))([*inputs]))


@pytest.mark.parametrize("budgets", [("60%", "min"), pytest.param(("100%", "40%"), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", EVERY_DAY)
def test_results_are_the_same_and_the_peak_is_as_predicted(name: str, budgets: tuple[str, ...]) -> None:
    one = case(name)
    given, inputs = full_step(one), inputs_of(one)
    expected = run(given, inputs)
    parameters = [*one.model.parameters()]
    nested = parameters, [*one.model.buffers()], one.x
    for mem in budgets:
        within = step_pass(mem, costs="measure", search=QUICK)
        try:
            graph = within(given, inputs)
        except fxremat.BudgetTooSmall:
            assert mem in ("60%", "40%")
            continue
        assert all(map(torch.equal, run(graph, inputs), expected)), mem
        torch.manual_seed(1)
        assert torch.equal(graph(*nested)[0], expected[0])  # it is called as the given graph
        plan = within.plan
        assert plan is not None
        call = as_emitted(graph)
        with torch.no_grad():
            measured = meter.peak_bytes(lambda call=call: call([*inputs]) and None)  # type: ignore[misc]
        assert plan.predicted_peak <= plan.budget
        assert plan.predicted_peak * 0.98 <= measured <= plan.predicted_peak, mem


@pytest.mark.parametrize("mark", ["partitioner_tag", "autograd_backward"])
def test_what_is_noted_stays_and_what_runs_again_is_of_the_backward(mark: str) -> None:
    given = full_step(case("gpt"), mark)
    before = given.print_readable(print_output=False)
    graph = step_pass("min", search=QUICK)(given)
    assert given.print_readable(print_output=False) == before
    again = [node for node in graph.graph.nodes if node.name.endswith("__r1")]
    assert again
    assert all(node.meta[mark] for node in again)
    ops = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in ops)
    names = [node.name for node in given.graph.nodes if node.op == "placeholder"]
    assert [node.name for node in graph.graph.nodes if node.op == "placeholder"] == names


def test_outputs_may_be_nested_and_in_any_order() -> None:
    given = full_step(case("experts"))
    node = given.graph.output_node()
    loss, *gradients = node.args[0]  # type: ignore[misc]
    node.args = ({"gradients": gradients, "loss": (loss, None)},)  # type: ignore[assignment]
    given.recompile()
    *parameters, x = inputs_of(case("experts"))
    flat = fx.GraphModule(given, copied(given.graph))
    expected: Any = flat(*parameters, x)
    found: Any = step_pass("min", search=QUICK)(flat)(*parameters, x)
    assert found["loss"][1] is None
    assert torch.equal(found["loss"][0], expected["loss"][0])
    assert all(map(torch.equal, found["gradients"], expected["gradients"]))


def test_a_graph_that_tells_no_backward_is_refused() -> None:
    given = full_step(case("experts"), mark="")
    for call in (lambda: step_pass("60%")(given), lambda: fxremat.capture(given)):
        with pytest.raises(CaptureError, match=r"neither tangents nor marks.*partitioner_tag"):
            call()


class Traced(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh().sum()


def test_the_graph_of_a_forward_is_captured_with_inputs() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    exported = torch.export.export(Traced(), (x,)).module()
    traced = fx.symbolic_trace(Traced())
    for graph in (traced, exported, graph_module(traced, traced.graph)):
        step = fxremat.capture(graph, (x,), costs="estimate", search=QUICK)
        assert len(step.graph.backward_ops) > 2
    symbolic = fx.symbolic_trace(Traced())
    for node in symbolic.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    with pytest.raises(CaptureError, match=r"x .* has no fake tensor|is a call_module of layer"):
        fxremat.capture(symbolic)


def test_captured_graphs_of_others_are_steps_like_any_other() -> None:
    step = fxremat.capture(full_step(case("gpt")), mem="60%", search=QUICK)
    assert step.plan().predicted_peak < step.plan("100%").predicted_peak
    assert step.least() <= step.plan("min").budget
    assert "peak" in str(step.plan().check())
    plan = step.plan()
    assert plan.to_networkx().number_of_nodes() == len(step.graph.ops) + len(step.graph.values)
    assert StepGraph.from_json(plan.step_graph.to_json()).digest == step.graph.digest


def test_symbolic_sizes_are_refused() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: [x.sin().sum(), x.cos()], tracing_mode="symbolic")(torch.randn(5, 7))
    node = next(node for node in graph.graph.nodes if node.name == "cos")
    node.meta["partitioner_tag"] = "is_backward"
    with pytest.raises(CaptureError, match=r"^x_1 .x_1. has the symbolic size \[s\d+, s\d+\], .*tracing_mode=\"fake\""):
        fxremat.capture(graph)


def test_sizes_that_depend_on_data_are_refused() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: [x.sum(), x[x > 0]], tracing_mode="symbolic")(torch.randn(5))
    for node in graph.graph.nodes:
        fixed = node.op == "placeholder" or not str(node.target).startswith(("aten.index", "aten.sym"))
        if fixed and isinstance(node.meta.get("val"), Tensor):
            with node.meta["val"].fake_mode:
                node.meta["val"] = torch.empty([5] * node.meta["val"].dim())
    with pytest.raises(CaptureError, match=r"^index \(aten.index.Tensor\) has the size \[u0\], which depends on data"):
        step_pass("60%")(graph)
