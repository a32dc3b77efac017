"""Budgets in bytes: the only place where percentages, "auto" and "min" become bytes.

    4 GiB     4294967296
    60 %      60 % of the step's peak without recomputation ("keep-all"). With weights on the host, that of a step with
              all weights on the device; with compiled ops, that of the step in eager PyTorch's kernels; with input
              sizes that change, that at the largest sizes
    auto      what the device has free, or would have left
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fxremat.budget import bytes_to_reserve, free_bytes
from fxremat.cost.allocator import allocator_of
from fxremat.cost.device_memory import DeviceMemory, Division, memory_on
from fxremat.cost.devices import Device
from fxremat.cost.estimate import estimate
from fxremat.errors import BudgetTooSmall, InvalidBudget
from fxremat.graphs.accounting import device_of, largest_tensor
from fxremat.graphs.captured import Captured
from fxremat.options import Options
from fxremat.planning.facts import estimated_device, facts_of
from fxremat.planning.step import Reference, Step
from fxremat.search.executions import keep_all_peak
from fxremat.search.survey import order_of_least, order_within
from fxremat.step.reserved import AllocatorState
from fxremat.transfers.network import communicates
from fxremat.units import Auto, Bytes, Least, Percent


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The memory budget of one step, in bytes or still in percent, with what errors need to state it as the user did.
    """

    known: int | None = None  # bytes; None while the budget is a percentage of a peak that is not known yet
    share: float | None = None  # percent; None if the budget was not given in percent
    keep_all: int | None = None  # bytes that `share` is a percentage of; None if not needed or not known yet
    device: DeviceMemory | None = None  # memory of a device that the user named, if the budget is "auto"
    division: Division | None = None  # of the `device_mem` that the user gave
    reserving: bool = False  # the budget limits what the device's allocator reserves, not what is allocated
    spare: int = 0  # bytes beyond the budget that a step may take, with a warning, if nothing fits otherwise
    words: str = ""  # the budget in words, for the log
    is_relative: bool = False  # it depends on what the step takes: a percentage, perhaps of an estimate, or the least

    def of(self, keep_all: Callable[[], int]) -> Limit:
        """Return the limit with its bytes known; `keep_all` returns the peak in bytes without recomputation."""
        if self.known is not None:
            return self
        assert self.share is not None, "a limit is known, or a share"
        everything = keep_all()
        return replace(self, known=int(everything * self.share / 100), keep_all=everything)

    def order_of(self, step: Step) -> Sequence[int]:
        """Return an execution order of a step's ops, by estimated costs, that fits into the budget, for measuring them.

        Where none does, or the budget depends on what the step takes, it is one of nearly the least memory: known from
        other sizes, or found without the estimates of workspaces, which may be far too high.
        """
        graph = step.graph
        costs = estimate(graph, Device.named(device_of(graph).type))
        everything = keep_all_peak(graph, costs)
        budget = self.of(lambda: everything).bytes
        if budget >= everything:
            return range(len(graph.ops))
        if self.is_relative and step.order is not None:
            return step.order
        order = None if self.is_relative else order_within(graph, costs, budget)
        workspace = [min(0, size) for size in costs.sizes.workspace]
        return order or order_of_least(graph, replace(costs, sizes=replace(costs.sizes, workspace=workspace)))

    @property
    def bytes(self) -> int:
        """The budget in bytes, once it is known."""
        assert self.known is not None, "the share of what?"
        return self.known

    def explained(self, error: BudgetTooSmall, reason: str = "") -> BudgetTooSmall:
        """Return the error with the budget stated in the form in which the user gave it."""
        if self.division:
            return self.division.explained(error.explained(reason=reason))
        note = self.device.shortage(error.minimum) if self.device else ""
        return error.explained(share=self.share, whole=self.keep_all, reason=reason, note=note)


