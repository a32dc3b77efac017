"""Makes table rows of the modules of a plan: equal siblings share a row, and negligible modules share the last one.

    GPT                       41.2 MiB   80.1 MiB        -    145 ms
      blocks.0-5 (6 x)         6.1 MiB    8.2 MiB        -   18.2 ms      each
        mlp                    ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise, takewhile

from fxremat.show.modules import ModuleNode, Share, added

MANY = 4  # this many or more numbers at equal distances, such as 2, 4, 6, 8, are shown as a range
# fractions of the model's figures; modules below a fraction are combined, and larger fractions give fewer rows
NEGLIGIBLE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
OWN = "its own ops"
DEEPEST = 12  # maximum depth of modules that is shown


Figures = Callable[[Share], tuple[float, ...]]


def what_it_does(share: Share) -> tuple[float, ...]:
    """Return the figures of some ops that a plan's table of modules has columns for."""
    return share.saved, share.recomputed, share.offloaded, share.extra


@dataclass(frozen=True, slots=True)
class Row:
    """A table row of one or more modules."""

    depth: int  # depth of the row's modules: 0 for the model, 1 for its submodules, and so on
    label: str  # names of the row's modules, such as "blocks.0-5"
    count: int  # number of modules
    share: Share  # figures of the modules together
    paths: tuple[str, ...]  # full paths of the modules

    @property
    def each(self) -> Share:
        """Average figures of one of the modules."""
        if self.count == 1:
            return self.share
        return Share(*(x // self.count if isinstance(x, int) else x / self.count for x in astuple(self.share)))


def rows_of(tree: ModuleNode, most: int, name: str, figures: Figures = what_it_does) -> list[Row]:
    """Return rows for a model's modules, with as many levels of submodules as fit into `most` rows.

    Args:
        name: the name of the model, for the first row.
        figures: returns the figures that the table shows; modules for which all are 0 are left out.
    """
    tries = [(1, share) for share in reversed(NEGLIGIBLE[1:])]
    tries += [(levels, NEGLIGIBLE[0]) for levels in range(1, DEEPEST)]
    found = [Row(0, name, 1, tree.total, ("",))]
    for levels, share in tries:
        rows = [found[0], *_Table(figures, tuple(share * x for x in figures(tree.total))).inside(tree, 1, levels)]
        if len(rows) > most:
            break
        found = rows
    return found


def all_rows(tree: ModuleNode, name: str, figures: Figures = what_it_does) -> list[Row]:
    """Return rows for all modules of a model called `name`; equal siblings share a row."""
    return [Row(0, name, 1, tree.total, ("",)), *_Table(figures, ()).inside(tree, 1, DEEPEST)]


@dataclass(frozen=True)
class _Table:
    """Makes the rows below a module's row; modules with less of each figure than `least` are combined."""

    figures: Figures
    least: Sequence[float]

    def inside(self, node: ModuleNode, depth: int, levels: int) -> Iterator[Row]:
        """Yield the rows of a module's submodules, down to `levels` levels."""
        if not levels or not node.parts:
            return
        small: list[ModuleNode] = []
        if any(self.figures(node.own)) and any(map(self._has_any, node.parts)):
            yield Row(depth, OWN, 1, node.own, (node.path,))
        for group in self._groups(self._transparent(node)):
            share = added(part.total for part in group)
            if not any(map(self._has_any, group)):
                continue
            if self._is_small(share):
                small += group
                continue
            yield _row(node, group, share, depth)
            for row in self.inside(group[0], depth + 1, levels - 1):
                yield _of_all(row, group)
        if len(small) == 1:
            yield _row(node, small, small[0].total, depth)
        elif small:
            share = added(part.total for part in small)
            yield Row(depth, f"{len(small)} others", 1, share, tuple(part.path for part in small))

    def _is_small(self, share: Share) -> bool:
        figures = self.figures(share)
        return any(self.least) and all(x < least for x, least in zip(figures, self.least, strict=True) if least)

    def _has_any(self, module: ModuleNode) -> bool:
        """Tell whether a module, or one inside of it, has any nonzero figure.

        Sums are not enough: in a difference of two trees they may cancel.
        """
        return any(any(self.figures(node.own)) for node in module.walk())

    def _transparent(self, node: ModuleNode) -> Iterator[ModuleNode]:
        """Yield the submodules of a module; a mere container, such as a ModuleList, is replaced by its own submodules.
        """
        for part in node.parts:
            holds = len(part.parts) == 1 or all(is_number(inner.name) for inner in part.parts)
            if part.parts and not any(self.figures(part.own)) and holds and not is_number(part.name):
                yield from self._transparent(part)
            else:
                yield part

    def _groups(self, parts: Iterable[ModuleNode]) -> list[list[ModuleNode]]:
        """Group numbered siblings, such as layers, whose rows would look equal; other modules are groups of one."""
        found: dict[object, list[ModuleNode]] = {}
        for part in parts:
            key = (part.path.rpartition(".")[0], self._looks(part)) if is_number(part.name) else part.path
            found.setdefault(key, []).append(part)
        return list(found.values())

    def _looks(self, node: ModuleNode) -> object:
        """Return what the rows of a module and its submodules would show, except its name; seconds to 3 digits."""
        own = tuple(f"{x:.3g}" if isinstance(x, float) else x for x in self.figures(node.own))
        return own, tuple((part.name, self._looks(part)) for part in node.parts)


def is_number(name: str) -> bool:
    """Tell whether a module's name is a number without leading zeros, as in a ModuleList."""
    return re.fullmatch("0|[1-9][0-9]*", name) is not None


def _row(outer: ModuleNode, group: Sequence[ModuleNode], share: Share, depth: int) -> Row:
    first = group[0].path.removeprefix(f"{outer.path}." if outer.path else "")
    paths = tuple(part.path for part in group)
    if len(group) == 1:
        return Row(depth, first, 1, share, paths)
    before = first.rpartition(".")[0]
    numbers = ranges(sorted(int(part.name) for part in group))
    return Row(depth, f"{before}.{numbers}" if before else numbers, len(group), share, paths)


def _of_all(row: Row, group: Sequence[ModuleNode]) -> Row:
    """Extend the row of a submodule of a group's first module to that submodule in all modules of the group."""
    if len(group) == 1:
        return row
    before = group[0].path
    paths = tuple(part.path + path.removeprefix(before) for part in group for path in row.paths)
    inside = [part.at(part.path + path.removeprefix(before)) for part in group for path in row.paths]
    own = row.label == OWN
    share = added(node.own if own else node.total for node in inside)
    return replace(row, count=row.count * len(group), share=share, paths=paths)


def ranges(numbers: Iterable[int]) -> str:
    """Format increasing numbers; neighbours, and four or more at equal distances, become ranges.

    >>> ranges([1, 2, 3, 5, 8, 9]), ranges([2, 4, 6, 8, 10])
    ('1-3, 5, 8-9', '2,4..10')
    """
    found, left = [], list(numbers)
    while left:
        count, distance = _run(left)
        if distance == 1 and count > 1:
            found.append(f"{left[0]}-{left[count - 1]}")
        elif count >= MANY:
            found.append(f"{left[0]},{left[1]}..{left[count - 1]}")
        else:
            count = 1
            found.append(str(left[0]))
        del left[:count]
    return ", ".join(found)


def _run(numbers: Sequence[int]) -> tuple[int, int]:
    """Return how many of the first numbers are at equal distances, and the distance; (1, 0) for a single number."""
    distances = [after - before for before, after in pairwise(numbers)]
    equal = list(takewhile(lambda distance: distance == distances[0], distances))
    return len(equal) + 1, distances[0] if distances else 0
