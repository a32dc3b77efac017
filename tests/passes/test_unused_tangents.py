"""Outputs that nobody differentiates change no bit of the gradients, in any step, whatever layouts their zeros have."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat import Search
from fxremat.ops.overwriting import overwrite_where_alike
from fxremat.passes.unused_tangents import without_tangents

QUICK = Search(seconds=0.2, progress=False)
aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("torch_ready")


class Heads(nn.Module):
    """Four outputs whose gradients meet at a normalized parameter, in several layouts."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.key, self.weight = nn.Parameter(torch.randn(2, 4, 16, 8)), nn.Parameter(torch.randn(8, 8))
        self.last, self.breaks = nn.Linear(8, 8), breaks

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.sin()
        if self.breaks:
            torch._dynamo.graph_break()
        key = self.key * torch.rsqrt((self.key * self.key).sum(-1, keepdim=True) + 1e-6)
        mixed = key @ self.weight
        crossed = key.transpose(-1, -2) @ x
        return mixed * x, crossed, self.last(torch.relu(mixed.transpose(1, 2))), crossed.mT.softmax(-2) @ key.mT


USED = [used for count in (1, 2, 3) for used in combinations(range(4), count)]


def gradients(model: Any, x: Tensor, used: tuple[int, ...]) -> list[Tensor | None]:
    model.zero_grad(set_to_none=True)
    outputs = model(x)
    sum(outputs[place].square().mean() for place in used).backward()
    return [p.grad for p in model.parameters()]


def equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def assert_equal_steps(plain: nn.Module, x: Tensor, mem: str) -> None:
    """Train a model and its compiled copy for three steps with the first output as loss, and compare gradients."""
    ours = fxremat.compile(copy.deepcopy(plain), mem=mem, search=QUICK)
    for _ in range(3):
        for model in (plain, ours):
            model.zero_grad(set_to_none=True)
            model(x)[0].backward()
        assert equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("how", ["one graph", "several graphs", "any size"])
@pytest.mark.parametrize("mem", ["100%", "min"])
def test_gradients_are_those_of_plain_pytorch(how: str, mem: str) -> None:
    torch.manual_seed(0)
    plain = Heads(how == "several graphs")
    options: dict[str, Any] = {"dynamic": True} if how == "any size" else {}
    ours = fxremat.compile(copy.deepcopy(plain), mem=mem, search=QUICK, **options)
    for number, used in enumerate(USED):
        x = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(number))
        assert equal(gradients(ours, x, used), gradients(plain, x, used)), used


def test_the_first_step_of_a_loss_beside_a_state_is_plain_pytorchs() -> None:
    class WithState(Heads):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            mixed, *states = super().forward(x)
            return mixed.square().mean(), *states

    torch.manual_seed(0)
    plain, x = WithState(), torch.randn(2, 4, 16, 8)
    assert_equal_steps(plain, x, mem="90%")


