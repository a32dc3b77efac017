"""A plan in one sentence, and the colors of its modules, by hand."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from fxremat.show.headline import headline
from fxremat.show.palette import COLORS, palette

MIB = 2**20


@pytest.mark.parametrize(
    ("peak", "time", "changed", "sentence"),
    [
        (33.5, 1.16, {}, "GPT trains in 33.5 MiB instead of 74.8, 16 % slower"),
        (33.5, 1.0, {}, "GPT trains in 33.5 MiB instead of 74.8, at the same speed"),
        (0.5, 2.26, {}, "GPT trains in 512.0 KiB instead of 74.8 MiB, 2.3 times as slow"),
        (60.0, 0.8, {}, "GPT trains in 60.0 MiB instead of 74.8, in 20 % less time"),
        (74.8, 1.0, {}, "GPT trains in 74.8 MiB and keeps everything"),
        (74.8, 1.1, {}, "GPT trains in 74.8 MiB, 10 % slower"),
        (33.5, 1.1, {"offloaded": MIB}, "GPT trains in 33.5 MiB instead of 74.8, 10 % slower, with 1.0 MiB offloaded"),
        (33.5, 1.02, {"offloaded": 0}, "GPT trains in 33.5 MiB instead of 74.8, 2 % slower"),
        (33.5, 4.0, {"weights": True}, "GPT trains in 33.5 MiB instead of 74.8, weights and optimizer state included"),
        (33.5, 1.1, {"timed": "estimated"}, "GPT trains in 33.5 MiB instead of 74.8, 10 % slower (estimated for A100)"),
    ],
)  # fmt: skip
def test_headlines(peak: float, time: float, changed: dict[str, Any], sentence: str) -> None:
    plan: Any = SimpleNamespace(
        graph=SimpleNamespace(model="GPT"),
        keep_all_peak=int(74.8 * MIB),
        keep_all_time=1.0,
        weights=changed.get("weights"),
        timed=changed.get("timed", "measured"),
        device="A100",
    )
    transfers = SimpleNamespace(bytes=changed["offloaded"]) if "offloaded" in changed else None
    candidate: Any = SimpleNamespace(peak=int(peak * MIB), time=time, transfers=transfers)
    assert headline(plan, candidate).replace("\u00a0", " ") == sentence
    assert not re.search(r"\d (%|.iB)", headline(plan, candidate)), "a unit is on the line of its number"


def shares(*groups: str, share: float = 0.05) -> dict[str, float]:
    return dict.fromkeys(groups, share)


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        (shares("embed", "h.0", "h.1", ""), ("embed", "h.0", "h.1", "GPT, its own ops")),
        (shares("embed", *(f"h.{k}" for k in range(16))), ("embed", *(f"h.{k}-{k + 1}" for k in range(0, 16, 2)))),
        (shares(*map(str, range(10))), ("0-1", "2-3", "4-5", "6-7", "8-9")),
        (shares("a", "b") | {"tiny": 0.001}, ("a", "b")),
        ({f"m{k}x": 0.02 + 0.01 * k for k in range(11)}, tuple(f"m{k}x" for k in range(2, 11))),
        (shares("a.0", "b.0", "a.1"), ("a.0", "b.0", "a.1")),
        ({}, ()),
    ],
)  # fmt: skip
def test_labels_of_colors(given: dict[str, float], labels: tuple[str, ...]) -> None:
    assert palette(given, "GPT, its own ops").labels == labels


def test_a_group_has_the_color_of_its_label() -> None:
    found = palette(shares("embed", *(f"h.{k}" for k in range(12))) | {"tiny": 0.001}, "")
    groups = ("embed", "h.0", "h.1", "h.2", "h.11", "tiny", "unknown")
    assert [found.color_of(group) for group in groups] == [0, 1, 1, 2, 6, -1, -1]
    layers = [(found.color_of(f"h.{k}"), found.shade_of(f"h.{k}")) for k in range(12)]
    assert all(before != after for before, after in pairwise(layers)), "neighbors differ in color or in shade"
    assert found.shade_of("tiny") == 0


def colors(scheme: int) -> dict[str, tuple[float, float, float]]:
    """The colors of page.css in light (0) or dark (1), as lightness, a and b of OKLab."""
    css = (files("fxremat.show") / "assets" / "page.css").read_text()
    found = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[scheme]
    return {name: oklab(value) for name, value in re.findall(r"--([a-z]+(?:-[a-z0-9]+)?): #([0-9a-f]{6});", found)}


def oklab(value: str) -> tuple[float, float, float]:
    """Ottosson's perceptual color space."""
    sent = [int(value[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    r, g, b = ((c / 12.92) if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in sent)
    l = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)  # noqa: E741
    m = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    s = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s,
        1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s,
        0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s,
    )


def distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return float(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_the_colors_of_modules_differ_from_each_other_and_from_the_page(scheme: int) -> None:
    found = colors(scheme)
    modules = {name: color for name, color in found.items() if name.startswith("module-")}
    assert sorted(modules) == [*(f"module-{k}" for k in range(COLORS)), "module-other"]
    for (one, first), (other, second) in combinations(modules.items(), 2):
        assert distance(first, second) > 0.09, (one, other)
    for name, color in modules.items():
        assert distance(color, found["page"]) > 0.15, name
        assert distance(color, found["weights"]) > 0.06, name
