"""Plans of one symbolic graph at the sizes of calls: made from plans for other sizes, or by a search from nothing.

    plans that were searched from nothing    the latest `KNOWN` are kept: their candidates are evaluated again at every
                                             other size
    a budget in percent                      refers to the peak of keep-all at the largest size: the end of the range
                                             that the user gave, else the largest size of a call so far
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.graphs.captured import Captured
from fxremat.graphs.symbolic import Dims, SymbolicGraph
from fxremat.options import Options, StepOptions, changed_options
from fxremat.planning import plan as plan_from_nothing
from fxremat.planning.captured_step import CapturedStep
from fxremat.planning.facts import estimated_keep_all
from fxremat.planning.limits import Limit, limit_of
from fxremat.planning.replan import Choice, replan
from fxremat.planning.step import Reference, Step
from fxremat.planning.surveys import surveyed
from fxremat.plans import Plan
from fxremat.progress import planning
from fxremat.units import Percent, format_bytes

KNOWN = 8  # plans searched from nothing that are kept
GROWTH = 1.5  # a call above the range that the user gave moves the range's end to this times the size of the call

Dimension = tuple[str, int | None]  # an input of the model and one of its dimensions; None: the input is a number


@dataclass(frozen=True)
class Range:
    """The largest sizes that are expected, and the peak of keep-all at them."""

    dims: Dims
    keep_all: int  # bytes


class PlansOfSizes:
    """Plans of one symbolic graph, each for the sizes of a call.

    Attributes:
        symbolic: the joint graph of symbolic sizes; programs are made into graphs from it that run at every size.

    Args:
        joint: the graph at the sizes of the call that it was captured from.
        dimensions: for each symbolic number, the input and the dimension whose size it is.
        limits: for each symbolic number, the largest size that is expected; None where no range is known.
        shapes: the inputs' symbolic shapes, by name.
    """

    def __init__(
        self,
        graph: SymbolicGraph,
        joint: Captured,
        dimensions: Sequence[Dimension],
        limits: Sequence[int | None],
        shapes: Mapping[str, Sequence[Any]],
        options: Options,
    ) -> None:
        self.symbolic = graph.as_captured(joint)
        self._graph, self._options = graph, options
        self._dimensions, self._limits = tuple(dimensions), tuple(limits)
        self._shapes = shapes
        self._range: Range | None = None
        self._known: tuple[Plan, ...] = ()

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
            called_with: the sizes of the inputs, for messages.
            choose: chooses from the known candidates that fit, fastest first.
            keep: True: later plans for other sizes may start from this one, and if these are the largest sizes so far,
                budgets in percent refer to them from now on.

        Raises:
            BudgetTooSmall: no program fits at these sizes, which the error states.
        """
        joint = self._graph.at(dims)
        range_ = self._range_with(dims, joint)
        reference = Reference(bytes=range_.keep_all, of=self.described(range_.dims)) if range_ else None
        called_with = called_with or self.described(dims)
        step = Step(graph=joint, inputs=inputs, called_with=called_with, reference=reference)
        plan = replan(step, self._known, self._options, choose) if self._known else None
        known = self._known
        if plan is None:
            try:
                plan = plan_from_nothing(step, self._options)
            except BudgetTooSmall as error:
                remark = f", and the budget is {limit_of(step, self._options).words}" if reference else ""
                raise error.explained(note=f"this is for inputs of {called_with}{remark}") from None
            known = (*self._known[1 - KNOWN :], plan)
        if keep:
            self._known, self._range = known, range_
        return replace(plan, step=SizedStep(self, dims))

    def least(self, dims: Dims) -> int:
        """Return the least budget at these sizes, in bytes; programs are searched for at these sizes from nothing."""
        joint = self._graph.at(dims)
        with planning(f"the least budget for inputs of {self.described(dims)}") as planned:
            step = Step(graph=joint, called_with=self.described(dims))
            least = surveyed(step, self._options, Limit(known=1)).frontier.minimum
            planned(format_bytes(least))
        return least

    def within(self, dims: Dims, mem: int | str | None, **changed: Any) -> Plan:
        """Plan for these sizes within another budget, or with other options, which `Plan.at` of this plan keeps.

        Args:
            mem: the budget; None: the one that these plans have.
        """
        others = copy.copy(self)
        others._options, others._known = changed_options(self._options, mem=mem, **changed), ()
        return others.plan(dims, keep=bool(changed))

    def described(self, dims: Dims) -> str:
        """Return the sizes as text: `tokens[1] = 300`."""
        return ", ".join(
            f"{name} = {dim}" if place is None else f"{name}[{place}] = {dim}"
            for (name, place), dim in zip(self._dimensions, dims, strict=True)
        )

    def resized(self, dims: Dims, sizes: Mapping[str, object]) -> Dims:
        """Return all symbolic sizes, after some of the inputs changed theirs from `dims`.

        Dimensions that have the same size and belong together, such as tokens and targets of one length, change too.

        Args:
            sizes: by name of an input: a shape, or its first sizes; sizes by dimension; or one number: the input itself
                if that is a number, else the size of its last symbolic dimension.

        Raises:
            FxrematError: an input of this name has no symbolic size, a value is no valid size, or the model takes
                another way at these sizes than the captured one.
        """
        changed: dict[int, int] = {}
        for name, given in sizes.items():
            places = {dim: place for place, (input_, dim) in enumerate(self._dimensions) if input_ == name}
            if not places:
                known = ", ".join(dict.fromkeys(input_ for input_, _ in self._dimensions))
                raise FxrematError(f"no size of {name!r} is symbolic in this plan; those of {known} are")
            changed |= {places[dim]: size for dim, size in _by_dimension(name, given, list(places)).items()}
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

    def _go_together(self, place: int, other: int, dims: Dims) -> bool:
        """Tell whether two symbolic numbers, given by place, change together.

        They do if they are equal at `dims` and are the same symbol, or sizes of dimensions of the same number.
        """
        symbols, dimensions = self._graph.symbols, self._dimensions
        alike = symbols[place] == symbols[other] or dimensions[place][1] == dimensions[other][1]
        return alike and dims[place] == dims[other]

    def _range_with(self, dims: Dims, joint: Captured) -> Range | None:
        """Return the range of sizes, extended so that it includes `dims`; None where the budget is not in percent."""
        if not isinstance(self._options.budget, Percent):
            return None
        if self._range and all(dim <= most for dim, most in zip(dims, self._range.dims, strict=True)):
            return self._range
        largest = tuple(self._largest(place, dims) for place in range(len(dims)))
        at_largest = joint if largest == dims else self._graph.at(largest)
        return Range(largest, estimated_keep_all(at_largest, self._options))

    def _largest(self, place: int, dims: Dims) -> int:
        """Return the largest size that is known or expected of the symbolic number at `place`.

        If the size of this call exceeds the range that the user gave, it is half as much again as in this call. A range
        that was given for tokens holds for targets too, whose size is the same now.
        """
        together = [other for other in range(len(dims)) if self._go_together(place, other, dims)]
        expected = max(self._limits[other] or 0 for other in together)
        known = max(expected, self._range.dims[place] if self._range else 0)
        if dims[place] <= known:
            return known
        return int(GROWTH * dims[place]) if expected else dims[place]


