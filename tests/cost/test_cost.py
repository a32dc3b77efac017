"""Costs: measured once and kept, sized as the op really leaves them, estimated without running anything."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxremat
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import simulate
from fxremat.cost import measure as measuring
from fxremat.cost.cache import CostCache
from fxremat.cost.calibrate import peak_of_step
from fxremat.cost.estimate import DEVICES, Device, estimate, flops_of
from fxremat.cost.made_up import call_of
from fxremat.cost.measure import measure
from fxremat.errors import FxrematError
from fxremat.graphs.batch_norm import NORMALIZED, STATISTICS
from fxremat.graphs.captured import Captured
from fxremat.linearize.chain_of import chain_of
from fxremat.linearize.crossings import crossings
from fxremat.linearize.lay_out import lay_out
from fxremat.linearize.save_sets import add_options
from fxremat.step.costs import OpCost
from fxremat.step.liveness import live_bytes
from fxremat.step.order import rematerialize
from tests.dags import Dag, Layer, Recipe, batch, capture

pytestmark = pytest.mark.usefixtures("torch_ready")


class Conv(nn.Module):
    """Four times convolution, BatchNorm, ReLU; mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4))
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.blocks(x), y)


IMAGES = (torch.ones(2, 4, 16, 16), torch.zeros(2, 4, 16, 16))


@pytest.fixture
def joint() -> Captured:
    return capture(Conv(), *IMAGES)


@pytest.fixture
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    return tmp_path


