"""Learns which outputs the caller drops before the backward begins, such as logits beside a loss.

    outputs = model(x); outputs.loss.backward()       holds all outputs to the end of the step
    model(x).loss.backward()                          drops the logits before the backward, which has their memory

A plan counts outputs as held, until a step was seen that has dropped some. They are dropped if their storages are gone
when the backward has ended, since until then it may need them itself. From then on each backward is checked, and an
output that was held once counts as held for good, unless nothing fits so: then a backward that begins while it is held
is refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fxremat.errors import BudgetTooSmall
from fxremat.graphs.captured import Captured, places_of
from fxremat.planned_step import PlannedStep
from fxremat.torch_private import is_allocated, storage_of, storage_watch
from fxremat.units import format_bytes

T = TypeVar("T")
NUMBER = 8  # bytes of a single number, such as a loss
HELD = (
    "it fits only if {size} of outputs are dropped before the backward, as in model(...).loss.backward(), and they "
    "are held: delete them before backward()"
)


@dataclass(frozen=True)
class WatchedOutputs:
    """The outputs of one call, without keeping them alive; those of single numbers and inputs are left out."""

    # the places of the outputs on one storage, its bytes, and whether it is still alive
    storages: tuple[tuple[frozenset[int], int, Callable[[], bool]], ...]

    @classmethod
    def of(cls, outputs: Sequence[Any], inputs: Sequence[Any]) -> WatchedOutputs:
        """Watch the outputs of a call."""
        given = {storage_of(x) for x in inputs if isinstance(x, torch.Tensor)}
        found = dict[int, tuple[set[int], torch.Tensor]]()
        for place, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and is_allocated(output) and output.untyped_storage().nbytes() > NUMBER:
                found.setdefault(storage_of(output), (set(), output))[0].add(place)
        watched = (each for storage, each in found.items() if storage not in given)
        return cls(tuple((frozenset(at), t.untyped_storage().nbytes(), storage_watch(t)) for at, t in watched))

    @property
    def dropped(self) -> dict[int, int]:
        """The outputs that are gone: place -> bytes, for outputs that share memory those of the first."""
        found = dict[int, int]()
        for places, size, is_alive in self.storages:
            if not is_alive():
                found |= dict.fromkeys(places, 0) | {min(places): size}
        return found

    @property
    def alive(self) -> frozenset[int]:
        """The outputs that are still there."""
        return frozenset(place for places, _, is_alive in self.storages if is_alive() for place in places)

    def held(self, *, apart_from: Set[int]) -> dict[int, int]:
        """Return the outputs that are still there: place -> bytes, as in `dropped`.

        What refers to itself, as errors and their frames may since the model was captured, is collected first if it
        may be all that holds any apart from these.
        """
        if any(is_alive() and not places <= apart_from for places, _, is_alive in self.storages):
            gc.collect()
        alive = [(places, size) for places, size, is_alive in self.storages if is_alive()]
        return {place: size if place == min(places) else 0 for places, size in alive for place in places}


@dataclass
class DroppedOutputs:
    """The assumptions of plans about the outputs of calls that differ in sizes alone.

    Attributes:
        places: the outputs that the caller drops before the backward.
        held: outputs that it has held, or that have to count as held.
        refused: the error of planning with all outputs held, while plans assume that they are dropped, though no step
            was seen, or one that has held some; None: otherwise.
        ends: the error that ends the backward that has just begun, whose outputs are held; None: it may run.
        may_assume: False: the call that is planned does not run, so that nothing is assumed that no step has shown.
    """

    places: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    refused: BudgetTooSmall | None = None
    ends: BudgetTooSmall | None = None
    may_assume: bool = True

    def new(self, dropped: Mapping[int, int]) -> frozenset[int]:
        """Return which outputs a step has dropped that plans count as held, and may count as dropped."""
        return frozenset(dropped) - self.held - self.places

    def fitting(
        self, plan: Callable[[], T], graph: Captured, drop: Callable[[Set[int]], None], *, in_percent: bool
    ) -> T:
        """Return what `plan` returns; where nothing fits, after `drop` was called with other outputs to assume.

        Args:
            graph: the step.
            in_percent: True if the budget is in percent.

        Raises:
            BudgetTooSmall: nothing fits either way; `drop` was called with what was assumed before.
        """
        try:
            return plan()
        except BudgetTooSmall as error:
            places = self._otherwise(graph, in_percent=in_percent)
            if places is None:
                raise
            drop(places)
            try:
                made = plan()
            except BudgetTooSmall:
                drop(self.places)
                raise error from None
            if not places:
                self.held |= self.places  # they would be counted as dropped again after the next step
            # a copy, since the traceback of the error refers to frames, which keep outputs alive
            self.places, self.refused = places, error.explained() if places else None
            return made

    def _otherwise(self, graph: Captured, *, in_percent: bool) -> frozenset[int] | None:
        """Return what to assume instead where nothing fits; None if nothing else is to be tried.

        That is: that nothing is dropped, as a budget in percent of less is less; or that all outputs beside the loss
        that the model returns are dropped, though no step was seen, or one that has held some.
        """
        if self.places:
            return frozenset() if in_percent and self.refused is None else None
        if not (graph.root_tangents and self.may_assume):
            return None
        large = frozenset(value for value in graph.kept_outputs - graph.returned if graph.values[value].bytes > NUMBER)
        return places_of(graph, large) or None

    def has_seen(self, held: Set[int]) -> frozenset[int]:
        """Take what a step has held, which counts as held from now on, and return what plans count as dropped of it."""
        relied = self.places & held
        self.held |= held
        self.places -= relied
        return relied

    def check(self, outputs: WatchedOutputs, plan: PlannedStep) -> None:
        """Refuse a backward that begins while the caller holds outputs, if its plan is known to fit only without them.
        """
        if not self.places & outputs.alive:
            return
        unread = self.places & plan.unread_outputs()  # nothing else holds them
        held = outputs.held(apart_from=outputs.alive - unread)
        if self.refused is None or plan.peak_dropping(self.places - (unread & held.keys())) <= plan.budget:
            return
        ways = self.refused.note, HELD.format(size=format_bytes(bytes_at(held, unread)))
        self.ends = self.refused.explained(note="; ".join(filter(None, ways)))

    def begin_backward(self) -> None:
        """Raise `BudgetTooSmall` if the backward that begins is refused."""
        ends, self.ends = self.ends, None
        if ends is not None:
            raise ends


def bytes_at(outputs: Mapping[int, int], places: Set[int]) -> int:
    """Return the bytes of those of the outputs that are at these places."""
    return sum(size for place, size in outputs.items() if place in places)
