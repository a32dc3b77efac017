"""A walk makes up the results of ops that it has run before: costs and layouts are those of a walk that runs all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxremat.cost import made_up_results
from fxremat.cost import measure as measuring
from fxremat.cost.cache import CostCache
from fxremat.cost.made_up import Call
from fxremat.cost.made_up_results import MadeUpResults
from fxremat.cost.measure import measure
from fxremat.graphs.captured import Captured
from fxremat.step.costs import Costs
from fxremat.torch_private import torch_release
from tests.dags import capture

pytestmark = pytest.mark.usefixtures("torch_ready")
WIDTH, DEPTH = 64, 6


class Watched(MadeUpResults):
    """Remembers the target and the type of result of every op whose result was made up."""

    found: list[tuple[str, torch.dtype]] = []  # noqa: RUF012
    walks = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Watched.walks += 1

    def may_replace(self, op: Any) -> bool:
        replaced = super().may_replace(op)
        if replaced:
            shown = self.joint.nodes[op.index].meta["val"]
            Watched.found += [(op.target, each.dtype) for each in (shown if isinstance(shown, tuple) else [shown])]
        return replaced


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    Watched.found, Watched.walks = [], 0
    monkeypatch.setattr(made_up_results, "WORTH", 0.0)
    monkeypatch.setattr(measuring, "MadeUpResults", Watched)
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path / "one"))


def linears() -> nn.ModuleList:
    """Equal linear layers, whose ops repeat."""
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


class Layers(nn.Module):
    """Equal layers: a linear map, a mask, a maximum's place, a slice, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = F.dropout(F.gelu(layer(x)), 0.1)
            x = torch.where(y > 0, y, y * 0.1) + self.table(y.argmax(-1)) + x[:, :1]
        return x.square().mean()


class Chances(nn.Module):
    """Layers whose results are small enough to be chances of drawing 1, as made-up data is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x)) * 0.1
        return (torch.bernoulli(x.detach() * 7) * x).square().mean()


class Factors(nn.Module):
    """Layers that check their data: a matrix without a Cholesky factor ends the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.linalg.cholesky(x @ x.T + torch.eye(WIDTH))
        return x.square().mean()


def given_for(joint: Captured) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(node.meta["val"].shape) / 8 for node in joint.primals]


def sizes(costs: Costs) -> tuple[Any, ...]:
    return tuple(costs.sizes.values), tuple(costs.sizes.workspace), costs.fresh


def test_costs_are_those_of_a_walk_that_runs_every_op(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    joint = capture(Layers(), torch.randn(WIDTH, WIDTH))
    made_up = sizes(measure(joint, given_for(joint)))
    targets = {target for target, _ in Watched.found}
    assert len(Watched.found) > DEPTH
    assert "aten.addmm.default" in targets
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(made_up_results, "WORTH", float("inf"))
    count = len(Watched.found)
    assert sizes(measure(joint, given_for(joint))) == made_up
    assert len(Watched.found) == count


def test_indices_and_masks_are_computed() -> None:
    joint = capture(Layers(), torch.randn(WIDTH, WIDTH))
    measure(joint, given_for(joint))
    assert {dtype for _, dtype in Watched.found} == {torch.float32}
    assert not {"aten.argmax.default", "aten.gt.Scalar"} & {target for target, _ in Watched.found}


def test_a_walk_whose_made_up_data_an_op_refuses_runs_every_op() -> None:
    joint = capture(Chances(), torch.randn(WIDTH, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it would warn of estimated costs
        measure(joint, given_for(joint))
    assert Watched.walks == 2
    assert Watched.found
    measure(joint, given_for(joint))  # the layouts are known: it walks no more
    assert Watched.walks == 2


@pytest.mark.skipif(torch_release() < (2, 13), reason="in torch 2.11 nothing of the check is in the graph")
def test_nothing_is_made_up_where_an_op_checks_data() -> None:
    joint = capture(Factors(), torch.randn(WIDTH, WIDTH))
    measure(joint, given_for(joint))
    assert (Watched.walks, Watched.found) == (1, [])


def test_a_result_that_shares_its_storage_is_not_made_up() -> None:
    joint = capture(Layers(), torch.randn(WIDTH, WIDTH))
    measure(joint, given_for(joint))
    op = next(op for op in joint.ops if op.target == "aten.gelu.default")
    x, cache = torch.randn(WIDTH, WIDTH), CostCache.of_device(torch.device("cpu"))
    for result, expected in ((x, False), (torch.randn(WIDTH, WIDTH), True)):
        known = MadeUpResults(joint, cache)
        known.note(op, op.key, Call(torch.ops.aten.gelu.default, (x,), {}), result)
        assert known.may_replace(op) is expected