def test_equal_ops_are_measured_once_and_never_again(
    joint: Captured, cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original = measuring.seconds_of

    def counted(*args: Any, **options: Any) -> float:
        calls.append("")
        return original(*args, **options)

    monkeypatch.setattr(measuring, "seconds_of", counted)
    first = measure(joint)
    assert len(calls) == len({op.key for op in joint.ops}) < len(joint.ops)
    assert measure(joint) == first
    assert len(calls) == len({op.key for op in joint.ops})
    assert len(list(cold_cache.glob("*.sqlite"))) == 1


def test_a_damaged_cache_counts_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("{ not json")
    cache = CostCache(path)
    assert cache.op("key") is None
    cache.keep_op("key", OpCost(1.5, 7, (4, 0)))
    cache.save()
    assert CostCache(path).op("key") == OpCost(1.5, 7, (4, 0))


def test_measuring_leaves_the_generator_alone(joint: Captured, cold_cache: Path) -> None:
    before = torch.get_rng_state()
    measure(joint)
    assert torch.equal(torch.get_rng_state(), before)


def test_outputs_are_as_large_as_the_op_leaves_them(joint: Captured) -> None:
    sizes = measure(joint).sizes
    loss = next(op for op in joint.ops if op.name == "mse_loss")
    assert joint.values[loss.writes[0]].bytes == 4
    assert sizes.values[loss.writes[0]] == 2 * 4 * 16 * 16 * 4  # the storage of all terms, resized to one


def test_an_op_that_cannot_run_is_estimated_with_a_warning(
    joint: Captured, cold_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = [primal.meta["val"] for primal in joint.primals]
    whole = measure(joint, fake)

    def broken(node: fx.Node, **options: bool) -> object:
        if node.target is torch.ops.aten.convolution.default:
            raise RuntimeError("no kernel")
        return call_of(node, **options)

    monkeypatch.setenv("FXREMAT_CACHE", str(cold_cache / "other"))
    monkeypatch.setattr(measuring, "call_of", broken)
    with pytest.warns(UserWarning, match=r"aten\.convolution\.default"):
        costs = measure(joint, fake)
    for op in joint.ops:
        if joint.nodes[op.index].target is torch.ops.aten.convolution.default:
            assert costs.sizes.workspace[op.index] >= whole.sizes.workspace[op.index]
            assert costs.seconds[op.index] > 0


def test_an_estimate_counts_flops_and_bytes() -> None:
    joint = capture(Dag(Recipe((Layer("linear", 0, 0),), 0, False)), *batch())
    addmm = next(op for op in joint.ops if op.name == "addmm")
    assert flops_of(joint.nodes[addmm.index]) == 2 * 16 * 8 * 8
    slow = dataclasses.replace(DEVICES["cpu"], flops=1.0, launch=0.0)
    assert estimate(joint, slow).seconds[addmm.index] == pytest.approx(2 * 16 * 8 * 8 / 0.6)
    far = dataclasses.replace(DEVICES["cpu"], bandwidth=1.0, launch=0.0)
    moved = 4 * (16 * 8 + 8 * 8 + 8 + 16 * 8)
    assert estimate(joint, far).seconds[addmm.index] == pytest.approx(moved / 0.8)


def test_an_estimate_lets_batch_norm_read_twice() -> None:
    joint = capture(Dag(Recipe((Layer("batch_norm", 0, 0),), 0, False)), *batch())
    halves = [op for op in joint.ops if joint.nodes[op.index].target in (STATISTICS, NORMALIZED)]
    far = dataclasses.replace(DEVICES["cpu"], bandwidth=1.0, launch=0.0)
    values, statistics = 4 * 16 * 8, 4 * 8
    least = (
        3 * values + 10 * statistics
    ) / 0.8  # input twice and output; weight, bias, running and saved statistics
    found = sum(estimate(joint, far).seconds[op.index] for op in halves)
    assert len(halves) == 2
    assert found == pytest.approx(least)


def test_the_first_half_of_a_batch_norm_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half runs the whole for its bits, but is timed without: the second half is an op of its own."""
    timed: list[Any] = []
    monkeypatch.setattr(measuring, "seconds_of", lambda call, *_, **__: timed.append(call) or 1.0)
    joint = capture(Dag(Recipe((Layer("batch_norm", 0, 0),), 0, False)), *batch())
    first = next(op for op in joint.ops if joint.nodes[op.index].target is STATISTICS)
    device = torch.device("cpu")
    with measuring.quiet_world(device):
        call = call_of(joint.nodes[first.index])
        cost, _ = measuring.measured(joint.nodes[first.index], call, device)
        assert measuring.alone(joint.nodes[first.index], device) == cost
    assert call.args[-1] is True
    assert [one.args[-1] for one in timed] == [False, False]
    assert cost.workspace >= 4 * 16 * 8, "the output of the whole"


def test_an_estimated_plan_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "call_of", None)
    start = time.perf_counter()
    plan = fxremat.plan(Conv(), IMAGES, mem="70%", costs="A100-40GB")
    assert time.perf_counter() - start < 60
    assert plan.timed == "estimated"
    assert plan.device == "A100-40GB"
    assert plan.predicted_peak <= plan.budget


def test_unknown_devices_are_refused_with_the_known_ones() -> None:
    with pytest.raises(FxrematError, match="A100-40GB"):
        Device.named("A9000")
    with pytest.raises(FxrematError, match="costs: unknown device 'A9000'"):
        fxremat.compile(Conv(), mem="1GiB", costs="A9000")


def test_the_chain_is_as_exact_as_the_graphs(joint: Captured) -> None:
    """The chain model's peak of keep-all and of checkpoints is never below, and close to, that of the exact replay."""
    costs = measure(joint)
    layout = add_options(lay_out(joint, crossings(joint).cuts()), costs.seconds, costs.sizes.values)
    chain = chain_of(layout, costs)
    n = len(chain)
    keep_all = " ".join([*(f"Fall{i}" for i in range(1, n + 1)), *(f"B{i}" for i in range(n, 0, -1))])
    half = n // 2
    forwards = [
        "Fck1",
        *(f"Fnone{i}" for i in range(2, half + 1)),
        *(f"Fall{i}" for i in range(half + 1, n + 1)),
    ]
    again = [*(f"Fall{i}" for i in range(1, half + 1)), *(f"B{i}" for i in range(half, 0, -1))]
    checkpoint = " ".join([*forwards, *(f"B{i}" for i in range(n, half, -1)), *again])
    for text in (keep_all, checkpoint):
        schedule = Schedule.parse(text)
        exact = live_bytes(rematerialize(layout, schedule), costs.sizes).peak
        assert exact <= simulate(chain, schedule).peak <= 1.1 * exact


def test_a_step_that_runs_for_its_peak_holds_no_running_statistics_as_those_of_users_do_not(joint: Captured) -> None:
    costs = measure(joint)
    layout = lay_out(joint, crossings(joint).cuts())
    blocks = range(1, len(layout.blocks) + 1)
    keep_all = " ".join([*(f"Fall{i}" for i in blocks), *(f"B{i}" for i in reversed(blocks))])
    program = rematerialize(layout, Schedule.parse(keep_all))
    given = sum(costs.sizes.values[tangent] for tangent in joint.tangent_values)
    given += costs.sizes.root  # numbers that a user may make of the loss
    assert peak_of_step(program, costs) == live_bytes(program, costs.sizes).peak - given
