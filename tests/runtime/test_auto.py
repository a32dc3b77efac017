"""mem="auto": what is free when a step begins, of a device that is pretended here."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fxremat
from fxremat import budget
from fxremat.planning import limits
from fxremat.runtime import dynamo
from fxremat.settings import Search
from tests.toys import Loss, Stack, rows
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0)}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are free, less the margin."""
    left = [10**6]
    for module in (budget, dynamo, limits):
        monkeypatch.setattr(module, "free_bytes", lambda *_: left[0])
    return left


def test_it_is_planned_for_anew_when_less_is_left(free: list[int], caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = Loss(Stack())
    torch.manual_seed(0)
    compiled, x = fxremat.compile(Loss(Stack()), mem="auto", **FAST), rows()

    def step() -> int:
        results = []
        for model in (plain, compiled):
            torch.manual_seed(1)
            model.zero_grad()
            model(x).backward()
            results.append([p.grad for p in model.parameters()])
        assert all(same(ours, theirs) for ours, theirs in zip(*results, strict=True))
        return len(compiled.fxremat.plans)

    assert step() == 1
    least = compiled.plan.minimum  # type: ignore[union-attr]
    free[0] = 980_000  # a little less: a batch that waits for its turn
    assert step() == 1
    free[0] = least + 1  # optimizer state has come
    with caplog.at_level(logging.INFO):
        assert step() == 2
    assert compiled.plan.budget == least + 1  # type: ignore[union-attr]
    assert 'mem="auto" has' in caplog.text
    assert step() == 2
    free[0] = 10
    with pytest.raises(fxremat.BudgetTooSmall):
        compiled(x)
    free[0] = 10**6
    compiled(x).backward()


@pytest.mark.parametrize(
    ("expandable", "free", "largest", "left"),
    [(True, 1000, 20, 950), (True, 1000, 90, 865), (False, 1000, 90, 800), (True, 100, 0, 60), (False, 30, 0, 2**-20)],
)
def test_the_margin_is_what_the_allocator_reserves_beside_what_is_allocated(
    expandable: bool, free: int, largest: int, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "free_memory", lambda _: free * 2**20)
    monkeypatch.setattr(budget, "allocates_in_expandable_segments", lambda: expandable)
    assert budget.free_bytes(torch.device("cuda", 0), largest * 2**20) == left * 2**20


def test_other_budgets_never_change(free: list[int]) -> None:
    compiled = fxremat.compile(Loss(Stack()), mem="100%", **FAST)
    for left in (10**6, 10):
        free[0] = left
        compiled(rows()).backward()
    assert len(compiled.fxremat.plans) == 1
