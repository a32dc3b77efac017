"""Compares two plans, for two budgets of a model or for two versions of it.

    print(plan.within("60%").diff(plan.within("40%")))

Figures are those of the second plan minus those of the first. Each op belongs to the row of exactly one module, so that
the rows add up to the totals; equal siblings share a row, and those that changed most come first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TypeVar

from fxremat.errors import FxrematError
from fxremat.planned_step import PlannedStep
from fxremat.show.labels import printable
from fxremat.show.modules import ModuleNode, Share, added, modules_of
from fxremat.show.moments import Moments
from fxremat.show.page_data import KINDS
from fxremat.show.table import WIDTH, Table
from fxremat.show.text import slicing_seconds, waiting_seconds
from fxremat.show.tree import OWN, Row, all_rows
from fxremat.step.kinds import MemoryKind
from fxremat.units import format_bytes, format_seconds, shortened

ROWS = 16  # maximum number of rows of modules that are shown
_FEW = 6  # maximum number of names shown of a list
_NAME = 48  # width of the column of module names
_INDENT = " " * 18
_SAME = "-"
_ROUNDING = 1e-9  # relative differences of times below this are rounding errors, and ignored
NOTHING = "no difference: the same budget, peak, time and least budget, and the same of every module"

_N = TypeVar("_N", int, float)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of an entire plan that are compared."""

    model: str  # the name of the model's class
    device: str  # the device, and how times were obtained: "CPU (measured times)"
    budget: int  # bytes
    peak: int  # predicted peak in bytes
    time: float  # predicted seconds of one forward and backward
    keep_all_time: float  # seconds of one forward and backward without recomputation
    waiting: float  # seconds spent waiting for copies or other ranks, less what the step without recomputation waits
    slicing: float  # seconds by which sliced ops take longer than the same ops unsliced
    minimum: int  # smallest budget in bytes that works
    at_peak: Mapping[MemoryKind, int]  # kind of memory -> its bytes at the peak

    @classmethod
    def of(cls, plan: PlannedStep, total: Share) -> Figures:
        """Return the figures of a plan; `total` has the bytes and seconds of all its modules together."""
        moments = Moments.of(plan.running.chosen, plan.running.costs)
        highest = max(range(len(moments.bytes)), key=moments.bytes.__getitem__, default=0)
        lives = moments.lives_at(highest)
        return cls(
            model=plan.graph.model,
            device=f"{plan.device} ({plan.timed} times)",
            budget=plan.budget,
            peak=plan.predicted_peak,
            time=plan.predicted_time,
            keep_all_time=plan.keep_all_time,
            waiting=waiting_seconds(plan, total),
            slicing=slicing_seconds(plan),
            minimum=plan.minimum,
            at_peak={kind: sum(life.bytes for life in lives if life.kind is kind) for kind in MemoryKind},
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A table row: how the figures of some modules change between two plans."""

    name: str  # the modules' names, such as "h.0-3, 7.mlp"
    count: int  # number of modules
    # figures of the modules together, such as saved bytes: those of the second plan minus those of the first
    share: Share


@dataclass(frozen=True, kw_only=True, eq=False)
class Difference:
    """The changes from one plan to another: the figures of the whole plan, and those of each module."""

    before: Figures
    after: Figures
    tree: ModuleNode  # the tree of modules with the changes of their figures
    only_before: tuple[str, ...]  # the outermost modules that only the first plan has
    only_after: tuple[str, ...]  # the outermost modules that only the second plan has

    @classmethod
    def of(cls, before: PlannedStep, after: object) -> Difference:
        """Compute the changes from the first plan to the second. O(steps).

        Raises `FxrematError` if `after` is no plan.
        """
        if not isinstance(after, PlannedStep):
            form = shortened(after)
            raise FxrematError(f"{form} is not a plan; for another budget: plan.diff(plan.within({form}))")
        trees = [modules_of(plan) for plan in (before, after)]
        first, second = ({node.path for node in tree.walk()} for tree in trees)
        return cls(
            before=Figures.of(before, trees[0].total),
            after=Figures.of(after, trees[1].total),
            tree=subtracted(*trees),
            only_before=outermost(trees[0], second),
            only_after=outermost(trees[1], first),
        )

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """The changes of modules whose figures differ, largest first; together they add up to `tree.total`."""
        found = [change for change in leaves(all_rows(self.tree, self.after.model)) if any(_shown(change.share))]
        columns = [*zip(*(_shown(change.share) for change in found), strict=True)]
        most = [max(map(abs, column)) or 1 for column in columns]

        def size(change: Change) -> float:
            return max(abs(part) / whole for part, whole in zip(_shown(change.share), most, strict=True))

        return tuple(sorted(found, key=size, reverse=True))

    def __bool__(self) -> bool:
        """Tell whether the two plans differ in anything that is compared."""
        figures = zip(_figures(self.before), _figures(self.after), strict=True)
        modules = self.changes or self.only_before or self.only_after
        return bool(modules) or any(abs(a - b) > _ROUNDING * abs(a) for a, b in figures)

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        if not self:
            return Table(heads=(), rows=(), notes=(NOTHING,))
        shown, others = self.changes[:ROWS], self.changes[ROWS:]
        rows = [_cells(change) for change in shown]
        if others:
            rest = added(change.share for change in others)
            rows.append(_cells(Change(f"{len(others)} others", sum(change.count for change in others), rest)))
        if rows:
            rows.append(_cells(Change(f"{self.after.model}, all of it", 1, self.tree.total)))
        return Table(
            title=("changes from the first plan to the second", *self._summary(), ""),
            heads=("module", "all of", "saved", "recomputed", "offloaded", "extra time"),
            rows=tuple(rows),
            notes=() if rows else ("the modules save, recompute and offload the same",),
            left=frozenset([0]),
            strong=frozenset([len(rows) - 1]),
        )

    def _summary(self) -> Iterator[str]:
        a, b = self.before, self.after
        for label, name, other in (("model", a.model, b.model), ("device", a.device, b.device)):
            if name != other:
                yield f"  {label:16}{printable(name)} -> {printable(other)}"
        yield _line("budget", (a.budget, b.budget), format_bytes, signed_bytes)
        yield _line("predicted peak", (a.peak, b.peak), format_bytes, signed_bytes)
        yield from _parts((KINDS[kind], signed_bytes(b.at_peak[kind] - a.at_peak[kind])) for kind in MemoryKind)
        yield _line("predicted time", (a.time, b.time), format_seconds, _seconds)
        yield from _parts(
            (
                ("keeping everything", _seconds(b.keep_all_time - a.keep_all_time)),
                ("recomputing", _seconds(self.tree.total.extra)),
                ("running in slices", _seconds(self._unless_rounding(b.slicing - a.slicing))),
                ("waiting", _seconds(self._unless_rounding(b.waiting - a.waiting))),
            )
        )
        yield _line("least budget", (a.minimum, b.minimum), format_bytes, signed_bytes)
        for where, names in (("first", self.only_before), ("second", self.only_after)):
            if names:
                more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
                text = f"only in the {where} plan: {', '.join(map(printable, names[:_FEW]))}{more}"
                yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=_INDENT)

    def _unless_rounding(self, seconds: float) -> float:
        return seconds if abs(seconds) > _ROUNDING * self.after.time else 0.0


def _figures(figures: Figures) -> tuple[float, ...]:
    return figures.budget, figures.peak, figures.time, figures.minimum


def _line(
    label: str, both: tuple[_N, _N], form: Callable[[_N], str], signed: Callable[[_N], str]
) -> str:
    first, second = both
    return f"  {label:16}{form(first):>11} -> {form(second):>11}   {signed(second - first)}"


def _parts(parts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield lines of text such as "kept +1.2 MiB, ..."; parts without a change are left out."""
    found = ", ".join(f"{label} {change}" for label, change in parts if change != _SAME)
    if found:
        yield from textwrap.wrap(found, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _cells(change: Change) -> tuple[str, ...]:
    name = printable(change.name)
    name = name if len(name) <= _NAME else f"..{name[2 - _NAME :]}"
    share = change.share
    sizes = (signed_bytes(share.saved), signed_bytes(share.recomputed), signed_bytes(share.offloaded))
    return name, f"{change.count} x" if change.count > 1 else "", *sizes, _seconds(share.extra)


def signed_bytes(change: int) -> str:
    """Format a change in bytes: "+1.2 MiB", "-300 B", or "-" where nothing changes."""
    return f"{'+' if change > 0 else ''}{format_bytes(change)}" if change else _SAME


def _seconds(change: float) -> str:
    return f"{'-' if change < 0 else '+'}{format_seconds(abs(change))}" if change else _SAME


def _shown(share: Share) -> tuple[float, ...]:
    return share.saved, share.recomputed, share.offloaded, share.extra




def subtracted(before: ModuleNode, after: ModuleNode) -> ModuleNode:
    """Return a tree of the modules of both trees, with the figures of `after` minus those of `before`."""
    parts = {part.path: part for part in before.parts}
    others = {part.path: part for part in after.parts}
    paths = dict.fromkeys((*others, *parts))
    pairs = ((parts.get(path, _empty(path)), others.get(path, _empty(path))) for path in paths)
    return ModuleNode(
        path=after.path, own=_less(after.own, before.own), parts=tuple(subtracted(*pair) for pair in pairs)
    )


def _empty(path: str) -> ModuleNode:
    return ModuleNode(path=path, own=Share(), parts=())


def _less(after: Share, before: Share) -> Share:
    """Return `after - before`, with 0 for seconds that differ only by rounding errors."""
    found = astuple(after - before)
    pairs = zip(found, astuple(after), strict=True)
    exact = (0.0 if isinstance(x, float) and abs(x) <= _ROUNDING * abs(y) else x for x, y in pairs)
    return Share(*exact)  # type: ignore[arg-type]


def outermost(tree: ModuleNode, others: set[str]) -> tuple[str, ...]:
    """Return the outermost modules of a tree whose paths are not among `others`."""
    if tree.path not in others:
        return (tree.path,)
    return tuple(path for part in tree.parts for path in outermost(part, others))


def leaves(rows: Sequence[Row]) -> Iterator[Change]:
    """Yield a change for each row without rows of submodules below it, with its full path as its name."""
    outer: list[str] = []
    for place, row in enumerate(rows):
        outer[row.depth :] = [row.label]
        if place + 1 < len(rows) and rows[place + 1].depth > row.depth:
            continue
        yield Change(_name(outer, row), row.count, row.share)


def _name(labels: Sequence[str], row: Row) -> str:
    if row.depth == 0:
        return f"{row.label}, its own ops"
    if row.label == OWN:
        return f"{'.'.join(labels[1:-1]) or labels[0]}, its own ops"
    return ".".join(labels[1:])
