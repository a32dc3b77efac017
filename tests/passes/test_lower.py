"""The two graphs that a program becomes compute what the joint graph does, and say of each node what it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxremat.chains.schedule import Schedule
from fxremat.graphs.captured import Captured
from fxremat.graphs.nodes import is_number
from fxremat.host.files import FileTier
from fxremat.linearize.lay_out import lay_out
from fxremat.passes.lower import lower
from fxremat.step.costs import Costs, Link
from fxremat.step.layout import Layout
from fxremat.step.liveness import Sizes
from fxremat.step.order import rematerialize
from fxremat.step.program import Program, Role
from fxremat.transfers.activations import swap, trips
from tests.dags import capture

pytestmark = pytest.mark.usefixtures("torch_ready")
AGAIN = "Fck1 Fnone2 Fall3 B3 Fall1 Fall2 B2 B1"
TWICE = "Fck1 Fck2 Fall3 B3 Fall2 B2 Fall1 B1"
KEEP = "Fall1 Fall2 Fall3 B3 B2 B1"


class Layers(nn.Module):
    """Linear and tanh, twice, with something between them; a sum."""

    def __init__(self, between: Callable[[Layers, Tensor], Tensor] = lambda m, x: x) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.register_buffer("seen", torch.ones(8))
        self.register_buffer("place", torch.tensor(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x).tanh())).tanh().square().sum()


def count(model: Layers, x: Tensor) -> Tensor:
    """Multiply by a buffer that is overwritten then: to run again reads the old one."""
    y = x * model.seen.clone()
    model.seen.add_(x.detach().mean(0))
    return y


def number(model: Layers, x: Tensor) -> Tensor:
    """Multiply by a row that the data chooses, and by a constant."""
    row = model.place.item()
    torch._check(row >= 0)
    torch._check(row < 4)
    return x * x[row] * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


BETWEEN: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "nothing": lambda m, x: x,
    "dropout": lambda m, x: m.drop(x),
    "two dropouts": lambda m, x: m.drop(x) * m.drop(x.exp()),
    "batch norm": lambda m, x: m.norm(x),
    "views": lambda m, x: x.view(2, 2, 8).transpose(0, 1).reshape(4, 8).t().t(),
    "an overwritten buffer": count,
    "a number": number,
}


@cache
def layout_of(between: str) -> Layout:
    joint = capture(Layers(BETWEEN[between]).train(), torch.ones(4, 8))
    return lay_out(joint, [op.index for op in joint.forward_ops if op.name.startswith("tanh")])


def program_of(between: str, schedule: str) -> Program:
    return rematerialize(layout_of(between), Schedule.parse(schedule))


def given(joint: Captured) -> tuple[list[Any], list[Tensor]]:
    """Primals and tangents: the same every time."""
    torch.manual_seed(1)

    def like(node: fx.Node) -> Any:
        value = node.meta["val"]
        make = torch.rand if value.is_floating_point() else torch.zeros
        return make(value.shape, dtype=value.dtype)

    return [like(node) for node in joint.primals], [like(node) for node in joint.tangent_nodes]


def ran(forward: fx.GraphModule, backward: fx.GraphModule, joint: Captured) -> tuple[list[Any], Tensor]:
    """Outputs and gradients of both graphs, with the primals overwritten in between, and the generator afterwards."""
    primals, tangents = given(joint)
    torch.manual_seed(2)
    returned = fx.Interpreter(forward).run(*primals)
    outputs, saved = returned[: len(joint.forward_outputs)], returned[len(joint.forward_outputs) :]
    for value, node in zip(outputs, joint.forward_outputs, strict=True):
        if isinstance(node, fx.Node) and joint.value_of[node] in joint.updates:
            for primal, old in zip(joint.primals, primals, strict=True):
                if joint.value_of[primal] in joint.mutated_primals and old.shape == value.shape:
                    old.copy_(value)  # as autograd's epilogue does, between the two graphs
    saved = [*filter(number_of, saved), *(item for item in saved if not number_of(item))]
    return [*outputs, *fx.Interpreter(backward).run(*saved, *tangents)], torch.get_rng_state()


def wanted(joint: Captured) -> tuple[list[Any], Tensor]:
    """The same of the joint graph."""
    primals, tangents = given(joint)
    torch.manual_seed(2)
    found = fx.Interpreter(joint.module).run(*primals, *tangents, enable_io_processing=False)
    return list(found), torch.get_rng_state()


def number_of(value: object) -> bool:
    return isinstance(value, int | float)


@pytest.mark.parametrize("schedule", [KEEP, AGAIN, TWICE])
@pytest.mark.parametrize("between", BETWEEN)
def test_the_two_graphs_compute_what_the_joint_graph_does(between: str, schedule: str) -> None:
    program = program_of(between, schedule)
    joint = program.layout.graph
    (found, state), (plain, plain_state) = ran(*lower(program), joint), wanted(joint)
    assert torch.equal(state, plain_state)
    for ours, its in zip(found, plain, strict=True):
        assert (ours is None) == (its is None)
        if its is not None:
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(its))


@pytest.mark.parametrize("between", BETWEEN)
def test_every_node_says_what_it_shows_and_what_it_is_for(between: str) -> None:
    program = program_of(between, AGAIN)
    forward, backward = lower(program)
    for graph in (forward.graph, backward.graph):
        for node in graph.nodes:
            if node.op == "call_function":
                assert node.meta["fxremat"]["role"] in {role.value for role in Role} | {"preserve"}
                assert node.meta["fxremat"]["block"] in (
                    {0} if node.meta["fxremat"]["role"] == "preserve" else {1, 2, 3}
                )
            if node.op == "placeholder":
                assert "val" in node.meta
    assert (type(forward).__name__, type(backward).__name__) == ("Forward", "Backward")
    names = {node.name for node in backward.graph.nodes if node.meta.get("fxremat", {}).get("role") == "recompute"}
    assert names
    assert all("__r1" in name for name in names)


def test_the_state_of_the_generator_is_saved_as_a_tensor() -> None:
    forward, backward = lower(program_of("dropout", AGAIN))
    (drawn,) = [node for node in forward.graph.nodes if node.name.endswith("_drawn")]
    (seed,) = [node for node in forward.graph.nodes if node.name.endswith("_seed")]
    assert drawn.meta["fxremat"] == seed.meta["fxremat"]
    assert drawn.meta["fxremat"]["role"] == "forward"
    (saved,) = [node for node in backward.graph.nodes if node.op == "placeholder" and node.name == seed.name]
    for node in (seed, saved):
        assert node.meta["val"].shape == torch.default_generator.get_state().shape
        assert node.meta["val"].dtype is torch.uint8
        assert node.meta["val"].fake_mode is drawn.args[1].meta["val"].fake_mode


def test_a_primal_that_is_overwritten_is_copied_before() -> None:
    program = program_of("an overwritten buffer", TWICE)
    (value,) = program.preserved
    forward, _ = lower(program)
    (copy,) = [
        node for node in forward.graph.nodes if node.meta.get("fxremat", {}).get("role") == "preserve"
    ]
    assert copy.target is torch.ops.aten.clone.default
    assert copy.args[0].name == program.layout.graph.values[value].name
    assert copy.meta["fxremat"] == {"block": 0, "name": "", "role": "preserve"}
    saved = list(forward.graph.output_node().args[0])[len(program.layout.graph.forward_outputs) :]
    assert copy in saved
    assert copy.args[0] not in saved


def test_saved_numbers_come_last_and_go_first() -> None:
    program = program_of("a number", KEEP)
    forward, backward = lower(program)
    outputs = list(forward.graph.output_node().args[0])[len(program.layout.graph.forward_outputs) :]
    numbers = [is_number(node.meta["val"]) for node in outputs]
    assert any(numbers)
    assert numbers == sorted(numbers)
    placeholders = backward.graph.find_nodes(op="placeholder")
    assert [node.name for node in placeholders[: sum(numbers)]] == [
        node.name for node, late in zip(outputs, numbers, strict=True) if late
    ]
    kept = [node.name for node, late in zip(outputs, numbers, strict=True) if not late]
    assert [node.name for node in placeholders[sum(numbers) : -1]] == kept
    assert placeholders[-1].name.startswith("tangents")
    assert list(backward.graph.nodes)[: len(placeholders)] == placeholders


def swapped(between: str, schedule: str) -> Program:
    program = program_of(between, schedule)
    joint = program.layout.graph
    sizes = Sizes(values=[v.bytes for v in joint.values], workspace=[0] * len(joint.ops))
    costs = Costs((1.0,) * len(joint.ops), sizes)
    found = trips(program, costs)
    assert found
    return swap(program, found, costs, Link(to_host=1e9, from_host=1e9), 1 << 20).program


@pytest.mark.parametrize("between", ["nothing", "dropout", "views"])
def test_what_travels_through_a_tier_comes_back(between: str) -> None:
    tier, program = FileTier(), swapped(between, KEEP)
    joint = program.layout.graph
    forward, backward = lower(program, tier.name)
    found, _ = ran(forward, backward, joint)
    for ours, its in zip(found, wanted(joint)[0], strict=True):
        assert its is None or torch.equal(ours, its)
    away = [node for node in forward.graph.nodes if node.name.endswith("_release")]
    assert away
    for node in away:
        left = node.args[1].meta["val"]
        for host in (node.meta["val"], node.args[0].meta["val"]):
            assert (host.shape, host.stride(), host.dtype) == (left.shape, left.stride(), left.dtype)
            assert host.device.type == "cpu"
            assert host.untyped_storage()._cdata != left.untyped_storage()._cdata
    back = [node for node in backward.graph.nodes if node.name.endswith("_wait")]
    assert len(back) == len(away)
    tier.close()
