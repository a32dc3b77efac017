"""docs/models.md: its table is what is on record, and names every model."""

import re

import pytest

from benchmarks import models_page

TEXT = models_page.PAGE.read_text(encoding="utf-8")

pytestmark = pytest.mark.long


def test_the_table_is_what_is_on_record():
    assert models_page.filled(TEXT) == TEXT, "run `python -m benchmarks.models_page`"


def test_its_models_are_known_and_the_best_known_are_in_it():
    from benchmarks.models import libraries

    names = [name for name, _ in re.findall(r"^\| (\w+) \| `(\w+)` \|", TEXT, re.MULTILINE)]
    assert {"gpt2", "bert", "t5", "llama", "vit"} <= set(names) <= {*libraries.CAPTURED, *libraries.REFUSED}


def test_a_difference_or_a_peak_over_the_budget_is_said_out_loud():
    least = {"mem": 50, "measured_peak": 51, "different": []}
    half = {
        "mem": 60,
        "measured_peak": 60,
        "different": ["gradient of w"],
        "seconds": 1.5,
        "plain_seconds": 1.0,
    }
    row = {
        "model": "m",
        "kind": "M",
        "note": "",
        "plain_peak": 100,
        "refused": None,
        "least": least,
        "half": half,
    }
    assert models_page.line(row) == (
        "| m | `M` | 0 MB | 51 % | 1.50x | no: 1, gradient of w first |  **over the budget** |"
    )


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_links_lead_somewhere(path):
    assert (models_page.PAGE.parent / path).exists()
