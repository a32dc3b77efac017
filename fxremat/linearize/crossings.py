"""Positions at which the forward may be cut into blocks: those that few values, or few bytes, cross.

    crossing(p) = the values made by forward ops 0..p and read by forward ops after p, without parameters, inputs and
                  values that depend on nothing trained, such as masks
    cut         = a position with at most `width` crossing values that are not carried
    low point   = a position that fewer bytes cross than those around it

Carrying a value (a UNet's skip, an encoder's output, the result of the first of two parallel branches) means
keeping it from its forward to its backward: this costs a constant amount of memory and allows cuts for as long
as the value lives. A value that is not carried is part of every boundary that it crosses. Which is better
depends on the budget, so several ways to cut are tried, each with its set of carried values:

    one value at each cut, after carrying the 0, 1, 2, ... values that allow the most cuts          carry_levels
    low points; values that cross many of them are carried, or none are                             low_cuts
    all positions that no more than a few values cross                                              cuts(width=...)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxremat.step.step_graph import StepGraph

CARRY_AT_MOST = 8  # maximum number of values that are kept from forward to backward so that the graph can be cut
# a value is carried (kept from forward to backward) if the cuts it allows span this fraction of the forward's
# seconds
LEAST_SPAN = 0.12
LEAST_CUTS = 5  # a value is carried (kept from forward to backward) if that allows at least this many cuts
LONG_LIVED = (1, 4)  # values that cross more than this many low points (possible cuts) are carried; each is tried


@dataclass(frozen=True)
class Crossing:
    """The values that cross each position of the forward: computed before it, and read by forward ops after it."""

    at: tuple[frozenset[int], ...]
    worth_keeping: frozenset[int]  # values that the backward reads too; only cuts that such values cross are useful

    def cuts(self, carried: frozenset[int] = frozenset(), width: int = 1) -> tuple[int, ...]:
        """Return the positions (op numbers) that at most `width` values cross, not counting the values `carried`.

        Of successive positions that the same values cross, only the first is returned. Positions are left out
        if the backward does not read the crossing values (a BatchNorm's output before its ReLU), since plans
        would save them for nothing.
        """
        found: list[int] = []
        before: frozenset[int] | None = None
        for position, values in enumerate(self.at[:-1]):
            left = values - carried
            if len(left) <= width and left != before and left <= self.worth_keeping:
                found.append(position)
                before = left
            elif len(left) > width:
                before = None
        return tuple(found)

    def low_points(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the positions that fewer bytes cross than the positions before and after.

        Of neighbouring positions with equally many bytes, those are returned whose crossing values the backward
        reads, one for each set of values; if there are none, the first position.
        """
        cost = [sum(sizes[value] for value in values) for values in self.at[:-1]]
        levels = [list(group) for _, group in groupby(range(len(cost)), key=cost.__getitem__)]
        found: list[int] = []
        for number, level in enumerate(levels):
            around = [
                cost[levels[other][0]] for other in (number - 1, number + 1) if 0 <= other < len(levels)
            ]
            if all(cost[level[0]] < bytes_ for bytes_ in around):
                found += self._distinct(level)
        return tuple(found)

    def _distinct(self, positions: Sequence[int]) -> list[int]:
        """Return one position for each set of crossing values that the backward reads.

        If there is none, the first position.
        """
        first: dict[frozenset[int], int] = {}
        for position in positions:
            if self.at[position] <= self.worth_keeping:
                first.setdefault(self.at[position], position)
        return list(first.values()) or [positions[0]]


def low_cuts(crossing: Crossing, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], frozenset[int]]]:
    """Yield ways to cut the forward at its low points, as (positions, values to carry).

    Values that cross more than a few low points are carried, which means kept from their forward to their
    backward; in the last way none are.

    Args:
        sizes: bytes of each value, by number.
    """
    points = crossing.low_points(sizes)
    crosses = Counter(value for point in points for value in crossing.at[point])
    for most in LONG_LIVED:
        yield points, frozenset(value for value, times in crosses.items() if times > most)
    yield points, frozenset()


def crossings(graph: StepGraph) -> Crossing:
    """Return the values that cross each position of the forward. O(ops * width)."""
    last: dict[int, int] = {}
    for op in graph.forward_ops:
        for (
            value
            # `again_reads` omits running statistics, which one call of a layer passes to the next
        ) in op.again_reads:
            last[value] = op.index
    live: set[int] = set()
    at: list[frozenset[int]] = []
    for op in graph.forward_ops:
        if not op.anchored:
            live.update(value for value in op.writes if last.get(value, -1) > op.index)
        live = {value for value in live if last[value] > op.index}
        at.append(frozenset(live))
    read = {value for op in graph.backward_ops for value in op.reads}
    return Crossing(tuple(at), frozenset(read))


def carry_levels(graph: StepGraph, crossing: Crossing, work: Sequence[float]) -> Iterator[frozenset[int]]:
    """Yield sets of values to carry (keep from forward to backward), starting with the empty set.

    Each further set adds the value that allows the most new cuts.

    Args:
        work: seconds of each forward op; a value is carried only if it allows cuts over a large part of their sum.
    """
    carried: frozenset[int] = frozenset()
    yield carried
    while len(carried) < CARRY_AT_MOST:
        gain = _gains(crossing, carried, work)
        best = max(gain, key=lambda value: (gain[value], -value), default=None)
        if best is None:
            return
        carried |= {best}
        yield carried


def _gains(crossing: Crossing, carried: frozenset[int], work: Sequence[float]) -> dict[int, float]:
    """Return, for each value worth carrying, the fraction of the forward's seconds over which carrying it allows cuts.
    """
    opened: dict[int, list[int]] = {}
    for position, values in enumerate(crossing.at[:-1]):
        left = values - carried
        if len(left) == 2:
            for value in left:
                if left - {value} <= crossing.worth_keeping:
                    opened.setdefault(value, []).append(position)
    total = sum(work) or 1.0
    gains = {}
    for value, positions in opened.items():
        distinct = {crossing.at[position] for position in positions}
        span = sum(work[positions[0] : positions[-1] + 1]) / total
        if len(distinct) >= LEAST_CUTS and span >= LEAST_SPAN:
            gains[value] = span
    return gains
