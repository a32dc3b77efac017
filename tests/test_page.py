"""The page of a plan: axes with units, the budget, kinds of memory with a legend, blocks tied to their rows."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import fxremat
from fxremat.cost.estimate import Device
from fxremat.plans import Plan
from fxremat.show.axes import round_steps, size_ticks, time_ticks
from fxremat.show.page import BUDGET, COLORS, HEIGHT, TOP
from fxremat.step.kinds import MemoryKind, bytes_by_kind

pytestmark = pytest.mark.usefixtures("torch_ready")
SVG = "{http://www.w3.org/2000/svg}"
INPUTS = (torch.ones(256, 16),)


class Deep(nn.Module):
    """Eight times linear and tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def planned(mem: str | int = "60%", **options: object) -> Plan:
    return fxremat.plan(Deep(), INPUTS, mem=mem, effort=0, **{"cost": "estimate"} | options)  # type: ignore[arg-type]


def pictures(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def labels(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


@pytest.mark.parametrize("options", [{}, {"offload": True, "mem": "50%"}], ids=["", "offload"])
def test_the_picture_has_axes_a_budget_and_the_kinds_of_memory(options: dict[str, object]) -> None:
    plan = planned(**options)  # type: ignore[arg-type]
    text = plan.to_html()
    picture = pictures(text)[0]
    assert {"forward", "backward", f"budget {fxremat.units.format_bytes(plan.budget)}"} <= set(labels(picture))
    assert any(re.fullmatch(r"[1-9]\d* KiB", label) for label in labels(picture))
    assert any(re.fullmatch(r"[1-9]\d* us", label) for label in labels(picture))
    kinds = bytes_by_kind(plan.program, plan.costs.sizes)
    shown = {kind: COLORS[kind] for kind, series in kinds.items() if any(series)}
    areas = picture.findall(f"{SVG}polygon")
    assert {area.get("fill") for area in areas} == {color for color, _ in shown.values()}
    legend = text[text.index('<p class="legend">') :]
    assert all(color in legend and words in legend for color, words in shown.values())
    assert (MemoryKind.OFFLOADED in shown) == bool(options)
    assert MemoryKind.RECOMPUTED in shown or options
    assert "<th>" in text
    assert str(plan.schedule) in text


def test_heights_are_to_scale() -> None:
    """The highest point of the areas and the budget line stand in the ratio of peak and budget."""
    plan = planned()
    picture = pictures(plan.to_html())[0]
    line = next(e for e in picture.iter(f"{SVG}line") if e.get("stroke") == BUDGET)
    tops = [
        float(point.split(",")[1]) for area in picture.iter(f"{SVG}polygon") for point in area.attrib["points"].split()
    ]
    bottom = TOP + HEIGHT
    ratio = (bottom - min(tops)) / (bottom - float(line.attrib["y1"]))
    assert ratio == pytest.approx(max(plan.memory.during) / plan.budget, abs=0.01)
    assert min(tops) >= TOP


def test_a_budget_far_above_is_said() -> None:
    picture = pictures(planned("100GiB").to_html())[0]
    assert "budget 100.0 GiB, above the picture" in labels(picture)


def test_blocks_lead_to_their_rows_and_back() -> None:
    plan = planned()
    text = plan.to_html()
    numbers = {*range(1, len(plan.chain) + 1)}
    assert {int(n) for n in re.findall(r'<tr id="block-(\d+)"', text)} == numbers
    assert {int(n) for n in re.findall(r'<a href="#block-(\d+)"', text)} == numbers
    assert {int(n) for n in re.findall(r'<a href="#ops-(\d+)"', text)} == numbers
    ids = re.findall(r' id="ops-(\d+)"', text)
    assert sorted(map(int, ids)) == sorted(numbers)
    assert text.count('<rect class="step"') == len(plan.program.steps)


def test_nothing_is_loaded_run_or_unescaped() -> None:
    class Named(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    device = Device(name="<b>&\"x\"</b>", flops=1e12, half_flops=1e12, bandwidth=1e11, link=1e9)
    text = fxremat.plan(Named(), INPUTS, mem="60%", effort=0, cost="estimate", device=device).to_html()
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;" in text
    assert "<script" not in text
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"(?:src|@import|url\()", text)


@pytest.mark.parametrize("mem", ["100%", 2**20])
def test_a_plan_of_one_op_in_no_time(mem: str | int) -> None:
    instant = Device(name="instant", flops=float("inf"), half_flops=float("inf"), bandwidth=float("inf"), launch=0.0)
    plan = fxremat.plan(nn.Linear(4, 4), torch.ones(2, 4), mem=mem, effort=0, cost="estimate", device=instant)
    picture = pictures(plan.to_html())[0]
    assert f"{len(plan.program.steps)} ops" in labels(picture)


@pytest.mark.parametrize(
    ("most", "steps"),
    [(43, [0, 10, 20, 30, 40]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (6, [0, 1, 2, 3, 4, 5, 6]), (0, [0])],
)
def test_round_steps(most: float, steps: list[float]) -> None:
    assert round_steps(most) == pytest.approx(steps)


def test_ticks_have_the_unit_that_fits() -> None:
    assert size_ticks(3 * 2**20)[-1] == (3 * 2**20, "3 MiB")
    assert time_ticks(0.043)[-1] == (pytest.approx(0.04), "40 ms")
    assert time_ticks(5e-7)[-1][1] == "0.5 us"
    assert size_ticks(0) == [(0.0, "0 B")]