def test_views_of_what_then_lies_otherwise() -> None:
    """With its zeros the gradient of what is split was contiguous; without them it is transposed."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.scale = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(8, 4, 16))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            split = (self.key * x).view(4, 8, 16)
            return (split.transpose(0, 1) * self.scale).sum(), split.exp().sum()

    torch.manual_seed(0)
    plain, x = Split(), torch.randn(16)
    assert_equal_steps(plain, x, mem="100%")


@pytest.mark.parametrize("breaks", [False, True])
def test_zeros_that_lie_otherwise_than_the_output_that_got_no_gradient(breaks: bool) -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(16, 16), nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            x = self.linear(x)
            if breaks:
                torch._dynamo.graph_break()
            y = x.transpose(1, 2)
            y = y * y.mean(-1, keepdim=True)
            return y, y * self.scale

    torch.manual_seed(0)
    plain, x = Transposed(), torch.randn(4, 16, 16)
    ours = fxremat.compile(copy.deepcopy(plain), mem="100%", search=QUICK)
    for _ in range(3):
        for model in (plain, ours):
            model.zero_grad(set_to_none=True)
            model(x)[1].square().sum().backward()
        assert equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("breaks", [False, True])
def test_a_derivative_that_is_infinite_reaches_nothing_from_an_output_without_gradient(breaks: bool) -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            x = self.first(x)
            if breaks:
                torch._dynamo.graph_break()
            x = self.second(x)
            return x, (x[:, None] - x[None]).square().sum(-1).sqrt()

    torch.manual_seed(0)
    assert_finite_steps(Distances(), torch.randn(6, 8))


def assert_finite_steps(plain: nn.Module, x: Tensor) -> None:
    ours = fxremat.compile(copy.deepcopy(plain), mem="100%", search=QUICK)
    for _ in range(3):
        found = gradients(ours, x, (0,))
        assert equal(found, gradients(plain, x, (0,)))
    assert all(gradient is None or gradient.isfinite().all() for gradient in found)


class Joined(nn.Module):
    """The gradient of a value meets, in an op that is no sum, that of an unused output with an infinite derivative."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(8, 8)
        self.recurrent = {"lstm": nn.LSTM, "gru": nn.GRU}.get(name, nn.Identity)(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.linear(x)
        if self.name == "chunk":
            unused, used = x.chunk(2, -1)
        elif self.name == "unbind":
            unused, used, *_ = x.unbind(0)
        else:
            unused, used = self.recurrent(x)
            used = used[0] if isinstance(used, tuple) else used
        return used.sin(), (unused - unused).abs().sqrt()


@pytest.mark.parametrize("name", ["chunk", "unbind", "lstm", "gru"])
def test_what_joins_a_gradient_of_zeros_in_another_op_than_a_sum_gets_zeros(name: str) -> None:
    torch.manual_seed(0)
    assert_finite_steps(Joined(name), torch.randn(6, 5, 8))


def test_the_budget_holds_without_the_sums() -> None:
    torch.manual_seed(0)
    ours, x = fxremat.compile(Heads(), mem="100%", search=QUICK), torch.randn(2, 4, 16, 8)
    for used in ((0,), (1,), (0, 1, 2, 3)):
        gradients(ours, x, used)
        assert peak_bytes(lambda used=used: gradients(ours, x, used)) <= ours.plan.budget


# --- generated graphs -----------------------------------------------------------------------------------------


def graph_of(function: Any, *names: str) -> fx.GraphModule:
    """A backward graph that computes `function` of placeholders of these names."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in names]
    for node in inputs:
        node.meta["val"] = torch.zeros(4, 4)
    graph.output(tuple(function(graph.call_function, *inputs)))
    for node in graph.nodes:
        if node.op == "call_function":  # what is negated lies transposed, and zeros do not
            is_transposed = node.target is aten.neg.default
            node.meta["val"] = torch.zeros(4, 4).t() if is_transposed else torch.zeros(4, 4)
    return fx.GraphModule({}, graph)


def ran(module: fx.GraphModule, *values: Tensor) -> list[Tensor]:
    return [x.clone() for x in module(*(x.clone() for x in values))]


IN_PLACE = {
    "the other term": lambda call, a, b: (
        (s := call(aten.add_.Tensor, (a, n := call(aten.neg.default, (b,))))),
        call(aten.mul_.Tensor, (n, 3.0)),
        call(aten.mul.Tensor, (s, 2.0)),
    ),
    "the sum": lambda call, a, b: (
        (n := call(aten.neg.default, (b,))),
        (s := call(aten.add_.Tensor, (a, n))),
        call(aten.mul_.Tensor, (s, 2.0)),
    )[::2],
    "a view of the sum": lambda call, a, b: (
        (n := call(aten.neg.default, (b,))),
        (s := call(overwrite_where_alike, (aten.add.Tensor, 0, a, n))),
        call(aten.mul_.Tensor, (call(aten.t.default, (s,)), 2.0)),
    )[::2],
    "nothing": lambda call, a, b: (
        call(aten.add.Tensor, (call(aten.add.Tensor, (a, call(aten.neg.default, (b,)))), a)),
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_a_sum_is_replaced_by_is_not_overwritten(name: str) -> None:
    module = graph_of(IN_PLACE[name], "tangents_1", "tangents_2")
    found = without_tangents(module, {"tangents_1"})
    assert found is not None
    assert not any(node.target in (aten.add.Tensor, aten.add_.Tensor) for node in found.graph.nodes)
    values = torch.zeros(4, 4), torch.arange(16.0).view(4, 4)
    assert all(map(torch.equal, ran(found, *values), ran(module, *values)))


def test_a_sum_in_the_memory_of_zeros_keeps_no_larger_tensor_alive() -> None:
    def sum_with_a_row(call: Any, a: fx.Node, b: fx.Node) -> tuple[Any, ...]:
        return (call(aten.add_.Tensor, (call(aten.neg.default, (a,)), call(aten.select.int, (b, 0, 1)))),)

    module = graph_of(sum_with_a_row, "tangents_1", "tangents_2")
    found = without_tangents(module, {"tangents_1"})
    assert found is not None
    (row,) = found(torch.zeros(4), torch.arange(16.0).view(4, 4))
    assert row.tolist() == [4, 5, 6, 7]
    assert row.untyped_storage().nbytes() == row.nbytes


def test_a_graph_that_adds_nothing_for_them_stays_as_it_is() -> None:
    module = graph_of(
        lambda call, a, b: (call(aten.add.Tensor, (a, call(aten.neg.default, (b,)))),), "tangents_1", "tangents_2"
    )
    assert without_tangents(module, {"tangents_1"}) is not None
    assert without_tangents(module, set()) is None
    assert without_tangents(module, {"tangents_1", "tangents_2"}) is None
    strided = graph_of(
        lambda call, a, b: (
            call(aten.as_strided.default, (call(aten.add.Tensor, (a, call(aten.neg.default, (b,)))), (2,), (1,))),
        ),
        "tangents_1",
        "tangents_2",
    )
    assert without_tangents(strided, {"tangents_1"}) is None
