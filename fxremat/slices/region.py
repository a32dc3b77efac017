"""Finding the region around an op that needs too much memory: the ops to run together in slices, and along which axis.

    seed     the largest value that the op reads or writes
    axes     of the seed: as many rows as there are tokens first, then entire sequences, then other dimensions
    grow     every producer and reader of a large value that is cut is added; the first of its ways (`rules`) that
             agrees with the known labels of its inputs and outputs says how these are cut

A label says how a tensor is cut: along which axis, not at all, or that a slice has one summand of it
(`labels`). Values that cross the border of a region are small, or equal in all slices, or a sum over them;
outputs of its forward may be large, and are then assembled from its slices. If a large value is read by an op
that has no way to run in slices, there is no region, and this reason is reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import fx

from fxremat.graphs.nodes import is_random
from fxremat.slices.body import Sliced
from fxremat.slices.labels import SUM, WHOLE, Part, axes
from fxremat.slices.rules import Way, name_of, shape_of, tensor_inputs, ways, why_not
from fxremat.slices.values import Values

MOST_BETWEEN = 60  # maximum number of ops between a region's forward and its backward that are added to it
# values count as large from these fractions of the largest value's bytes on; tried in this order
LARGE = (0.25, 0.125, 0.5)

Label = Part | tuple[Part, ...]


class Blocked(Exception):
    """Raised if no group of ops can run in slices; the message names the op that prevents it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """A region: a group of ops that can run together in slices."""

    count: int  # number of rows into which tensors are cut
    outer: int  # product of the dimensions of `seed`, the largest value, before the axis
    ops: tuple[fx.Node, ...]
    labels: dict[fx.Node, Label]
    large: frozenset[fx.Node]  # values of which only one slice is allocated at a time
    seed: fx.Node

    @property
    def axis(self) -> tuple[int, int]:
        """(elements before the cut dimensions, rows): equal if two regions around one op are cut along the same axis.
        """
        return self.outer, self.count


def find(values: Values, op: fx.Node) -> Iterator[Found]:
    """Yield regions around an op, those with the finest axis first.

    Raises `Blocked` if there is none, with the reason of the attempt that came closest.
    """
    reasons: list[tuple[int, str]] = []  # with the number of ops that an attempt has reached
    found = 0
    seed = max(
        (v for v in {*values.read_by(op), *values.made_by(op)} if v.op == "call_function"),
        key=lambda value: (values.bytes(value), -values.place[value]),
    )
    for outer, count in _axes_of(values, seed):
        for share in LARGE:
            growing = _Growing(values, seed, outer, count, share * values.bytes(seed))
            try:
                grown = growing.run()
            except Blocked as reason:
                reasons.append((len(growing.ops), str(reason)))
                continue
            found += 1
            yield grown
            break
    if not found:
        _, nearest = max(reasons, key=itemgetter(0), default=(0, f"{op.name} has no axis to cut along"))
        raise Blocked(nearest)


def _axes_of(values: Values, seed: fx.Node) -> Iterator[tuple[int, int]]:
    """Yield the possible axes of a value, in the shapes of all its views: (elements before the axis, rows)."""
    numel = seed.meta["val"].numel()
    found: dict[tuple[int, int], None] = {}
    for node in values.showing(seed):
        if not isinstance(node.meta.get("val"), torch.Tensor) or node.meta["val"].numel() != numel:
            continue
        shape = shape_of(node)
        for dim in range(len(shape)):
            for end in range(len(shape) - 1, dim, -1):
                if 1 < (count := math.prod(shape[dim:end])) < numel:
                    found[math.prod(shape[:dim]), count] = None
    return iter(sorted(found, key=lambda axis: (axis[0], -axis[1])))


