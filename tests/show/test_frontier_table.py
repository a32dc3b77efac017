"""The plans on offer as a table and as a chart: the chosen one is marked, bounds are below times, units are said."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat.cost.estimate import Device
from fxremat.plans import Plan
from fxremat.search.candidate import unbeaten
from fxremat.show.frontier import ROWS, FrontierTable, thinned
from fxremat.show.text import whatever_is
from fxremat.units import format_bytes
from tests.exported import PLANS, Deep, Words, planned, rows

pytestmark = pytest.mark.usefixtures("torch_ready")


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


@pytest.fixture(scope="module")
def long() -> Plan:
    """A plan with far more alternatives than the table has rows, the chosen one in the middle."""
    return planned(Deep(24), "43%")


def test_the_frontier_is_still_a_tuple_of_pairs(plan: Plan) -> None:
    pairs = tuple((candidate.peak, candidate.time) for candidate in plan.alternatives.candidates)
    assert plan.frontier == pairs
    assert isinstance(plan.frontier, tuple)
    assert hash(plan.frontier) == hash(pairs)
    assert repr(plan.frontier) == repr(pairs)
    assert plan.frontier is plan.frontier
    for other in (copy.copy(plan.frontier), copy.deepcopy(plan.frontier), pickle.loads(pickle.dumps(plan.frontier))):
        assert type(other) is tuple
        assert other == pairs


def test_one_row_is_the_plan_and_no_row_beats_its_bound(plan: Plan) -> None:
    offered = plan.frontier.rows
    assert [row.chosen for row in offered].count(True) == (0 if plan.weights else 1)
    assert all(row.bound is None or row.bound <= row.time * (1 + 1e-9) for row in offered)
    assert [row.time for row in offered] == sorted(row.time for row in offered)
    for row in offered:
        if row.chosen:
            assert (row.peak, row.time) == (plan.predicted_peak, plan.predicted_time)
    bounds = [row.bound for row in offered if row.bound is not None]
    assert bounds == sorted(bounds)


def test_bounds_are_those_of_plans_within_these_peaks() -> None:
    plan = PLANS["plain"]()
    for row in plan.frontier.rows:
        assert row.bound == plan.within(row.peak).lower_bound == replace(plan, budget=row.peak).lower_bound
    assert plan.frontier.rows[0].bound < plan.frontier.rows[-1].bound  # type: ignore[operator]


def test_slices_have_no_bound_for_programs_without() -> None:
    """The lower bound is of the plan's own graph; a frontier may have programs of others, which are cut elsewhere."""
    sliced, whole = PLANS["slices"](), planned(Words(), "100%", rows(), torch.zeros(256, dtype=torch.long))
    every = unbeaten([*sliced.alternatives.candidates, *whole.alternatives.candidates])
    plan = replace(sliced, alternatives=replace(sliced.alternatives, candidates=tuple(every)))
    of_its_own = [candidate.layout.graph is plan.graph for candidate in plan.alternatives.candidates]
    assert {*of_its_own} == {True, False}
    assert [row.bound is not None for row in plan.frontier.rows] == of_its_own
    assert all(row.bound is None or row.bound <= row.time * (1 + 1e-9) for row in plan.frontier.rows)
    assert len(str(plan.frontier).splitlines()) == 3 + len(of_its_own)


def test_nothing_is_solved_before_the_table_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(Deep(), "60%")
    asked: list[int] = []
    bound = property(lambda self: asked.append(self.budget) or self.keep_all_time)
    monkeypatch.setattr(type(plan), "lower_bound", bound)
    assert len(plan.frontier) > 2
    assert asked == []
    assert str(plan.frontier) == str(plan.frontier)
    assert asked == [peak for peak, _ in plan.frontier]


def test_the_table_as_text(plan: Plan) -> None:
    lines = str(plan.frontier).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[1].split() == ["peak", "of", "keep-all", "time", "of", "keep-all", "lower", "bound"]
    marked = [line for line in lines if line.endswith("<- this plan")]
    if plan.weights:
        assert not marked
        assert f"with its weights, this plan has {format_bytes(plan.predicted_peak)}" in lines[-1]
    else:
        assert len(marked) == 1
        assert marked[0].strip().startswith(format_bytes(plan.predicted_peak))
    assert any("100.0%" in line and " 1.00x" in line for line in lines) or plan.slices


