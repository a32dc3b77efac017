"""The page of a plan: its data are those of the plan, and no name in them can leave their place."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxremat
from fxremat.cost.estimate import Device
from fxremat.plans import Plan
from fxremat.search.candidate import Candidate, Frontier
from fxremat.settings import Offload, Search
from fxremat.show.axes import round_steps, size_ticks, time_ticks
from fxremat.show.headline import headline
from fxremat.show.labels import source_of
from fxremat.show.lanes import lanes_picture, planned_lanes
from fxremat.show.moments import Moments
from fxremat.show.page import SCRIPTS, page_of
from fxremat.show.page_data import DRAWN, KINDS, Data, Numbers, group_of, page_data
from fxremat.show.palette import COLORS
from fxremat.show.tree import OWN
from fxremat.step.kinds import MemoryKind
from fxremat.step.program import Role
from fxremat.units import format_bytes

pytestmark = pytest.mark.usefixtures("torch_ready")
ROWS, WIDTH = 256, 16
ASSETS = files("fxremat.show") / "assets"
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "\"it's\"",
    "\u2028\u2029",
    "back\\slash\\u003c",
    "@DATA@",
    "@SCRIPT@",
    "@TEXT@",
    "@STYLE@",
    "&lt;&amp;",
    "${x}`",
    "]]>",
    "\x00\x1b",
)


class Deep(nn.Module):
    """Eight times linear and tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def planned(model: nn.Module, mem: str | int = "60%", **options: Any) -> Plan:
    given = {"search": Search(seconds=0), "costs": "estimate", "dynamic": False} | options
    plan = fxremat.plan(model, torch.ones(ROWS, WIDTH), mem=mem, **given)
    assert isinstance(plan, Plan)
    return plan


@cache
def plan_of(kind: str) -> Plan:
    """A plan of each kind, made once."""
    match kind:
        case "recomputing":
            return planned(Deep())
        case "offloading":
            return planned(Deep(), "50%", offload=True)
        case "loss outside":
            return planned(nn.Sequential(*Deep().layers), "100%", loss="100kB")
        case "updates":
            model = Deep()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return planned(model, "100%", optimizer=optimizer, offload=Offload(weights=True))
        case "slices":
            model = nn.Sequential(nn.Linear(WIDTH, 1000), nn.GELU(), nn.Linear(1000, WIDTH), nn.Flatten(0))
            return planned(model, "50%", slices=True)
        case _:
            speeds = dict.fromkeys(("flops", "half_flops", "bandwidth"), float("inf"))
            device = Device(name="instant", launch=0.0, **speeds)
            return planned(nn.Linear(WIDTH, WIDTH), "100%", costs=device)


KINDS_OF_PLANS = ["recomputing", "offloading", "loss outside", "updates", "slices", "instant"]


def drawn_of(plan: Plan, data: Data) -> list[Candidate]:
    """The candidate of each plan that is drawn, by its peak and time."""
    found = {(c.peak, c.time): c for c in (*plan.alternatives.candidates, plan.chosen)}
    return [found[drawn["peak"], drawn["time"]] for drawn in data["plans"]]


@dataclass
class Reader(HTMLParser):
    """The page as a browser would see it: elements, scripts and texts."""

    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str | None]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # by id, or by tag where there is none
    comments: list[str] = field(default_factory=list)
    here: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self.here.append(dict(attrs).get("id") or tag)

    def handle_endtag(self, tag: str) -> None:
        self.here.pop()

    def handle_data(self, data: str) -> None:
        if self.here:
            self.texts[self.here[-1]] = self.texts.get(self.here[-1], "") + data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.here == []
    return reader


@cache
def frame() -> Reader:
    """The page of no data."""
    return read(page_of({}, ""))


