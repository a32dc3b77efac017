"""Towers that meet at the loss: found, planned as a join, and run with the numbers of plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks import models
from benchmarks.capture import joint_graph
from benchmarks.meter import peak_bytes
from fxremat.chains.join_schedule import JoinSchedule
from fxremat.graphs.captured import read_joint
from fxremat.linearize.crossings import crossings
from fxremat.linearize.towers import Towers, find_towers, on_the_layout
from fxremat.passes.pipelines import PIPELINES, normalize
from fxremat.search import survey as planner
from fxremat.settings import Search
from tests.dags import estimated
from tests.saved_steps import saved
from tests.training import differences, train

pytestmark = pytest.mark.usefixtures("torch_ready")
WIDTH, ROWS = 16, 64


class Tower(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.2))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Pair(nn.Module):
    """Two encoders of unequal depth, or one used twice, and the distance of what they say."""

    def __init__(self, shared: bool, count: int = 2) -> None:
        super().__init__()
        first = Tower(5)
        self.towers = nn.ModuleList([first if shared else Tower(4 + k) for k in range(count)])

    def forward(self, *inputs: Tensor) -> Tensor:
        values = [tower(x) for tower, x in zip(self.towers, inputs, strict=True)]
        return sum((F.mse_loss(value, values[0]) for value in values[1:]), values[0].square().mean())


def inputs(count: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count))


def towers_of(name: str) -> Towers | None:
    graph, costs = saved(name)
    return find_towers(graph, crossings(graph), costs.seconds)


@pytest.mark.parametrize(("name", "count"), [("pair", 2), ("shared_pair", 2), ("three_towers", 3)])
def test_towers_are_found(name: str, count: int) -> None:
    towers = towers_of(name)
    assert towers is not None
    assert len(towers.ends) == len(towers.carried) == count


def test_the_siamese_benchmark_has_two_towers_and_other_models_none() -> None:
    found = {}
    for name in ("siamese", "gpt", "encoder_decoder", "inception", "unet"):
        towers = towers_of(name)
        found[name] = len(towers.ends) if towers else 0
    assert found == {"siamese": 2, "gpt": 0, "encoder_decoder": 0, "inception": 0, "unet": 0}


def test_towers_that_share_weights_share_no_copies_of_these_in_another_layout() -> None:
    """Convolutions run in channels_last where regions are to be compiled, and read copies of their weights."""
    case = models.get("siamese", "small")
    module, outputs = joint_graph(case.model(), *case.batch())
    joint = read_joint(normalize(module, PIPELINES["inductor"]), outputs)
    clones = [op for op in joint.forward_ops if joint.nodes[op.index].target is torch.ops.aten.clone.default]
    assert len({joint.nodes[op.index].args[0] for op in clones}) < len(clones)
    towers = find_towers(joint, crossings(joint), estimated(joint).seconds)
    assert towers is not None
    assert len(towers.ends) == 2


def test_first_runs_keep_the_captured_order() -> None:
    schedule = JoinSchedule.parse("2:Fck1 1:Fall1 2:Fall2 0:Fall1 0:B1 2:B2 2:Fall1 2:B1 1:B1")
    moved = on_the_layout(schedule, [range(1), range(1, 3), range(3, 4)])
    assert str(moved) == "Fall1 Fck2 Fall3 Fall4 B4 B3 Fall2 B2 B1"


@pytest.mark.parametrize(("shared", "count"), [(True, 2), (False, 3)])
def test_joins_run_with_the_numbers_of_plain_pytorch(
    shared: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedules of the join alone are offered; the smallest interleaves its branches the most."""
    monkeypatch.setattr(planner, "_solved", lambda *_: [])
    torch.manual_seed(0)
    plain = Pair(shared, count).train()
    batch = inputs(count)
    compiled = fxremat.compile(copy.deepcopy(plain), mem="min", example_inputs=batch, search=Search(seconds=0))
    assert compiled.plan.budget == compiled.plan.minimum
    smallest = compiled.plan.alternatives.candidates[-1]
    assert smallest.join is not None
    results = []
    for model in (plain, compiled):
        torch.manual_seed(5)
        loss = model(*batch)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    compiled.zero_grad(set_to_none=True)
    assert peak_bytes(lambda: compiled(*batch).backward()) <= compiled.plan.budget
    assert isinstance(compiled.plan.schedule, JoinSchedule)
    assert compiled.plan.timeline.memory
    assert f"schedule: {compiled.plan.schedule}" in " ".join(str(compiled.plan).split())


def test_shared_batch_norms_are_run_again_in_towers() -> None:
    """A second run of a BatchNorm whose new statistics another call reads must not ask for them."""
    case = models.get("siamese", "small")
    plain = train(case.model(), case)
    compiled = fxremat.compile(case.model(), mem="min", search=Search(seconds=0))
    assert differences(train(compiled, case), plain) == []
    assert compiled.plan.budget == compiled.plan.minimum
