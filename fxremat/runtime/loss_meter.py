"""Measures the memory that a loss outside the model allocates, from the allocator's counters while steps run.

A plan reserves memory between forward and backward for a loss that it does not know
(`graphs.accounting.outside_bytes`). On CUDA the loss is measured from the first step on: the counters are read,
but not reset, when the planned forward has run, and when the first gradient reaches its backward. Steps 1, 2,
4, 8 and so on are measured, since losses may grow. A CPU's allocator has no counters, so the assumption stays; but in
the first step the values of the loss are looked for that Python still holds when the model's backward begins. So are
gradients of parameters that are there by then, as those of a penalty on their norm.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxremat.device import Ability, kind_of
from fxremat.graphs.accounting import assumed_for, numbers_of_loss
from fxremat.torch_private import (
    accumulates_into,
    current_node,
    is_compiled_backward,
    is_node_of,
    roots_of_backward,
    sequence_number,
    storage_of,
    watching_backward,
)


@dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """The measured memory of a loss outside the model, in bytes above what was allocated at the end of the forward."""

    assumed: int  # bytes that plans reserve for outputs of these shapes before a loss was measured
    # largest bytes allocated before the model's backward; a lower bound if `exact` is False; None: not measured
    peak: int | None
    held: int  # bytes allocated when the model's backward begins, without the gradients of the outputs
    early: int  # of gradients of parameters that are there by then, and were not when the forward began, beside `held`
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
        stepping: the step updates its parameters itself, and has their gradients elsewhere.
    """

    def __init__(
        self,
        step: Callable[..., Sequence[Any]],
        trained: Sequence[int],
        tell: Callable[[MeasuredLoss], None],
        *,
        stepping: bool = False,
    ) -> None:
        self.step, self.trained, self.tell, self.stepping = step, tuple(trained), tell, stepping
        self.calls = 0
        self._stop: Callable[[], None] | None = None

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        measured = (self.calls + 1) & self.calls == 0
        leaves = [x for x in inputs if _is_without_gradient(x)] if measured and not self.stepping else []
        self._unwatch()
        outputs = self.step(*inputs)
        self.calls += 1
        if measured:
            self._measure(outputs, leaves)
        return outputs

    def _measure(self, outputs: Sequence[Any], leaves: Sequence[Tensor]) -> None:
        trained = [outputs[position] for position in self.trained]
        others = [t for position, t in enumerate(outputs) if position not in self.trained and isinstance(t, Tensor)]
        nodes = (output.grad_fn for output in trained)
        node = next((node for node in nodes if node is not None and is_compiled_backward(node)), None)
        tensors = [output for output in trained if output.dim() > 0]
        if node is None:
            return
        if not tensors:
            self._look_for_held(node, None, leaves, 0)
            return
        device, assumed = tensors[0].device, sum(assumed_for(t.numel(), t.dtype) for t in tensors)
        assumed += sum(assumed_for(t.numel(), t.dtype, trained=False) for t in others)
        if (before := levels_of(device)) is None:
            self._look_for_held(node, [*tensors, *others] if self.calls == 1 else None, leaves, assumed)
            return
        gradients = sum(t.numel() * t.element_size() for t in tensors)

        def tell(_: Any) -> None:
            handle.remove()
            if (now := levels_of(device)) is None:
                return
            (start, top), (level, highest) = before, now
            exact = highest > top
            peak = (highest if exact else max(level, start)) - start
            self.tell(MeasuredLoss(assumed=assumed, peak=peak, held=level - start - gradients, early=0, exact=exact))

        handle = node.register_prehook(tell)

    def _look_for_held(
        self, node: Any, outputs: Sequence[Tensor] | None, leaves: Sequence[Tensor], assumed: int
    ) -> None:
        """Look for values of the loss, and for gradients of `leaves`, when the model's backward begins.

        Args:
            outputs: the model's outputs, which the plan has room for. None: values of the loss are not looked for.
        """
        looks, known, call = outputs is not None, {storage_of(output) for output in outputs or ()}, self.calls
        watched, early = [weakref.ref(leaf) for leaf in leaves], [0]
        numbers = numbers_of_loss(outputs[0].device) if outputs else 0
        begins = weakref.ref(node, lambda _: stop())  # a call may be dropped without a backward

        def before() -> None:
            # if the step has called the model again, gradients may be that call's
            if call == self.calls and (alive := begins()) is not None:
                early[0] = _early(alive, [leaf for leaf in (each() for each in watched) if leaf is not None])

        def tell(_: Any) -> None:
            handle.remove()
            self._unwatch()
            found = made_from(current_node()) if looks else ()
            held = {storage_of(each): each.untyped_storage().nbytes() for each in found}
            size = sum(count for storage, count in held.items() if storage not in known)
            size += numbers if size else 0
            self.tell(MeasuredLoss(assumed=assumed, peak=None, held=size, early=early[0], exact=False))

        handle = node.register_prehook(tell)
        self._stop = stop = watching_backward(before, lambda: None)

    def _unwatch(self) -> None:
        """End the watch for the backward of the last call that was measured."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


def _early(node: Any, leaves: Sequence[Tensor]) -> int:
    """Return the bytes of gradients of leaves that a backward makes before it reaches a node, or that exist already.

    The backward is the one that begins now. Autograd runs what was computed last first, so that a penalty on parameters
    is differentiated before the model, and keeps its gradients to add those of the model to them.
    """
    sizes = {id(leaf): leaf.nbytes for leaf in leaves}
    seen, waiting = set[Any](), list(roots_of_backward())
    number, early = sequence_number(node), {id(leaf) for leaf in leaves if leaf.grad is not None}
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        following = [each for each, _ in at.next_functions if each is not None]
        if sequence_number(at) > number and not is_node_of(at, "fxremat"):
            early |= {id(leaf) for leaf in map(accumulates_into, following) if leaf is not None}
        waiting += following if at is not node else ()
    return sum(sizes.get(each, 0) for each in early) if node in seen else 0


def _is_without_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf and value.grad is None


def made_from(node: Any) -> Iterator[Tensor]:
    """Yield the tensors, apart from single numbers, that Python holds and that were computed from a node's results.

    A loss may be a single number in a large storage: on a CPU, `mse_loss` returns its mean in the storage of all terms.
    Costs a look at every object of the process, some tens of milliseconds.
    """
    leads = {node: True}
    for each in gc.get_objects():
        if type(each) is not Tensor or each.layout is not torch.strided or each.grad_fn is None:
            continue
        if each.untyped_storage().nbytes() > each.element_size() and _leads(each.grad_fn, leads):
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
