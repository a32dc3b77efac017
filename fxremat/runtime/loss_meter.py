"""Measures the memory that a loss outside the model allocates, from the allocator's counters while steps run.

A plan reserves memory between forward and backward for a loss that it does not know
(`graphs.accounting.outside_bytes`). On CUDA the loss is measured from the first step on: the counters are read,
but not reset, when the planned forward has run, and when the first gradient reaches its backward. Steps 1, 2,
4, 8 and so on are measured, since losses may grow. A CPU's allocator has no counters, so the assumption stays; but in
the first step the values of the loss are looked for that Python still holds when the model's backward begins.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxremat.device import Ability, kind_of
from fxremat.graphs.accounting import assumed_for
from fxremat.torch_private import current_node, is_compiled_backward, storage_of


@dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """The measured memory of a loss outside the model, in bytes above what was allocated at the end of the forward."""

    assumed: int  # bytes that plans reserve for outputs of these shapes before a loss was measured
    # largest bytes allocated before the model's backward; a lower bound if `exact` is False; None: not measured
    peak: int | None
    held: int  # bytes allocated when the model's backward begins, without the gradients of the outputs
    exact: bool  # False if an earlier, higher peak of the process hides the peak of the loss


def levels_of(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes allocated now, and their peak so far; None if the device's allocator has no counters."""
    kind = kind_of(device)
    return (kind.allocated(device), kind.most_allocated(device)) if kind.can(Ability.STATISTICS) else None


class LossMeter:
    """A wrapper of a compiled step that measures the memory of the loss, which is computed outside of the step.

    Args:
        step: the compiled step.
        trained: indices of the step's outputs that require grad.
        tell: called with each measurement.
    """

    def __init__(
        self,
        step: Callable[..., Sequence[Any]],
        trained: Sequence[int],
        tell: Callable[[MeasuredLoss], None],
    ) -> None:
        self.step, self.trained, self.tell = step, tuple(trained), tell
        self.calls = 0

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        outputs = self.step(*inputs)
        self.calls += 1
        if self.calls & (self.calls - 1) == 0:
            self._measure(outputs)
        return outputs

    def _measure(self, outputs: Sequence[Any]) -> None:
        trained = [outputs[position] for position in self.trained]
        others = [t for position, t in enumerate(outputs) if position not in self.trained and isinstance(t, Tensor)]
        nodes = (output.grad_fn for output in trained)
        node = next((node for node in nodes if node is not None and is_compiled_backward(node)), None)
        tensors = [output for output in trained if output.dim() > 0]
        if node is None or not tensors:
            return
        device, assumed = tensors[0].device, sum(assumed_for(t.numel(), t.dtype) for t in tensors)
        assumed += sum(assumed_for(t.numel(), t.dtype, trained=False) for t in others)
        if (before := levels_of(device)) is None:
            if self.calls == 1:
                self._look_for_held(node, [*tensors, *others], assumed)
            return
        gradients = sum(t.numel() * t.element_size() for t in tensors)

        def tell(_: Any) -> None:
            handle.remove()
            if (now := levels_of(device)) is None:
                return
            (start, top), (level, highest) = before, now
            exact = highest > top
            peak = (highest if exact else max(level, start)) - start
            self.tell(MeasuredLoss(assumed=assumed, peak=peak, held=level - start - gradients, exact=exact))

        handle = node.register_prehook(tell)

    def _look_for_held(self, node: Any, outputs: Sequence[Tensor], assumed: int) -> None:
        known = {storage_of(output) for output in outputs}  # which the plan has room for

        def tell(_: Any) -> None:
            handle.remove()
            held = {storage_of(each): each.untyped_storage().nbytes() for each in made_from(current_node())}
            size = sum(count for storage, count in held.items() if storage not in known)
            self.tell(MeasuredLoss(assumed=assumed, peak=None, held=size, exact=False))

        handle = node.register_prehook(tell)


def made_from(node: Any) -> Iterator[Tensor]:
    """Yield the tensors, apart from single numbers, that Python holds and that were computed from a node's results.

    Costs a look at every object of the process, some tens of milliseconds.
    """
    leads = {node: True}
    for each in gc.get_objects():
        known = type(each) is Tensor and each.layout is torch.strided and each.numel() > 1
        if known and each.grad_fn is not None and _leads(each.grad_fn, leads):
            yield each


def _leads(begin: Any, leads: dict[Any, bool]) -> bool:
    """Tell whether a node of autograd's depends on one that `leads` maps to True, and note the answer for all between.
    """
    waiting = [begin]
    while waiting:
        node = waiting[-1]
        before = [each for each, _ in node.next_functions if each is not None]
        unknown = [each for each in before if each not in leads]
        if node in leads or not unknown:
            leads.setdefault(waiting.pop(), any(leads.get(each) for each in before))
        else:
            waiting += unknown
    return leads[begin]
