"""Tests of memory beside a step: the state that PyTorch's own optimizers keep on a device, and figures made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxremat
from fxremat.cost.device_memory import OPTIMIZERS, DeviceMemory, memory_on
from fxremat.cost.devices import DEVICES, Device
from fxremat.errors import BudgetTooSmall, InvalidBudget
from fxremat.settings import Search
from tests.dags import capture

pytestmark = pytest.mark.usefixtures("torch_ready")

MIB = 2**20
H100 = DEVICES["H100"]


def blocks(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 512) * 512


class Frozen(nn.Module):
    """A frozen layer and a trained one, in two types; nothing reads a third."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64, dtype=dtype).requires_grad_(False)
        self.trained = nn.Linear(64, 32, dtype=dtype)
        self.unread = nn.Linear(64, 64, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x).relu()).float().square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_that_of_pytorchs_optimizer(name: str, dtype: torch.dtype) -> None:
    model, x = Frozen(dtype), torch.ones(8, 64, dtype=dtype)
    kind, settings = OPTIMIZERS[name]
    optimizer = kind(list(model.trained.parameters()), **settings)
    model(x).backward()
    optimizer.step()
    kept = [s for state in optimizer.state.values() for s in state.values() if isinstance(s, torch.Tensor) and s.dim()]
    joint = capture(model, x)
    for given in (name, name.upper(), optimizer):
        found = memory_on(H100, joint, given)
        assert found.state == sum(map(blocks, kept))
        assert found.given == sum(map(blocks, (x, *model.frozen.parameters(), *model.trained.parameters())))
    assert found.stepping >= sum(map(blocks, model.trained.parameters()))


TEMPORARIES = {"sgd": 0, "sgd-momentum": 0, "adam": 1, "adamw": 1, "rmsprop": 1, "adagrad": 2}


@pytest.mark.parametrize("name", TEMPORARIES)
def test_updating_all_parameters_at_once_takes_copies_of_them(name: str) -> None:
    model = Frozen(torch.float32)
    found = memory_on(H100, capture(model, torch.ones(8, 64)), name)
    weights = sum(map(blocks, model.trained.parameters()))
    assert found.stepping == (1 + TEMPORARIES[name]) * weights


def test_adamw_is_assumed_unless_another_is_named() -> None:
    joint = capture(Frozen(torch.float32), torch.ones(8, 64))
    assumed, named = memory_on(H100, joint, None), memory_on(H100, joint, "adamw")
    assert (assumed.state, assumed.stepping) == (named.state, named.stepping)
    assert "(AdamW, assumed)" in str(assumed)
    assert "(SGD)" in str(memory_on(H100, joint, "sgd"))
    assert "(AdamW)" in str(memory_on(H100, joint, "adamw"))
    assert "(SGD, momentum=0.9)" in str(memory_on(H100, joint, "sgd-momentum"))


def test_an_input_that_wants_a_gradient_has_no_optimizer_state() -> None:
    model, x = Frozen(torch.float32), torch.ones(8, 64, requires_grad=True)
    plan = fxremat.plan(
        model, x, mem="100%", search=Search(seconds=0), costs="H100", optimizer="adamw"
    )
    assert plan.on_device.state == 2 * sum(map(blocks, model.trained.parameters()))


def device_of(memory: int) -> Device:
    return Device(name="tiny", flops=1e12, half_flops=1e12, bandwidth=1e12, memory=memory)


def text(memory: DeviceMemory, **figures: int) -> dict[str, str]:
    return dict(memory.facts(**{"budget": 10 * MIB, "peak": 10 * MIB, "least": 10 * MIB, **figures}))


TIGHT = DeviceMemory(
    device=device_of(100 * MIB), optimizer="adamw", given=40 * MIB, state=30 * MIB, stepping=20 * MIB
)


