"""The largest batch on a device: from one capture, the same as from a capture of each size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.__main__ import main
from fxremat.cost.devices import DEVICES
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.settings import Search
from fxremat.what_if import PlansOfSize, largest, largest_on, sizes_that_change

pytestmark = pytest.mark.usefixtures("torch_ready")

A100, RTX, T4 = (DEVICES[name] for name in ("A100", "RTX-4090", "T4"))


class Mixer(nn.Module):
    """Layers over features, with an input beside that does not grow with the batch."""

    def __init__(self, width: int = 32, scale: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu() * self.scale
        if x.shape[0] == 7:  # a size that takes another way
            x = x.sin()
        return ((x - y).square() if mask is None else (x - y) * mask).mean()


def model(batch: int = 4) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Mixer(), (torch.ones(batch, 16, 32), torch.ones(batch, 16, 32))


def wider(batch: int = 4) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Mixer(width=8 * batch), (torch.ones(2, 8 * batch), torch.ones(2, 8 * batch))


def planned(made: nn.Module, inputs: Any, **options: Any) -> Any:
    settings = {"search": Search(seconds=0, slots=50), "costs": "estimate", "optimizer": None}
    if options.get("device") is None:
        settings.pop("optimizer")
    return fxremat.plan(made, inputs, **(settings | options))


def least_of(plan: Any) -> int:
    """The least budget of a step, of programs that are searched for at its sizes."""
    with pytest.raises(BudgetTooSmall) as error:
        plan.within(1)
    assert not plan.sizes or plan.step.least() == error.value.minimum
    return error.value.minimum


def test_one_capture_serves_all_sizes_and_devices(captures: list[object]) -> None:
    plans = PlansOfSize(model, planned)
    found = {(device, size): plans.at(device, size) for device in (A100, RTX) for size in (3, 64)}
    assert len(captures) == 1
    for (device, size), plan in found.items():
        alone = planned(*model(size), costs=device, mem="100%", dynamic=False)
        assert plan.keep_all_peak == alone.keep_all_peak
        assert 0.9 * least_of(alone) <= least_of(plan) <= least_of(alone)
        assert plan.on_device == alone.on_device
        assert plan.device == alone.device
    before = len(captures)
    plans.at(T4, 5)  # has no flash attention
    assert len(captures) == before + 1


def test_sizes_that_take_another_way_are_captured_by_themselves(captures: list[object]) -> None:
    plans = PlansOfSize(model, planned)
    for size in (1, 7):
        plan = plans.at(A100, size)
        assert not plan.sizes
        assert plan.minimum == planned(*model(size), costs=A100, mem="100%", dynamic=False).minimum
    before = len(captures)
    plans.at(A100, 7)
    assert len(captures) == before


def test_a_number_that_changes_the_model_is_captured_for_each(captures: list[object]) -> None:
    plans = PlansOfSize(wider, planned)
    assert plans.at(A100, 2).keep_all_peak < plans.at(A100, 4).keep_all_peak
    assert len(captures) == 2


def named(batch: int) -> tuple[nn.Module, Any]:
    return Mixer(), {"y": torch.ones(3 * batch, 4), "x": torch.ones(3 * batch, 4), "mask": torch.ones(4)}


def scaled(batch: int) -> tuple[nn.Module, Any]:
    return Mixer(scale=1.0 / batch), torch.ones(batch, 4)


def squared(batch: int) -> tuple[nn.Module, Any]:
    return Mixer(), (torch.ones(batch * batch, 4), torch.ones(4))


def falling(batch: int) -> tuple[nn.Module, Any]:
    return Mixer(), (torch.ones(10 - batch, 4), torch.ones(4))


def factor(batch: int) -> tuple[nn.Module, Any]:
    return Mixer(), (torch.ones(4), torch.ones(4), float(batch))


def constant(batch: int) -> tuple[nn.Module, Any]:
    return Mixer(), torch.ones(4)


@pytest.mark.parametrize(
    ("make", "at_seven"),
    [
        (model, {"x": {0: 7}, "y": {0: 7}}),
        (named, {"x": {0: 21}, "y": {0: 21}}),
        *((make, None) for make in (wider, scaled, squared, falling, factor, constant)),
    ],
)
def test_sizes_that_a_number_decides(make: Callable[[int], Any], at_seven: dict[str, Any] | None) -> None:
    found = sizes_that_change(make)
    assert (found and found(7)) == at_seven


@pytest.mark.parametrize("limit", [1, 2, 9, 4096])
@pytest.mark.parametrize("start", [1, 2, 7, 300, 5000])
def test_the_search_may_start_anywhere(start: int, limit: int) -> None:
    for edge in (1, 2, 3, 6, 7, 8, 299, 300, 301, 4095):
        tried: list[int] = []

        def least(size: int, tried: list[int] = tried) -> int:
            tried.append(size)
            return 10 * size

        found = largest(least, 10 * edge + 3, limit, start=start)
        assert found.size == min(edge, limit)
        assert found.next_least == (10 * (edge + 1) if edge < limit else None)
        assert len(set(tried)) == len(tried)
        assert len(tried) <= 2 * abs(edge - min(start, limit)).bit_length() + 2
    with pytest.raises(BudgetTooSmall) as error:
        largest(lambda size: 7 * size, 6, limit, start=start)
    assert error.value.minimum == 7


@pytest.mark.parametrize(
    ("make", "mem"),
    [
        (model, "auto"),
        (wider, 150_000),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((wider, "auto"), (model, 150_000))),
    ],
)
def test_the_largest_size_fits_and_the_next_does_not(make: Callable[..., Any], mem: int | str) -> None:
    device = replace(A100, name="small", memory=400_000)
    budget, found = largest_on(device, PlansOfSize(make, planned), mem, 4096)
    assert budget == (380_000 if mem == "auto" else mem)
    assert found.size > 1

    def needed(size: int) -> int:
        plan = planned(*make(size), costs=device, mem="100%", dynamic=False)
        memory = plan.on_device
        least = least_of(plan)
        return memory.given + memory.state + max(least, memory.stepping) if mem == "auto" else least

    assert found.next_least is not None
    assert found.least <= budget < found.next_least
    for size, least in ((found.size, found.least), (found.size + 1, found.next_least)):
        assert needed(size) == pytest.approx(least, rel=0.1)


def test_the_command_line_finds_the_largest_batch_of_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "tests.test_largest:model", "--estimate", "--slots", "50", "--largest", "batch"]
    assert main([*asked, "--mem", "auto", "--device", "T4", "--up-to", "40"]) == 0
    assert capsys.readouterr().out.startswith("T4: the largest batch within 14.2 GiB is 40 (the least budget is ")
    assert main([*asked, "--mem", "auto"]) == 2
    assert "--mem auto with --device H100" in capsys.readouterr().err


def test_what_a_factory_raises_is_told_of() -> None:
    def fails(size: int) -> Any:
        raise FxrematError("no such size")

    with pytest.raises(FxrematError, match="no such size"):
        PlansOfSize(fails, planned)
