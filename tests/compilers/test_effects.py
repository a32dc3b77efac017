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


def updated_as_lists(parameters: list[Tensor], x: Tensor) -> Any:
    """Clips gradients by their norm and updates, as optimizers with foreach=True do."""
    leaves = leaves_of(parameters)
    loss = deep(leaves, x).square().mean()
    found = list(gradients(loss, leaves))
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found)))
    torch._foreach_mul_(found, (1 / (norm + 1e-6)).clamp(max=1))
    torch._foreach_add_(parameters, found, alpha=-0.1)
    return loss, norm


def updated_by_adam(parameters: list[Tensor], x: Tensor) -> Any:
    leaves = leaves_of(parameters)
    loss = deep(leaves, x).square().mean()
    found = gradients(loss, leaves)
    squares = [torch.zeros_like(each) for each in parameters]
    torch._foreach_mul_(squares, 0.9)
    torch._foreach_addcmul_(squares, found, found, 0.1)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(parameters, found, roots, -0.01)
    return loss, squares


def lists_of_another_type(parameters: list[Tensor], x: Tensor) -> Any:
    leaves = leaves_of(parameters)
    loss = deep(leaves, x).square().mean()
    found = [each.bfloat16().t() for each in gradients(loss, leaves)]
    torch._foreach_mul_(found, parameters)
    return loss, found


def overwrites_a_part(parameters: list[Tensor], x: Tensor) -> Any:
    """Overwrites parts of a value, of which other parts and views are read later."""
    leaves = leaves_of(parameters)
    y = deep(leaves, x).detach()
    row, turned = y[3], y.t()
    y[:, 1::2].mul_(2)
    row.add_(1)
    turned[2].zero_()
    loss = deep(leaves, x * y).square().mean() + row.sum()
    return loss, turned, row, gradients(loss, leaves)


def overwrites_parts_of_an_input(parameters: list[Tensor], x: Tensor) -> Any:
    last = x[-1]
    x[0].zero_()
    x[1].add_(last)
    last.mul_(2)
    return drawn_in_the_backward(parameters, x), last


def overwrites_through_an_alias(parameters: list[Tensor], x: Tensor) -> Any:
    leaves = leaves_of(parameters)
    loss = deep(leaves, x).square().mean()
    for parameter, gradient in zip(parameters, gradients(loss, leaves), strict=True):
        parameter.detach().sub_(gradient)
    return loss, parameters[0].sum()


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


STEPS = (
    *(updated_in_place, updated_by_copies, of_another_type, seen_by_views, drawn_for_nobody, drawn_in_the_backward),
    *(updated_as_lists, updated_by_adam, lists_of_another_type),
    *(overwrites_a_part, overwrites_parts_of_an_input, overwrites_through_an_alias),
)


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


def as_integers(parameters: list[Tensor], x: Tensor) -> Any:
    y = x * 1
    y.view(torch.int32).bitwise_and_(-2)
    return drawn_in_the_backward(parameters, y)


def fused(parameters: list[Tensor], x: Tensor) -> Any:
    states = [[torch.zeros_like(each) for each in parameters] for _ in range(4)]
    steps = [torch.zeros(()) for _ in parameters]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    torch._fused_adam_(parameters, *states, steps, **options, maximize=False)  # type: ignore[arg-type]
    return drawn_in_the_backward(parameters, x)


def twice(parameters: list[Tensor], x: Tensor) -> Any:
    torch._foreach_add_([x, x], 1)
    return drawn_in_the_backward(parameters, x)


def two_rows_at_once(parameters: list[Tensor], x: Tensor) -> Any:
    torch._foreach_add_([x[0], x[1]], 1)
    return drawn_in_the_backward(parameters, x)


REFUSED = {
    as_integers: r"bitwise_and_ \(aten.bitwise_and_.Scalar\) .*, in the memory that it overwrites, is read .* int32:",
    fused: r"_fused_adam_ \(aten._fused_adam_.default\) overwrites .*; it overwrites 5 arguments at once: ",
    twice: r"_foreach_add_ \(aten._foreach_add_.Scalar\) .*; it overwrites one tensor more than once: .*functionalize",
    two_rows_at_once: r"_foreach_add_ .*; it overwrites two views of the same memory: ",
}


@pytest.mark.parametrize("step", REFUSED)
def test_what_cannot_be_written_as_a_new_value_is_refused_with_the_reason(step: Step) -> None:
    given = traced(step, *inputs())
    before = given.print_readable(print_output=False)
    with pytest.raises(fxremat.CaptureError, match=REFUSED[step]):
        step_pass("min", search=QUICK)(given)
    assert given.print_readable(print_output=False) == before


def test_what_is_refused_can_be_functionalized_as_the_refusal_says() -> None:
    given = traced(as_integers, *inputs())
    fakes = [node.meta["val"] for node in given.graph.find_nodes(op="placeholder")]
    with torch.fx.traceback.preserve_node_meta(), fakes[0].fake_mode:
        functional = make_fx(torch.func.functionalize(fx.Interpreter(given).run))(*fakes)
    planned = step_pass("min", search=QUICK)(functional)
    results = []
    for graph, given_inputs in ((given, inputs()), (planned, torch.utils._pytree.tree_leaves(inputs()))):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(torch.utils._pytree.tree_leaves((graph(*given_inputs), given_inputs)))
    assert all(map(torch.equal, *results))


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