def limit_of(step: Step, options: Options, *, replayed: bool = True) -> Limit:
    """Return the limit that the user's budget sets for a step.

    All ranks have to call it together: "auto" is the free memory of the rank that has least.

    Args:
        replayed: the bytes that a program makes the allocator reserve may be predicted, so that "auto" need not leave
            room for them.

    Raises:
        InvalidBudget: the budget is "auto", and the device cannot tell how much memory is free.
    """
    words = _words(options)
    match options.budget:
        case Bytes() if options.division is not None:
            division = options.division.of(step.graph)
            return Limit(known=division.budget, words=words, division=division)
        case Bytes(count):
            return Limit(known=count, words=words, reserving=options.counts_reserved)
        case Least():
            # nothing fits in one byte, and the error then names the least budget
            return Limit(known=1, is_relative=True, words=words, reserving=options.counts_reserved)
        case Auto() if options.device is not None:
            memory = left_on_device(step.graph, options)
            return Limit(known=max(1, memory.auto), device=memory, words=f"what {memory.device} has left")
        case Auto() if replayed and (allocator := _replayable(step, options)) is not None:
            known, margin = bytes_to_reserve(device_of(step.graph), allocator.returnable)
            return Limit(known=known, words=words, reserving=True, spare=margin)
        case Auto():
            return Limit(known=_free_on_all(step), words=words, reserving=options.counts_reserved)
        case Percent(share):
            if step.reference:
                return _share_of(step.reference, share)
            unknown = Limit(share=share, is_relative=True, words=words)
            if step.as_eager is None:
                return unknown
            eager = replace(step, graph=step.as_eager, as_eager=None, order=None)
            everything = keep_all_peak(eager.graph, facts_of(eager, options, partial(unknown.order_of, eager)))
            return Limit(known=max(1, int(everything * share / 100)), share=share, keep_all=everything, words=words)


def _replayable(step: Step, options: Options) -> AllocatorState | None:
    """Return the device's allocator if it is known what programs of the step make it reserve; else None."""
    alone = len(step.ranks.ranks) == 1 and not communicates(step.graph)
    if not alone or options.host or options.compiles or options.may_offload or step.trained:
        return None
    return allocator_of(device_of(step.graph))


def limit_of_paths(
    options: Options, device: torch.device, largest: int, keep_all: Callable[[], int], least: Callable[[], int]
) -> Limit:
    """Return the limit that the user's budget sets for a step that calls several graphs.

    Args:
        largest: bytes of the largest tensor that a known graph allocates.
        keep_all: returns the peak in bytes of a step that recomputes nothing; called for a budget in percent.
        least: returns the least budget that works, in bytes; called for mem="min".
    """
    words = _words(options)
    match options.budget:
        case Bytes(count):
            return Limit(known=count, words=words, division=options.division)
        case Least():
            return Limit(known=least(), words=words)
        case Auto():
            return Limit(known=free_bytes(device, largest), words=words)
        case Percent(share):
            return Limit(share=share, words=words).of(keep_all)


def _words(options: Options) -> str:
    return f"what device_mem={options.device_mem} leaves" if options.division else str(options.mem)


def _share_of(reference: Reference, share: float) -> Limit:
    """Return the limit of `share` percent of the peak at the reference sizes; errors will state it in bytes."""
    allowed = max(1, int(reference.bytes * share / 100))
    return Limit(known=allowed, is_relative=True, words=f"{share:g}% of what {reference.of} takes")


def _free_on_all(step: Step) -> int:
    free = free_bytes(device_of(step.graph), largest_tensor(step.graph))
    if len(step.ranks.ranks) == 1:
        return free
    return int(-step.ranks.maximum([-float(free)], "comparing free memory")[0])


def left_on_device(graph: Captured, options: Options) -> DeviceMemory:
    """Return the memory of the device that the user named, and the bytes that weights and optimizer state take there.

    Raises:
        InvalidBudget: the description of the device does not state its memory.
    """
    return stated(memory_on(estimated_device(graph, options), graph, options.optimizer))


def stated(memory: DeviceMemory) -> DeviceMemory:
    """Return what a device's memory is used for. Raises `InvalidBudget` if it is not known how much that device has."""
    if memory.device.memory is None:
        raise InvalidBudget(
            f'mem="auto" plans for what a device has left, and the memory of {memory.device} is not stated; '
            'give bytes, such as mem="4GiB", or a Device(..., memory=...)'
        )
    return memory