@dataclass
class _Growing:
    """A region under construction, which ops are added to."""

    values: Values
    seed: fx.Node
    outer: int
    count: int
    large_from: float  # bytes from which a value counts as large
    labels: dict[fx.Node, Label] = field(default_factory=dict)
    ops: dict[fx.Node, Way] = field(default_factory=dict)
    large: set[fx.Node] = field(default_factory=set)

    def run(self) -> Found:
        """Grow the region from its seed, the largest value. Raises `Blocked`."""
        values = self.values
        if not any(outer == self.outer for outer, _ in axes(shape_of(self.seed), self.count)):
            raise Blocked(f"{self.seed.name} has no such axis")
        self._put(self.seed, self.outer)
        self.large.add(self.seed)
        self._grow([self.seed])
        while between := self._between(same_part=True):
            self._take(between)
        self._take_all_or_none()
        large = self.large
        self._check_sums(large)
        for node in values.nodes:  # sets the labels of views between ops of the region
            if values.is_view(node):
                self._try_view(node)
        self._check_views()
        ops = tuple(sorted(self.ops, key=values.place.__getitem__))
        return Found(
            count=self.count,
            outer=self.outer,
            ops=ops,
            labels=self.labels,
            large=frozenset(large),
            seed=self.seed,
        )

    def _grow(self, values: Iterable[fx.Node]) -> None:
        """Add to the region all ops that write or read these values; repeat for the large values that are sliced then.
        """
        queue = deque(values)
        while queue:
            value = queue.popleft()
            around = [self.values.producer(value)] if value.op == "call_function" else []
            for op in [*around, *self.values.readers(value)]:
                if op not in self.ops and op.op != "output":
                    queue.extend(self._join(op))

    def _take(self, ops: Iterable[fx.Node]) -> None:
        """Add these ops to the region, and all ops that then have to be in it."""
        for op in ops:
            if op not in self.ops:
                self._grow(self._join(op))

    def _take_all_or_none(self) -> None:
        """Add the ops between the forward and the backward of the region, if they are few and can run in slices."""
        before = dict(self.labels), dict(self.ops), set(self.large)
        try:
            while between := self._between(same_part=False):
                if len(between) > MOST_BETWEEN:
                    raise Blocked("too much stands between forward and backward")
                self._take(between)
            self._check_sums(self.large)
        except Blocked:
            self.labels, self.ops, self.large = before

    def _between(self, *, same_part: bool) -> list[fx.Node]:
        """List ops outside the region that depend on its values, and on which its ops depend, directly or indirectly.

        Args:
            same_part: True: list ops between two ops of the forward, or of the backward; False: between forward and
                backward.
        """
        late = self.values.late
        parts = ((False, False), (True, True)) if same_part else ((False, True),)
        found: dict[fx.Node, None] = {}
        for begin, end in parts:
            below = self._reached(self.values.nodes, begin, lambda node: node.all_input_nodes)
            above = self._reached(reversed(self.values.nodes), end, lambda node: list(node.users))
            for op in self.values.ops:
                if op in below and op in above and op not in self.ops and (not same_part or (op in late) == begin):
                    found[op] = None
        return sorted(found, key=self.values.place.__getitem__)

    def _reached(
        self, nodes: Iterable[fx.Node], late: bool, following: Callable[[fx.Node], Iterable[fx.Node]]
    ) -> set[fx.Node]:
        """Return the nodes reached from the region's forward ops or, if `late`, from its backward ops.

        Args:
            nodes: all nodes, in the order in which to visit them.
            following: returns the nodes from which a node is reached.
        """
        found = {op for op in self.ops if (op in self.values.late) == late}
        for node in nodes:
            if any(other in found for other in following(node)):
                found.add(node)
        return found

    def _is_large(self, value: fx.Node) -> bool:
        return (
            value.op == "call_function"
            and not is_random(self.values.producer(value))
            and isinstance(self.labels.get(value), int)
            and self.values.bytes(value) >= self.large_from
        )

    def _join(self, op: fx.Node) -> list[fx.Node]:
        """Add an op to the region, cut in the first way that agrees with known labels.

        Return values that then count as large.

        Raises `Blocked` if no way agrees.
        """
        for way in ways(op, self.count):
            made = self.values.made_by(op)
            parts = {value: way.writes[_position(value, op)] for value in made}
            if not self._agrees(way, parts):
                continue
            for parent, part in way.reads.items():
                self._put(parent, part)
            for value, part in parts.items():
                self._put(value, part)
            self.ops[op] = way
            around = [*self.values.read_by(op), *made]
            new = [value for value in around if value not in self.large and self._is_large(value)]
            self.large.update(new)
            return new
        raise Blocked("" if isinstance(op.target, Sliced) else why_not(op))

    def _agrees(self, way: Way, parts: dict[fx.Node, Part]) -> bool:
        known = [(self._see(parent), part) for parent, part in way.reads.items()]
        known += [(self.labels.get(value), part) for value, part in parts.items()]
        return all(_fits(old, new) for old, new in known) and any(isinstance(old, int) for old, _ in known)

    def _put(self, node: fx.Node, part: Part) -> None:
        """Store how a node is cut, and the tensor that it is a view of. Raises `Blocked` if that contradicts a label.
        """
        old = self.labels.get(node)
        if old is not None:
            if not _fits(old, part):
                raise Blocked(f"{node.name} is read along two axes")
            if old is WHOLE:
                self.labels[node] = part
            return
        self.labels[node] = part
        if not self.values.is_view(node):
            return
        parent, above = self._above(node, part)
        if above is not None:
            self._put(parent, above)

    def _above(self, view: fx.Node, part: Part) -> tuple[fx.Node, Part | None]:
        """Return the tensor that a view was taken from, and how it is cut, or None if that does not follow from `part`.
        """
        parent = tensor_inputs(view)[0] if tensor_inputs(view) else view.all_input_nodes[0]
        if part is WHOLE or part is SUM:
            return parent, WHOLE if part is WHOLE else None
        if not isinstance(view.meta.get("val"), torch.Tensor) or not isinstance(parent.meta.get("val"), torch.Tensor):
            return parent, None
        found = [way.reads[parent] for way in ways(view, self.count) if way.writes[0] == part]
        return parent, found[0] if found else None

    def _see(self, node: fx.Node) -> Label | None:
        """Return how a node is cut, inferred for a view from its base if possible; None if it is not known."""
        if node in self.labels or not self.values.is_view(node):
            return self.labels.get(node)
        self._try_view(node)
        return self.labels.get(node)

    def _try_view(self, node: fx.Node) -> None:
        """Label a view if how it is cut follows from the tensor that it was taken from."""
        if node in self.labels:
            return
        parent = node.all_input_nodes[0]
        above = self._see(parent)
        if above is None:
            return
        if isinstance(above, tuple):
            self.labels[node] = above[_position(node, parent)]
        elif above is WHOLE or above is SUM:
            if name_of(node) != "expand":  # an uncut tensor may be expanded along the cut dimension
                self.labels[node] = WHOLE
        else:
            found = [way.writes for way in ways(node, self.count) if way.reads.get(parent) == above]
            if found:
                several = not isinstance(node.meta.get("val"), torch.Tensor)
                self.labels[node] = found[0] if several else found[0][0]

    def _check_sums(self, large: set[fx.Node]) -> None:
        """Raise `Blocked` if a sum over the slices is read before all slices have run."""
        for op in self.ops:
            for value in self.values.read_by(op):
                if self.labels.get(value) is not SUM or self.values.producer(value) not in self.ops:
                    continue
                earlier = self.values.producer(value) not in self.values.late and op in self.values.late
                if value in large or not earlier:
                    raise Blocked(f"{op.name} reads {value.name}, which is a sum over the slices")


    def _check_views(self) -> None:
        """Raise `Blocked` if a view of a value in the region cannot be taken of a slice of the value."""
        for op in self.ops:
            for node in op.all_input_nodes:
                base = self.values.base(node)
                if self.values.producer(base) not in self.ops or not self.values.is_view(node):
                    continue
                while self.values.is_view(node):
                    parent, part = node.all_input_nodes[0], self.labels.get(node)
                    if isinstance(self.labels.get(parent), int) and not self._follows(node, parent, part):
                        raise Blocked(f"{node.name} shows {base.name} along another axis")
                    node = parent

    def _follows(self, view: fx.Node, parent: fx.Node, part: Label | None) -> bool:
        above = self.labels.get(parent)
        made = [way.writes for way in ways(view, self.count) if way.reads.get(parent) == above]
        return any(part in (writes, writes[0]) for writes in made)


def _fits(old: Label | None, new: Part) -> bool:
    """Tell whether two labels agree on how a node is cut.

    A sum over slices (SUM) may be read as an uncut tensor (WHOLE) once it is complete.
    """
    if old is None or old == new:
        return True
    return (old is SUM and new is WHOLE) or (old is WHOLE and new is SUM)


def _position(value: fx.Node, op: fx.Node) -> int:
    """Return the index of a value among the outputs of an op."""
    if value is op:
        return 0
    position = value.args[1]
    assert isinstance(position, int)
    return position
