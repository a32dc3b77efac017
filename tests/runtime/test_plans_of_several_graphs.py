"""Plans and estimates of models that are several graphs, which run for them and are as before afterwards."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat.__main__ import main
from fxremat.cost.devices import DEVICES
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.units import parse_bytes
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK: dict[str, Any] = {"search": fxremat.Search(seconds=0.0, progress=False)}
ESTIMATED: dict[str, Any] = {**QUICK, "costs": "estimate"}
WIDTH = 32


class Net(nn.Module):
    """Blocks with BatchNorm and dropout; in the middle a value decides a branch, if it is `broken`."""

    def __init__(self, *, broken: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)),
                *(nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)),
            )
            for _ in range(3)
        )
        self.head, self.broken = nn.Linear(WIDTH, 8), broken

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if self.broken and number == 1 and x.sum().item() > 1e9:
                x = x * 2
        return self.head(x).square().mean()


def net(*, broken: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(broken=broken)


def rows(count: int = 256) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))


@functools.cache
def planned(mem: int | str | None = "60%", **options: Any) -> PlanOfGraphs:
    found = fxremat.plan(net(), rows(), mem=mem, **{**ESTIMATED, **options})
    assert isinstance(found, PlanOfGraphs)
    return found


@pytest.mark.parametrize("mem", ["60%", pytest.param("min", marks=pytest.mark.long), "600KiB"])
def test_the_plan_is_the_one_that_a_compiled_model_trains_with(mem: str) -> None:
    ours = fxremat.compile(net(), mem=mem, **ESTIMATED)
    for _ in range(4):
        ours(rows()).backward()
    plan = planned(mem)
    assert str(plan) == str(ours.plan)
    assert (plan.predicted_peak, plan.minimum) == (ours.plan.predicted_peak, ours.plan.minimum)


def test_a_measured_plan_has_the_bytes_of_an_estimated_one() -> None:
    measured = fxremat.plan(net(), rows(), mem="100%", **QUICK)
    assert measured.predicted_peak == pytest.approx(planned("100%").predicted_peak, rel=0.05)
    assert "estimated" not in str(measured)
    assert "times and workspaces, for cpu and its kernels" in str(planned("100%"))


def test_the_model_is_as_before(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    model(rows()).backward()
    before, state = copy.deepcopy(model), torch.get_rng_state()
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients if gradient is not None]
    with caplog.at_level(logging.WARNING, "fxremat"):
        fxremat.plan(model, rows(), mem="60%", **ESTIMATED)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is known for parameter, known in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(gradients, values, strict=True))
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert all(map(torch.equal, model.buffers(), before.buffers()))
    (told,) = caplog.messages
    assert told.startswith("Net is several graphs, which only a run shows: a few steps run for this plan")


def test_gradients_that_are_there_do_not_count() -> None:
    least = []
    for there in (False, True):
        model = net()
        if there:
            model(rows()).backward()
        least.append(fxremat.plan(model, rows(), mem="60%", **ESTIMATED).minimum)
    assert least[0] == least[1]


class Counting(Net):
    """Counts its calls in a buffer that it replaces, and has a method that trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x)

    def training_step(self, x: Tensor) -> None:
        self(x).backward()


def test_buffers_that_the_model_replaces_are_put_back() -> None:
    model = Counting()
    count = model.count
    fxremat.plan(model, rows(), mem="70%", **ESTIMATED)
    assert model.count is count
    assert count == 0


def test_a_method_that_may_train_is_not_tried() -> None:
    model = Counting()
    with pytest.raises(fxremat.CaptureError):
        fxremat.plan(model, rows(), mem="70%", method="training_step", **ESTIMATED)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.count == 0


def test_parameters_stay_on_the_device() -> None:
    model = net()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    options: dict[str, Any] = {"exact": True, "optimizer": torch.optim.AdamW(model.parameters()), **QUICK}
    for device_mem in ("1MiB", "100KiB"):
        with contextlib.suppress(fxremat.BudgetTooSmall):
            fxremat.plan(model, rows(), device_mem=device_mem, **options)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


