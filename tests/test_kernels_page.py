"""The tables of docs/kernels.md: what fxremat is compared with at each budget, and what the page says of it.

The record is made by hand: nothing is compiled here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import kernel_starts, kernels_page, readme
from benchmarks.kernel_starts import NOTHING, OTHERS, SAME
from benchmarks.kernel_starts import Row as Start
from benchmarks.kernels import (
    CHECKPOINTED,
    COMPILED,
    EAGER,
    OURS,
    OURS_EAGER,
    SWEPT,
    Record,
    Row,
    add,
    parse,
    worst_difference,
)
from benchmarks.kernels_page import cells, fastest_that_fits, fits

pytestmark = pytest.mark.long

CONDITIONS = {
    "date": "2026-01-01", "cpu": "a CPU", "cores": 2, "torch": "2", "threads": 1, "rounds": 7,
    "load_before": 0.1, "load_after": 0.2, "minutes": 3.0,
}  # fmt: skip


def row(family: str, peak: int, seconds: float, setting: str = "", off: float = 1e-6) -> Row:
    return Row(
        family=family, setting=setting, place=1, peak=peak, seconds=seconds, first_seconds=9.0,
        same_bits=True, worst_to_eager=2e-6, worst_to_compiled=3e-6, all_to_eager=off, all_to_compiled=off,
    )  # fmt: skip


def ours(family: str, percent: float | None, mem: int, peak: int, seconds: float, place: int = 1) -> Row:
    setting = "least" if percent is None else f"{percent:g} %"
    found = row(family, peak, seconds, setting)
    return replace(found, percent=percent, budget=mem, minimum=300, predicted_peak=peak - 10, place=place)


def refused(family: str, percent: float, mem: int) -> Row:
    error = "BudgetTooSmall: no | schedule"
    return Row(
        family=family, setting=f"{percent:g} %", percent=percent, budget=mem, minimum=300, error=error
    )


ROWS = [
    row(EAGER, 1000, 1.0),
    row(COMPILED, 900, 0.8),
    row(SWEPT, 600, 1.0, "0.5"),
    row(SWEPT, 580, 1.25, "0.4"),  # less memory, but slower
    row(SWEPT, 601, 0.5, "0.3", off=0.9),  # a byte too much for 60 %
    Row(family=SWEPT, setting="0.2", error="RuntimeError: it does not compile"),
    row(CHECKPOINTED, 420, 1.5),
    ours(OURS, 80, 800, 790, 0.4),
    replace(ours(OURS, 60, 600, 600, 0.5, 2), regions=20, distinct=7, compiling_seconds=4.0),
    ours(OURS, 50, 500, 500, 3.0, 3),
    ours(OURS, 40, 400, 390, 2.0, 4),
    refused(OURS, 20, 200),
    ours(OURS, None, 300, 300, 2.5, 6),
    ours(OURS_EAGER, 80, 800, 800, 0.8),
    ours(OURS_EAGER, 60, 600, 600, 4.0, 2),
    ours(OURS_EAGER, None, 350, 350, 3.0, 6),
]
RECORD = Record(model="unet", size="full", conditions=CONDITIONS, rows=ROWS)
CELLS = {cell.ours.setting: cell for cell in cells([RECORD])}


@pytest.mark.parametrize(
    ("budget", "name"),
    [
        (1000, "torch.compile, budget 0.3"),
        (600, "torch.compile, budget 0.5"),
        (599, "torch.compile, budget 0.4"),
        (420, "torch.compile + checkpoint"),
        (419, None),
    ],
)
def test_the_fastest_that_fits(budget: int, name: str | None) -> None:
    found = fastest_that_fits(RECORD, budget)
    assert (found and found.name) == name


def test_plain_pytorch_is_one_of_the_ways() -> None:
    slow = replace(RECORD, rows=[row(EAGER, 1000, 1.0), row(COMPILED, 900, 1.1)])
    found = fastest_that_fits(slow, 1000)
    assert found is not None
    assert found.family == EAGER


def test_ratios() -> None:
    assert {name: cell.ratio for name, cell in CELLS.items()} == {
        "80 %": 0.8,
        "60 %": 0.5,
        "50 %": 2.0,
        "40 %": None,
        "20 %": None,
        "least": None,
    }
    assert {name: cell.ratio_to_eager for name, cell in CELLS.items() if cell.ratio_to_eager} == {
        "80 %": 0.5,
        "60 %": 0.125,
    }


def test_a_plan_above_its_budget_counts_for_nothing() -> None:
    over = replace(RECORD, rows=[*ROWS[:7], ours(OURS, 60, 600, 601, 0.5)])
    (cell,) = cells([over])
    assert not cell.holds
    assert cell.ratio is None
    assert "| **over the budget** |" in kernels_page.tables(text_of(over))
    assert not fits(refused(OURS, 20, 200), 200)


def test_means() -> None:
    assert kernels_page.mean([0.5, None, 2.0]) == "1.000 (2 budgets)"
    assert kernels_page.mean([None]) == "-"
    other = replace(RECORD, model="gpt", rows=[*ROWS[:4], ours(OURS, 60, 600, 600, 0.5)])
    text = kernels_page.tables(text_of(RECORD, other))
    assert "| unet | 0.928 (3 budgets) | 0.250 (2 budgets) |" in text  # (0.8 * 0.5 * 2) ** (1 / 3)
    assert "| gpt | 0.500 (1 budget) | - |" in text
    assert "| all | 0.795 (4 budgets) | 0.250 (2 budgets) |" in text  # 0.4 ** (1 / 4)


def test_lines_of_the_page() -> None:
    text = kernels_page.tables(text_of(RECORD))
    sweep = "torch.compile, budget"
    for line in (
        f"| unet | 80 % | 0.400 | 0.800 | 0.500 | `{sweep} 0.3` † | 0.80 | 78.0 % | 79.0 % |",
        f"| unet | 60 % | 0.500 | 4.000 | 1.000 | `{sweep} 0.5` | 0.50 | 59.0 % | 60.0 % |",
        "| unet | 50 % | 3.000 | - | 1.500 | `torch.compile + checkpoint` | **2.00** | 49.0 % | 50.0 % |",
        "| unet | 40 % | 2.000 | - | none |  | alone | 38.0 % | 39.0 % |",
        "| unet | 20 % | - | - | none |  | - | - | - |",
        "| unet | least, 30.0 % | 2.500 | 3.000 in 35.0 % | none |  | alone | 29.0 % | 30.0 % |",
        "| unet | 9.0 s | 9.0 s | 9.0 s | 4.0 s | 20, 7 |",
        "| unet | 2.0e-06 | 3.0e-06 | 2.0e-06 | yes |",
        f"`{sweep} 0.2` failed: RuntimeError: it does not compile",
        "`fxremat inductor 20 %` failed: BudgetTooSmall: no / schedule",
        "| unet | 2026-01-01 | a CPU, 2 cores | 2 | 1 | 7 | 0.1 to 0.2 | 3.0 |",
    ):
        assert line in text.splitlines()


def test_other_bits_are_told_of() -> None:
    unequal = replace(RECORD, rows=[*ROWS, replace(ROWS[7], same_bits=False)])
    assert "| unet | 2.0e-06 | 3.0e-06 | 2.0e-06 | **no** |" in kernels_page.tables(text_of(unequal))


def test_records_join_those_of_other_models(tmp_path: Path) -> None:
    path = tmp_path / "results" / "kernels.json"
    other = replace(RECORD, model="gpt")
    for record in (replace(RECORD, rows=ROWS[:1]), other, RECORD):
        add(path, record)
    assert parse(path.read_text()) == [other, RECORD]
    assert [file.name for file in path.parent.iterdir()] == ["kernels.json"]


def test_differences_of_gradients() -> None:
    wanted = [torch.tensor([3.0, 4.0]), torch.tensor([100.0])]
    assert worst_difference(wanted, wanted) == 0
    assert worst_difference([torch.tensor([3.0, 4.5]), torch.tensor([101.0])], wanted) == pytest.approx(0.1)
    assert worst_difference(wanted[:1], wanted) == float("inf")


def test_the_page_takes_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    add(tmp_path / "kernels.json", RECORD)
    page = readme.filled("before\n<!-- kernels -->\nof an older record\n<!-- /kernels -->\nafter\n")
    assert page.startswith("before\n<!-- kernels -->\n| model | budget |")
    assert page.endswith("\n<!-- /kernels -->\nafter\n")
    assert "of an older record" not in page


def text_of(*records: Record) -> str:
    return json.dumps([asdict(record) for record in records])


def test_starts_stand_beside_a_cold_torch_compile() -> None:
    rows = [
        Start(model="gpt", percent=None, known=NOTHING, seconds=20.0),
        Start(model="gpt", percent=None, known=SAME, seconds=5.0),
        Start(model="gpt", percent=60.0, known=NOTHING, seconds=30.0),
        Start(model="gpt", percent=50.0, known=OTHERS, seconds=10.0),
        Start(model="gpt", percent=50.0, known=SAME, seconds=8.0),
    ]
    text = kernel_starts.tables(json.dumps({"conditions": CONDITIONS, "rows": [asdict(row) for row in rows]}))
    assert text.splitlines()[2:5] == [
        "| gpt | torch.compile | 20.0 s (1.00) |  | 5.0 s (0.25) |",
        "| gpt | 60 % | 30.0 s (1.50) |  |  |",
        "| gpt | 50 % |  | 10.0 s (0.50) | 8.0 s (0.40) |",
    ]
