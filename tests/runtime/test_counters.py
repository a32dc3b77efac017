"""Models that count their calls in Python: numbers that change become inputs of the graph, and are captured once."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.runtime.changing_attributes import MANY_CAPTURES, MOST_CALLS
from fxremat.settings import Search
from fxremat.torch_private import torch_release
from tests.training import gradients_of, unequal

pytestmark = pytest.mark.usefixtures("torch_ready")
FAST: Any = {"search": Search(seconds=0.0, slots=100)}
CALLS = 8


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.net(x).square().mean()  # type: ignore[no-any-return]


class WarmUp(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * min(1, self.steps / 5)


class Alternating(Counting):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss * 2 if self.steps % 2 else loss


class InDict(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["calls"] += 1
        return self.net(x).square().mean()  # type: ignore[no-any-return]


class Broken(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.net[0](x)
        if x.sum() > 1e9:
            x = x * 2
        for part in self.net[1:]:
            x = part(x)
        return x.square().mean() * min(1, self.steps / 5)


class Calls:
    """Counts for a whole program."""

    count = 0


class OfClass(Counting):
    def forward(self, x: Tensor) -> Tensor:
        Calls.count += 1
        return super().forward(x) * (2 if Calls.count > 0 else 1)


def trained(plain: Counting, x: Tensor, **options: Any) -> tuple[Any, list[int]]:
    """Train a plain and a compiled model, compare them, and return the compiled one and its captures after each step.
    """
    compiled = fxremat.compile(copy.deepcopy(plain), mem="100%", **FAST, **options)
    captures = []
    for _ in range(CALLS):
        for model in (plain, compiled):
            model.zero_grad()
            model(x).backward()
        assert compiled.steps == plain.steps
        assert not unequal(gradients_of(compiled), gradients_of(plain))
        captures.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return compiled, captures


@pytest.mark.parametrize("make", [Counting, WarmUp, Alternating, InDict, Broken])
def test_a_counter_is_captured_at_two_values_and_then_for_all(make: type[Counting]) -> None:
    _, captures = trained(make(), torch.randn(16, 32))
    assert captures[3] == captures[-1]


@pytest.mark.skipif(torch_release() < (2, 13), reason="torch 2.11 loses what a graph writes to a class")
def test_a_counter_of_a_class_is_captured_at_two_values_and_then_for_all() -> None:
    before = Calls.count
    _, captures = trained(OfClass(), torch.randn(16, 32))
    assert captures[3] == captures[-1]
    assert Calls.count == before + 2 * CALLS


@pytest.mark.parametrize("options", [{"dynamic": False}, {"dynamic": True}, {"offload": True}], ids=str)
def test_where_numbers_are_fixed_a_warning_names_the_counter(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        trained(WarmUp(), torch.randn(16, 32), **options)
    told = [text for text in caplog.messages if "captured and planned again at each call" in text]
    assert len(told) == 1
    assert "since steps of it has another value each time" in told[0]
    assert told[0].endswith("numbers that change are taken as fixed with these options")


def test_a_text_that_changes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Phases(Counting):
        phase = ""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * len(self.phase)

    compiled, x = fxremat.compile(Phases(), mem="100%", **FAST), torch.randn(16, 32)
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        for step in range(6):
            compiled.phase = f"phase {step}"
            compiled(x).backward()
    assert "since phase of it has another value each time" in caplog.text


@pytest.mark.parametrize("is_read_by_an_op", [True, False])
def test_a_number_that_an_op_needs_as_it_is_is_named(is_read_by_an_op: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Change the probability of a dropout, and a factor, which becomes an input of the graph."""

    class Annealed(Counting):
        rate = 0.0

        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            return loss + (F.dropout(x, self.rate).sum() if is_read_by_an_op else self.rate * x.sum())

    compiled, x = fxremat.compile(Annealed(), mem="100%", **FAST), torch.randn(16, 32)
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        for step in range(6):
            compiled.rate = 0.1 + 0.1 * step
            compiled(x).backward()
    assert ("since rate of it has another value each time, and an op needs it" in caplog.text) == is_read_by_an_op


class Noting(Counting):
    """Notes its losses, and weighs the next one by how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        self.losses.append(loss.detach())
        return loss * len(self.losses)


class ByNumber(Counting):
    """Notes its losses by the number of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = nn.Module()
        self.noted.losses = {}

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        self.noted.losses[len(self.noted.losses)] = loss.detach()
        return loss


@pytest.mark.parametrize("make", [Noting, ByNumber])
def test_a_container_that_grows_is_left_to_python(make: type[Counting]) -> None:
    compiled, captures = trained(make(), x := torch.randn(16, 32))
    assert captures[MANY_CAPTURES + 3] == captures[-1]
    compiled(x).backward()
    assert isinstance(compiled.plan, PlanOfGraphs)


def test_where_one_graph_is_wanted_a_warning_names_the_list_that_grows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        trained(Noting(), torch.randn(16, 32), fullgraph=True)
    assert "since len(losses) of it has another value each time" in caplog.text


def test_calls_that_differ_in_something_else_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor, parts: tuple[Any, ...]) -> Tensor:
            return self.forward(self.layer(x), parts[0]) if parts else x.square().mean()

    compiled, x = fxremat.compile(Nested(), mem="100%", **FAST), torch.randn(16, 32)
    parts: tuple[Any, ...] = ((),)
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        for _ in range(MOST_CALLS + 3):
            compiled(x, parts).backward()
            parts = (parts,)
    told = [text for text in caplog.messages if "for input sizes that were planned for before" in text]
    assert len(told) == 1


def test_a_first_call_that_captures_many_graphs_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    lines = ["def forward(self, x):", *["x = self.net[0](x)[:, :32]; torch._dynamo.graph_break()"] * (MOST_CALLS + 2)]
    names: dict[str, Any] = {"torch": torch}
    exec("\n    ".join([*lines, "return x.square().mean()"]), names)  # a loop with such a line would stay Python
    often = type("Often", (Counting,), {"forward": names["forward"]})
    compiled, x = fxremat.compile(often(), mem="100%", **FAST), torch.randn(16, 32)
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        for _ in range(3):
            compiled(x).backward()
    assert len(compiled.plan.calls) > MOST_CALLS
    assert "captured and planned again" not in caplog.text


def test_a_counter_is_not_blamed_for_sizes_that_change(caplog: pytest.LogCaptureFixture) -> None:
    compiled = fxremat.compile(Counting(), mem="100%", **FAST)
    with caplog.at_level(logging.WARNING, logger="fxremat"):
        for rows in range(8, 16):
            compiled(torch.randn(rows, 32)).backward()
    assert "captured and planned again" not in caplog.text
