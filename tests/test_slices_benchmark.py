"""The benchmark of slices: other heads compute the same loss, and its tables say what is on record."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

from benchmarks import heads, slices_page
from benchmarks.models.case import Case
from benchmarks.models.words import GPT, EncoderDecoder, LanguageModel, Llama, Shape, case_of
from benchmarks.slices import Row, compared, outcome

SHAPE = Shape(words=64, width=16, layers=2, heads=2, batch=2, tokens=16)
CASES = [
    case_of("gpt", GPT, SHAPE),
    case_of("t5", EncoderDecoder, SHAPE, sides=2),
    case_of("llama", Llama, SHAPE),
]
FUSED = pytest.mark.skipif(not hasattr(nn.functional, "linear_cross_entropy"), reason="torch 2.11 has no such function")
EAGER = [
    pytest.param(way, marks=FUSED) if way == "linear_cross_entropy" else way
    for way in heads.WAYS
    if not way.startswith("Inductor")
]

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("torch_ready")]


@pytest.mark.parametrize("way", EAGER)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_other_heads_compute_the_same(case: Case, way: str) -> None:
    model = case.model()
    assert isinstance(model, LanguageModel)
    got = outcome(heads.WAYS[way](model), case.batch())
    found = compared(got, outcome(case.model(), case.batch()))
    assert found["worst_error"] < 1e-5
    assert found["loss_ulps"] < 8


def test_a_difference_is_found() -> None:
    case = CASES[0]
    plain = outcome(case.model(), case.batch())
    model = case.model()
    with torch.no_grad():
        model.get_parameter("head.weight").mul_(1.5)
    found = compared(outcome(model, case.batch()), plain)
    assert found["worst_error"] > 1e-2
    assert found["equal_gradients"] < found["gradients"]


def test_tables_say_what_is_on_record() -> None:
    numbers = {"seconds": 2.0, "plain_seconds": 1.0, "loss_ulps": 0.0, "worst_error": 2e-7, "gradients": 5}
    common = {"model": "gpt_32k", "date": "2026-01-01", "equal_gradients": 4, **numbers}
    plan = {"predicted_peak": 40_000_000, "peak": 40_000_000, "planning_seconds": 3.0}
    region = {"parts": 16, "rows": 32, "inside": True, "where": "head", "sums": 2}
    rows = [
        Row(way="plain", peak=200_000_000, **common),
        Row(way="fxremat, least", minimum=100_000_000, **plan, **common),
        Row(
            way="slices 25%",
            minimum=60_000_000,
            model="gpt_32k",
            date="2026-01-01",
            error="BudgetTooSmall: no",
        ),
        Row(way="slices, least", minimum=40_000_000, regions=(region,), **plan, **common),
        Row(way="by hand 4", peak=80_000_000, **common),
        Row(way="slices for by hand 4", **plan, **common),
    ]
    conditions = {"cpu": "a CPU", "torch": "2", "steps": 7}
    text = slices_page.tables(json.dumps({"conditions": conditions, "rows": [asdict(row) for row in rows]}))
    assert "| GPT, 32,768 words | 200.0 MB | 100.0 MB | 2.00 | 40.0 MB | 40% | 2.00 |  |  | - |" in text
    assert "| slices, least | 16 | 40.0 MB | 40.0 MB | 2.00 | 0 | 2.0e-07 | 4 of 5 | 3.0 s |" in text
    assert "| by hand 4 | 80.0 MB | 2.00 | 2.0e-07 | 40.0 MB | 2.00 |" in text
    assert "Measured on 2026-01-01." in text
