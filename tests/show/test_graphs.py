"""The page and the memory snapshot of a model that is several graphs."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.errors import FxrematError
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.planned_graphs import named
from fxremat.settings import Search

pytestmark = pytest.mark.usefixtures("torch_ready")
WIDTH = 48


class Layered(nn.Module):
    """Blocks with a graph break behind each; every second step leaves after the first half."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early, self.steps = early, 0
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def block(self, number: int, x: Tensor) -> Tensor:
        return x + self.blocks[number](x)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for number in range(4):
            x = self.block(number, x)
            if x.sum().item() > 1e9 or (self.early and self.steps % 2 and number == 1):
                break
        return x.square().mean()


class _Checked(HTMLParser):
    """Checks that tags are closed in order, and that nothing is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href"}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@cache
def planned(early: bool) -> PlanOfGraphs:
    torch.manual_seed(0)
    model: Any = fxremat.compile(Layered(early), mem="65%", search=Search(seconds=0.2, progress=False))
    for _ in range(6):
        model(torch.randn(256, WIDTH)).backward()
        model.zero_grad()
    found: PlanOfGraphs = model.plan
    return found


def test_long_names_are_cut_at_dots_and_long_lines_are_wrapped() -> None:
    plan = planned(early=False)
    python = "forward, modeling_with_a_long_name.py:361: outputs = self.model(input_ids, attention_mask, position_ids)"
    calls = tuple(replace(call, name="model.visual.blocks.0.attn.qkv") for call in plan.calls)
    lines = replace(plan, python=(python,), calls=calls).describe().splitlines()
    assert max(map(len, lines)) <= 100
    assert f"stays Python {python}: only what it calls is planned" in " ".join(" ".join(lines).split())
    rows = lines[next(place for place, line in enumerate(lines) if line.startswith("modules")) + 1 :]
    assert {row[:30].strip() for row in rows} <= {"...visual.blocks.0.attn.qkv", "...attn.qkv to ...attn.qkv"}


@pytest.mark.parametrize(
    ("first", "last", "shown"),
    [
        ("blocks.0", "blocks.5", "blocks.0 to blocks.5"),
        ("model.visual.blocks.0.attn.qkv", "", "...visual.blocks.0.attn.qkv"),
        ("model.blocks.0.up", "model.blocks.11.down", "...0.up to ...11.down"),
        ("a" * 40, "", "..." + "a" * 26),
    ],
)
def test_names_of_rows(first: str, last: str, shown: str) -> None:
    assert named(first, last, 29) == shown


def most_allocated(snapshot: dict[str, Any]) -> int:
    now = most = 0
    for event in snapshot["device_traces"][0]:
        change = {"alloc": event["size"], "free_completed": -event["size"]}
        now += change.get(event["action"], 0)
        most = max(most, now)
    return most


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.long)])
def test_page_and_snapshot_have_the_planned_peak(early: bool, tmp_path: Path) -> None:
    plan = planned(early)
    assert max(moment.peak for moment in plan.moments) == plan.predicted_peak <= plan.budget
    assert sum(moment.seconds for moment in plan.moments) == pytest.approx(plan.predicted_time)
    calls = [moment.call for moment in plan.moments if moment.phase == "forward"]
    assert calls == list(range(len(plan.calls)))
    assert [moment.call for moment in plan.moments if moment.phase == "backward"] == calls[::-1]
    plan.save_snapshot(tmp_path / "plan.pickle")
    snapshot = pickle.loads((tmp_path / "plan.pickle").read_bytes())
    assert most_allocated(snapshot) == plan.predicted_peak
    names = {event["frames"][0]["name"] for event in snapshot["device_traces"][0][1:]}
    assert {"between graphs", "forward of blocks.0", "backward of blocks.1"} <= names
    page = plan.to_html()
    _Checked().feed(page)
    assert page.count("<svg") == 1
    assert ("<h2>Paths</h2>" in page) == early == (len(plan.paths) > 1)
    for text in (plan.headline, "blocks.0", "budget", "stays Python", "what the running call needs"):
        assert text in page
    assert "<iframe" in plan._repr_html_()


def test_calls_without_backward_have_none_in_the_picture() -> None:
    class Tokens(Layered):
        """The scores of the last block choose what nobody trains with."""

        def forward(self, x: Tensor) -> Tensor:
            first = self.block(0, x)
            torch._dynamo.graph_break()
            if self.block(1, first).sum().item() > 1e9:
                raise RuntimeError
            return first.square().mean()

    torch.manual_seed(0)
    model: Any = fxremat.compile(Tokens(False), mem="100%", search=Search(seconds=0.2, progress=False))
    for _ in range(5):
        model(torch.randn(256, WIDTH)).backward()
        model.zero_grad()
    plan = model.plan
    backward = [moment.call for moment in plan.moments if moment.phase == "backward"]
    assert len(backward) < len(plan.calls)
    assert max(moment.peak for moment in plan.moments) == plan.predicted_peak


def test_names_cannot_break_out_of_the_page() -> None:
    plan = copy.copy(planned(False))
    object.__setattr__(plan, "model", "<script>alert(1)</script>")
    assert "<script" not in plan.to_html()


def test_a_plan_of_several_graphs_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(FxrematError, match=r"plan\.json is not written: a plan of several graphs, or of several calls"):
        planned(False).save(tmp_path / "plan.json")
    assert not any(tmp_path.iterdir())


def test_a_single_call_is_one_and_the_least_budget_is_of_all_paths() -> None:
    plan = planned(early=True)
    assert replace(plan, calls=plan.calls[:1]).describe().splitlines()[0].endswith("1 graph, 1 call a step")
    assert "for all known paths" in plan.describe()
    assert "for all known paths" not in planned(early=False).describe()