class Hidden(Net):
    """Returns rows, of which a loss outside is computed."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if number == 1 and x.sum().item() > 1e9:
                x = x * 2
        return x


def test_a_loss_that_the_user_tells_of_counts() -> None:
    without, beside = (
        fxremat.plan(Hidden(), rows(), mem="100%", loss=loss, **ESTIMATED) for loss in (None, "20MB")
    )
    assert without.predicted_peak < parse_bytes("20MB") <= beside.predicted_peak


def test_a_step_with_estimated_costs_fits_and_has_the_bits_of_plain_training() -> None:
    ours, plain = fxremat.compile(net(), mem="70%", **ESTIMATED), net()
    x = rows()
    for _ in range(4):
        theirs = step_of(plain, lambda: plain(x), lambda loss: loss)
        assert differences(step_of(ours, lambda: ours(x), lambda loss: loss), theirs) == []
    ours.zero_grad(set_to_none=True)
    assert meter.peak_bytes(lambda: ours(x).backward()) <= ours.plan.budget


def test_the_least_budget_of_an_error_works() -> None:
    with pytest.raises(fxremat.BudgetTooSmall) as error:
        planned("10KiB")
    assert error.value.budget == parse_bytes("10KiB")
    assert planned(error.value.minimum).predicted_peak <= error.value.minimum


def test_another_device_counts_as_for_one_graph() -> None:
    several = planned("100%", costs="H200")
    one = fxremat.plan(net(broken=False), rows(), mem="100%", **{**ESTIMATED, "costs": "H200"})
    assert isinstance(one, fxremat.Plan)
    assert several.keep_all_peak == pytest.approx(one.keep_all_peak, rel=0.05)
    assert 0.7 * one.keep_all_time <= several.keep_all_time <= one.keep_all_time
    assert several.on_device is not None
    assert several.on_device == one.on_device
    assert "times and workspaces, for H200 and the kernels of the cpu, where it ran" in str(several)
    assert f"{'fits':18}yes: 133.4 GiB left beside the planned " in str(several)


class Convolutions(nn.Module):
    """Convolutions, whose backward needs more workspace on a CPU than is assumed of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 5, padding=2), nn.Conv2d(8, 8, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def test_workspaces_of_the_cpu_do_not_count_on_another_device() -> None:
    plan = fxremat.plan(Convolutions(), torch.randn(4, 8, 32, 32), mem="100%", costs="H200", **QUICK)
    assert isinstance(plan, PlanOfGraphs)
    assert [call.node.excess for call in plan.calls] == [0, 0]


def test_what_a_device_has_left_is_a_budget() -> None:
    room = planned("100%", costs="H200").on_device
    assert room is not None
    everything, least = planned("100%", costs="H200").predicted_peak, planned("min", costs="H200").minimum

    def card(left: int) -> fxremat.Device:
        memory = int((room.given + room.state + left) / (1 - fxremat.cost.device_memory.AUTO_MARGIN)) + 1
        return fxremat.Device(name="card", flops=1e12, half_flops=1e12, bandwidth=1e11, memory=memory)

    assert planned("auto", costs=card(everything)).predicted_peak == everything
    between = planned("auto", costs=card((everything + least) // 2))
    assert between.predicted_peak <= between.budget <= (everything + least) // 2 + 1
    with pytest.raises(fxremat.BudgetTooSmall, match=r"card has .* optimizer state .*, and the step takes .* at least"):
        planned("auto", costs=card(least // 2))
    unknown = fxremat.Device(name="card", flops=1e12, half_flops=1e12, bandwidth=1e11)
    with pytest.raises(fxremat.InvalidBudget, match="the memory of card is not stated"):
        planned("auto", costs=unknown)


def test_all_that_a_process_has_is_a_budget() -> None:
    plan = planned(None, device_mem="1MiB")
    assert plan.predicted_peak <= plan.budget < parse_bytes("1MiB")
    assert plan.on_device is not None
    assert plan.on_device.total == parse_bytes("1MiB")


@pytest.mark.parametrize(
    "call",
    [
        lambda: fxremat.capture(net(), rows(), **QUICK),
        lambda: fxremat.profile(net(), rows(), costs="estimate", **QUICK),
        lambda: fxremat.compare(net().to("meta"), rows().to("meta"), ["A100", "H200"], mem="100%", **QUICK),
        lambda: fxremat.plan(net().to("meta"), rows().to("meta"), mem="100%", **ESTIMATED),
    ],
)
def test_a_step_that_does_not_run_has_to_be_one_graph(call: Any) -> None:
    told = r"several graphs, but a step that is captured without running the model \(fxremat.plan runs one that has "
    with pytest.raises(fxremat.CaptureError, match=told):
        call()


def test_a_model_that_has_to_be_one_graph_does_not_run() -> None:
    for options in ({"fullgraph": True}, {"mem": "1GiB", "count": "reserved"}):
        model, runs = net(), list[None]()
        model.head.register_forward_hook(lambda *_, runs=runs: runs.append(None))
        with pytest.raises(fxremat.CaptureError, match="the model is not one graph"):
            fxremat.plan(model, rows(), **{"mem": "100%", **ESTIMATED, **options})
        assert not [run for run in runs if run is not None]


def wide(batch: int = 256) -> tuple[nn.Module, Tensor]:
    return net(), rows(batch)


NAME = "tests.runtime.test_plans_of_several_graphs:wide"
ARGUMENTS = ["--estimate", "--effort", "0"]


def test_the_command_line_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NAME, "--mem", "80%", "--device", "H200", "--full", *ARGUMENTS]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("fxremat plan of Net, 2 graphs, ")
    assert "\nH200\n" in shown


def test_the_command_line_shows_a_plan_that_cannot_be_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", NAME, "--mem", "80%", "--save", str(path), *ARGUMENTS]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("fxremat plan of Net, 2 graphs, ")
    assert f"{path} is not written: a plan of several graphs" in shown.err


class Exits(nn.Module):
    """Leaves out its second layer if values are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.abs().sum().item() > 1000:
            return x.sum()
        return self.second(x).sum()


def test_that_a_branch_depends_on_data_is_said_without_symbols() -> None:
    with pytest.raises(fxremat.CaptureError, match=r"item\(\) > 1000: \(Data-dependent branching\)\. Keep what"):
        fxremat.capture(Exits(), torch.ones(2, 8))


def test_devices_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with caplog.at_level(logging.WARNING):
        found = fxremat.compare(model, rows(), ["A100", "H200"], mem="80%", **QUICK)
    assert caplog.text.count("a few steps run for this plan") == 1
    for name, plan in found.plans.items():
        alone = fxremat.plan(model, rows(), mem="80%", costs=name, **QUICK)
        assert isinstance(plan, PlanOfGraphs)
        assert plan.describe() == alone.describe()
    table = str(found).splitlines()
    assert table[0].split()[:3] == ["device", "memory", "keep"]
    assert [row.split()[0] for row in table[1:3]] == ["A100", "H200"]
    for estimate in found.estimates:
        times = [estimate.seconds_at(share) for share in (100, 80, 60, 40)]
        assert times[1] == estimate.plan.predicted_time
        known = [seconds for seconds in times if seconds is not None]
        assert known == sorted(known), "less memory takes no less time"
        assert estimate.seconds_at(1) is None


def test_what_a_device_has_left_is_compared() -> None:
    """Take the least where a device has less left than that."""
    memory = fxremat.plan(net(), rows(), mem="min", costs="A100", **QUICK).on_device
    assert memory is not None
    small = replace(DEVICES["A100"], name="small", memory=memory.given + 1000)
    found = fxremat.compare(net(), rows(), ["A100", small], mem="auto", **QUICK)
    large, least = found.estimates
    assert large.plan.budget == large.on_device.auto
    assert least.plan.budget == least.plan.minimum
    assert (least.left_at_least or 0) < 0 < (large.left or 0)


def test_the_command_line_compares_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", NAME, "--mem", "80%", "--device", "A100,H200", "--effort", "0"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[:3]] == ["device", "A100", "H200"]


@pytest.mark.long
def test_the_command_line_finds_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    least = [fxremat.plan(*wide(batch), mem="min", **ESTIMATED).minimum for batch in (11, 12)]
    assert main(["plan", NAME, "--mem", str(sum(least) // 2), "--largest", "batch", "--up-to", "16", *ARGUMENTS]) == 0
    assert " is 11 (the least budget is " in capsys.readouterr().out