def check_page(text: str, data: Data) -> None:
    """A page has the elements and scripts of an empty one, and exactly these data."""
    found = read(text)
    assert found.tags == frame().tags
    assert found.attributes == frame().attributes
    assert found.comments == frame().comments
    assert found.texts["script"] == frame().texts["script"]
    assert found.texts["style"] == frame().texts["style"]
    assert json.loads(found.texts["data"]) == data
    block = re.findall(r'<script type="application/json" id="data">(.*?)</script', text, re.DOTALL)
    assert len(block) == 1
    assert not re.search("[<>&\u2028\u2029]", block[0])


@pytest.mark.parametrize("kind", KINDS_OF_PLANS)
def test_the_page_has_the_data_of_the_plan(kind: str) -> None:
    plan = plan_of(kind)
    text = plan.to_html()
    check_page(text, json.loads(json.dumps(page_data(plan))))
    assert read(text).texts["text"] == plan.describe(full=True)


@pytest.mark.parametrize("kind", KINDS_OF_PLANS)
def test_lives_add_up_to_the_moments_of_every_plan_that_is_drawn(kind: str) -> None:
    plan = plan_of(kind)
    data = page_data(plan)
    for candidate, drawn in zip(drawn_of(plan, data), data["plans"], strict=True):
        moments = Moments.of(candidate, plan.costs)
        lives, count = drawn["lives"], len(drawn["starts"])
        columns = list(zip(*(lives[name] for name in ("kind", "first", "last", "bytes", "value", "op")), strict=True))
        change = [0] * (count + 1)
        for _, first, last, size, *_ in columns:
            assert 0 <= first <= last < count
            change[first] += size
            change[last + 1] -= size
        total = [sum(change[: place + 1]) for place in range(count)]
        assert tuple(total) == moments.bytes
        assert max(total) == drawn["peak"] == candidate.peak
        assert [row[3] for row in columns].count(0) == 0
        assert len(columns) == len(moments.lives)

        starts = [moment.start for moment in moments.moments]
        assert drawn["starts"] == pytest.approx(starts, rel=1e-8)
        assert drawn["starts"] == sorted(drawn["starts"])
        assert all(end >= start for start, end in zip(drawn["starts"], drawn["ends"], strict=True))
        assert [drawn["roles"][role] for role in drawn["role"]] == [moment.role for moment in moments.moments]
        assert [None if op < 0 else op for op in drawn["op"]] == [moment.op for moment in moments.moments]
        assert drawn["split"] == moments.split
        assert all(0 <= block < len(drawn["blocks"]) for block in drawn["block"])


@pytest.mark.parametrize("kind", KINDS_OF_PLANS)
def test_lives_lie_in_the_order_in_which_they_are_stacked(kind: str) -> None:
    """Lives are sorted by module in the order of the list, the model's own last; then by purpose, and by birth."""
    plan = plan_of(kind)
    data = page_data(plan)
    order = [*dict.fromkeys(group_of(module) for module in data["modules"] if module), ""]
    for candidate, drawn in zip(drawn_of(plan, data), data["plans"], strict=True):
        lives = drawn["lives"]
        groups = []
        for value, op in zip(lives["value"], lives["op"], strict=True):
            number = data["values"]["module"][value] if value >= 0 else data["ops"]["module"][op] if op >= 0 else 0
            groups.append(order.index(group_of(data["modules"][number])))
        weights = [kind != list(KINDS).index(MemoryKind.WEIGHTS) for kind in lives["kind"]]  # below all others
        stacked = zip(weights, groups, lives["kind"], lives["first"], strict=True)
        keys = [key if key[0] else (False, 0, *key[2:]) for key in stacked]
        assert keys == sorted(keys)
        joint = candidate.layout.graph
        modules = sorted(source_of(joint, life).module for life in Moments.of(candidate, plan.costs).lives)
        assert sorted(group_of(module) for module in modules) == sorted(order[group] for group in groups)


