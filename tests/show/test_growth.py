"""What grew between two profiles, by hand: each byte belongs to one module, and grown ones come first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat.show.growth import ROWS, Growth
from fxremat.show.profile_figures import ProfileFigures, allowed

PATHS = st.sampled_from(["", "a", "a.b", "a.c", *(f"layers.{n}.{part}" for n in range(6) for part in ("up", "down"))])
SIZES = st.dictionaries(PATHS, st.integers(1, 2**40), max_size=12)


def names(changes: Any) -> list[tuple[str, int, int]]:
    return [(change.name, change.count, change.share.saved) for change in changes]


def test_grown_modules_come_first_and_equal_layers_share_a_row() -> None:
    before = {"": 5, "head": 40, "layers.0.up": 10, "layers.1.up": 10, "layers.2.up": 10, "old": 7}
    after = {"": 6, "head": 10, "layers.0.up": 30, "layers.1.up": 30, "layers.2.up": 10, "new": 3}
    growth = Growth.of(before, after, model="Net")
    assert names(growth.grown) == [("layers.0-1.up", 2, 40), ("new", 1, 3), ("Net, its own ops", 1, 1)]
    assert names(growth.shrunk) == [("head", 1, -30), ("old", 1, -7)]
    assert (growth.only_before, growth.only_after) == (("old",), ("new",))
    text = str(growth).splitlines()
    assert text[1].split() == ["layers.0-1.up", "2", "x", "+40", "B"]
    assert text[-3].split() == ["all", "modules", "+7", "B"]
    assert text[-2:] == ["  gone: old", "  new: new"]


def test_nothing_changed() -> None:
    growth = Growth.of({"a": 1}, {"a": 1}, model="Net")
    assert growth.changes == ()
    assert str(growth) == "every module has as many bytes at the peak as before"


@given(SIZES, SIZES)
def test_changes_add_up(before: dict[str, int], after: dict[str, int]) -> None:
    growth = Growth.of(before, after, model="Net")
    assert sum(change.share.saved for change in growth.changes) == sum(after.values()) - sum(before.values())
    assert growth.changes == (*growth.grown, *growth.shrunk)


@pytest.mark.parametrize(("grown", "shrunk"), [(30, 0), (0, 30), (30, 30), (30, 1), (2, 30), (8, 8), (9, 8)])
def test_many_changes_share_the_last_rows(grown: int, shrunk: int) -> None:
    before = {f"g{n}": n + 1 for n in range(grown)} | {f"s{n}": 1000 + n for n in range(shrunk)}
    after = {f"g{n}": 2 * n + 3 for n in range(grown)} | {f"s{n}": 1 for n in range(shrunk)}
    growth = Growth.of(before, after, model="Net")
    rows = growth.table.rows
    assert len(rows) <= ROWS + 1
    assert any("others that grew" in row[0] for row in rows) == (grown + shrunk > ROWS and grown > ROWS // 2)
    assert any("others that shrank" in row[0] for row in rows) == (grown + shrunk > ROWS and shrunk > ROWS // 2)
    assert len(growth.grown) == grown
    assert len(growth.shrunk) == shrunk


FIGURES = ProfileFigures(
    model="Net", device="cpu", torch="2.13", peak=100, time=0.5, modules={"": 40, "a": 60}, kinds={"kept": 100}
)


def test_figures_come_back_from_json() -> None:
    assert ProfileFigures.from_json(FIGURES.to_json()) == FIGURES
    assert ProfileFigures.from_json(json.loads(FIGURES.to_json())) == FIGURES


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format": 2}, 'its "format" is 2, and this fxremat reads 1'),
        ({"peak": 99}, "its modules have 100 bytes, and its peak is 99"),
        ({"kinds": {"kept": 1}}, "its kinds have 1 bytes, and its peak is 100"),
        ({"modules": [1]}, "its 'modules' is [1]"),
        ({"modules": {"a": "much"}}, "'much' is not a number of bytes"),
        ({"time": None}, "its 'time' is None"),
        ({"model": 3}, "its 'model' is 3"),
    ],
)
def test_what_is_no_profile_is_said(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(fxremat.FxrematError) as error:
        ProfileFigures.from_json(json.loads(FIGURES.to_json()) | changed)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "no"])
def test_a_text_that_is_no_profile(text: str) -> None:
    with pytest.raises(fxremat.FxrematError, match=r"^no profile: "):
        ProfileFigures.from_json(text)


@pytest.mark.parametrize(
    ("tolerance", "least"), [("1%", 102), ("0", 101), (0, 101), ("10", 111), (10, 111), (" 2.5 % ", 103), ("50%", 151)]
)
def test_a_peak_may_grow_by_the_tolerance(tolerance: int | str, least: int) -> None:
    def grown_to(peak: int) -> ProfileFigures:
        return ProfileFigures.from_json(
            json.loads(FIGURES.to_json()) | {"peak": peak, "modules": {"a": peak}, "kinds": {"kept": peak}}
        )

    assert FIGURES.compare(grown_to(least)).exceeds(tolerance)
    assert not FIGURES.compare(grown_to(least - 1)).exceeds(tolerance)
    assert not FIGURES.compare(grown_to(50)).exceeds(tolerance)


@pytest.mark.parametrize("tolerance", ["much", "-1%", 0.01, None, "1.5", True])
def test_what_is_no_tolerance_is_said(tolerance: Any) -> None:
    with pytest.raises(fxremat.InvalidBudget, match=r'tolerance is .*such as "1%", or bytes such as "10MiB"'):
        allowed(tolerance, 100)


def test_a_comparison_is_with_a_profile() -> None:
    with pytest.raises(fxremat.FxrematError, match="'60%' is no profile"):
        FIGURES.compare("60%")
