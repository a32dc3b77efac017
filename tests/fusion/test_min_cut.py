"""The order of least memory traffic: it is valid, its kept values are a minimum cut, and it writes nothing twice."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn

from benchmarks.capture import capture
from fxremat.fusion.min_cut import _Cut, least_traffic
from fxremat.fusion.units import is_pointwise
from fxremat.graphs.captured import Captured
from fxremat.search.survey import survey
from fxremat.step.program import Order, Role
from tests.dags import Dag, Recipe, batch, estimated, few, small_recipes

pytestmark = pytest.mark.usefixtures("torch_ready")


def order_of(graph: Captured, once: frozenset[int] = frozenset()) -> tuple[Order, Order]:
    """An order that recomputes nothing, and the one of least traffic."""
    known = survey(graph, estimated(graph), effort=0.0).keep_all.order()
    return known, least_traffic(graph, known, once)


def recomputed(order: Order) -> list[str]:
    """The names of the functions that run again."""
    graph = order.layout.graph
    steps = [step for step in order.program().executions if step.role is Role.RECOMPUTE]
    return [graph.ops[step.op].target.split(".")[1] for step in steps]


@few(8)
@given(small_recipes)
def test_kept_values_are_a_minimum_cut_of_the_forward(recipe: Recipe) -> None:
    graph = capture(Dag(recipe).train(), *batch())
    known, order = order_of(graph)
    assert {step.op for step in order.program().executions} == {step.op for step in known.program().executions}
    fusible = {op.index for op in graph.ops if op.writes and is_pointwise(graph.nodes[op.index])}
    again = {op.index for op in graph.forward_ops if op.index in fusible and not op.random}
    cut = _Cut(graph, fusible, again)
    kept = cut.kept()
    network: nx.DiGraph[int] = nx.DiGraph()
    for (begin, end), capacity in cut.edges.items():
        network.add_edge(begin, end, capacity=capacity)
    least, _ = nx.minimum_cut(network, *cut.ends)
    assert sum(cut.edges[2 * value, 2 * value + 1] for value in kept) == least


class Layer(nn.Module):
    """A normalization and a gated product, between matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_what_a_product_reads_again_is_kept_and_what_kernels_fuse_is_recomputed() -> None:
    _, order = order_of(capture(Layers(), torch.randn(64, 32)))
    assert "silu" in recomputed(order)  # its backward is fused
    # a matrix product of the backward reads it: it would be written twice
    assert not {"native_layer_norm", "addmm"} & {*recomputed(order)}
    assert recomputed(order).count("silu") == 3


def test_what_must_not_run_again_does_not() -> None:
    graph = capture(Layers(), torch.randn(64, 32))
    silu = frozenset(op.index for op in graph.forward_ops if "silu" in op.target)
    assert "silu" not in recomputed(order_of(graph, silu)[1])


class Chain(nn.Module):
    """More ops in a row, all fused, than Python nests calls."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1100):
            x = x.sin()
        return x.sum()


@pytest.mark.long
def test_chains_of_any_length_are_recomputed() -> None:
    assert recomputed(order_of(capture(Chain(), torch.randn(8, requires_grad=True)))[1])