@pytest.mark.parametrize("kind", KINDS_OF_PLANS)
def test_points_are_the_frontier(kind: str) -> None:
    plan = plan_of(kind)
    data = page_data(plan)
    points, plans = data["points"], data["plans"]
    assert (plans[data["chosen"]]["peak"], plans[data["chosen"]]["time"]) == (plan.predicted_peak, plan.predicted_time)
    assert all(before[1] <= after[1] for before, after in pairwise(points))
    if not plan.weights:
        own = [point for point in points if plan.predicted_peak != point[0]]
        assert all(before[0] > after[0] for before, after in pairwise(own))
        frontier = {(peak, float(f"{time:.9g}")) for peak, time in plan.frontier}
        assert frontier <= {(peak, time) for peak, time, _ in points}
    places = [number for _, _, number in points if number >= 0]
    assert places == list(range(len(plans)))
    assert len(plans) <= DRAWN + 1
    for peak, time, number in points:
        if number >= 0:
            assert (plans[number]["peak"], plans[number]["time"]) == (peak, pytest.approx(time, rel=1e-8))
    assert data["keep_all"] == [plan.keep_all_peak, plan.keep_all_time]
    assert data["budget"] == plan.budget


def test_a_plan_beside_the_frontier_has_its_place_in_it() -> None:
    plan = plan_of("recomputing")
    candidates = plan.alternatives.candidates
    others = Frontier(keep_all=candidates[0], candidates=(*candidates[:1], *candidates[2:]))
    data = page_data(replace(plan, chosen=candidates[1], alternatives=others))
    points = [(peak, time) for peak, time, _ in data["points"]]
    assert points == [(c.peak, float(f"{c.time:.9g}")) for c in candidates]
    assert data["plans"][data["chosen"]]["peak"] == candidates[1].peak


@pytest.mark.parametrize("kind", KINDS_OF_PLANS)
def test_numbers_refer_to_what_is_there(kind: str) -> None:
    plan = plan_of(kind)
    data, joint = page_data(plan), plan.graph
    assert [data["modules"][number] for number in data["values"]["module"]] == [s.module for s in joint.value_sources]
    assert [data["modules"][number] for number in data["ops"]["module"]] == [s.module for s in joint.sources]
    assert [data["sources"][number] for number in data["ops"]["source"]] == [str(s.frame or "") for s in joint.sources]
    assert data["ops"]["name"] == [op.name for op in joint.ops]
    assert len(data["values"]["name"]) == len(joint.values) == len(data["values"]["type"])
    assert data["modules"][0] == data["sources"][0] == data["types"][0] == ""
    assert len(set(data["modules"])) == len(data["modules"])
    assert [name for name, _ in data["kinds"]] == [kind.value for kind in KINDS]
    for drawn in data["plans"]:
        first = drawn["rows"][0]
        assert first[:4] == [0, data["model"], 1, [0]]
        for row in drawn["rows"]:
            assert all(0 <= module < len(data["modules"]) for module in row[3])
            assert len(row[3]) == (0 if row[1] == OWN else row[2])
        if not drawn["copies"] and not plan.weights:
            assert first[8] == pytest.approx(drawn["time"], rel=1e-6, abs=1e-12)
        for _, start, end in drawn["copies"]:
            assert 0 <= start <= end


def test_parameters_and_gradients_are_called_as_in_the_model() -> None:
    plan = plan_of("recomputing")
    names = page_data(plan)["values"]["name"]
    parameters = {name for name, _ in Deep().named_parameters()}
    assert parameters <= set(names)
    assert {f"gradient of {name}" for name in parameters} <= set(names)
    assert "float32[256, 16]" in page_data(plan)["types"]


def test_copies_are_those_of_the_clock() -> None:
    plan = plan_of("offloading")
    assert plan.chosen.transfers
    data = page_data(plan)
    copies = data["plans"][data["chosen"]]["copies"]
    assert len(copies) == len(plan.chosen.transfers.copies)
    lanes = {"to the host": Role.OFFLOAD, "from the host": Role.PREFETCH}
    spans = sorted((lanes[lane].value, start, end) for lane, start, end in copies)
    clock = sorted((role.value, *span) for (role, _), span in plan.chosen.transfers.copies.items())
    assert [row[0] for row in spans] == [row[0] for row in clock]
    assert [row[1:] for row in spans] == [pytest.approx(row[1:], rel=1e-8) for row in clock]


