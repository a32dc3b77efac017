"""Tests of the reason why no smaller budget works: the op that needs most at the least, its line, and what for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from fxremat.graphs.names import frame_of, module_of
from fxremat.search.floor import Floor, floor_of
from fxremat.search.survey import survey
from fxremat.step.kinds import MemoryKind
from tests.dags import capture, estimated

pytestmark = pytest.mark.usefixtures("torch_ready")


class Wide(nn.Module):
    """Small layers, and one that is wide."""

    def __init__(self, loss: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8))])
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).tanh()
        x = self.layers[1](x)  # the wide one
        return x.square().mean() if self.loss else x


def test_the_worst_op_is_named_with_its_module_and_line() -> None:
    joint = capture(Wide(loss=True), torch.ones(64, 8))
    costs = estimated(joint)
    frontier = survey(joint, costs, effort=0)
    floor = floor_of(frontier.candidates[-1].program(), costs)
    assert floor.bytes == frontier.minimum == sum(size for _, size in floor.kinds)
    assert "(backward of layers.1." in str(floor)
    assert "test_floor.py:" in str(floor)
    assert "x = self.layers[1](x)  # the wide one" in str(floor)
    assert " runs with " in str(floor)
    assert "\n" not in str(floor)


def test_what_is_negligible_is_not_named() -> None:
    kinds = ((MemoryKind.RESULTS, 2**20), (MemoryKind.KEPT, 11_000), (MemoryKind.WORKSPACE, 16))
    floor = Floor(bytes=sum(size for _, size in kinds), moment="mm runs", kinds=kinds)
    assert str(floor) == "mm runs with 1.0 MiB of gradients to return and 10.7 KiB of kept values"


def test_a_loss_outside_the_model_is_named() -> None:
    joint = capture(Wide(loss=False), torch.ones(4096, 8))
    costs = estimated(joint)
    costs = replace(costs, sizes=replace(costs.sizes, outside=10**9))
    keep_all = survey(joint, costs, effort=0).keep_all
    floor = floor_of(keep_all.program(), costs)
    assert str(floor).startswith("the loss outside the model runs with 953.7 MiB of ")
    assert dict(floor.kinds)[MemoryKind.OUTSIDE] == 10**9
    assert floor.bytes == keep_all.peak == sum(size for _, size in floor.kinds)


def test_an_op_of_which_nothing_is_known() -> None:
    node = fx.Graph().placeholder("x")
    assert (frame_of(node), module_of(node)) == (None, "")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']", ""),
        ("L['self'].layers.3.up", "layers.3.up"),
        ("L['self'].layers[3].up", "layers.3.up"),
        ("L['fn']._modules['layers']._modules['3']", "layers.3"),
        ("getattr(getattr(L['self'].layers, 'a b')._modules['0'], 'it\\'s').up", "layers.a b.0.it's.up"),
    ],
)
def test_modules_are_named_as_users_do(path: str, name: str) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"1": (path, nn.Linear)}
    assert module_of(node) == name
