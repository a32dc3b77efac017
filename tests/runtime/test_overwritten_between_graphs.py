"""A graph may overwrite what an earlier graph reads, where PyTorch's own backward does not read it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat import Search
from fxremat.runtime.called_graph import saved_calls
from tests.steps import differences, step_of

from .test_several_graphs import peak_of

pytestmark = pytest.mark.usefixtures("torch_ready")

WIDTH = 64


def rows(p: Tensor) -> None:
    p[: len(p) // 2] = 0


def through_a_view(p: Tensor) -> None:
    p.view(-1)[:: 3].mul_(2)


def whole(p: Tensor) -> None:
    p.add_(1)


class Attention(nn.Module):
    """Reads probabilities in a graph, and overwrites them in the next one, as Longformer does."""

    def __init__(self, overwrite: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.overwrite = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), overwrite

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(self.up(x), -1) * 2 + 0.0
        torch._dynamo.graph_break()
        y = self.down(F.dropout(F.pad(p, (0, 0, 0, 1)), 0.1))[:-1]  # the backward reads the padded copy
        torch._dynamo.graph_break()
        self.overwrite(p)
        return y + p.detach()


class Model(nn.Module):
    def __init__(self, overwrite: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(overwrite) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def twins(overwrite: Callable[[Tensor], Any], mem: str) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Model(overwrite)
    return fxremat.compile(model, mem=mem, search=Search(seconds=0.0)), copy.deepcopy(model)


def assert_equal_steps(ours: Any, plain: nn.Module, x: Tensor) -> None:
    first, second = (step_of(model, lambda model=model: model(x), lambda loss: loss) for model in (ours, plain))
    assert differences(first, second) == []


CASES = [
    pytest.param(way, mem, marks=() if (way, mem) in {(rows, "min"), (through_a_view, "100%")} else pytest.mark.long)
    for way in (rows, through_a_view, whole)
    for mem in ("min", "85%", "100%")
]


@pytest.mark.parametrize(("overwrite", "mem"), CASES)
def test_what_a_later_graph_overwrites_is_read_as_it_was(overwrite: Callable[[Tensor], Any], mem: str) -> None:
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))
    ours, plain = twins(overwrite, mem)
    for _ in range(4):
        assert_equal_steps(ours, plain, x)
    assert not saved_calls
    assert peak_of(ours, x) <= ours.plan.budget


def test_a_call_whose_input_is_overwritten_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let go of what calls saved, as where memory is short: a call whose input is overwritten has to keep it."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    ours, plain = twins(rows, "100%")
    for _ in range(3):
        assert_equal_steps(ours, plain, x)
    coordinator = ours._fxremat.backend.coordinator
    backward, kept = coordinator.backward, []

    def letting_go(call: Any, tangents: list[Tensor]) -> Any:
        kept.append(call.own > 0 and not call.can_let_go)
        if call.can_let_go:
            call.let_go()
        return backward(call, tangents)

    monkeypatch.setattr(coordinator, "backward", letting_go)
    assert_equal_steps(ours, plain, x)
    assert any(kept)


class Queue(nn.Module):
    """Contrast with a queue of keys (MoCo), which is overwritten in a graph that trains nothing."""

    keys: Tensor
    place: Tensor

    def __init__(self, reads: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.reads = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), reads
        self.register_buffer("keys", torch.randn(16, 64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        place = int(self.place)
        self.keys[:, place : place + len(keys)] = keys.T
        self.place[0] = (place + len(keys)) % 64

    def forward(self, x: Tensor) -> Tensor:
        queries = self.query(x)
        loss = (queries @ self.reads(self.keys)).logsumexp(1).mean()
        torch._dynamo.graph_break()
        self.enqueue(queries.detach())
        return loss


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda keys: keys.clone().detach(),
    "product": lambda keys: keys * 2,
    "padded": lambda keys: F.pad(keys, (0, 1)),
}


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("mem", ["min", "100%"])
def test_what_a_graph_that_trains_nothing_overwrites_is_read_as_it_was(mem: str, reads: str) -> None:
    torch.manual_seed(0)
    plain, x = Queue(READS[reads]), torch.randn(16, 16)
    ours = fxremat.compile(copy.deepcopy(plain), mem=mem, search=Search(seconds=0.0))
    for _ in range(5):
        assert_equal_steps(ours, plain, x)
    assert not saved_calls
    assert peak_of(ours, x) <= ours.plan.budget
