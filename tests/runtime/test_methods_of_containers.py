"""Models whose graph ends in the argument of a container's method, as in `states.append(block(x))`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable

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


class Two(nn.Module):
    """Two blocks, whose states a container holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.turns = False


class Appends(Two):
    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        states.append(self.first(x))
        states.append(self.second(states[-1]))
        return loss_of(states)


class Inserts(Two):
    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        states.insert(0, self.first(x))
        states.extend([self.second(x)])
        return loss_of(states)


class Names(Two):
    def forward(self, x: Tensor) -> Tensor:
        states = {"none": x}
        states.update(first=self.first(x))
        states.setdefault("second", self.second(states["first"]))
        return loss_of(states.values())


class Turns(Two):
    def forward(self, x: Tensor) -> Tensor:
        states = deque([x])
        (states.appendleft if self.turns else states.append)(self.first(x))
        return loss_of(states)


def loss_of(states: Iterable[Tensor]) -> Tensor:
    """Weigh the states by their order."""
    return torch.stack([weight * state for weight, state in enumerate(states, 1)]).square().mean()


@pytest.mark.parametrize("kind", [Appends, Names, pytest.param(Inserts, marks=pytest.mark.long)])
def test_they_are_captured_once(kind: type[Two]) -> None:
    captured = compared(kind(), [False] * 4)
    assert captured[1] == captured[-1] > 1


def test_another_method_is_called_where_the_model_calls_another() -> None:
    captured = compared(Turns(), [False, True, False, True, False, True])
    assert captured[2] == captured[-1] > 1


def compared(plain: Two, turns: list[bool]) -> list[int]:
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
