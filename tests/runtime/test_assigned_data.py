"""Models that assign to `parameter.data` in their forward, and graphs that cannot be planned, beside plain PyTorch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

import fxremat
from fxremat.settings import Search
from tests.steps import differences, step_of
from tests.toys import WIDTH, rows

pytestmark = pytest.mark.usefixtures("torch_ready")
QUICK = Search(seconds=0.0, progress=False)


class Momentum(nn.Module):
    """A momentum encoder, as MoCo's published code updates it, and a step that may look at what was there before."""

    def __init__(self, update: Callable[[nn.Linear, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.update(self.query, self.key)
            key = self.key(x)
        return (self.query(x) - key + seen).square().mean()


def momentum(query: nn.Linear, key: nn.Linear) -> Tensor:
    for own, other in zip(key.parameters(), query.parameters(), strict=True):
        own.data = own.data * 0.9 + other.data * 0.1
    return torch.zeros(())


def difference(query: nn.Linear, key: nn.Linear) -> Tensor:
    before = key.weight.data
    key.weight.data = before * 0.9 + query.weight.data * 0.1
    return (key.weight.data - before).sum()  # a copy would change what `before` shows


def transposed(query: nn.Linear, key: nn.Linear) -> Tensor:
    key.weight.data = (key.weight.data * 0.5).t()
    return torch.zeros(())


def normalized(query: nn.Linear, key: nn.Linear) -> Tensor:
    query.weight.data = nn.functional.normalize(query.weight.data)
    return torch.zeros(())


@pytest.mark.parametrize("update", [momentum, normalized, difference, transposed])
@pytest.mark.filterwarnings("ignore:no part of")
def test_assigned_data_is_that_of_plain_training(update: Callable[[nn.Linear, nn.Linear], Tensor]) -> None:
    model = Momentum(update)
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, mem="100%", search=QUICK)
    for _ in range(3):
        mine, its = (step_of(each, lambda each=each: each(rows()), lambda loss: loss) for each in (ours, plain))
        assert differences(mine, its) == []
    assert isinstance(ours.plan, fxremat.Plan) == (update in (momentum, normalized))


def test_data_that_is_assigned_where_a_copy_would_show_is_named_by_its_line() -> None:
    says = r"assignment to \.data, .*test_assigned_data.py:\d+ in difference: .*tensor\.data\.copy_"
    with pytest.raises(fxremat.CaptureError, match=says):
        fxremat.compile(Momentum(difference), mem="100%", search=QUICK, fullgraph=True)(rows())


class Energy(nn.Module):
    """Gradients of each sample, by functorch inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(lambda one: self.energy(one).squeeze()))(x).square().mean()


def test_gradients_of_samples_inside_of_the_forward_are_planned() -> None:
    model = Energy()
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, mem="100%", search=QUICK)
    for _ in range(2):
        mine, its = (step_of(each, lambda each=each: each(rows()), lambda loss: loss) for each in (ours, plain))
        assert differences(mine, its) == []
    assert isinstance(ours.plan, fxremat.Plan)


class Jagged(nn.Module):
    """A part that reads nested tensors, whose sizes no plan can know, before one that can be planned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU())
        self.rest = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).values()
        torch._dynamo.graph_break()
        return self.rest(y).square().mean()


def test_a_graph_that_cannot_be_planned_stays_plain_beside_one_that_is(caplog: pytest.LogCaptureFixture) -> None:
    model, parts = Jagged(), [rows(k) for k in (3, 5, 2)]
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, mem="100%", search=QUICK)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            x = torch.nested.nested_tensor(parts, layout=torch.jagged)
            mine, its = (step_of(each, partial(each, x), lambda loss: loss) for each in (ours, plain))
            assert differences(mine, its) == []
    assert any("cannot be planned, and runs as plain PyTorch" in record.message for record in caplog.records)
    assert isinstance(ours.plan, fxremat.PlanOfGraphs)