class SizedStep(CapturedStep):
    """A captured step at certain sizes of its inputs, from which plans for other sizes can be made too."""

    def __init__(self, plans: PlansOfSizes, dims: Dims, inputs: Sequence[Any] = ()) -> None:
        self._plans, self._dims, self._inputs = plans, dims, inputs

    @property
    def options(self) -> Options:
        """The options that the step was captured with."""
        return self._plans._options

    @property
    def graph(self) -> Captured:
        """The step at these sizes, op by op."""
        return self._plans._graph.at(self._dims)

    @property
    def sizes(self) -> str:
        """The sizes that may change, as `tokens[1] = 300`."""
        return self._plans.described(self._dims)

    @property
    def resizable_inputs(self) -> frozenset[str]:
        """The names of the inputs that have symbolic sizes; sizes of further inputs may follow from theirs."""
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
        """Return the same step for inputs of other sizes: see `CapturedStep.at`."""
        return SizedStep(self._plans, self._plans.resized(self._dims, sizes))


def _shown(sizes: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {given}" for name, given in sizes.items())


def _by_dimension(name: str, given: object, dimensions: Sequence[int | None]) -> dict[int | None, int]:
    """Return the sizes that a user gave for an input, by dimension.

    Raises:
        FxrematError: a dimension is not symbolic, or a size is no integer above 1.
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
