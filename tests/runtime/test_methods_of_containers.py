"""Models whose graph ends in the argument of a container's method, as in `states.append(block(x))`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import Search
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")


class Block(nn.Module):
    """A layer with something in its middle that no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        torch._dynamo.graph_break()
        return x + self.down(hidden)


class Collecting(nn.Module):
    """Collects the states after its blocks, and weighs them by their order."""

    def __init__(self, collect: Callable[[Any, Tensor], Collection[Tensor]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.collect = collect
        self.turns = False

    def forward(self, x: Tensor) -> Tensor:
        weighed = [weight * state for weight, state in enumerate(self.collect(self, x), 1)]
        return torch.stack(weighed).square().mean()


def appended(model: Collecting, x: Tensor) -> list[Tensor]:
    states = [x]
    for block in model.blocks:
        states.append(block(states[-1]))
    return states


def inserted(model: Collecting, x: Tensor) -> list[Tensor]:
    states = [x]
    states.insert(0, model.blocks[0](x))
    states.extend([model.blocks[1](x)])
    return states


def named(model: Collecting, x: Tensor) -> Collection[Tensor]:
    states = {"first": x}
    states.update(second=model.blocks[0](x))
    states.setdefault("third", model.blocks[1](x))
    return states.values()


def at_an_end(model: Collecting, x: Tensor) -> deque[Tensor]:
    states = deque([x])
    (states.appendleft if model.turns else states.append)(model.blocks[0](x))
    return states


LONG = pytest.mark.long


@pytest.mark.parametrize("collect", [appended, named, pytest.param(inserted, marks=LONG)])
def test_they_are_captured_once(collect: Callable[[Any, Tensor], Collection[Tensor]]) -> None:
    steps = compared(Collecting(collect), [False] * 4)
    assert steps[1] == steps[-1] > 1


def test_another_method_is_called_where_the_model_calls_another() -> None:
    steps = compared(Collecting(at_an_end), [False, True, False, True, False, True])
    assert steps[2] == steps[-1] > 1


def compared(plain: Collecting, turns: list[bool]) -> list[int]:
    """Train a model beside a compiled copy; return after each step how many graphs were captured."""
    torch.manual_seed(0)
    compiled = fxremat.compile(copy.deepcopy(plain), "100%", search=Search(seconds=0.0))
    x, captured, began = torch.randn(32, 16), [], graphs()
    for turn in turns:
        steps = []
        for model in (compiled, plain):
            model.turns = turn
            steps.append(step_of(model, lambda model=model: model(x), lambda loss: loss))
        assert differences(*steps) == []
        captured.append(graphs() - began)
    return captured


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
