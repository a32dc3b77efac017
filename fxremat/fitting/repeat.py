"""A captured step with more equal layers than were captured: what a capture of the deeper model would give.

    captured    before | W0 | W1 | W2 | after            windows: the ops of one period of equal layers
    repeated    before | W0 | W1 | C1 ... Cm | W2 | after

Every window has one part in the forward and one in the backward. An op of a window reads values of windows at a fixed
distance (the layer before, for the forward), weights of its own layer, or values that all windows share (masks, an
encoder's output). That is compared between all windows; a copy of W1 then reads by the same rule. Nothing is assumed of
the model: where the windows differ in anything but names, `NotPeriodic` is raised.

Windows may be of several kinds, which have the same ops and read other shared values: layers with a sliding window of
attention and layers without. A copy is then one of a window of its kind.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxremat.errors import FxrematError
from fxremat.step.costs import Costs
from fxremat.step.source import Source
from fxremat.step.step_graph import Op, Origin, StepGraph, Value

LEAST_WINDOWS = 3  # the first and the last one may border on other ops; one between them is the template


class NotPeriodic(FxrematError):
    """The layers of a captured step are not equal, so that their number cannot be changed."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The layers of a captured stack that repeat: which of them there are, and how many make one period."""

    path: str  # the module that holds the layers, such as "model.layers"
    first: int  # number of the first layer that belongs to a window
    period: int  # layers in one window
    kinds: tuple[int, ...]  # of each window
    before: int  # the number of windows before the copies
    copies: tuple[int, ...]  # the kind of each copy, in the order of the forward

    @property
    def count(self) -> int:
        """The number of windows."""
        return len(self.kinds)


@dataclass(frozen=True, kw_only=True, eq=False)
class Repeated:
    """A step graph with more layers, and the captured op and value that each of its ops and values is like."""

    graph: StepGraph
    ops: tuple[int, ...]
    values: tuple[int, ...]

    def costs(self, of: Costs) -> Costs:
        """Return the costs of the ops and values, given those of the captured graph."""
        places: dict[int, list[int]] = {}
        for place, op in enumerate(self.ops):
            places.setdefault(op, []).append(place)
        copies: dict[int, list[int]] = {}
        for place, value in enumerate(self.values):
            copies.setdefault(value, []).append(place)
        sizes = replace(
            of.sizes,
            values=tuple(of.sizes.values[value] for value in self.values),
            workspace=tuple(of.sizes.workspace[op] for op in self.ops),
        )
        return Costs(
            seconds=tuple(of.seconds[op] for op in self.ops),
            sizes=sizes,
            fresh=frozenset(place for op in of.fresh for place in places.get(op, ())),
            staying=frozenset(place for value in of.staying for place in copies.get(value, ())),
        )


def repeated(graph: StepGraph, windows: Windows) -> Repeated:
    """Return the step with further windows of equal layers, the copies. O(ops of the result).

    The first or the last window may differ from the others, since gradients of what all layers read are not yet, or no
    longer, added up there. A stack that no op belongs to is left as it is.

    Raises:
        NotPeriodic: other windows differ, or something else than a neighbour depends on one of them.
    """
    inside = f"{windows.path}."
    if not any(f"{source.module}.".startswith(inside) for source in graph.sources):
        return Repeated(graph=graph, ops=tuple(range(len(graph.ops))), values=tuple(range(len(graph.values))))
    reasons = []
    for part in _parts(windows):
        try:
            return _Copier(_Periods(graph, part)).result()
        except NotPeriodic as error:
            reasons.append(error)
    raise reasons[0] if reasons else NotPeriodic(f"{windows.path}: {windows.count} periods are too few to compare")


def _parts(windows: Windows) -> list[Windows]:
    """Return the windows, then those without the last, the first, and both, as far as enough are left."""
    fewer = replace(windows, kinds=windows.kinds[:-1])
    later = replace(
        windows, first=windows.first + windows.period, kinds=windows.kinds[1:], before=windows.before - 1
    )
    inner = replace(later, kinds=later.kinds[:-1])
    return [part for part in (windows, fewer, later, inner) if part.count >= LEAST_WINDOWS and _has_templates(part)]


def _has_templates(windows: Windows) -> bool:
    """Tell whether the copies have a place between two windows, and each has a window of its kind between others."""
    return 0 < windows.before < windows.count and set(windows.copies) <= set(windows.kinds[1:-1])


Place = tuple[int, bool, int, int]  # window, whether in the backward, offset of the op there, position of the value


