"""Effects of ops in the graph of a full step: values that they overwrite, and random numbers that they draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxremat
from fxremat.compilers.text import from_text, to_text
from fxremat.passes import step_pass
from tests.compilers.models import full_step

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.2, progress=False)
WIDTH = 16

Step = Callable[..., Any]


def deep(parameters: list[Tensor], x: Tensor) -> Tensor:
    for weight in parameters:
        x = x + (x @ weight).tanh() * 0.5
    return x


def gradients(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves)


def leaves_of(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.detach().requires_grad_() for parameter in parameters]


def updated_in_place(parameters: list[Tensor], x: Tensor) -> Any:
    leaves = leaves_of(parameters)
    loss = deep(leaves, x).square().mean()
    for parameter, gradient in zip(parameters, gradients(loss, leaves), strict=True):
        parameter.sub_(gradient, alpha=0.1)
    return loss


def updated_by_copies(parameters: list[Tensor], x: Tensor) -> Any:
    leaves = leaves_of(parameters)
    loss = deep(leaves, x).square().mean()
    for parameter, gradient in zip(parameters, gradients(loss, leaves), strict=True):
        parameter.copy_(parameter - 0.1 * gradient)
    return loss, sum(parameter.sum() for parameter in parameters)


def of_another_type(parameters: list[Tensor], x: Tensor) -> Any:
    leaves = leaves_of(parameters)
    y = deep(leaves, x).bfloat16()
    y.mul_(x)
    loss = y.float().square().mean()
    return loss, y, gradients(loss, leaves)


def seen_by_views(parameters: list[Tensor], x: Tensor) -> Any:
    leaves = leaves_of(parameters)
    y = deep(leaves, x) * 1
    y.add_(1)
    y.unsqueeze_(0)
    z = y.view(-1, 8).t()[1:]
    loss = z.sin().mean()
    return loss, z, gradients(loss, leaves)


def drawn_for_nobody(parameters: list[Tensor], x: Tensor) -> Any:
    leaves = leaves_of(parameters)
    y = deep(leaves, x)
    torch.bernoulli(y.sigmoid())
    torch.zeros(3).normal_()
    loss = (y * torch.rand_like(y)).square().mean()
    return loss, gradients(loss, leaves)


def drawn_in_the_backward(parameters: list[Tensor], x: Tensor) -> Any:
    leaves = leaves_of(parameters)
    loss = deep(leaves, x).square().mean()
    return loss, [gradient + torch.randn_like(gradient) for gradient in gradients(loss, leaves)]


def traced(step: Step, *inputs: Any) -> fx.GraphModule:
    """A step as a graph, in which only the gradients' ops are marked, not those of an update behind them."""
    graph = make_fx(step, tracing_mode="fake")(*inputs)
    nodes = [*graph.graph.nodes]
    start = next(node for node in nodes if node.target is torch.ops.aten.ones_like.default)
    for node in nodes[nodes.index(start) :]:
        if str(node.target).startswith(("aten.ones_like", "aten.mm", "aten.tanh_backward", "aten.mul", "aten.expand")):
            node.meta["partitioner_tag"] = "is_backward"
    return graph


def inputs() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH) for _ in range(5)], torch.randn(32, WIDTH)


def outcome(graph: fx.GraphModule) -> list[Tensor]:
    """All that a step leaves behind: results, inputs, and the state of the generator."""
    given = inputs()
    torch.manual_seed(1)
    with torch.no_grad():
        results = torch.utils._pytree.tree_leaves((graph(*given), given))
    return [*results, torch.get_rng_state()]


STEPS = (updated_in_place, updated_by_copies, of_another_type, seen_by_views, drawn_for_nobody, drawn_in_the_backward)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_leaves_the_same_behind(step: Step) -> None:
    given = traced(step, *inputs())
    expected = outcome(given)
    peaks = []
    for mem in ("100%", "min"):
        within = step_pass(mem, search=QUICK)
        found = outcome(within(given))
        assert [each.dtype for each in found] == [each.dtype for each in expected]
        assert all(map(torch.equal, found, expected)), mem
        assert within.plan is not None
        assert "as predicted" in str(within.plan.check())
        peaks.append(within.plan.predicted_peak)
    assert peaks[1] < peaks[0]  # what reads gradients is no part of the forward


def overwrites_part_of_an_input(parameters: list[Tensor], x: Tensor) -> Any:
    x[0].zero_()
    return drawn_in_the_backward(parameters, x)


def test_what_others_see_being_overwritten_is_refused() -> None:
    with pytest.raises(fxremat.CaptureError, match=r"zero_ \(aten.zero_.default\) overwrites an argument"):
        step_pass("min", search=QUICK)(traced(overwrites_part_of_an_input, *inputs()))


def test_an_input_that_is_read_after_it_was_overwritten_has_its_new_value() -> None:
    graph = traced(drawn_in_the_backward, *inputs())
    x = [*graph.graph.find_nodes(op="placeholder")][-1]
    first = next(iter(x.users))
    with graph.graph.inserting_before(first):
        doubled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
        write = graph.graph.call_function(torch.ops.aten.copy_.default, (x, doubled))
    doubled.meta, write.meta = dict(x.meta), dict(x.meta)
    graph.recompile()
    assert all(map(torch.equal, outcome(step_pass("min", search=QUICK)(graph)), outcome(graph)))


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(4))
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.down(layer(x))
        return x.square().mean()


def test_running_statistics_that_a_trace_overwrites_are_overwritten_once() -> None:
    from tests.compilers.models import Case

    torch.manual_seed(0)
    model, x = Normalized(), torch.randn(64, 8)
    given = full_step(Case(model, x))
    assert given.graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm.default)
    planned = step_pass("min", search=QUICK)(given)
    after = []
    for graph in (given, planned):
        buffers = [buffer.clone() for buffer in model.buffers()]
        with torch.no_grad():
            results = graph(list(model.parameters()), buffers, x)
        after.append([*results, *buffers])
    assert all(map(torch.equal, *after))


def test_complex_numbers_are_read_back() -> None:
    text = to_text(make_fx(lambda x: [x * (1 - 0.5j), x * 2j, x + complex(-1, 3)], tracing_mode="fake")(torch.ones(2)))
    assert to_text(from_text(text).module) == text
