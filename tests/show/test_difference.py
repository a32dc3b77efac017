"""Changes from one plan to another add up: modules to totals, kinds of memory to the peak, parts to the time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.plans import Plan
from fxremat.show import difference
from fxremat.show.difference import NOTHING, Difference
from fxremat.show.modules import added
from tests.exported import PLANS, WIDTH, Deep, planned, rows

pytestmark = pytest.mark.usefixtures("torch_ready")
COLUMNS = ("saved", "recomputed", "offloaded")


class Nested(nn.Module):
    """Layers of two linear maps each, of increasing width where asked for; the second half of the names may differ."""

    def __init__(self, depth: int, *, other: str = "", widths: Callable[[int], int] = lambda _: WIDTH) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, widths(k)), nn.Tanh(), nn.Linear(widths(k), WIDTH), nn.Tanh())
            for k in range(depth)
        )
        self.more = other
        if other:
            self.add_module(other, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        if self.more:
            x = self.get_submodule(self.more)(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Plans of several models and budgets."""
    torch.manual_seed(0)
    made = {name: make() for name, make in PLANS.items()}
    made["nested"] = planned(Nested(3), "65%")
    made["more"] = planned(Nested(5), "50%")
    made["tail"] = planned(Nested(3, other="tail"), "65%")
    made["wide"] = planned(Nested(5, widths=lambda k: 8 + 8 * k), "60%")
    return made


def test_everything_adds_up(plans: dict[str, Plan]) -> None:
    for first, second in itertools.permutations(plans.values(), 2):
        found = first.diff(second)
        shares = added(change.share for change in found.changes)
        for column in COLUMNS:
            before, after = (getattr(plan.modules.total, column) for plan in (first, second))
            assert getattr(shares, column) == getattr(found.tree.total, column) == after - before
        extra = second.modules.total.extra - first.modules.total.extra
        assert shares.extra == pytest.approx(extra, abs=1e-12)
        kinds = sum(found.after.at_peak[kind] - size for kind, size in found.before.at_peak.items())
        assert kinds == second.predicted_peak - first.predicted_peak
        parts = [found.after.keep_all_time - found.before.keep_all_time, extra]
        parts.append(found.after.waiting - found.before.waiting)
        parts.append(found.after.slicing - found.before.slicing)
        assert sum(parts) == pytest.approx(second.predicted_time - first.predicted_time, abs=1e-12)


def test_the_way_back_is_the_same_with_other_signs(plans: dict[str, Plan]) -> None:
    there, back = plans["nested"].diff(plans["more"]), plans["more"].diff(plans["nested"])
    assert [-x for x in (there.tree.total.saved, there.tree.total.recomputed)] == [
        back.tree.total.saved,
        back.tree.total.recomputed,
    ]
    assert there.only_after == back.only_before == ("h.3", "h.4")
    assert there.only_before == back.only_after == ()


def test_no_difference_says_so(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        same = plan.diff(plan)
        assert not same
        assert str(same) == NOTHING
        assert same._repr_html_() == f"<p>{NOTHING}</p>"
    again = planned(Deep(), "60%")
    assert str(plans["plain"].diff(again)) == NOTHING


def test_a_budget_alone_is_a_difference(plans: dict[str, Plan]) -> None:
    plan = plans["plain"]
    found = plan.diff(plan.within(plan.budget + 1))
    assert found
    assert "+1 B" in str(found)
    assert "the modules save, recompute and offload the same" in str(found)


def test_modules_on_one_side_only_are_named_by_the_outermost(plans: dict[str, Plan]) -> None:
    found = plans["nested"].diff(plans["tail"])
    assert (found.only_before, found.only_after) == ((), ("tail",))
    assert "only in the second plan: tail" in str(found)
    assert "only in the first plan: tail" in str(plans["tail"].diff(plans["nested"]))


def test_the_text(plans: dict[str, Plan]) -> None:
    for first, second in itertools.permutations(plans.values(), 2):
        lines = str(first.diff(second)).splitlines()
        assert max(map(len, lines)) <= 100
        assert all(any(label in line for line in lines) for label in ("budget", "predicted peak", "predicted time"))
    text = str(plans["keep_all"].diff(plans["plain"]))
    assert re.search(r"\n  layers\.\d[\d, -]* +\d x +- +\+\d", text)
    assert re.search(r"recomputing \+[\d.]+ us", text)
    assert "device" not in text
    assert "model           Deep -> Nested" in str(plans["plain"].diff(plans["nested"]))


def test_those_that_changed_most_come_first_and_the_rest_is_one_row(
    plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difference, "ROWS", 3)
    keep = plans["wide"].within("100%")
    found = keep.diff(plans["wide"])
    shares = [change.share for change in found.changes]
    most = [max(abs(getattr(share, column)) for share in shares) or 1 for column in (*COLUMNS, "extra")]
    sizes = [
        max(abs(getattr(share, column)) / whole for column, whole in zip((*COLUMNS, "extra"), most, strict=True))
        for share in shares
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(found.changes) > 3
    table = str(found).split("\n\n")[1].splitlines()
    assert len(table) == 1 + 3 + 2
    assert f"{len(found.changes) - 3} others" in table[-2]
    assert table[-1].startswith("  Nested, all of it")


def test_equal_layers_share_a_row(plans: dict[str, Plan]) -> None:
    found = plans["more"].within("100%").diff(plans["more"])
    assert any(change.count > 1 for change in found.changes)
    names = [change.name for change in found.changes]
    assert len(names) == len(set(names))
    modules = sum(change.count for change in found.changes)
    assert modules > len(names)


def test_everything_is_escaped() -> None:
    class Named(Nested):
        """One module with a name that is markup."""

    plan = planned(Named(2, other='<b onclick="x">'), "60%", rows())
    html = planned(Nested(2), "60%", rows()).diff(plan)._repr_html_()
    assert "<b" not in html.replace("<br>", "").replace("<tbody", "")
    assert "&lt;b onclick=" in html


def test_the_type() -> None:
    assert isinstance(PLANS["plain"]().diff(PLANS["plain"]()), Difference)


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(fxremat.FxrematError, match=r"'40%' is not a plan; .*plan\.within\('40%'\)"):
        PLANS["plain"]().diff("40%")  # type: ignore[arg-type]
