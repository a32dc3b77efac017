"""Every pair of features trains as plain PyTorch does, within the budget, or is refused in a line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import combinations

pytestmark = pytest.mark.usefixtures("torch_ready")
REFUSED: set[tuple[str, ...]] = set()
# three at once: several graphs by other means, and compiled kernels with weights on the host
OTHERS = ("dynamic", "accumulation", "autocast", "outside")
THREE = [
    *(("break", means, other) for means in ("offload", "slices", "inductor") for other in OTHERS),
    ("break", "offload", "slices"),
    *(("inductor", "hosted", other) for other in (*OTHERS, "clipping", "scaler", "offload", "slices")),
]


@pytest.mark.long
@pytest.mark.parametrize("features", [*combinations.pairs(), *THREE], ids="+".join)
def test_features_go_together(features: tuple[str, ...]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cell = combinations.trained(features)
    finally:
        torch.set_num_threads(threads)
    refused = features in REFUSED
    assert cell.outcome in (("refused",) if refused else ("bits", "rounding")), cell
    assert refused or (cell.peak is not None and cell.peak <= 1)
    assert cell.outcome != "rounding" or combinations.INEXACT & {*features}


def test_the_page_has_a_row_for_each_feature_and_the_reasons() -> None:
    table = combinations.page(combinations.OUT.read_text())
    rows = [line for line in table.splitlines() if line.startswith("| **")]
    assert [row.split("**")[1] for row in rows] == list(combinations.FEATURES)
    assert all(row.count("|") == len(combinations.FEATURES) + 2 for row in rows)
    assert "WRONG" not in table
    assert "BROKEN" not in table
    page = Path(__file__).parents[1] / "docs" / "combinations.md"
    assert table in page.read_text()
