"""The page of a plan in a real browser: it draws what the plan says, answers when pointed at, and loads nothing.

Chromium is Debian's (`make browser`), driven by playwright. Screenshots are written to tests/screenshots.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from benchmarks.models import get
from fxremat.plans import Plan
from fxremat.show.moments import Moments
from fxremat.show.page import page_of
from fxremat.show.page_data import KINDS, page_data
from fxremat.units import format_bytes, format_seconds

FRAME = "(({left, top, width, height}) => [left, top, width, height])(fxremat.picture)"  # pixels
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = Path(__file__).parent / "screenshots"
HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=2>\u2028\"'&"

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: `make browser` installs Debian's"),
]


class Opened:
    """A page in the browser, with what went wrong in it."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.faults: list[str] = []
        tab.on("console", lambda message: self._note_message(message.type, message.text))
        tab.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        tab.on("request", lambda request: self._note(request.url))

    def _note_message(self, kind: str, text: str) -> None:
        if kind == "error":
            self.faults.append(f"console: {text}")

    def _note(self, url: str) -> None:
        if not url.startswith("file:"):
            self.faults.append(f"request: {url}")

    def js(self, script: str, *arguments: Any) -> Any:
        return self.tab.evaluate(script, *arguments)

    def text(self, selector: str) -> str:
        return str(self.tab.locator(selector).first.inner_text())

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer to a place of the picture, in its pixels."""
        self.tab.mouse.move(*self.place(x, y))

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a place of the picture is in the window."""
        self.tab.locator("#picture").scroll_into_view_if_needed()
        box = self.tab.locator("#picture").bounding_box()
        return box["x"] + x, box["y"] + y

    def keep(self, name: str) -> None:
        SCREENSHOTS.mkdir(exist_ok=True)
        self.tab.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="`make test-long` installs playwright")
    with sync.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A function that opens a page and checks, when the test is over, that nothing went wrong in it."""
    tabs: list[Opened] = []

    def show(html: str, *, width: int = 1200, dark: bool = False) -> Opened:
        file = tmp_path / f"{len(tabs)}.html"
        file.write_text(html, encoding="utf-8")
        scheme = "dark" if dark else "light"
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tabs.append(made := Opened(tab))
        tab.goto(file.as_uri())
        return made

    yield show
    for made in tabs:
        made.tab.close()
        assert made.faults == []


def planned(name: str, mem: str | int, **options: Any) -> Plan:
    case = get(name, "small")
    return fxremat.plan(case.model(), case.batch(0), mem=mem, cost="estimate", effort=0, progress=False, **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned("gpt", "60%")


@pytest.fixture(scope="module")
def offloaded() -> Plan:
    return planned("deep_chain", "40%", offload=True)


def with_weights() -> Plan:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"offload_weights": True, "optimizer": optimizer, "loss_bytes": 64}
    return fxremat.plan(model, torch.ones(64, 32), mem=2**40, cost="estimate", effort=0, progress=False, **options)


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["plan", "offloaded", "weights", "loss outside", "slices", "profile"])
def test_pages_load_without_errors_or_requests(opened: Any, request: Any, kind: str, dark: bool, width: int) -> None:
    if kind in ("plan", "offloaded"):
        html = request.getfixturevalue(kind).to_html()
    elif kind == "profile":
        case = get("gpt", "small")
        html = fxremat.profile(case.model(), case.batch(0), cost="estimate", effort=0, progress=False).to_html()
    elif kind == "slices":
        html = planned("gpt", "50%", slices=True).to_html()
    elif kind == "weights":
        html = with_weights().to_html()
    else:
        html = fxremat.plan(nn.Linear(8, 8), torch.ones(4, 8), mem="100%", cost="estimate").to_html()
    page = opened(html, width=width, dark=dark)
    page.keep(f"{kind.replace(' ', '-')}-{'dark' if dark else 'light'}-{width}")
    assert page.text("#title") == page.js("fxremat.data.title")
    assert page.js("document.documentElement.scrollWidth <= window.innerWidth"), "wider than the screen"


def stacked(data: dict[str, Any], number: int, moment: int) -> list[tuple[int, int, int]]:
    """The lives at a moment of a drawn plan, from the bottom up: life, where it begins and ends in bytes."""
    lives, height, found = data["plans"][number]["lives"], 0, []
    for life, (first, last, size) in enumerate(zip(lives["first"], lives["last"], lives["bytes"], strict=True)):
        if first <= moment <= last:
            found.append((life, height, height + size))
            height += size
    return found


def life_name(data: dict[str, Any], number: int, life: int) -> str:
    lives = data["plans"][number]["lives"]
    if (value := lives["value"][life]) >= 0:
        return str(data["values"]["name"][value])
    kind = data["kinds"][lives["kind"][life]]
    return f"{kind[0]} of {data['ops']['name'][lives['op'][life]]}" if lives["op"][life] >= 0 else str(kind[1])


@pytest.mark.parametrize("fixture", ["plan", "offloaded"])
def test_pointing_names_the_right_value(opened: Any, request: Any, fixture: str) -> None:
    plan: Plan = request.getfixturevalue(fixture)
    data = page_data(plan)
    page = opened(plan.to_html())
    picture = page.js("({left: fxremat.picture.left, top: fxremat.picture.top, height: fxremat.picture.height,"
                      " most: fxremat.picture.most, columns: [...fxremat.picture.columns]})")  # fmt: skip
    chosen, seen, rng = data["chosen"], set(), random.Random(0)
    for _ in range(40):
        column = rng.randrange(len(picture["columns"]))
        moment = picture["columns"][column]
        pixel = picture["most"] / picture["height"]  # bytes
        tall = [entry for entry in stacked(data, chosen, moment) if entry[2] - entry[1] > 3 * pixel]
        life, low, high = rng.choice(tall)
        y = picture["top"] + picture["height"] * (1 - (low + high) / 2 / picture["most"])
        page.point_at(picture["left"] + column + 0.5, y)
        assert page.text("#tip b") == life_name(data, chosen, life)
        value = data["plans"][chosen]["lives"]["value"][life]
        told = page.text("#detail")
        assert format_bytes(high - low) in told
        if value >= 0:
            source, module = (data["values"][column][value] for column in ("source", "module"))
            assert data["sources"][source] in told.replace("\n", " ") or not source
            assert (data["modules"][module] or data["model"]) in told
        seen.add(life)
    assert len(seen) > 15
    assert plan.moments.bytes[moment] == stacked(data, chosen, moment)[-1][2]


def test_the_stacks_add_up_to_the_plans_memory(opened: Any, plan: Plan) -> None:
    """At 20 moments, in both orders, as numbers and as painted pixels."""
    page = opened(plan.to_html())
    rng = random.Random(1)
    moments = [rng.randrange(len(plan.moments.moments)) for _ in range(20)]
    for by in ("purpose", "module"):
        page.tab.check(f"input[value={by}]")
        for moment in moments:
            top = page.js("moment => Math.max(...fxremat.step().at(moment).map(({high}) => high))", moment)
            assert top == plan.moments.bytes[moment]
        heights = page.js(PAINTED)
        for column in rng.sample(range(len(heights)), 20):
            moment = page.js("column => fxremat.picture.columns[column]", column)
            wanted = heights_of(page, plan.moments.bytes[moment])
            assert heights[column] == pytest.approx(wanted, abs=2)


PAINTED = """() => {
  const {canvas, left, top, height, width} = fxremat.picture, scale = window.devicePixelRatio;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const page = [...pixels.slice(0, 3)];
  const empty = (x, y) => {
    const at = (Math.round(y * scale) * canvas.width + Math.round(x * scale)) * 4;
    const gray = Math.max(...[0, 1, 2].map((c) => Math.abs(pixels[at + c] - pixels[at])));
    return gray < 6;
  };
  return Array.from({length: width}, (_, column) => {
    let y = top + height - 1;
    while (y > top && !empty(left + column, y)) y--;
    return top + height - 1 - y;
  });
}"""


def heights_of(page: Opened, size: int) -> float:
    """Pixels that so many bytes are tall."""
    height, most = page.js("[fxremat.picture.height, fxremat.picture.most]")
    return float(height * size / most)


def test_choosing_another_point_of_the_frontier_redraws(opened: Any, plan: Plan) -> None:
    page = opened(plan.to_html())
    data = page.js("fxremat.data")
    before = page.js("fxremat.picture.canvas.toDataURL()")
    other = len(data["plans"]) - 1
    assert other != data["chosen"]
    page.tab.locator(f"circle[data-plan='{other}']").click()
    candidate = next(c for c in plan.alternatives.candidates if c.peak == data["plans"][other]["peak"])
    expected = Moments.of(candidate, plan.costs).bytes
    assert page.js("[...fxremat.step().total]") == list(expected)
    assert page.js("fxremat.picture.canvas.toDataURL()") != before
    assert format_bytes(candidate.peak) in page.text("#facts")
    assert page.tab.locator("circle[aria-checked=true]").get_attribute("data-plan") == str(other)
    page.keep("least-budget")
    page.tab.locator(f"circle[data-plan='{other}']").press("ArrowRight")
    assert page.js("fxremat.state.plan") == other - 1
    for _ in range(other):
        if page.js("fxremat.state.plan") != data["chosen"]:
            page.tab.click("#more")
    assert page.js("fxremat.picture.canvas.toDataURL()") == before
    assert format_bytes(plan.budget) in page.text("#facts")


def test_a_module_is_selected_by_click_and_by_name(opened: Any, plan: Plan) -> None:
    page = opened(plan.to_html())
    page.tab.locator("#modules tr[data-path='blocks.1'] button.plain").click()
    assert page.tab.locator("#modules tr.selected").get_attribute("data-path") == "blocks.1"
    modules = page.tab.locator("#values tbody td:nth-child(5)").all_inner_texts()
    assert modules
    assert all(module == "blocks.1" or module.startswith("blocks.1.") for module in modules)
    total = sum(entry["high"] - entry["low"] for entry in page.js("fxremat.step().at(40)"))
    assert total == plan.moments.bytes[40]
    page.keep("selected")
    page.tab.click("#deselect")
    assert page.js("fxremat.state.selected") == -1
    left, top, width, height = page.js(FRAME)
    page.point_at(left + width / 2, top + height * 0.85)
    named = page.js("fxremat.data.modules[fxremat.step().module[fxremat.state.hover.life]]")
    page.tab.mouse.down()
    page.tab.mouse.up()
    assert page.js("fxremat.data.modules[fxremat.state.selected]") == named


def test_the_picture_works_with_the_keyboard(opened: Any, plan: Plan) -> None:
    page = opened(plan.to_html())
    picture = page.tab.locator("#picture")
    picture.focus()
    picture.press("Home")
    first = page.text("#detail")
    for _ in range(12):
        picture.press("ArrowRight")
    moment = page.js("fxremat.state.hover.moment")
    assert moment == 12
    names = []
    for _ in range(20):
        picture.press("ArrowDown")
    for _ in range(3):
        names.append(page.text("#detail b"))
        picture.press("ArrowUp")
    alive = stacked(page_data(plan), page.js("fxremat.state.plan"), moment)
    assert names == [life_name(page_data(plan), page.js("fxremat.state.plan"), life) for life, _, _ in alive[:3]]
    assert page.text("#detail") != first
    assert format_bytes(plan.moments.bytes[12]) in page.text("#detail")
    picture.press("+")
    assert page.js("fxremat.state.view[1] - fxremat.state.view[0] < fxremat.step().end")
    picture.press("Escape")
    assert page.js("fxremat.state.view") is None


def test_readers_of_the_screen_find_names_for_everything(opened: Any, plan: Plan) -> None:
    page = opened(plan.to_html())
    unnamed = page.js(
        "() => [...document.querySelectorAll('button, input, [role], [tabindex]')].filter((e) => e.id !== 'tip' &&"
        " !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert unnamed == []
    assert page.js("document.querySelectorAll('[aria-live]').length") >= 2
    assert page.js("[...document.querySelectorAll('section')].every((s) => s.querySelector('h2, summary'))")
    assert page.js("document.documentElement.lang") == "en"


def test_figures_are_written_as_in_python(opened: Any, plan: Plan) -> None:
    page = opened(plan.to_html())
    rng = random.Random(2)
    sizes = [0, 1, 1023, 1024, 2**20, 3 * 2**30, *(int(10 ** rng.uniform(0, 12)) for _ in range(50))]
    assert page.js("sizes => sizes.map(fxremat.bytes)", sizes) == [format_bytes(size) for size in sizes]
    times = [0, 1.0, 0.9999, 0.0582, 9.113e-6, *(10 ** rng.uniform(-7, 2) for _ in range(50))]
    assert page.js("times => times.map(fxremat.seconds)", times) == [format_seconds(time) for time in times]
    assert page.js("fxremat.sizeTicks(3 * 2 ** 20).at(-1)") == [3 * 2**20, "3 MiB"]
    assert [label for _, label in page.js("fxremat.timeTicks(0, 0.043)")] == [f"{n} ms" for n in (0, 10, 20, 30, 40)]
    assert page.js("fxremat.timeTicks(0, 5e-7).at(-1)[1]") == "0.5 us"
    close = [label for _, label in page.js("fxremat.timeTicks(0.9, 0.900001)")]
    assert len(close) == len(set(close)) > 3


def test_dragging_zooms(opened: Any, plan: Plan) -> None:
    page = opened(plan.to_html())
    left, top, width, _ = page.js(FRAME)
    page.point_at(left + width * 0.25, top + 50)
    page.tab.mouse.down()
    page.point_at(left + width * 0.75, top + 60)
    page.tab.mouse.up()
    begin, end = page.js("fxremat.state.view")
    whole = page.js("fxremat.step().end")
    assert (begin / whole, end / whole) == (pytest.approx(0.25, abs=0.01), pytest.approx(0.75, abs=0.01))
    page.tab.click("#whole")
    assert page.js("fxremat.state.view") is None
    page.point_at(left - 40, top + 50)  # a drag beside the picture is none, and so is a press of another button
    page.tab.mouse.down()
    page.point_at(left - 10, top + 50)
    page.tab.mouse.up()
    page.point_at(left + width / 2, top + 250)
    page.tab.mouse.click(*page.place(left + width / 2, top + 250), button="right")
    assert (page.js("fxremat.state.view"), page.js("fxremat.state.selected")) == (None, -1)


LAYERS, PARTS = 60, 6


def large(values: int) -> dict[str, Any]:
    """The data of a made-up model of 60 layers with so many values, each saved for the backward or made again."""
    count = 2 * values
    layers = range(LAYERS)
    modules = ["", "layers", *(f"layers.{i}" for i in layers)]
    modules += [f"layers.{i}.part{j}" for i in layers for j in range(PARTS)]
    mirrored = [min(i, count - 1 - i) for i in range(count)]
    step = {
        "peak": 1,
        "time": 1.0,
        "timed": True,
        "split": values,
        "starts": [i * 1e-3 for i in range(count)],
        "ends": [(i + 1) * 1e-3 for i in range(count)],
        "role": [int(i >= values) for i in range(count)],
        "roles": ["forward", "backward"],
        "op": mirrored,
        "value": [-1] * count,
        "block": [i * LAYERS // values for i in mirrored],
        "blocks": [f"layers.{i}" for i in layers],
        "copies": [],
        "host": [],
        "lives": many_lives(values),
        "tree": [[i, 10, 10, 0, 10, 1.0, 2.0, 0.5] for i in range(len(modules))],
    }
    texts = {
        "name": [f"value_{i}" for i in range(values)],
        "module": [2 + value * LAYERS // values for value in range(values)],
        "source": [0] * values,
        "type": [0] * values,
    }
    kinds = [[kind.value, text] for kind, text in KINDS.items()]
    return {
        "model": "Large", "title": "large", "facts": [["a", "b"]], "sources": [""], "types": [""],
        "budget": 10**10, "keep_all": [10**10, 1.0], "points": [[1, 1.0, 0]], "chosen": 0,
        "kinds": kinds, "modules": modules, "values": texts, "ops": texts, "plans": [step],
    }


def many_lives(values: int) -> dict[str, list[int]]:
    """Half of the values are kept from their op to its backward, the others are freed and made again."""
    rng, kinds, last = random.Random(0), [kind.value for kind in KINDS], 2 * values - 1
    rows = []
    for value in range(values):
        spans = [("kept", value, last - value)]
        if rng.random() < 0.5:
            spans = [("temporary", value, min(value + 5, values - 1)), ("recomputed", last - value - 2, last - value)]
        rows += [(kinds.index(kind), first, end, rng.randrange(10**5, 10**7), value, -1) for kind, first, end in spans]
    names = ("kind", "first", "last", "bytes", "value", "op")
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


MOVES = """([x, y]) => {
  const picture = document.getElementById("picture"), began = performance.now();
  for (let i = 0; i < 5; i++)
    picture.dispatchEvent(new PointerEvent("pointermove", {clientX: x + i, clientY: y}));
  return (performance.now() - began) / 5;
}"""


def test_ten_thousand_values_render_in_under_a_second(opened: Any) -> None:
    page = opened(page_of(large(10_000), "large"))
    assert page.js("fxremat.data.values.name.length") == 10_000
    assert page.js("fxremat.drawMilliseconds") < 1000
    left, top, width, height = page.js(FRAME)
    y = top + height / 2 + page.tab.locator("#picture").bounding_box()["y"]
    took = page.js(MOVES, [left + width / 2, y])
    assert took < 150, "milliseconds for one move of the pointer"
    page.keep("ten-thousand")


def test_hostile_names_stay_text(opened: Any, plan: Plan) -> None:
    data = page_data(plan) | {"title": HOSTILE, "model": HOSTILE}
    data["facts"] = [[HOSTILE, HOSTILE]]
    data["advice"] = [HOSTILE]
    data["modules"] = [f"{module}{HOSTILE}" if module else "" for module in data["modules"]]
    data["sources"] = [HOSTILE for _ in data["sources"]]
    data["values"]["name"] = [f"{name}{HOSTILE}" for name in data["values"]["name"]]
    data["ops"]["name"] = [f"{name}{HOSTILE}" for name in data["ops"]["name"]]
    for drawn in data["plans"]:
        drawn["blocks"] = [HOSTILE for _ in drawn["blocks"]]
    page = opened(page_of(data, HOSTILE))
    left, top, width, height = page.js(FRAME)
    page.point_at(left + width / 2, top + height * 0.9)
    assert HOSTILE in page.js("document.querySelector('#tip b').textContent")
    assert page.js("document.querySelector('#title').textContent") == HOSTILE
    assert page.js("document.querySelector('#text').textContent") == HOSTILE
    assert page.js("window.pwned") is None
    assert page.js("document.querySelectorAll('img, script').length") == 2, "the data and the page's own script"