def test_a_long_frontier_is_thinned(long: Plan) -> None:
    assert len(long.frontier) > 2 * ROWS
    lines = str(long.frontier).splitlines()
    shown = long.frontier.rows
    assert len(shown) == ROWS == len(lines) - 4
    assert (shown[0].peak, shown[0].time) == long.frontier[0]
    assert (shown[-1].peak, shown[-1].time) == long.frontier[-1]
    assert 0 < [row.chosen for row in shown].index(True) < ROWS - 1
    assert f"{len(long.frontier) - ROWS} of them, in between, are not shown" in lines[-1]


@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=60), st.integers(3, 15), st.data())
def test_what_is_thinned_keeps_its_ends_and_the_chosen_one(peaks: set[int], most: int, data: st.DataObject) -> None:
    points = [(peak, float(place)) for place, peak in enumerate(sorted(peaks, reverse=True))]
    chosen = data.draw(st.sampled_from(points))
    found = thinned(points, most, chosen)
    assert len(found) == min(most, len(points))
    assert {points[0], points[-1], chosen} <= set(found)
    assert found == [point for point in points if point in found]


class _Tags(HTMLParser):
    """The tags of a page, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_table_as_html(plan: Plan) -> None:
    tags = _Tags(plan.frontier._repr_html_())
    assert tags.open == []
    assert tags.seen.count("tr") == 1 + len(plan.frontier.rows)


def test_everything_is_escaped() -> None:
    device = Device(name="<b>&\"x\"</b>", flops=1e12, half_flops=1e12, bandwidth=1e11, link=1e9)
    text = planned(Deep(), "60%", costs=device).frontier._repr_html_()
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;" in text


def test_a_device_with_a_long_name() -> None:
    device = Device(name="x" * 200, flops=1e12, half_flops=1e12, bandwidth=1e11, link=1e9)
    assert max(map(len, str(planned(Deep(), "60%", costs=device).frontier).splitlines())) == 100


# --- the chart --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pyplot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib, the extra `plot`")
    before = matplotlib.get_backend(auto_select=False)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")
    if before:
        matplotlib.use(before)


def test_the_chart(plan: Plan, pyplot: Any) -> None:
    axes = plan.plot()
    axes.figure.canvas.draw()
    assert axes.get_xlabel() == f"peak memory of a step ({format_bytes(plan.alternatives.keep_all.peak).split()[1]})"
    assert re.fullmatch(r"time of a step \((us|ms|s)\)", axes.get_ylabel())
    lines = {line.get_label(): line for line in axes.get_lines()}
    curve = lines["fastest plan on offer"]
    assert curve.get_drawstyle() == "steps-post"
    size = {"KiB": 2**10, "MiB": 2**20}[axes.get_xlabel()[-4:-1]]
    time = {"us": 1e-6, "ms": 1e-3, "s": 1.0}[axes.get_ylabel().split("(")[1][:-1]]
    drawn = [(x * size, y * time) for x, y in curve.get_xydata()]
    for (peak, seconds), (x, y) in zip(reversed(plan.frontier), drawn, strict=False):
        assert (x, y) == (pytest.approx(peak), pytest.approx(seconds))
    ((x, y),) = lines["this plan"].get_xydata()
    assert (x * size, y * time) == (pytest.approx(plan.predicted_peak), pytest.approx(plan.predicted_time))
    ((x, y),) = lines["everything kept"].get_xydata()
    assert x * size == pytest.approx(plan.alternatives.keep_all.peak)
    assert lines[f"budget {format_bytes(plan.budget)}"].get_xdata()[0] * size == pytest.approx(plan.budget)
    bound = lines[f"lower bound, {whatever_is(plan)}"].get_ydata()
    assert len(bound) == len([row for row in plan.frontier.rows if row.bound is not None])
    assert max(bound) * time <= max(plan.predicted_time, plan.frontier[-1][1]) * (1 + 1e-9)


def test_the_chart_on_axes_that_are_there(pyplot: Any) -> None:
    _, axes = pyplot.subplots()
    assert PLANS["plain"]().plot(axes) is axes
    assert pyplot.get_fignums() == [axes.figure.number]


def test_a_budget_far_above_is_not_drawn(pyplot: Any) -> None:
    axes = planned(Deep(), "1GiB").plot()
    assert not any(str(line.get_label()).startswith("budget") for line in axes.get_lines())
    assert axes.get_xlim()[1] < 1000


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(fxremat.FxrematError, match=r"pip install fxremat\[plot\]"):
        PLANS["plain"]().plot()


def test_it_is_a_frontier_table() -> None:
    assert type(PLANS["plain"]().frontier) is FrontierTable
