"""A plan as text: narrow, short where blocks are alike, whole where asked; and its lower bound as it was found."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.cost.estimate import Device
from fxremat.plans import Plan
from fxremat.settings import Search
from fxremat.show import text as description
from fxremat.show.tree import ranges
from fxremat.units import format_bytes

pytestmark = pytest.mark.usefixtures("torch_ready")


class Layers(nn.Module):
    """Alternately narrow and wide layers."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.Tanh(), nn.Linear(w, 8)) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Towers(nn.Module):
    """Two stacks that meet at the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left(x) - self.right(x.sin())).square().mean()


class Single(nn.Module):
    """One op, and a backward that reads nothing of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * 2


MODELS = {
    "linear": nn.Linear(8, 8),
    "no loss": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
    "equal": Layers(*[8] * 6),
    "alternating": Layers(*[8, 64] * 6),
    "different": Layers(*range(8, 20)),
    "towers": Towers(),
    "single": Single(),
}
INPUTS = (torch.ones(64, 8),)
INSTANT = Device(name="instant", flops=math.inf, half_flops=math.inf, bandwidth=math.inf, launch=0.0, link=1e9)


def planned(name: str, mem: str | int, **options: object) -> Plan:
    given: Any = {"mem": mem, "search": Search(seconds=0), "costs": "estimate"} | options
    return fxremat.plan(MODELS[name], INPUTS, **given)


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in MODELS), ("equal", {"offload": True}), ("towers", {"offload": True}),
     *((name, {"costs": INSTANT}) for name in ("linear", "equal", "single"))],
)  # fmt: skip
def test_every_line_is_at_most_a_hundred_columns(name: str, options: dict[str, object]) -> None:
    whole = planned(name, "100%", **options)
    for plan in (whole, whole.within(whole.minimum)):
        for text in (str(plan), plan.describe(full=True)):
            assert max(map(len, text.splitlines())) <= 100
            assert all(word in text for word in ("budget", "predicted peak", "least budget", "schedule: "))
        assert len(plan.headline.splitlines()) == 1
        assert plan.lower_bound <= plan.predicted_time * (1 + 1e-9)
        assert plan.lower_bound >= plan.keep_all_time * (1 - 1e-9)


class HeavierCaptured(nn.Module):
    """Runs other code in captured graphs than in eager mode, as libraries do for some models."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = 8 if torch.compiler.is_compiling() else 1
        return x.repeat(wide, 1).sin().exp().sum()


def test_it_says_what_a_percentage_refers_to() -> None:
    x = torch.ones(64, 8, requires_grad=True)
    plan = fxremat.plan(HeavierCaptured(), (x,), mem="100%", search=Search(seconds=0), costs="estimate")
    everything = format_bytes(plan.keep_all_peak)
    assert plan.keep_all_peak > 8 * x.nbytes
    assert f"of the {everything} of keeping everything in the captured graph" in " ".join(str(plan).split())


def test_alike_modules_share_a_line() -> None:
    """Twelve layers, wide and narrow in turn, look one of two ways if they keep everything."""
    plan = planned("alternating", "100%")
    table = str(plan).split("\n\n")[1].splitlines()
    rows = {line.split("  ")[2].strip(): int(count[1]) for line in table if (count := re.search(r" (\d+) x ", line))}
    assert rows["layers.0,2..10"] == rows["layers.1,3..11"] == 6
    full = plan.describe(full=True).split("\n\n")[2].splitlines()
    assert [int(line.split()[0]) for line in full[1:]] == [*range(1, len(plan.chain) + 1)]


def test_the_full_form_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "_LINES", 6)
    plan = planned("different", "min")
    short, full = str(plan), plan.describe(full=True)
    assert " ".join(full.split()).count(str(plan.schedule)) == 1
    assert len(full.splitlines()) > 20
    assert len(short.splitlines()) < 48
    assert len(short.split("\n\n")[1].splitlines()) <= description.ROWS + 1 < len(full.split("\n\n")[1].splitlines())
    assert "print(plan.schedule) shows them" in short


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([1, 2, 3], "1-3"), ([1, 3, 5], "1, 3, 5"), ([1, 2, 4, 7, 8, 9], "1-2, 4, 7-9"),
     ([1, 2, 4, 6, 8, 9], "1-2, 4, 6, 8-9"), ([1, 4, 7, 10, 20], "1,4..10, 20")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
