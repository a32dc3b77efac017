"""The page of a plan in a real browser: it draws what the plan says, answers when pointed at, and loads nothing.

Chromium is Debian's (`make browser`), driven by playwright. Screenshots are written to tests/screenshots.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from benchmarks.models import get
from fxremat.plans import Plan
from fxremat.settings import Offload, Search
from fxremat.show.moments import Moments
from fxremat.show.page import page_of
from fxremat.show.page_data import KINDS, group_of, page_data
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
        """The place in the window of a place of the picture, which is scrolled into view."""
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
    return fxremat.plan(case.model(), case.batch(0), mem=mem, search=Search(seconds=0), costs="estimate", **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned("gpt", "60%")


@pytest.fixture(scope="module")
def offloaded() -> Plan:
    return planned("deep_chain", "40%", offload=True)


def with_weights() -> Plan:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"loss": 64, "offload": Offload(weights=True, activations=False), "optimizer": optimizer}
    return fxremat.plan(model, torch.ones(64, 32), mem=2**40, search=Search(seconds=0), costs="estimate", **options)


@cache
def html_of(kind: str) -> str:
    match kind:
        case "profile":
            case = get("gpt", "small")
            return fxremat.profile(case.model(), case.batch(0), search=Search(seconds=0), costs="estimate").to_html()
        case "slices":
            return planned("gpt", "50%", slices=True).to_html()
        case "weights":
            return with_weights().to_html()
        case _:
            return fxremat.plan(nn.Linear(8, 8), torch.ones(4, 8), mem="100%", costs="estimate").to_html()


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["plan", "offloaded", "weights", "loss outside", "slices", "profile"])
def test_pages_load_without_errors_or_requests(opened: Any, request: Any, kind: str, dark: bool, width: int) -> None:
    html = request.getfixturevalue(kind).to_html() if kind in ("plan", "offloaded") else html_of(kind)
    page = opened(html, width=width, dark=dark)
    page.keep(f"{kind.replace(' ', '-')}-{'dark' if dark else 'light'}-{width}")
    assert page.js("document.title") == page.js("fxremat.data.title")
    assert page.js("document.querySelector('#headline').textContent") == page.js("fxremat.data.headline")
    assert page.js("document.documentElement.scrollWidth <= window.innerWidth"), "wider than the screen"
    assert page.js(SCROLLING) == [], "scrolls inside of the page"
    picture, facts = (page.tab.locator(name).bounding_box() for name in ("#picture", "#facts"))
    assert picture["y"] + picture["height"] < 844, "the whole picture is on the first screen of a phone"
    assert picture["y"] + picture["height"] <= facts["y"]
    assert page.tab.locator("#detail").bounding_box()["height"] == 0, "an empty box"
    assert overlaps(page.js(WRITTEN)) == []
    if page.js("fxremat.data.points.length") > 1:
        svg, holder = (page.tab.locator(name).bounding_box() for name in ("#frontier svg", "#frontier"))
        assert svg["width"] == holder["width"] > 0.9 * (width - 40)
        drawn = page.js("document.querySelector('#frontier svg').viewBox.baseVal.width")
        assert drawn == pytest.approx(svg["width"], abs=1), "scaled"
        assert overlaps(page.js(IN_THE_FRONTIER)) == []


SCROLLING = """() => [...document.querySelectorAll("main *")].filter((e) => e.tagName !== "PRE" && e.id !== "said"
  && (e.scrollHeight > e.clientHeight + 2 || e.scrollWidth > e.clientWidth + 2)
  && !["visible", "clip"].includes(getComputedStyle(e).overflowY)).map((e) => e.outerHTML.slice(0, 80))"""

# Texts over the memory in the picture, as [text, left, top, right, bottom]
WRITTEN = """() => {
  const { picture, step } = fxremat, { context } = picture, found = [], write = context.fillText;
  context.fillText = (text, x, y) => {
    const wide = context.measureText(text).width, align = { left: 0, center: 0.5, right: 1 };
    const left = x - align[context.textAlign] * wide;
    if (x > picture.left && y < picture.top + picture.height) found.push([text, left, y - 10, left + wide, y + 2]);
  };
  picture.draw(step(), picture.state);
  context.fillText = write;
  picture.draw(step(), picture.state);
  return found;
}"""

# Texts and points of the curve
IN_THE_FRONTIER = """() => [...document.querySelectorAll("#frontier text, #frontier circle")].map((e) => {
  const { x, y, width, height } = e.getBBox();
  return [e.tagName === "circle" ? "" : e.textContent, x, y, x + width, y + height];
})"""


def overlaps(boxes: list[Any]) -> list[tuple[str, str]]:
    """Texts that cover another text, or a point, whose name is empty; points may cover each other."""
    return [
        (a, b)
        for (a, left, top, right, bottom), (b, x, y, end, low) in combinations(boxes, 2)
        if (a or b) and left < end and x < right and top < low and y < bottom
    ]


@pytest.mark.parametrize("width", [1200, 390])
def test_labels_do_not_collide(opened: Any, plan: Plan, width: int) -> None:
    """Whatever the budget and the peak of keeping everything, and whichever plan is drawn."""
    page = opened(plan.to_html(), width=width)
    chosen, count = page.js("fxremat.data.chosen"), page.js("fxremat.data.plans.length")
    least = plan.minimum / plan.predicted_peak  # a point of the curve, high up on the left
    for budget, whole in product((least, 1.0, 1.05, 3.0, 50.0), (1.0, 1.02, 1.2, 2.5, 30.0)):
        sizes = [int(factor * plan.predicted_peak) for factor in (budget, whole)]
        page.js("([budget, whole]) => { fxremat.data.budget = budget; fxremat.data.keep_all[0] = whole; }", sizes)
        for number in (chosen, 0, count - 1):
            page.js("number => fxremat.choose(number)", number)
            written = page.js(WRITTEN)
            assert overlaps(written) == [], (budget, whole)
            (peak,) = (box for box in written if box[0].startswith("peak"))
            assert peak[1] - 40 < page.js("fxremat.picture.peakAt().x") < peak[3] + 40
            assert overlaps(page.js(IN_THE_FRONTIER)) == [], (budget, whole)


def test_the_peaks_are_marked(opened: Any, plan: Plan) -> None:
    page = opened(plan.to_html())
    words = [text for text, *_ in page.js(WRITTEN)]
    assert f"peak {format_bytes(plan.predicted_peak)}" in words
    assert f"keeping everything {format_bytes(plan.keep_all_peak)}" in words
    assert f"budget {format_bytes(plan.budget)}" in words
    left, top, width, height = page.js(FRAME)
    for size, color in ((plan.keep_all_peak, "quiet"), (plan.budget, "text")):
        line = page.js(ROW, [top + height - heights_of(page, size), left + 0.9 * width])
        assert page.js(COLOR, color) in line
    point = page.js("(({x, y}) => [x, y])(fxremat.picture.peakAt())")
    assert point[1] == pytest.approx(top + height - heights_of(page, plan.predicted_peak))
    moment = page.js("x => fxremat.picture.columns[fxremat.picture.column(x)]", point[0])
    assert plan.moments.bytes[moment] == plan.predicted_peak
    assert page.js(COLOR, "text") in page.js(ROW, [point[1], point[0] - 3])
    page.js("fxremat.zoom(0, fxremat.step().plan.starts[2])")
    assert not any(text.startswith("peak") for text, *_ in page.js(WRITTEN)), "it is out of sight"


# Colors of the pixels around a place of the picture, over ten columns
ROW = """([y, x]) => {
  const scale = window.devicePixelRatio, found = new Set(), { context } = fxremat.picture;
  const pixels = context.getImageData(x * scale, Math.round((y - 2) * scale), 10, 5).data;
  for (let at = 0; at < pixels.length; at += 4)
    found.add([...pixels.slice(at, at + 3)].map((part) => part >> 4).join());
  return [...found];
}"""
COLOR = """(name) => {
  const { context, picture } = { context: document.createElement("canvas").getContext("2d"), picture: fxremat.picture };
  context.fillStyle = picture.color(name);
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((part) => part >> 4).join();
}"""


def test_each_module_has_its_color_and_the_legend_says_which(opened: Any, plan: Plan) -> None:
    page = opened(plan.to_html())
    data = page_data(plan)
    legend = dict(page.js("fxremat.step().legend('module')"))
    assert [text for text in legend.values() if text in data["colors"]] == list(data["colors"])
    for life in range(len(data["plans"][data["chosen"]]["lives"]["kind"])):
        module = data["modules"][page.js("life => fxremat.step().module[life]", life)]
        name = page.js("life => fxremat.step().color('module', life)", life)
        assert name in legend
        if name != "module-other":
            first, last = re.fullmatch(r"(?:.*?(\d+)-(\d+))?.*", legend[name]).groups()  # type: ignore[union-attr]
            group = group_of(module)
            assert group == legend[name] or (not group and "its own ops" in legend[name]) or first is not None
            if first is not None:
                assert int(first) <= int(group.rpartition(".")[2]) <= int(last)
    shown = [item.strip() for item in page.tab.locator("#legend li").all_inner_texts()]
    assert shown == list(legend.values())
    page.tab.check("input[value=purpose]")
    texts = [text for _, text in data["kinds"]]
    assert all(item.strip() in texts for item in page.tab.locator("#legend li").all_inner_texts())


def test_times_that_hardly_differ_look_alike(opened: Any, plan: Plan) -> None:
    data = page_data(plan)
    points = [[peak, 0.914 + 0.0005 * number, drawn] for number, (peak, _, drawn) in enumerate(data["points"])]
    page = opened(page_of(data | {"points": points[:9]}, ""))
    heights = page.js("fxremat.data.points.map(([, time]) => fxremat.frontier.y(time))")
    assert max(heights) - min(heights) < 0.1 * 280
    assert min(heights) > 140, "at the bottom, where the fast ones are"


@pytest.mark.parametrize("fixture", ["plan", "offloaded"])
@pytest.mark.parametrize("width", [1200, 390])
def test_the_tip_covers_nothing_and_is_told_once(opened: Any, request: Any, fixture: str, width: int) -> None:
    page = opened(request.getfixturevalue(fixture).to_html(), width=width)
    left, top, wide, height = page.js(FRAME)
    rng, shown = random.Random(3), 0
    for _ in range(40):
        page.point_at(left + rng.random() * wide, top + (1 - rng.random() ** 2) * height)
        box = page.js("fxremat.picture.outlined")
        tip = page.js("(({offsetLeft: x, offsetTop: y, offsetWidth: w, offsetHeight: h}) => [x, y, x + w, y + h])(tip)")
        assert page.text("#detail") == ""
        if box:
            shown += 1
            covered = tip[0] < box["right"] and box["left"] < tip[2] and tip[1] < box["bottom"] and box["top"] < tip[3]
            assert not covered
        assert tip[0] >= 0
        assert tip[2] <= page.js("document.querySelector('#picture').clientWidth") + 1
    assert shown > 10
    page.tab.mouse.move(1, 1)
    assert not page.tab.locator("#tip").is_visible()
    assert page.tab.locator("#detail").bounding_box()["height"] == 0


def test_a_finger_and_the_keys_are_answered_below_the_picture(opened: Any, plan: Plan) -> None:
    page = opened(plan.to_html(), width=390)
    left, top, width, height = page.js(FRAME)
    page.tab.locator("#picture").focus()
    page.tab.locator("#picture").press("ArrowRight")
    assert "on the device" in page.text("#detail")
    assert not page.tab.locator("#tip").is_visible()
    page.js(TAP, [left + width / 2, top + 0.9 * height])
    assert "purpose" in page.text("#detail")
    assert not page.tab.locator("#tip").is_visible()
    assert page.js("fxremat.picture.outlined") is not None, "it stays when the finger is lifted"
    page.tab.locator("#detail button").click()
    assert page.js("fxremat.state.selected").__len__() == 1
    assert page.text("#detail") == ""


TAP = """([x, y]) => {
  const holder = document.getElementById("picture"), box = holder.getBoundingClientRect();
  for (const kind of ["pointerdown", "pointerup", "pointerleave"])
    holder.dispatchEvent(new PointerEvent(kind, { clientX: box.left + x, clientY: box.top + y, pointerType: "touch" }));
}"""


def test_rows_of_equal_modules_open_close_and_are_selected_together(opened: Any) -> None:
    page = opened(planned("gpt", "100%").to_html())
    row = page.tab.locator("#modules tr", has_text="each of 3").first
    assert "0-2 each of 3" in row.inner_text()
    before = page.tab.locator("#modules tbody tr").count()
    row.locator("button.toggle").click()
    assert page.tab.locator("#modules tbody tr").count() != before
    page.tab.locator("#modules tr", has_text="each of 3").first.locator("button.plain").click()
    assert len(page.js("fxremat.state.selected")) == 3
    assert "and 2 like it" in page.text("#values-of")
    modules = page.tab.locator("#values tbody td:nth-child(5)").all_inner_texts()
    assert {module.split(".")[1] for module in modules} == {"0", "1", "2"}


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
        told = page.text("#tip")
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
    assert page.js("fxremat.state.selected") == []
    left, top, width, height = page.js(FRAME)
    page.point_at(left + width / 2, top + height * 0.85)
    named = page.js("fxremat.step().module[fxremat.state.hover.life]")
    page.tab.mouse.down()
    page.tab.mouse.up()
    assert page.js("fxremat.state.selected") == [named]


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
    assert page.js("fxremat.sizeTicks(0, 3 * 2 ** 20).at(-1)") == [3 * 2**20, "3 MiB"]
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
    assert (page.js("fxremat.state.view"), page.js("fxremat.state.selected")) == (None, [])


LAYERS, PARTS = 60, 6


def large(values: int) -> dict[str, Any]:
    """The data of a made-up model of 60 layers with so many values, each saved for the backward or made again."""
    count = 2 * values
    layers = range(LAYERS)
    modules = ["", "layers", *(f"layers.{i}" for i in layers)]
    modules += [f"layers.{i}.part{j}" for i in layers for j in range(PARTS)]
    groups = [0, 1, *range(2, LAYERS + 2), *(2 + i for i in layers for _ in range(PARTS))]
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
        "headline": "large",
        "rows": [[len(m.split(".")) if m else 0, m, 1, [i], 9, 9, 0, 9, 3.0, 0.5] for i, m in enumerate(modules)],
    }
    texts = {
        "name": [f"value_{i}" for i in range(values)],
        "module": [2 + value * LAYERS // values for value in range(values)],
        "source": [0] * values,
        "type": [0] * values,
    }
    kinds = [[kind.value, text] for kind, text in KINDS.items()]
    colors = {"of": groups, "color": [i // 7 for i in range(LAYERS + 2)], "shade": [i % 2 for i in range(LAYERS + 2)]}
    return {
        "model": "Large", "title": "large", "headline": "large", "about": "", "facts": [["a", "b"]],
        "sources": [""], "types": [""], "groups": colors, "colors": [f"layers {i}" for i in range(9)],
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
    data = page_data(plan) | dict.fromkeys(("title", "headline", "about", "model"), HOSTILE)
    data["colors"] = [HOSTILE for _ in data["colors"]]
    data["facts"] = [[HOSTILE, HOSTILE]]
    data["advice"] = [HOSTILE]
    data["modules"] = [f"{module}{HOSTILE}" if module else "" for module in data["modules"]]
    data["sources"] = [HOSTILE for _ in data["sources"]]
    data["values"]["name"] = [f"{name}{HOSTILE}" for name in data["values"]["name"]]
    data["ops"]["name"] = [f"{name}{HOSTILE}" for name in data["ops"]["name"]]
    for drawn in data["plans"]:
        drawn["blocks"] = [HOSTILE for _ in drawn["blocks"]]
        drawn["rows"] = [[row[0], HOSTILE, *row[2:]] for row in drawn["rows"]]
    page = opened(page_of(data, HOSTILE))
    left, top, width, height = page.js(FRAME)
    page.point_at(left + width / 2, top + height * 0.9)
    assert HOSTILE in page.js("document.querySelector('#tip b').textContent")
    assert page.js("document.title.length") >= len(HOSTILE) - 1
    assert page.js("document.querySelector('#headline').textContent") == HOSTILE
    assert page.js("document.querySelector('#modules button.plain').textContent") == HOSTILE
    assert page.js("document.querySelector('#text').textContent") == HOSTILE
    assert page.js("window.pwned") is None
    assert page.js("document.querySelectorAll('img, script').length") == 2, "the data and the page's own script"
