"""Costs at the sizes of each call are those that measuring finds there, though few sizes are measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxremat.cost.at_sizes import IRREGULAR, CostsAtSizes, SizedCosts
from fxremat.cost.measure import measure
from fxremat.cost.resized import resized
from fxremat.graphs.symbolic import Dims, SymbolicGraph
from tests.cost.test_resized import Encoder
from tests.symbolic import symbolic_graph
from tests.test_shapes import ConvNet, pictures, text

pytestmark = pytest.mark.usefixtures("torch_ready")


class Parts(nn.Module):
    """Two parts of the rows take different ways; the loss is outside, and gets a transposed output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU())

    def forward(self, some: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.first(some).cumsum(0), self.second(others)])
        return both.t().softmax(0), F.mse_loss(both, torch.zeros_like(both))


def rows(sizes: tuple[int, int]) -> Mapping[str, Tensor]:
    return {"some": torch.randn(sizes[0], 16), "others": torch.randn(sizes[1], 16)}


class Attention(nn.Module):
    """Attention whose workspace on the CPU follows the length, and not the bytes of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.mse_loss(self.outer(y.transpose(1, 2).flatten(2)), x)


def sequences(sizes: tuple[int, int]) -> Mapping[str, Tensor]:
    return {"x": torch.randn(*sizes, 16)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Mapping[str, Tensor]]]] = {
    "encoder": (Encoder, text),
    "conv": (ConvNet, pictures),
    "parts": (Parts, rows),
    "attention": (Attention, sequences),
}
SIZES = {
    "encoder": [*product(range(4, 20), range(16, 64))],
    "conv": [*product(range(2, 5), range(12, 24))],
    "parts": [*product(range(4, 20), range(16, 64))],
    "attention": [*product(range(4, 16), range(16, 64, 2))],
}


@cache
def costs_of(name: str) -> tuple[CostsAtSizes, Callable[[Dims], SizedCosts]]:
    make, inputs = MODELS[name]
    graph = symbolic_graph(make().train(), *inputs((9, 32)).values())
    joint = graph.now()
    costs = measure(joint)

    @cache
    def exact(dims: Dims) -> SizedCosts:
        now = graph.at(dims)
        return SizedCosts.of(now, resized(now, joint, costs))

    found = CostsAtSizes(graph, joint, costs)
    found.at(graph.dims)
    return found, exact


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Dims]:
    """The sizes that a graph was made at."""
    found, at = list[Dims](), SymbolicGraph.at
    monkeypatch.setattr(SymbolicGraph, "at", lambda graph, dims: found.append(dims) or at(graph, dims))
    return found


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_bytes_at_any_sizes_are_those_that_measuring_finds(name: str, data: st.DataObject) -> None:
    known, exact = costs_of(name)
    costs, at_random = copy(known), st.sampled_from(SIZES[name])
    for earlier in data.draw(st.lists(at_random, max_size=8)):
        costs.at(earlier)
    sizes = data.draw(at_random)
    found, wanted = costs.at(sizes), exact(sizes)
    assert replace(found, costs=wanted.costs) == wanted
    both = zip(found.costs.sizes.values, wanted.costs.sizes.values, strict=True)
    assert all(theirs <= ours <= 1.2 * theirs for ours, theirs in both)
    assert sum(found.costs.sizes.values) <= 1.02 * sum(wanted.costs.sizes.values)
    both = zip(found.costs.sizes.workspace, wanted.costs.sizes.workspace, strict=True)
    assert all(ours >= theirs for ours, theirs in both)
    assert sum(found.costs.seconds) == pytest.approx(sum(wanted.costs.seconds), rel=0.7)


@pytest.mark.parametrize("name", ["encoder", "parts"])
def test_few_sizes_are_measured(name: str, counted: list[Dims]) -> None:
    costs = copy(costs_of(name)[0])
    for sizes in SIZES[name]:
        costs.at(sizes)
    assert len(counted) < len(SIZES[name]) / 15
    counted.clear()
    costs.at((40, 128))
    assert counted == [(40, 128)], "sizes much larger than all before are measured"


def test_ops_that_need_another_workspace_at_each_size_are_run_by_themselves(
    counted: list[Dims], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = list[int]()
    ops_at = SymbolicGraph.ops_at
    monkeypatch.setattr(
        SymbolicGraph, "ops_at", lambda graph, nodes, dims: run.append(len(nodes)) or ops_at(graph, nodes, dims)
    )
    costs = copy(costs_of("attention")[0])
    costs.at((16, 64))
    counted.clear()
    attention = np.array(["attention" in op.target for op in costs._joint.ops])
    costs._confirmed = np.where(attention, -IRREGULAR, costs._confirmed)  # as one measurement above the rest lets it be
    for sizes in random.Random(0).sample(SIZES["attention"], 200):
        costs.at(sizes)
    assert not counted, "the whole graph is made again at sizes that are smaller"
    assert max(run) > attention.sum()
    assert run[-50:].count(attention.sum()) > 45, "ops whose workspace can be foreseen are run again"
