"""Programs of calls that no plan knows yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.options import options_of
from fxremat.planning.paths import PathPlans
from fxremat.search.paths import Node
from fxremat.settings import Search
from tests.search.test_paths import program


def chosen(mem: int | str, known: int | None, gradients: int = 0, *, runs_again: bool = True) -> int:
    """Return which of three programs runs in a call whose lowest peak is 50: it saves 10, the others nothing."""
    plans = PathPlans(options_of(mem=mem), "Model", "", torch.device("cpu"))
    if known is not None:
        plans.limit = plans.limit or SimpleNamespace(bytes=known)  # type: ignore[assignment]
    programs = [program(1, 10, 20, 40), program(2, 0, 15, 90), program(3, 0, 30, 80)]
    at: Any = SimpleNamespace(programs=programs, run_again=programs)
    return plans.number(Node(SimpleNamespace(runs_again=runs_again), expected=gradients), at, 0)


@pytest.mark.parametrize(
    ("mem", "known", "expected"),
    [
        ("min", None, 0),  # nothing is known: a later call lets it go
        ("min", 100, 2),
        ("min", 60, 0),  # it fits alone
        ("min", 30, 0),  # nothing fits, and the budget grows with what the step needs
        (30, None, 1),  # nothing fits: perhaps no backward will run, and this forward needs least
    ],
)
def test_a_call_without_a_plan_needs_little(mem: int | str, known: int | None, expected: int) -> None:
    assert chosen(mem, known) == expected


def test_a_call_that_cannot_run_again_saves_nothing_where_the_budget_is_not_known() -> None:
    assert chosen("min", None, runs_again=False) == 2, "the one of the lowest peak among those that save nothing"


@pytest.mark.parametrize(("gradients", "expected"), [(0, 2), (20, 2), (21, 0), (50, 0)])
def test_gradients_that_later_calls_make_take_room_in_a_backward(gradients: int, expected: int) -> None:
    assert chosen(100, None, gradients) == expected


class Front(nn.Module):
    """A first graph whose backward runs last, beside the gradients of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.scale = nn.Linear(8, 32).requires_grad_(False), nn.Parameter(torch.ones(32))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x) * self.scale
        torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_in_a_first_step_gradients_of_later_calls_are_expected() -> None:
    model = Front()
    ours = fxremat.compile(model, mem=2**20, search=Search(seconds=0))
    ours(torch.randn(4, 8))
    first, second = ours._fxremat.backend.coordinator._step.calls  # type: ignore[attr-defined]
    assert first.node.expected == sum(p.nbytes for p in model.layers.parameters())
    assert second.node.expected == 0
