"""Chooses colors for modules: one for each layer or first-level module, or for several layers if there are many.

    embed, blocks.0, ..., blocks.31, head  ->  embed, blocks.0-5, blocks.6-11, ..., blocks.30-31, head

Modules too small to be seen, and the smallest of those that are too many, have none: they are drawn in gray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxremat.show.tree import is_number, ranges

COLORS = 9  # number of colors that assets/page.css defines
SMALL = 0.01  # least fraction of the picture that a part needs for its color to be recognized


@dataclass(frozen=True, kw_only=True)
class Palette:
    """The groups of modules that are drawn in each color, and the label of each color in the legend."""

    groups: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]

    def color_of(self, group: str) -> int:
        """Return the index of the color of a group of modules; -1: gray."""
        return next((number for number, groups in enumerate(self.groups) if group in groups), -1)

    def shade_of(self, group: str) -> int:
        """Return the shade of a group's color, 0 or 1; neighbouring groups of one color have different shades."""
        number = self.color_of(group)
        return 0 if number < 0 else self.groups[number].index(group) % 2


def palette(shares: Mapping[str, float], own: str) -> Palette:
    """Choose the colors of a picture.

    Args:
        shares: group of modules -> the fraction of the picture that it fills, in the order in which groups are
            stacked.
        own: label of the group "", which is the model's own ops.
    """
    seen = [group for group, share in shares.items() if share > SMALL]
    runs = _runs(seen, 1)
    for length in range(2, len(seen) + 1):
        if len(runs) <= COLORS:
            break
        runs = _runs(seen, length)
    largest = sorted(runs, key=lambda run: sum(shares[group] for group in run), reverse=True)[:COLORS]
    kept = tuple(run for run in runs if run in largest)
    return Palette(groups=kept, labels=tuple(_label(run) or own for run in kept))


def _runs(groups: Sequence[str], length: int) -> list[tuple[str, ...]]:
    """Return the groups in order, with up to `length` neighbouring layers of one list of layers in each tuple."""
    runs: list[tuple[str, ...]] = []
    for outer, together in groupby(groups, key=lambda g: g.rpartition(".")[0] if is_number(_last(g)) else (g,)):
        layers = list(together)
        step = length if isinstance(outer, str) else 1
        runs += [tuple(layers[first : first + step]) for first in range(0, len(layers), step)]
    return runs


def _label(run: Sequence[str]) -> str:
    if len(run) == 1:
        return run[0]
    outer = run[0].rpartition(".")[0]
    return f"{outer}{'.' if outer else ''}{ranges(int(_last(group)) for group in run)}"


def _last(group: str) -> str:
    return group.rpartition(".")[2]
