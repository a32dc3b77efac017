"""Bytes and budgets: every right form, and the wrong ones with the error that shows the right ones."""

import math

import numpy as np
import pytest

from fxremat.errors import InvalidBudget
from fxremat.units import (
    Auto,
    Bytes,
    Percent,
    format_bytes,
    format_ratio,
    format_seconds,
    parse_budget,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("300MB", 300_000_000),
        ("4 GB", 4_000_000_000),
        ("1.5kib", 1536),
        (" 7 B ", 7),
        ("4294967296", 2**32),
        (4294967296, 2**32),
        ("0.3 kB", 300),
    ],
)
def test_bytes(text, count):
    assert parse_bytes(text) == count
    assert parse_budget(text) == Bytes(count)


@pytest.mark.parametrize(
    ("text", "budget"), [("60%", Percent(60.0)), ("0.5 %", Percent(0.5)), (" Auto ", Auto())]
)
def test_other_budgets(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "wrong",
    [None, True, False, 0, -1, 4.0, math.nan, math.inf, "", "GiB", "4 Gi", "-4GiB", "nan", "0", "0%", "-3%",
     "4 5 GB", "four", b"4GiB", [4], 2**60, "99999999TiB", "٤GiB", "0.1B"],
)  # fmt: skip
def test_wrong_budgets_show_the_right_forms(wrong):
    with pytest.raises(InvalidBudget) as error:
        parse_budget(wrong)
    message = str(error.value)
    assert "\n" not in message
    assert all(form in message for form in ("4GiB", "300MB", "4294967296", "60%", "auto", repr(wrong)))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [(1.5e9, "int(1.5e9)"), ("4e9", "int(4e9)"), (1234567891.5, "int(1234567891.5)"), (np.float64(3e9), "int(3e9)"),
     (0.6, '"60%"'), (1.0, '"100%"'), (0.333, '"33.3%"')],
)  # fmt: skip
def test_what_was_meant_comes_first(wrong, right):
    with pytest.raises(InvalidBudget) as error:
        parse_budget(wrong)
    assert f"is not a budget; write {right}, " in str(error.value)


def test_integers_of_numpy_are_bytes():
    assert parse_budget(np.int64(5)) == Bytes(5)
    assert type(parse_bytes(np.uint8(5))) is int
    with pytest.raises(InvalidBudget):
        parse_bytes(np.bool_(True))


@pytest.mark.parametrize("wrong", ["x" * 100_000, b"y" * 100_000, [1] * 100_000, "9" * 100_000, "9" * 100_000 + "%"])
def test_long_input_is_not_repeated(wrong):
    with pytest.raises(InvalidBudget) as error:
        parse_budget(wrong)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("wrong", ["60%", "auto", None, 1.5, -2])
def test_a_number_of_bytes_is_no_other_budget(wrong):
    with pytest.raises(InvalidBudget, match="4GiB"):
        parse_bytes(wrong)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (365, "365 B"), (1024, "1.0 KiB"), (112 * 2**20, "112.0 MiB"), (3650722201, "3.4 GiB")],
)
def test_format(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.03, "1.03 s"), (0.9999, "1 s"), (0.0582, "58.2 ms"), (9.999e-4, "1 ms"), (9.11e-6, "9.11 us"),
     (1e-9, "0.001 us"), (999.9, "1000 s"), (12345.6, "12346 s"), (-1.1e-3, "-1.1 ms")],
)  # fmt: skip
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_ratios_of_nothing():
    assert [format_ratio(*of, ".2f") for of in ((3, 2), (0, 2), (0, 0), (1, 0))] == ["1.50", "0.00", "1.00", "inf"]
