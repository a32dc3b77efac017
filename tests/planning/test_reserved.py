"""Plans within a budget of reserved bytes, for a device that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import budget
from fxremat.budget import REPLAYED_MARGIN
from fxremat.device import Ability, kind_of
from fxremat.planning import choosing, limits
from fxremat.planning.choosing import SPARE
from fxremat.settings import Search
from fxremat.step.reserved import AllocatorState

QUICK = Search(seconds=0.0, progress=False)
WIDTH, DEPTH, ROWS = 512, 6, 4096


class Deep(nn.Module):
    """Layers that save 8 MiB each, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def step() -> Any:
    return fxremat.capture(Deep(), torch.randn(ROWS, WIDTH), mem="100%", costs="H200", search=QUICK)


def test_a_plan_for_a_gpu_says_what_is_reserved(step: Any) -> None:
    plan = step.plan("60%")
    assert plan.predicted_reserved >= plan.predicted_peak
    assert plan.predicted_reserved % 2**20 == 0
    assert "  reserved  " in str(plan)
    assert "expandable segments" in str(plan)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes that a device has free, for plans on it: this one, as if PyTorch's allocator of CUDA had it."""
    state = AllocatorState(expandable=True)
    kind = replace(kind_of(torch.device("cpu")), abilities=frozenset(Ability))
    for module in (limits, choosing):
        monkeypatch.setattr(module, "allocator_of", lambda _: state)
    monkeypatch.setattr(budget, "kind_of", lambda _: kind)
    monkeypatch.setattr(type(kind), "cached", lambda *_: 0)
    monkeypatch.setattr(type(kind), "empty_cache", lambda _: None)

    def free(there: int) -> None:
        monkeypatch.setattr(type(kind), "free", lambda *_: there)

    return free


def trained(seed: int) -> tuple[Any, Tensor]:
    torch.manual_seed(seed)
    return fxremat.compile(Deep(), mem="auto", costs="estimate", search=QUICK), torch.randn(ROWS, WIDTH)


def test_auto_is_what_can_be_reserved(device: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    device(10**10)
    compiled, x = trained(0)
    compiled(x).backward()
    everything = compiled.plan.predicted_reserved
    assert compiled.plan.budget == int(10**10 * (1 - REPLAYED_MARGIN))
    assert "of reserved bytes" in str(compiled.plan)
    free = int(0.9 * everything) + SPARE + budget.LEAST_MARGIN
    device(free)
    compiled(x).backward()  # less is free: it is planned anew
    assert len(compiled.fxremat.plans) == 2
    assert compiled.plan.predicted_reserved + SPARE <= compiled.plan.budget < free
    device(int(0.99 * free))
    compiled(x).backward()
    assert len(compiled.fxremat.plans) == 2
    assert "which leaves" not in caplog.text


def test_auto_is_planned_anew_for_sizes_that_change_too(device: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    device(10**9)
    compiled = fxremat.compile(Deep(), mem="auto", dynamic=True, costs="estimate", search=QUICK)
    x = torch.randn(ROWS, WIDTH)
    compiled(x).backward()
    assert compiled.plan.reserving
    free = int(0.9 * compiled.plan.predicted_reserved) + SPARE + budget.LEAST_MARGIN
    device(free)
    compiled(x).backward()
    assert compiled.plan.budget < free


def test_plans_of_several_sizes_are_made_anew_where_the_first_had_more(device: Callable[[int], None]) -> None:
    compiled = fxremat.compile(Deep(), mem="auto", dynamic=False, costs="estimate", search=QUICK)
    x = torch.randn(ROWS, WIDTH)
    for share, rows, plans in ((1.0, ROWS, 1), (0.98, ROWS // 2, 2), (0.96, ROWS, 3), (0.96, ROWS, 3)):
        device(int(share * 10**9))
        compiled(x[:rows]).backward()
        assert len(compiled.fxremat.plans) == plans


def test_auto_takes_the_last_bytes_of_the_margin_where_nothing_else_fits(
    device: Callable[[int], None], caplog: pytest.LogCaptureFixture, step: Any
) -> None:
    least = step.plan("min", count="reserved").budget
    device(least + 2**20)
    compiled, x = trained(1)
    compiled(x).backward()
    assert compiled.plan.predicted_reserved + SPARE == least
    assert "which leaves 1.0 MiB of the device free" in caplog.text
    device(least - 2**20)
    compiled, x = trained(1)
    with pytest.raises(fxremat.BudgetTooSmall, match="these are reserved bytes"):
        compiled(x)


def test_it_is_not_known_on_a_cpu() -> None:
    plan = fxremat.plan(Deep(), torch.randn(8, WIDTH), mem="100%", costs="estimate", search=QUICK)
    assert plan.predicted_reserved is None
    assert "  reserved  " not in str(plan)


def test_a_budget_of_reserved_bytes_holds_and_more_is_not_slower(step: Any) -> None:
    times = []
    least = step.plan("min", count="reserved").budget
    for mem in (least, least + 2 * SPARE, 2 * step.plan("100%").predicted_reserved):
        plan = step.plan(mem, count="reserved")
        assert plan.predicted_reserved + SPARE <= plan.budget == mem
        times.append(plan.predicted_time)
    assert times == sorted(times, reverse=True)
    assert times[-1] == step.plan("100%").predicted_time


def test_as_much_reserved_leaves_less_for_tensors(step: Any) -> None:
    mem = step.plan("70%").predicted_peak
    assert step.plan(mem, count="reserved").predicted_peak < mem


def test_the_least_budget_is_the_least_that_works(step: Any) -> None:
    with pytest.raises(fxremat.BudgetTooSmall, match="reserved bytes") as raised:
        step.plan(1, count="reserved")
    least = raised.value.minimum
    assert step.plan(least, count="reserved").predicted_reserved + SPARE == least
    with pytest.raises(fxremat.BudgetTooSmall):
        step.plan(least - 1, count="reserved")


def test_what_does_not_go_together_is_said() -> None:
    def of(**options: Any) -> Callable[[], object]:
        return lambda: fxremat.compile(Deep(), count="reserved", **options)

    for options, words in (
        ({"mem": "60%"}, "not with percent"),
        ({"mem": "1GiB", "offload": True}, "does not go with offload"),
        ({"mem": "1GiB", "backend": "inductor"}, "does not go with backend"),
    ):
        with pytest.raises(fxremat.FxrematError, match=words):
            of(**options)()
    with pytest.raises(fxremat.FxrematError, match="one of allocated, reserved"):
        fxremat.compile(Deep(), mem="1GiB", count="everything")
    with pytest.raises(fxremat.FxrematError, match="CUDA device"):
        fxremat.plan(Deep(), torch.randn(8, WIDTH), mem="1GiB", costs="estimate", count="reserved", search=QUICK)


def test_a_plan_from_a_file_does_not_know_the_allocator(step: Any, tmp_path: Any) -> None:
    step.plan("60%").save(tmp_path / "plan")
    assert fxremat.Plan.load(tmp_path / "plan").predicted_reserved is None
