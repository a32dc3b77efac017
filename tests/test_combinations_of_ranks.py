"""Ways of sharing a model among processes train with each feature as without fxremat, or are refused in a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import combinations_of_ranks as ranks
from benchmarks.combinations import Cell

REFUSED = {(way, "pipeline") for way in ranks.WAYS}
REFUSED |= {(way, "inductor") for way in ("sharded", "replicated", "tensor")}
REFUSED |= {(way, "hosted") for way in ("sharded", "around", "tensor")}


@pytest.mark.long
@pytest.mark.parametrize("names", list(ranks.every()), ids="+".join)
def test_a_cell(names: tuple[str, str]) -> None:
    cell = ranks.trained(*names)
    refused = names in REFUSED
    assert cell.outcome in (("refused",) if refused else ("bits", "rounding")), cell
    assert refused or (cell.peak is not None and cell.peak <= 1)
    assert cell.outcome != "rounding" or names in ranks.ROUNDED


def test_the_page_has_a_row_for_each_way_and_the_reasons() -> None:
    table = ranks.page(ranks.OUT.read_text())
    rows = [line for line in table.splitlines() if line.startswith("| **")]
    assert [row.split("**")[1] for row in rows] == list(ranks.WAYS)
    assert all(row.count("|") == len(ranks.FEATURES) + 2 and "|  |" not in row for row in rows)
    assert "WRONG" not in table
    assert "BROKEN" not in table
    page = Path(__file__).parents[1] / "docs" / "combinations.md"
    assert table in page.read_text()


def test_the_outcome_of_a_cell_is_that_of_the_rank_where_it_is_worse() -> None:
    fine = Cell(("sharded", "offload"), "bits", peak=0.5)
    off = replace(fine, outcome="wrong", off=0.5, peak=0.25)
    refused = replace(fine, outcome="refused", peak=None, why="FxrematError: no")
    assert ranks.worst([fine, off]) == replace(off, peak=0.5)
    assert ranks.worst([refused, refused]) == refused
    assert ranks.worst([fine, refused]).outcome == "broken"
