"""Costs at other sizes take the bytes that measuring there finds, and seconds in proportion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxremat.cost import resized as resizing
from fxremat.cost.measure import measure
from fxremat.cost.resized import resized
from fxremat.graphs.symbolic import SymbolicGraph
from tests.symbolic import symbolic_graph
from tests.test_shapes import ConvNet, gpt, pictures, text

pytestmark = pytest.mark.usefixtures("torch_ready")


class Encoder(nn.Module):
    """One layer of a transformer with dropout and a mask that is made of lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.mix, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens % 32)
        parts = self.mix(self.norm(x)).view(*tokens.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].mT
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
        mixed = F.dropout(scores.masked_fill(~mask, -1e9).softmax(-1), 0.1) @ parts[2]
        x = x + F.gelu(self.out(mixed.transpose(1, 2).flatten(2)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten() % 32)


Made = tuple[Callable[[], nn.Module], Callable[[Any], Mapping[str, Tensor]]]
MODELS: dict[str, Made] = {"encoder": (Encoder, text), "gpt": (lambda: gpt(1), text), "conv": (ConvNet, pictures)}
SIZES = ((4, 24), (8, 40), (5, 13))
BOTH_KINDS = [pytest.param(name, marks=[pytest.mark.long] * (name == "gpt")) for name in MODELS]  # text: "encoder"


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    monkeypatch.setattr(resizing, "_took", {})


@cache
def graph_of(name: str) -> SymbolicGraph:
    make, inputs = MODELS[name]
    return symbolic_graph(make().train(), *inputs((4, 24)).values())


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_bytes_are_those_that_measuring_finds(name: str) -> None:
    graph = graph_of(name)
    joints = [graph.at(size) for size in SIZES]
    measured = [measure(joint) for joint in joints]
    for here, joint, wanted in zip(SIZES, joints, measured, strict=True):
        for there, known, costs in zip(SIZES, joints, measured, strict=True):
            assert resized(joint, known, costs).sizes == wanted.sizes, (there, here)


@pytest.mark.parametrize("name", BOTH_KINDS)
def test_seconds_grow_with_the_sizes(name: str) -> None:
    graph = graph_of(name)
    known = graph.at((4, 24))
    costs = measure(known)
    same = resized(graph.at((4, 24)), known, costs)
    assert same.seconds == pytest.approx(costs.seconds)
    small, large = (resized(graph.at(size), known, costs) for size in ((2, 12), (8, 48)))
    for op in known.ops:
        assert 0 < small.seconds[op.index] <= same.seconds[op.index] <= large.seconds[op.index], op.name
    assert sum(large.seconds) > 1.5 * sum(same.seconds)
    assert sum(same.seconds) > 1.2 * sum(small.seconds)


def test_what_took_nothing_is_not_run_for_smaller_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("encoder")
    known = graph.at((8, 40))
    costs = measure(known)
    ran = running(monkeypatch)
    resized(graph.at((4, 24)), known, costs)
    smaller = len(ran)
    assert smaller < len(known.ops) / 3
    resized(graph.at((4, 24)), known, costs)
    assert len(ran) == smaller, "what was known is run again"
    resized(graph.at((16, 48)), known, costs)
    assert len(ran) > 2 * smaller


def test_what_cannot_run_alone_is_estimated_generously(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("conv")
    known, joint = graph.at((2, 12)), graph.at((8, 40))
    costs = measure(known)
    wanted = resized(joint, known, costs).sizes
    monkeypatch.setattr(resizing, "_took", {})
    monkeypatch.setattr(resizing, "alone", lambda node, device, **_: None)
    found = resized(joint, known, costs)
    assert found.sizes.values == wanted.values
    assert all(ours >= theirs for ours, theirs in zip(found.sizes.workspace, wanted.workspace, strict=True))
    assert all(seconds > 0 for seconds in found.seconds)


def test_a_result_in_a_larger_storage_is_noticed() -> None:
    """The mean squared error is in the storage of all its terms, as large as the sizes are."""
    graph = symbolic_graph(Squared(), torch.randn(6, 5))
    known, joint = graph.at((6,)), graph.at((40,))
    costs = measure(known)
    loss = next(op for op in known.ops if "mse_loss" in op.name)
    assert resized(joint, known, costs).sizes.values[loss.writes[0]] == 40 * 5 * 4
    assert resized(graph.at((3,)), known, costs).sizes == measure(graph.at((3,))).sizes


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.linear(x), x)


def running(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows with every op that runs alone."""
    found: list[object] = []
    alone = resizing.alone
    monkeypatch.setattr(
        resizing, "alone", lambda node, *args, **options: found.append(node) or alone(node, *args, **options)
    )
    return found
