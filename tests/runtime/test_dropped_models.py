"""A model that nobody holds any more is freed with its plans and graphs, as in a sweep that makes one after another."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.settings import Search
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")
QUICK = Search(seconds=0.0, progress=False)


class Net(nn.Module):
    """Two layers, with something between them that no graph holds if `graphs` is 2."""

    def __init__(self, graphs: int) -> None:
        super().__init__()
        self.first, self.second, self.graphs = nn.Linear(8, 8), nn.Linear(8, 8), graphs

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.graphs == 2:
            torch._dynamo.graph_break()
        return self.second(hidden).square().mean()


def trained(graphs: int, steps: int = 3) -> nn.Module:
    model = fxremat.compile(Net(graphs), mem="100%", search=QUICK)
    for _ in range(steps):
        model(torch.ones(4, 8)).backward()
    return model


@pytest.mark.parametrize("graphs", [1, 2])
def test_a_dropped_model_is_freed_with_its_plan(graphs: int) -> None:
    model = trained(graphs)
    plan = model.fxremat.plan  # type: ignore[union-attr]
    assert plan is not None
    alive = [weakref.ref(model), weakref.ref(plan), weakref.ref(model._fxremat.backend)]  # type: ignore[union-attr]
    del model, plan
    gc.collect()
    assert [each() for each in alive] == [None, None, None]


@pytest.mark.parametrize("graphs", [1, 2])
def test_a_model_outlives_others_of_its_class(graphs: int) -> None:
    torch.manual_seed(0)
    plain = Net(graphs)
    ours, x = fxremat.compile(copy.deepcopy(plain), mem="100%", search=QUICK), torch.ones(4, 8)
    for _ in range(2):
        trained(graphs, 1)
        gc.collect()
        mine = step_of(ours, lambda: ours(x), lambda loss: loss)
        assert differences(mine, step_of(plain, lambda: plain(x), lambda loss: loss)) == []


@pytest.mark.parametrize("graphs", [1, 2])
def test_a_backward_runs_though_its_model_was_dropped(graphs: int) -> None:
    torch.manual_seed(0)
    plain = Net(graphs)
    ours = fxremat.compile(copy.deepcopy(plain), mem="100%", search=QUICK)
    x, y = torch.ones(4, 8, requires_grad=True), torch.ones(4, 8, requires_grad=True)
    ours(x).backward()
    x.grad, loss = None, ours(x)
    del ours
    gc.collect()
    loss.backward()
    plain(y).backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)