def script(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("module", "group"),
    [
        ("", ""),
        ("head", "head"),
        ("head.up", "head"),
        ("0", "0"),
        ("0.1.2", "0"),
        ("transformer.h.3.mlp.c_fc", "transformer.h.3"),
        ("h.31", "h.31"),
        ("layer1.conv", "layer1"),
        ("down.1x.a", "down"),
        ("a.b.c", "a"),
        ("a b.it's.7.x", "a b.it's.7"),
        ("a\nb.3.c", "a\nb.3"),
    ],
)
def test_groups(module: str, group: str) -> None:
    assert group_of(module) == group


@pytest.mark.parametrize("kind", KINDS_OF_PLANS)
def test_modules_of_one_group_have_one_color(kind: str) -> None:
    data = page_data(plan_of(kind))
    of, color, shade = (data["groups"][name] for name in ("of", "color", "shade"))
    numbers = dict(zip(map(group_of, data["modules"]), of, strict=True))
    assert of == [numbers[group_of(module)] for module in data["modules"]]
    assert sorted(numbers.values()) == list(range(len(color)))
    assert len(color) == len(shade)
    assert set(color) - {-1} == set(range(len(data["colors"])))
    assert 0 < len(data["colors"]) <= COLORS


def test_equal_modules_share_a_row() -> None:
    """Layers that a plan treats alike are one row, as in its text; the figures of a row are those of each."""
    plan = planned(Deep(), "100%")
    rows = page_data(plan)["plans"][0]["rows"]
    assert [row[1] for row in rows if row[2] > 1] == ["layers.0-7"]
    (layers,) = (row for row in rows if row[2] > 1)
    assert [page_data(plan)["modules"][module] for module in layers[3]] == [f"layers.{k}" for k in range(8)]
    assert layers[7] == 4 * (WIDTH * WIDTH + WIDTH), "gradients of one layer"


@pytest.mark.parametrize("kind", KINDS_OF_PLANS)
def test_the_page_begins_with_the_model_and_its_figures(kind: str) -> None:
    plan = plan_of(kind)
    found, data, model = read(plan.to_html()), page_data(plan), plan.graph.model
    assert model in found.texts["title"]
    assert plan.device not in found.texts["title"]
    assert found.texts["headline"] == data["headline"] == headline(plan, plan.running.chosen)
    assert data["headline"].startswith(f"{model} trains in ")
    for candidate, drawn in zip(drawn_of(plan, data), data["plans"], strict=True):
        assert drawn["headline"] == headline(plan, candidate)
        assert format_bytes(candidate.peak) in drawn["headline"].replace("\u00a0", " ")


def test_the_page_rounds_its_figures() -> None:
    """Exact bytes, which one needs to ask for the least budget, are in the text alone."""
    plan = plan_of("recomputing")
    facts = dict(page_data(plan)["facts"])
    assert f"({plan.minimum} bytes)" in str(plan)
    assert facts["least budget"].startswith(format_bytes(plan.minimum))
    assert not any(re.search(r"\d bytes", fact) for fact in facts.values())


def test_the_picture_comes_before_the_prose() -> None:
    text = plan_of("recomputing").to_html()
    assert text.index('id="headline"') < text.index('id="picture"') < text.index('id="facts"')
    assert text.index('id="picture"') < text.index('id="advice"')


