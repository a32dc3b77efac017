"""Plans of one graph with symbolic sizes, at the sizes of each call.

A plan is made from plans for other sizes if possible, else by a search from nothing. A budget in percent refers
to the peak without recomputation at the largest sizes: the ends of the ranges that the user gave, else those
seen so far.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch

from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.graphs.captured import Captured, dropped_in, note_dropped
from fxremat.graphs.symbolic import Dims, SymbolicGraph
from fxremat.options import Options, SeenLoss, StepOptions, changed_options
from fxremat.planning import plan as plan_from_nothing
from fxremat.planning.captured_step import CapturedStep
from fxremat.planning.facts import estimated_keep_all
from fxremat.planning.limits import Limit, limit_of
from fxremat.planning.replan import Choice, order_of_least, replan
from fxremat.planning.step import LargestCall, Reference, Step
from fxremat.planning.surveys import surveyed
from fxremat.plans import Plan
from fxremat.progress import planning
from fxremat.torch_private import expression_of
from fxremat.units import Percent, format_bytes

KNOWN = 8  # this many plans that were searched from nothing are kept, and re-evaluated at other sizes
GROWTH = 1.5  # factor by which the user's range of a size is extended beyond a call's size that exceeds it

# (name of an input, one of its dimensions); None for an input that is itself a number
Dimension = tuple[str, int | None]


@dataclass(frozen=True)
class Range:
    """The largest input sizes that are expected, and the peak without recomputation at them."""

    dims: Dims
    keep_all: int  # peak bytes without recomputation


class PlansOfSizes:
    """The plans of one graph with symbolic sizes.

    Attributes:
        symbolic: the joint forward-backward graph with symbolic sizes, from which code for all sizes is generated.

    Args:
        joint: the graph at the sizes of the call that it was captured from.
        dimensions: for each symbolic size, the input and the dimension that it is the size of.
        limits: for each symbolic size, the largest number that is expected; None if the user gave no range.
        shapes: the inputs' symbolic shapes, by name.
        largest: the largest of the calls that were captured otherwise, with sizes of their own.
    """

    def __init__(
        self,
        graph: SymbolicGraph,
        joint: Captured,
        dimensions: Sequence[Dimension],
        limits: Sequence[int | None],
        shapes: Mapping[str, Sequence[Any]],
        options: Options,
        largest: LargestCall | None = None,
    ) -> None:
        self.symbolic = graph.as_captured(joint)
        self._graph, self._dimensions, self._limits = graph, tuple(dimensions), tuple(limits)
        self._shapes = shapes
        self._range: Range | None = None
        self.take(options)
        self._largest_call = largest or LargestCall()
        self._known: tuple[Plan, ...] = ()
        self._dropped = dropped_in(graph.module.graph)

    def take(self, options: Options) -> None:
        """Plan with these options from now on."""
        self._options = replace(options, compress=False)  # values are packed at fixed sizes
        if self._range is not None:
            dims = self._range.dims
            self._range = Range(dims, estimated_keep_all(self._graph.at(dims), self._options))

    def drop(self, places: Set[int]) -> None:
        """Plan for a caller that drops these outputs before the backward from now on."""
        if places == self._dropped:
            return
        self._dropped = frozenset(places)
        note_dropped(self._graph.module.graph, places)
        self._known, self._largest_call.reference = (), None  # programs for less, and percent of less
        self.take(self._options)

    @property
    def loss_seen(self) -> SeenLoss | None:
        """The memory of a loss outside the model, as plans count it; None until it was measured."""
        return self._options.loss_seen

    def grown(self, known: int) -> int:
        """Return the bytes that the budget is now a percentage of, if that was of `known` bytes, and has grown; else 0.
        """
        return self._largest_call.grown(known) if self.in_percent else 0

    @property
    def in_percent(self) -> bool:
        """True if the budget is in percent."""
        return isinstance(self._options.budget, Percent)

    def plan(
        self,
        dims: Dims,
        *,
        inputs: Sequence[Any] = (),
        called_with: str = "",
        choose: Choice = lambda fitting: fitting[0],
        keep: bool = True,
    ) -> Plan:
        """Return the plan at these sizes.

        Args:
            inputs: the arguments of the call; (): ops that have to be measured run on made-up data.
            called_with: the sizes of the inputs as text, for messages.
            choose: chooses from the known candidates that fit, which come fastest first.
            keep: True: later plans may reuse this one, and budgets in percent refer to these sizes if they are the
                largest so far.

        Raises:
            BudgetTooSmall: no program fits at these sizes, which the error states.
        """
        joint = self._graph.at(dims)
        range_ = self._range_with(dims, joint)
        reference = None
        if range_:
            own = Reference(bytes=range_.keep_all, of=self.described(range_.dims))
            reference = self._largest_call.or_larger(own)
        called_with = called_with or self.described(dims)
        order = order_of_least(self._known, joint)
        step = Step(graph=joint, inputs=inputs, called_with=called_with, reference=reference, order=order)
        plan = replan(step, self._known, self._options, choose) if self._known else None
        known = self._known
        if plan is None:
            plan = self._from_nothing(step)
            known = (*self._known[1 - KNOWN :], plan)
        if keep:
            self._known, self._range = known, range_
            if reference:
                self._largest_call.note(reference)
        return replace(plan, step=SizedStep(self, dims))

    def _from_nothing(self, step: Step) -> Plan:
        try:
            return plan_from_nothing(step, self._options)
        except BudgetTooSmall as error:
            if larger := self._largest_call.with_more(error.budget, self._options.budget):
                return self._from_nothing(replace(step, reference=larger))
            remark = f", and the budget is {limit_of(step, self._options).words}" if step.reference else ""
            note = "; ".join(filter(None, [error.note, f"this is for inputs of {step.called_with}{remark}"]))
            raise error.explained(note=note) from None

    def least(self, dims: Dims) -> int:
        """Return the least budget at these sizes, in bytes, by a search from nothing."""
        joint = self._graph.at(dims)
        with planning(f"the least budget for inputs of {self.described(dims)}") as planned:
            step = Step(graph=joint, called_with=self.described(dims))
            least = surveyed(step, self._options, Limit(known=1)).frontier.minimum
            planned(format_bytes(least))
        return least

    def within(self, dims: Dims, mem: int | str | None, **changed: Any) -> Plan:
        """Plan for these input sizes with another budget or other options, which the resulting plan's `at` reuses.

        Args:
            mem: the budget; None: the budget of these plans.
        """
        others = copy.copy(self)
        if changed.get("compress"):
            raise FxrematError(f"compress={changed['compress']!r} needs inputs of fixed sizes, and these may change")
        options = changed_options(self._options, mem=mem, **changed)
        others._options, others._known = replace(options, compress=False), ()
        others._largest_call = copy.copy(self._largest_call)
        return others.plan(dims, keep=bool(changed))

    def described(self, dims: Dims) -> str:
        """Return the sizes that shape tensors as text, such as `tokens[1] = 300`; all, if none does."""
        places = self._graph.shaping or range(len(dims))
        return ", ".join(f"{_named(*self._dimensions[place])} = {dims[place]}" for place in places)

    def resized(self, dims: Dims, sizes: Mapping[str, object]) -> Dims:
        """Return all symbolic sizes after the user changed some of them; `dims` are the sizes before.

        Sizes that depend on each other, such as the lengths of tokens and targets, change together.

        Args:
            sizes: by name of an input: a shape, or its first sizes; sizes by dimension; or one number, which is the
                input itself if that is a number, else the size of its last symbolic dimension.

        Raises:
            FxrematError: a named input has no symbolic size, a size is invalid, two inputs give the same size
                differently, or the captured graph does not hold for these sizes.
        """
        changed: dict[int, int] = {}
        for name, given in sizes.items():
            places = self._places_of(name)
            if not places:
                known = ", ".join(dict.fromkeys(input_ for input_, _ in self._dimensions))
                none = f"no size of {name!r} is" if name in self._shapes else f"no input {name!r} is"
                raise FxrematError(f"{none} symbolic in this plan; those of {known} are")
            shape = self._shapes.get(name)
            if shape is not None and isinstance(given, tuple | list) and len(given) > len(shape):
                raise FxrematError(f"{_shown({name: given})} has {len(given)} sizes, and {name} has {len(shape)}")
            for dim, size in _by_dimension(name, given, list(places)).items():
                place = places[dim]
                if changed.setdefault(place, size) != size:
                    both = f"{_named(name, dim)} and {_named(*self._dimensions[place])}"
                    raise FxrematError(f"{both} are one size in this plan: {_shown(sizes)} differ")
        found = list(dims)
        for place in range(len(dims)):
            others = (changed[other] for other in changed if self._go_together(place, other, dims))
            found[place] = changed.get(place, next(others, dims[place]))
        numbers = self._graph.numbers(tuple(found))
        fitting = all(
            [*map(numbers, self._shapes[name][: len(given)])] == [*given]
            for name, given in sizes.items()
            if isinstance(given, tuple | list) and name in self._shapes
        )
        if not fitting or not self._graph.serves(tuple(found)):
            raise FxrematError(
                f"this plan is for {self.described(dims)}: {_shown(sizes)} takes another way through the model, and is "
                "captured by itself"
            )
        return tuple(found)

    def _places_of(self, name: str) -> dict[int | None, int]:
        """Map the symbolic dimensions of an input to the indices of their sizes; None if the input is itself a number.

        Dimensions of several inputs that are one symbol, such as the lengths of tokens and targets, have one index.
        """
        own: dict[Any, int] = {dim: place for place, (input_, dim) in enumerate(self._dimensions) if input_ == name}
        places = {symbol: place for place, symbol in enumerate(self._graph.symbols) if symbol.is_Symbol}
        varying = [(dim, size) for dim, size in enumerate(self._shapes.get(name, ())) if isinstance(size, torch.SymInt)]
        shared = {dim: places[symbol] for dim, size in varying if (symbol := expression_of(size)) in places}
        return own if None in own else dict(sorted({**shared, **own}.items()))

    def _go_together(self, place: int, other: int, dims: Dims) -> bool:
        """Tell whether the symbolic sizes with the indices `place` and `other` change together.

        They do if they are equal in `dims`, and either are the same symbol or belong to the same dimension of
        two inputs.
        """
        symbols, dimensions = self._graph.symbols, self._dimensions
        alike = symbols[place] == symbols[other] or dimensions[place][1] == dimensions[other][1]
        return alike and dims[place] == dims[other]

    def _range_with(self, dims: Dims, joint: Captured) -> Range | None:
        """Return the largest expected sizes, `dims` included, with their peak; None if the budget is not in percent.
        """
        if not isinstance(self._options.budget, Percent):
            return None
        if self._range and all(dims[place] <= self._range.dims[place] for place in self._graph.shaping):
            return self._range
        largest = tuple(self._largest(place, dims) for place in range(len(dims)))
        at_largest = joint if largest == dims else self._graph.at(largest)
        return Range(largest, estimated_keep_all(at_largest, self._options))

    def _largest(self, place: int, dims: Dims) -> int:
        """Return the largest number expected for the symbolic size at index `place` of `dims`.

        If this call exceeds the range that the user gave, return `GROWTH` times its size. A range that was
        given for tokens also holds for targets that have the same length.
        """
        together = [other for other in range(len(dims)) if self._go_together(place, other, dims)]
        expected = max(self._limits[other] or 0 for other in together)
        known = max(expected, self._range.dims[place] if self._range else 0)
        if dims[place] <= known:
            return known
        return int(GROWTH * dims[place]) if expected else dims[place]


class SizedStep(CapturedStep):
    """A captured step at certain input sizes, which can also be planned for other sizes."""

    def __init__(self, plans: PlansOfSizes, dims: Dims, inputs: Sequence[Any] = ()) -> None:
        self._plans, self._dims, self._inputs = plans, dims, inputs

    @property
    def options(self) -> Options:
        """The options that the step was captured with."""
        return self._plans._options

    @property
    def graph(self) -> Captured:
        """The captured forward and backward at these sizes, op by op."""
        return self._plans._graph.at(self._dims)

    @property
    def sizes(self) -> str:
        """The input sizes that may change, as text such as `tokens[1] = 300`."""
        return self._plans.described(self._dims)

    @property
    def resizable_inputs(self) -> frozenset[str]:
        """The names of the inputs that have symbolic sizes; the sizes of other inputs may follow from them."""
        return frozenset(name for name, _ in self._plans._dimensions)

    def plan(self, mem: int | str | None = None, **options: Unpack[StepOptions]) -> Plan:
        """Plan for these sizes: see `CapturedStep.plan`."""
        if mem is None and not options:
            return self._plans.plan(self._dims, inputs=self._inputs, keep=False)
        return self._plans.within(self._dims, mem, **options)

    def least(self) -> int:
        """Return the least budget that works at these sizes, in bytes."""
        return self._plans.least(self._dims)

    def at(self, **sizes: object) -> SizedStep:
        """Return the same step for other input sizes; see `CapturedStep.at`."""
        return SizedStep(self._plans, self._plans.resized(self._dims, sizes))


def _named(name: str, dim: int | None) -> str:
    """Return a size of an input as text, such as `tokens[1]`; `dim` is None if the input is itself a number."""
    return name if dim is None else f"{name}[{dim}]"


def _shown(sizes: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {given}" for name, given in sizes.items())


def _by_dimension(name: str, given: object, dimensions: Sequence[int | None]) -> dict[int | None, int]:
    """Return the sizes that a user gave for an input, by dimension (None if the input is itself a number).

    Raises:
        FxrematError: a dimension is not symbolic, or a size is not an integer above 1.
    """
    match given:
        case bool():
            found: dict[Any, Any] = {}
        case int():
            found = {dimensions[-1]: given}
        case Mapping():
            found = dict(given)
        case tuple() | list():
            found = {dim: given[dim] if dim is not None and dim < len(given) else None for dim in dimensions}
        case _:
            found = {}
    if not found or not all(dim in dimensions and isinstance(size, int) and size > 1 for dim, size in found.items()):
        dims = ", ".join(map(str, dimensions))
        raise FxrematError(
            f"{name}={given!r} gives no sizes above 1 of its symbolic dimensions ({dims}): write {name}=300, "
            f"{name}=(8, 300) or {name}={{1: 300}}; sizes of 0 and 1 are captured by themselves"
        )
    return found
