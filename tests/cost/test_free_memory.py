"""Free memory of a device decides what is run before training; the device is pretended here."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat import budget
from fxremat.agreement import ALONE
from fxremat.cost import calibrate
from fxremat.cost import measure as measuring
from fxremat.cost.calibrate import has_room, peak_of_step
from fxremat.cost.made_up import Call
from fxremat.cost.measure import alone
from fxremat.cost.walk import Walk
from fxremat.planning import compiled
from fxremat.settings import Search
from tests.dags import capture
from tests.toys import Loss, Stack, rows

pytestmark = pytest.mark.usefixtures("torch_ready")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def plan() -> fxremat.Plan:
    return fxremat.plan(Loss(Stack(2)), (rows(),), mem="100%", search=Search(seconds=0.0))


def test_what_the_allocator_keeps_for_reuse_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 300)
    assert budget.free_memory(CUDA) == 500


def test_a_step_is_run_before_training_where_it_has_room(
    plan: fxremat.Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = sum(node.meta["val"].nbytes for node in plan.captured.primals)  # without inputs all is made up
    needed = 1.05 * (made + plan.predicted_peak)
    monkeypatch.setattr(calibrate, "device_of", lambda _: CUDA)
    monkeypatch.setattr(calibrate, "free_memory", lambda _: needed)
    assert has_room(plan.program, plan.costs)
    monkeypatch.setattr(calibrate, "free_memory", lambda _: needed - 1)
    with caplog.at_level(logging.INFO):
        assert not has_room(plan.program, plan.costs)
        assert peak_of_step(plan.program, plan.costs) is None
    assert "a step is not run before training: it takes" in caplog.text


@pytest.mark.parametrize(("room", "within"), [(False, True), (True, False)], ids=["no room", "it fails"])
def test_a_program_in_regions_that_cannot_be_tried_for_want_of_memory_is_not_rejected(
    room: bool, within: bool, plan: fxremat.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "has_room", lambda *_: room)
    monkeypatch.setattr(compiled, "peak_of_step", lambda *_: None)
    search: Any = SimpleNamespace(_plan=plan, _step=SimpleNamespace(inputs=()), _tier="")
    judged: Any = SimpleNamespace(program=plan.program, costs=plan.costs, peak=plan.predicted_peak)
    assert compiled._Search._runs_within(search, judged) is within


# --- out of memory while measuring -------------------------------------------------------------------------


def test_a_walk_that_fails_lets_go_of_its_values() -> None:
    joint = capture(Loss(Stack(3)), rows())
    walk, seen = Walk(joint, {}, range(len(joint.ops))), list[int]()

    def fail_late(op: Any, call: Any) -> Any:
        seen.append(len(walk.values))
        if op.backward:
            raise torch.OutOfMemoryError
        return call()

    with pytest.raises(torch.OutOfMemoryError):
        walk.run(fail_late)
    assert max(seen) > 1
    assert not walk.values


def test_an_op_that_has_no_memory_to_be_measured_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has less.")

    joint = capture(Loss(Stack(1)), rows())
    monkeypatch.setattr(measuring, "call_of", lambda _, **__: Call(refuse, (), {}))
    assert alone(joint.nodes[0], torch.device("cpu")) is None
    assert f"there is no memory on the device to measure {joint.nodes[0].target} by itself: CUDA out" in caplog.text


class Frozen(nn.Module):
    """A wide part that is not trained, so that a step takes most in the middle of its forward, before a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)).requires_grad_(False)
        self.head = nn.Linear(64, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(x))


def test_a_step_that_is_timed_takes_no_more_than_one_in_training() -> None:
    plan = fxremat.plan(Frozen(), torch.ones(256, 64), mem="100%", search=Search(seconds=0.0))
    assert sum(node.meta["val"].nbytes for node in plan.captured.tangent_nodes) > 0.1 * plan.predicted_peak
    made = sum(node.meta["val"].nbytes for node in plan.captured.primals)
    measured = meter.peak_bytes(lambda: calibrate._run(plan.program, plan.costs, (), ALONE))
    assert measured - made <= 1.01 * plan.predicted_peak