class _Periods:
    """The windows of a captured graph, and what their ops read: the rule that a copy follows."""

    def __init__(self, graph: StepGraph, windows: Windows) -> None:
        self.graph, self.windows = graph, windows
        self.forward = self._starts(graph.forward_ops, range(windows.count))
        self.backward = self._starts(graph.backward_ops, range(windows.count - 1, -1, -1))
        self.lengths = {False: self._length(self.forward), True: self._length(self.backward)}
        self._check_equal()
        self.place_of: dict[int, Place] = {
            value: (window, late, offset, position)
            for window in range(windows.count)
            for late in (False, True)
            for offset, op in enumerate(self.ops(window, late=late))
            for position, value in enumerate(op.writes)
        }
        self.value_at = {place: value for value, place in self.place_of.items()}
        self._check_sequences()
        self._shifts: dict[tuple[bool, int, int], int | None] = {}

    def ops(self, window: int, *, late: bool) -> Sequence[Op]:
        """Return the ops of the forward or backward part of a window."""
        start = (self.backward if late else self.forward)[window]
        return self.graph.ops[start : start + self.lengths[late]]

    def layer_of(self, module: str) -> int | None:
        """Return the number of the layer that a module belongs to; None for a module outside of the stack."""
        found = self._pattern.match(module)
        return int(found[1]) if found else None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.windows.path) + r"\.(\d+)(?=\.|$)")

    def _window_of(self, op: Op) -> int | None:
        layer = self.layer_of(self.graph.sources[op.index].module)
        if layer is None or layer < self.windows.first:
            return None
        window = (layer - self.windows.first) // self.windows.period
        return window if window < self.windows.count else None

    def _starts(self, ops: Sequence[Op], order: Sequence[int]) -> list[int]:
        """Return the number of the first op of each window, by window."""
        first: dict[int, int] = {}
        for op in ops:
            window = self._window_of(op)
            if window is not None:
                first.setdefault(window, op.index)
        starts = [first.get(window, -1) for window in order]
        if -1 in starts or starts != sorted(starts):
            raise NotPeriodic(f"{self.windows.path}: the layers do not run one after the other")
        return [first[window] for window in range(self.windows.count)]

    def _length(self, starts: Sequence[int]) -> int:
        lengths = {abs(after - before) for before, after in itertools.pairwise(starts)}
        if len(lengths) != 1:
            raise NotPeriodic(f"{self.windows.path}: layers have {sorted(lengths)} ops")
        return lengths.pop()

    def _check_equal(self) -> None:
        for late in (False, True):
            last = self.windows.count - 1 if not late else 0
            end = (self.backward if late else self.forward)[last] + self.lengths[late]
            limit = len(self.graph.ops) if late else self.graph.forward_count
            if end > limit:
                raise NotPeriodic(f"{self.windows.path}: the last layer has fewer ops than the others")
            shown = [
                [(op.key, op.random, op.anchored, len(op.writes), len(op.reads)) for op in self.ops(window, late=late)]
                for window in range(self.windows.count)
            ]
            if any(other != shown[0] for other in shown[1:]):
                raise NotPeriodic(f"{self.windows.path}: layers have different ops")

    def _check_sequences(self) -> None:
        self.sequence = [
            min((op.sequence for op in self.ops(window, late=False) if op.sequence is not None), default=0)
            for window in range(self.windows.count)
        ]
        widths = {after - before for before, after in itertools.pairwise(self.sequence)}
        if len(widths) != 1:
            raise NotPeriodic(f"{self.windows.path}: autograd numbers the layers' ops in different ways")
        self.width = widths.pop()

    def shift(self, late: bool, offset: int, read: int) -> int | None:
        """Return how many windows away an op's read value is made; None if all windows read the same value.

        Reads are those of `again_reads` after those of `reads`. An own weight has distance 0.
        """
        if (late, offset, read) not in self._shifts:
            self._shifts[late, offset, read] = self._shift(late, offset, read)
        return self._shifts[late, offset, read]

    def _shift(self, late: bool, offset: int, read: int) -> int | None:
        """Compare the windows between the first and the last one, which border on other ops."""
        inner = range(1, self.windows.count - 1)
        pairs = [pair for window in inner if (pair := self._pair(window)) is not None]
        found = {self._distance(*pair, late, offset, read) for pair in pairs}
        if len(found) != 1:
            raise NotPeriodic(f"{self.windows.path}: layers read values of different layers")
        (rule,) = found
        if not all(self._follows(rule, window, late, offset, read) for window in inner):
            raise NotPeriodic(f"{self.windows.path}: layers of different kinds read values of different layers")
        return rule

    def _pair(self, window: int) -> tuple[int, int] | None:
        """Return a window with the next one of its kind; None if there is none."""
        kinds = self.windows.kinds
        later = (other for other in range(window + 1, self.windows.count) if kinds[other] == kinds[window])
        return next(((window, other) for other in later), None)

    def _distance(self, window: int, other: int, late: bool, offset: int, read: int) -> int | None:
        here = _all_reads(self.ops(window, late=late)[offset])[read]
        there = _all_reads(self.ops(other, late=late)[offset])[read]
        if here == there:
            return None
        if here in self.place_of:
            return self.place_of[here][0] - window
        if self.graph.values[here].origin is Origin.PRIMAL:
            return 0
        raise NotPeriodic(f"{self.windows.path}: a layer reads a value of its own that no layer makes")

    def _follows(self, rule: int | None, window: int, late: bool, offset: int, read: int) -> bool:
        """Tell whether a window reads by this rule, as far as it can be told from the window alone."""
        value = _all_reads(self.ops(window, late=late)[offset])[read]
        if value in self.place_of:
            return rule is None or rule == self.place_of[value][0] - window
        return rule is None or (rule == 0 and self.graph.values[value].origin is Origin.PRIMAL)