def test_nothing_is_loaded() -> None:
    text = plan_of("offloading").to_html()
    assert set(re.findall(r"https?://[^\"'\s<>)]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    found = frame()
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    assert not re.search(r"@import|url\(", found.texts["style"])


def test_scripts_put_text_in_place_as_text() -> None:
    for name in SCRIPTS:
        text = script(name)
        for way in ("innerHTML", "outerHTML", "document.write", "insertAdjacentHTML", "createContextualFragment"):
            assert way not in text, name
        unsafe = r"\beval\b|\bFunction\s*\(|\bimport\b|\bfetch\b|XMLHttpRequest|WebSocket|srcdoc"
        assert not re.search(unsafe, text), name
        assert "</script" not in text.lower()
        assert not re.search("@(TEXT|DATA|SCRIPT|STYLE)@", text)
    assert frame().tags.count("script") == 2


def test_numbers_of_texts() -> None:
    numbers = Numbers(["", "a", "", "b"])
    assert (list(numbers), numbers["b"], numbers["c"], list(numbers)) == (["", "a", "b"], 2, 3, ["", "a", "b", "c"])


class Hostile(nn.Module):
    """Layers whose names have a meaning to HTML, JSON and the frame of the page."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.table = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for name in self.table:
            x = torch.tanh(self.table[name](x))  # </script><script>alert("line")</script>
        return x.square().mean()


def test_names_cannot_leave_their_place() -> None:
    names = tuple(name.replace(".", "_") for name in HOSTILE if "\x00" not in name)
    Hostile.__name__ = "</script><!--Model"
    try:
        model = Hostile(names)
        device = Device(name="<b>&\"x\"</b>", flops=1e12, half_flops=1e12, bandwidth=1e11, link=1e9)
        plan = planned(model, "70%", costs=device)
        text, data = plan.to_html(), page_data(plan)
    finally:
        Hostile.__name__ = "Hostile"
    check_page(text, json.loads(json.dumps(data)))
    back = json.loads(read(text).texts["data"])
    assert back["model"] == "</script><!--Model"
    assert {f"table.{name}" for name in names} <= set(back["modules"])
    parameters = {name for name, _ in model.named_parameters()}
    assert parameters <= set(back["values"]["name"])
    assert any('alert("line")' in source for source in back["sources"])
    assert "<b>" not in text
    assert "alert(1)</script>" not in text


def test_a_hostile_file_name_in_the_trace() -> None:
    """Lines that compiled code claims to have come from reach the page as text."""

    def body(x: Tensor) -> Tensor:
        return torch.tanh(x)

    code: CodeType = body.__code__.replace(co_name="<lambda>", co_filename="/<script>alert(2)<script>.py")
    strange = FunctionType(code, globals() | {"torch": torch})

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return strange(self.up(x)).square().mean()  # type: ignore[no-any-return]

    plan = planned(Calls(), "100%")
    check_page(plan.to_html(), json.loads(json.dumps(page_data(plan))))
    assert any("alert(2)<script>.py:" in source for source in page_data(plan)["sources"])


texts = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
values = st.recursive(
    st.one_of(texts, st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=5), st.lists(texts, max_size=4).map(" ".join))
def test_any_data_and_text_come_back_as_they_were(data: Data, text: str) -> None:
    page = page_of(data, text)
    check_page(page, data)
    shown = read(page).texts.get("text", "")
    assert shown.replace("\r", "\n").replace("\x00", "") == text.replace("\r", "\n").replace("\x00", "")


def test_data_without_a_number_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        page_of({"time": float("nan")}, "")


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


def test_lanes_are_those_of_the_clock() -> None:
    plan = plan_of("offloading")
    assert plan.chosen.transfers
    lanes = planned_lanes(plan)
    assert len(lanes.ops) == len(plan.program.executions)
    assert len(lanes.out) + len(lanes.back) == len(plan.chosen.transfers.copies)
    assert max(size for _, size in lanes.memory) == max(plan.memory.during)
    picture = lanes_picture({"<plan>": lanes}, budget=plan.budget)
    assert "&lt;plan&gt;" in picture
    assert "<plan>" not in picture
    assert picture.count("<rect ") == len(lanes.ops) + len(lanes.out) + len(lanes.back)


def test_a_plan_without_copies_has_no_lanes() -> None:
    with pytest.raises(fxremat.FxrematError, match="offloads nothing"):
        planned_lanes(plan_of("recomputing"))