@pytest.mark.parametrize(
    ("figures", "answer"),
    [
        ({"peak": 25 * MIB}, "yes: 0 B left beside the planned 25.0 MiB and 5.0 MiB for driver, context"),
        ({"peak": 22 * MIB}, "yes: 3.0 MiB left beside the planned 22.0 MiB and 5.0 MiB for driver, context and frag"),
        ({"peak": 26 * MIB}, "hardly: 4.0 MiB left beside the planned 26.0 MiB, and driver, context and fragments may"),
        ({"peak": 30 * MIB}, "hardly: 0 B left"),
        ({"peak": 31 * MIB}, "not the planned 31.0 MiB, which is 1.0 MiB over; but a budget of up to 30.0 MiB does"),
        ({"peak": 31 * MIB}, "and the least is 10.0 MiB"),
        ({"peak": 40 * MIB, "least": 32 * MIB}, "no: 2.0 MiB over, even with the least budget of 32.0 MiB"),
        ({"peak": 10 * MIB}, "yes: 5.0 MiB left"),  # while the optimizer steps, 20 MiB are taken
    ],
)
def test_the_answer_is_about_the_planned_peak_and_about_the_least(figures: dict[str, int], answer: str) -> None:
    assert answer in text(TIGHT, **figures)["fits"]


def test_a_budget_above_what_there_is_is_told_of() -> None:
    assert "budget" not in text(TIGHT, budget=30 * MIB)
    assert text(TIGHT, budget=31 * MIB)["budget"] == "31.0 MiB is more than the 30.0 MiB left for a step"
    assert text(TIGHT, budget=103 * MIB)["budget"] == "103.0 MiB is 3.0 MiB more than the device has"
    assert text(TIGHT, peak=10 * MIB)["update"].startswith("20.0 MiB of gradients and temporaries")
    assert "update" not in text(TIGHT, peak=20 * MIB)


def test_gradients_are_counted_once() -> None:
    """At the peak of the step they are in the peak; while the optimizer steps, the peak is over."""
    assert TIGHT.left(25 * MIB) == (100 - 40 - 30 - 25) * MIB
    assert TIGHT.left(15 * MIB) == (100 - 40 - 30 - 20) * MIB


class Wide(nn.Module):
    """Layers whose activations are most of what a step needs, and can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sigmoid()
        return x.square().mean()


def planned(memory: int, **options: object) -> fxremat.Plan:
    with torch.device("meta"):
        model, x = Wide(), torch.ones(4096, 32)
    settings = {"mem": "auto", "search": Search(seconds=0), "costs": device_of(memory)}
    return fxremat.plan(model, x, **(settings | options))


def test_auto_is_what_the_device_has_left() -> None:
    memory = 4 * MIB
    plan = planned(memory, optimizer="adamw")
    found = plan.on_device
    assert plan.budget == memory - memory // 20 - found.given - found.state
    assert plan.predicted_peak <= plan.budget < plan.keep_all_peak
    assert found.left(plan.predicted_peak) >= memory // 20
    assert "\n  fits            yes: " in str(plan)
    sgd = planned(memory, optimizer="sgd")
    assert sgd.budget == plan.budget + found.state
    assert planned(memory).budget == plan.budget  # AdamW is assumed
    assert plan.within("auto").budget == plan.budget


def test_auto_says_why_nothing_fits() -> None:
    memory = 2 * MIB
    with pytest.raises(BudgetTooSmall, match=r"tiny has 2.0 MiB: .* of parameters, buffers and inputs, and") as error:
        planned(memory, optimizer="adamw")
    assert "and the step takes" in str(error.value)
    found = planned(memory, mem="100%").on_device
    assert error.value.budget == found.auto < error.value.minimum


def test_auto_needs_a_device_whose_memory_is_known() -> None:
    with pytest.raises(InvalidBudget, match="the memory of cpu is not stated"):
        planned(1, costs="cpu")
    with pytest.raises(InvalidBudget, match=r'for what another device would have left, add costs="H100"'):
        planned(1, costs="estimate")