def _all_reads(op: Op) -> tuple[int, ...]:
    return (*op.reads, *op.again_reads)


class _Copier:
    """A builder of the step with copies of windows between two of them."""

    def __init__(self, periods: _Periods) -> None:
        self.periods, self.graph = periods, periods.graph
        windows = periods.windows
        self.count, self.before, self.more = windows.count, windows.before, len(windows.copies)
        inner = {windows.kinds[window]: window for window in range(self.count - 2, 0, -1)}
        self.templates = tuple(inner[kind] for kind in windows.copies)
        self.values: list[Value] = list(self.graph.values)
        self.origin: list[int] = list(range(len(self.values)))
        self.copied: dict[tuple[int, int], int] = {}  # (value of a template, copy) -> its number
        self._copy_values()
        self.ops: list[Op] = []
        self.op_origin: list[int] = []
        self.sources: list[Source] = []

    def result(self) -> Repeated:
        """Return the step with the copies."""
        graph, periods = self.graph, self.periods
        between = periods.forward[self.before]
        before = periods.backward[self.before - 1]  # copies run in the backward before this one, the last one first
        self._check_others()
        for op in graph.ops:
            if op.index == between:
                for copy in range(self.more):
                    self._add_window(copy, late=False)
            if op.index == before:
                for copy in reversed(range(self.more)):
                    self._add_window(copy, late=True)
            self._add_original(op)
        made = replace(
            graph,
            ops=tuple(self.ops),
            values=tuple(self.values),
            forward_count=graph.forward_count + self.more * periods.lengths[False],
            sources=tuple(self.sources),
            parameters=self._parameters(),
            output_values=self._with_copies(graph.output_values),
            kept_outputs=self._with_copies(graph.kept_outputs),
            dropped_outputs=self._with_copies(graph.dropped_outputs),
            mutated_primals=self._with_copies(graph.mutated_primals),
            updates=self._with_copies(graph.updates),
            returned=self._with_copies(graph.returned),
        )
        return Repeated(graph=made, ops=tuple(self.op_origin), values=tuple(self.origin))

    def _copy_values(self) -> None:
        """Add a copy of each value that a template makes, and of each weight that it alone reads."""
        own = {template: self._own(template) for template in set(self.templates)}
        for copy, template in enumerate(self.templates):
            for value in own[template]:
                self.copied[value, copy] = len(self.values)
                self.values.append(replace(self.graph.values[value], index=len(self.values)))
                self.origin.append(value)

    def _own(self, template: int) -> tuple[int, ...]:
        """Return the values that a window makes, and the weights that it alone reads."""
        periods = self.periods
        found = [value for value, place in periods.place_of.items() if place[0] == template]
        for late in (False, True):
            for offset, op in enumerate(periods.ops(template, late=late)):
                for read, value in enumerate(_all_reads(op)):
                    if value not in periods.place_of and periods.shift(late, offset, read) == 0:
                        found.append(value)
        return tuple(dict.fromkeys(found))

    def _check_others(self) -> None:
        """Raise `NotPeriodic` where an op outside of the windows reads a value of an inner window."""
        inside = {
            op.index
            for window in range(self.count)
            for late in (False, True)
            for op in self.periods.ops(window, late=late)
        }
        for op in self.graph.ops:
            for value in () if op.index in inside else _all_reads(op):
                window = self.periods.place_of.get(value, (0,))[0]
                if 0 < window < self.count - 1:
                    raise NotPeriodic(f"{self.periods.windows.path}: {op.name} reads a value of a layer in the middle")

    def _add_window(self, copy: int, *, late: bool) -> None:
        """Add the forward or backward part of a copy."""
        template = self.templates[copy]
        for offset, op in enumerate(self.periods.ops(template, late=late)):
            reads = [self._read(copy, late, offset, op, read) for read in range(len(_all_reads(op)))]
            self._add(op, reads, tuple(self.copied[value, copy] for value in op.writes), template, copy)

    def _read(self, copy: int, late: bool, offset: int, op: Op, read: int) -> int:
        """Return the value that an op of a copy reads."""
        value = _all_reads(op)[read]
        distance = self.periods.shift(late, offset, read)
        if distance is None:
            return value
        if value not in self.periods.place_of:
            return self.copied[value, copy]
        return self._value(self.before + copy + distance, self.periods.place_of[value])

    def _value(self, at: int, place: Place) -> int:
        """Return the value of the window that stands at place `at` of the result."""
        copy = at - self.before
        if 0 <= copy < self.more:
            return self.copied[self.periods.value_at[self.templates[copy], *place[1:]], copy]
        window = at if copy < 0 else at - self.more
        return self.periods.value_at[window, *place[1:]]

    def _place(self, window: int) -> int:
        """Return the place in the result of a captured window."""
        return window if window < self.before else window + self.more

    def _add_original(self, op: Op) -> None:
        window, late, offset = self._window_at(op)
        reads = list(_all_reads(op))
        if window is not None:
            at = self._place(window)
            for read, value in enumerate(reads):
                if value in self.periods.place_of and self.periods.shift(late, offset, read) is not None:
                    distance = self.periods.place_of[value][0] - window
                    reads[read] = self._value(at + distance, self.periods.place_of[value])
        self._add(op, reads, op.writes, window, None)

    def _window_at(self, op: Op) -> tuple[int | None, bool, int]:
        late = op.backward
        length = self.periods.lengths[late]
        for window, start in enumerate(self.periods.backward if late else self.periods.forward):
            if start <= op.index < start + length:
                return window, late, op.index - start
        return None, late, 0

    def _add(
        self, op: Op, reads: Sequence[int], writes: tuple[int, ...], window: int | None, copy: int | None
    ) -> None:
        index = len(self.ops)
        first, again = tuple(reads[: len(op.reads)]), tuple(reads[len(op.reads) :])
        exchanged = dict(zip((*_all_reads(op), *op.writes), (*reads, *writes), strict=True))
        self.ops.append(
            replace(
                op,
                index=index,
                name=_name(op.name, copy),
                reads=first,
                writes=writes,
                again_reads=again,
                again_writes=tuple(exchanged[value] for value in op.again_writes),
                overwrites=None if op.overwrites is None else exchanged[op.overwrites],
                sequence=self._sequence(op.sequence, window, copy),
            )
        )
        for value in writes:
            name = _name(self.values[value].name, copy)
            self.values[value] = replace(self.values[value], producer=index, name=name)
        self.op_origin.append(op.index)
        source = self.graph.sources[op.index]
        self.sources.append(replace(source, module=self._module(source.module, window, copy)))

    def _sequence(self, sequence: int | None, window: int | None, copy: int | None) -> int | None:
        """Return autograd's number of an op, which grows by the numbers of the copies before it."""
        if sequence is None:
            return None
        width, starts = self.periods.width, self.periods.sequence
        if window is None or not -width < sequence - starts[window] < 2 * width:
            return sequence + (self.more * width if sequence >= starts[self.before] else 0)
        at = self._place(window) if copy is None else self.before + copy
        return sequence - starts[window] + starts[0] + at * width

    def _module(self, name: str, window: int | None, copy: int | None) -> str:
        """Return a module's name with the number that its layer has in the result.

        Args:
            window: the window that the copy is one of.
            copy: None: the module of a captured op or parameter.
        """
        layer = self.periods.layer_of(name)
        windows = self.periods.windows
        if layer is None:
            return name
        if copy is None or window is None:
            later = layer >= windows.first + self.before * windows.period
            number = layer + windows.period * (self.more if later else 0)
        else:
            number = layer + windows.period * (self.before + copy - window)
        return f"{windows.path}.{number}{name[len(f'{windows.path}.{layer}') :]}"

    def _parameters(self) -> dict[int, str]:
        named = {value: self._module(name, None, None) for value, name in self.graph.parameters.items()}
        return named | {
            number: self._module(self.graph.parameters[value], self.templates[copy], copy)
            for (value, copy), number in self.copied.items()
            if value in self.graph.parameters
        }

    def _with_copies(self, values: Iterable[int]) -> frozenset[int]:
        held = frozenset(values)
        return held | {number for (value, _), number in self.copied.items() if value in held}


def _name(of: str, copy: int | None) -> str:
    return of if copy is None else f"{of}_copy{copy + 1}"
