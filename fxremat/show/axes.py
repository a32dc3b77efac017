"""Chooses round numbers with units for the axes of pictures, and draws axes in SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator

SIZES = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))
SECONDS = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))
_TICKS = 6  # maximum number of labelled ticks of an axis, 0 not counted


def round_steps(most: float, count: int = _TICKS) -> list[float]:
    """Return 0 and the multiples up to `most` of a round number (1, 2 or 5 times a power of ten).

    At most `count` of them are above 0.

    >>> round_steps(43.0)
    [0.0, 10.0, 20.0, 30.0, 40.0]
    """
    if not most > 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(step for factor in (1, 2, 5, 10) if most / (step := factor * power) <= count)
    return [number * step for number in range(int(most / step * (1 + 1e-9)) + 1)]


def size_ticks(most: float) -> list[tuple[float, str]]:
    """Return ticks (bytes, label) from 0 to at most `most`, such as (2097152.0, "2 MiB")."""
    return _labelled(most, SIZES)


def time_ticks(most: float) -> list[tuple[float, str]]:
    """Return ticks (seconds, label) from 0 to at most `most`, such as (0.02, "20 ms")."""
    return _labelled(most, SECONDS)


def _labelled(most: float, units: tuple[tuple[str, float], ...]) -> list[tuple[float, str]]:
    unit, factor = next(((u, f) for u, f in reversed(units) if most >= f), units[0])
    return [(step * factor, f"{step:g} {unit}") for step in round_steps(most / factor)]


def vertical_axis(
    ticks: list[tuple[float, str]], most: float, *, left: float, right: float, top: float, height: float
) -> Iterator[str]:
    """Yield SVG of horizontal grid lines, with labels to their left."""
    for value, label in ticks:
        y = top + height * (1 - value / most if most else 1)
        yield f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{label}</text>'


def horizontal_axis(
    ticks: list[tuple[float, str]], most: float, *, left: float, width: float, y: float
) -> Iterator[str]:
    """Yield SVG of a horizontal line with tick marks, and labels below it."""
    yield f'<line x1="{left:.1f}" x2="{left + width:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888"/>'
    for value, label in ticks:
        x = left + width * (value / most if most else 0)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}" stroke="#888"/>'
        yield f'<text x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle" fill="#555">{label}</text>'
