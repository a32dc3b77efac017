"""Measures what a loss outside the model, or what runs beside a loss that it returns, allocates, while steps run.

A plan reserves memory between forward and backward for a loss that it does not know
(`graphs.accounting.outside_bytes`). On CUDA the loss is measured from the first step on: the counters are read, but not
reset, when the planned forward has run, and when the first gradient reaches its backward. Steps 1, 2, 4, 8 and so on
are measured, since losses may grow, and those with larger inputs than any before. A CPU's allocator has no counters:
there a profiler records what the loss allocates (`step_memory`). Where the program starts one of its own, the
assumption stays; but in the first step the values of the loss are looked for that Python still holds when the model's
backward begins. So are gradients of parameters that are there by then, as those of a penalty on their norm, and, in the
first two steps and those with larger inputs, what stays beside a loss that the model returns.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxremat.device import Ability, kind_of
from fxremat.graphs.accounting import assumed_for, numbers_of_loss
from fxremat.graphs.nodes import storage_bytes
from fxremat.runtime.dropped_outputs import WatchedOutputs
from fxremat.runtime.step_memory import Border, OtherModels, Recorded, recorder_of
from fxremat.torch_private import (
    accumulates_into,
    current_node,
    history_of,
    is_allocated,
    is_compiled_backward,
    is_node_of,
    is_transformed,
    kept_graph,
    roots_of_backward,
    sequence_number,
    storage_of,
    watching_backward,
)

MOST_LOOKS = 2  # on a device without counters, what is beside a loss is looked for in so many calls, and larger ones
GROWTH = 1.02  # a loss is measured again where the inputs have grown by this factor
MOST_PLACES, MOST_LEFT_OUT = 4, 0.25  # what a loss may leave out of a dimension of outputs: places, and their share


@dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """The measured memory of a loss outside the model, in bytes above what was allocated at the end of the forward.

    Where the model returns its loss, that of what runs before its backward.
    """

    # bytes that plans reserve for outputs of these shapes before a loss was measured; 0 if the model returns its loss
    assumed: int
    # largest bytes allocated before the model's backward, beside `early`; a lower bound if `exact` is False.
    # None: not measured
    peak: int | None
    held: int  # bytes allocated when the model's backward begins, without the gradients of the outputs
    early: int  # of gradients of parameters that are there by then, and were not when the forward began, beside `held`
    fixed: int  # of gradients of parameters that only the loss has, within `peak` and `held`
    # bytes by which what is alive at `peak`, and in `held`, is smaller than outputs, as without the last token of each
    left_out: tuple[int, int] = (0, 0)
    exact: bool  # False if an earlier, higher peak of the process hides the peak of the loss
    # outputs of the model that are gone when its backward begins: place -> bytes, which are not taken off `held`
    dropped: Mapping[int, int] = field(default_factory=dict)
    is_whole: bool = True  # all outputs got a gradient; a loss that reads others, too, may take more
    anew: bool = False  # what was measured before counts no more, since models that the loss consists of have new plans
    call: int = 0  # the number of the call since the step was captured

    def held_beside(self, dropped: Set[int]) -> int:
        """Return the bytes that are held beside a plan that counts these outputs as dropped, and others as held."""
        return max(0, self.held - sum(size for place, size in self.dropped.items() if place not in dropped))


class OutputsHeard(NamedTuple):
    """The functions that are told what the caller does with the outputs of a call."""

    begins: Callable[[WatchedOutputs], None]  # called as the backward of the step begins
    ended: Callable[[WatchedOutputs], None]  # called when the backward has ended, unless that keeps its graph


class _Outputs(NamedTuple):
    """The outputs of a call that a loss outside is computed from, single numbers left out, and their bytes.

    What several outputs share, as a tensor and its transpose do, counts once: their gradients are added up before they
    reach the model's backward.
    """

    tensors: tuple[Tensor, ...]
    assumed: int  # bytes that plans reserve for a loss of them before it was measured
    # bytes of their gradients when the model's backward begins, each with its index among those that this gets; None:
    # the output is a view that AOTAutograd makes
    gradients: tuple[tuple[int | None, int], ...]

    @property
    def shapes(self) -> dict[int, torch.Size]:
        """The outputs' shapes by their bytes, also for wider numbers, in which a loss may be computed."""
        widths = {(tensor, width) for tensor in self.tensors for width in (tensor.element_size(), 4, 8)}
        return {t.numel() * width: t.shape for t, width in widths if width >= t.element_size()}

    @classmethod
    def of(cls, trained: Sequence[Tensor], others: Sequence[Tensor]) -> _Outputs:
        """Count outputs that require grad, and others."""
        assumed, gradients = 0, list[tuple[int | None, int]]()
        left = dict[int, int]()  # numbers in each storage that no output before has
        outputs = [(tensor, True) for tensor in trained] + [(tensor, False) for tensor in others]
        for tensor, is_trained in sorted(outputs, key=lambda each: _is_expanded(each[0])):
            storage, counted = storage_of(tensor), tensor.numel()
            counted = min(counted, left.get(storage, counted))
            left[storage] = max(0, left.get(storage, _numbers_in_storage(tensor)) - counted)
            assumed += assumed_for(counted, tensor.dtype, trained=is_trained)
            if tensor.requires_grad:
                number = tensor.output_nr if is_compiled_backward(tensor.grad_fn) else None
                gradients.append((number, counted * tensor.element_size()))
        return cls((*trained, *others), assumed, tuple(gradients))


def _arrived(sizes: Iterable[tuple[int | None, int]], gradients: Sequence[Tensor | None]) -> int:
    """Return the bytes of the gradients of outputs that a backward got: of several losses, each may give some.

    Args:
        sizes: as in `_Outputs.gradients`.
        gradients: those that it got, and None for the others.
    """
    return sum(size for number, size in sizes if number is None or gradients[number] is not None)


def _is_whole(sizes: Iterable[tuple[int | None, int]], gradients: Sequence[Tensor | None]) -> bool:
    """Tell whether all outputs got a gradient; the arguments are those of `_arrived`."""
    return all(number is None or gradients[number] is not None for number, _ in sizes)


def _left_out(alive: Mapping[int, int], outputs: Mapping[int, torch.Size]) -> int:
    """Return the bytes by which tensors are smaller than the outputs, without a few places of one of their dimensions.

    The loss of a causal model reads `logits[:, :-1]`: its bytes grow with the length less one.

    Args:
        alive: number of tensors of the loss, by size in bytes.
        outputs: as `_Outputs.shapes` returns them.
    """

    def missing(size: int) -> int:
        for whole, shape in outputs.items():
            left = whole - size
            places = (left * count / whole for count in shape)
            if 0 < left <= MOST_LEFT_OUT * whole and any(each in range(1, MOST_PLACES + 1) for each in places):
                return left
        return 0

    return sum(count * missing(size) for size, count in alive.items())


class _Gradients(NamedTuple):
    """Bytes of gradients of parameters that are there when a backward reaches the model's."""

    own: int  # of parameters of the model: those that exist already, or that another part of the step makes
    others: int  # of parameters that the model does not have, and that had none before

    @classmethod
    def before(cls, node: Any, leaves: Sequence[Tensor]) -> _Gradients:
        """Count what the backward that begins now makes before it reaches the node of the model's backward.

        Autograd runs what was computed last first, so that a penalty on parameters is differentiated before the model,
        and keeps its gradients to add those of the model to them.

        Args:
            leaves: the parameters of the model.
        """
        sizes = {id(leaf): leaf.nbytes for leaf in leaves}
        seen, waiting, others = set[Any](), list(roots_of_backward()), dict[int, int]()
        number, own = sequence_number(node), {id(leaf) for leaf in leaves if leaf.grad is not None}
        while waiting:
            at = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            following = [each for each, _ in at.next_functions if each is not None]
            if sequence_number(at) > number and not is_node_of(at, "fxremat"):
                made = [leaf for leaf in map(accumulates_into, following) if leaf is not None]
                own |= {id(leaf) for leaf in made}
                others |= {id(leaf): leaf.nbytes for leaf in made if leaf.grad is None and id(leaf) not in sizes}
            waiting += following if at is not node else ()
        if node not in seen:
            return cls(0, 0)
        return cls(sum(sizes.get(each, 0) for each in own), sum(others.values()))


class _Look:
    """A look, at the beginning of a backward, at the gradients that are made before it reaches a node.

    Args:
        node: of the model's backward.
        leaves: the parameters of the model.
        is_last: tells whether the model has not been called since.
    """

    def __init__(self, node: weakref.ref[Any], leaves: Sequence[Tensor], is_last: Callable[[], bool]) -> None:
        self.found = _Gradients(0, 0)
        self._node, self._leaves, self._is_last = node, [weakref.ref(leaf) for leaf in leaves], is_last

    def __call__(self) -> None:
        if self._is_last() and (node := self._node()) is not None:
            alive = [leaf for each in self._leaves if (leaf := each()) is not None]
            self.found = _Gradients.before(node, alive)


def levels_of(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes allocated now, and their peak so far; None if the device's allocator has no counters."""
    kind = kind_of(device)
    return (kind.allocated(device), kind.most_allocated(device)) if kind.can(Ability.STATISTICS) else None


class LossMeter:
    """A wrapper of a compiled step that measures the memory of the loss, which is computed outside of the step.

    It also tells what the caller does with the outputs until the backward has ended.

    Args:
        step: the compiled step.
        trained: indices of the step's outputs that require grad.
        judge: called after each call that is measured; returns a function that takes the measurement.
        of_outputs: called after each call, with whether it is measured; returns whom to tell what the caller does with
            its outputs, or None.
        others: tells whether other models have new plans; then the loss is measured again, and where they have replaced
            plans, what was measured before counts no more. Is told of this step.
        stepping: the step updates its parameters itself, and has their gradients elsewhere.
        replanned: returns how often the model got new plans without being captured again; then the loss is measured.
    """

    def __init__(
        self,
        step: Callable[..., Sequence[Any]],
        trained: Sequence[int],
        judge: Callable[[], Callable[[MeasuredLoss], None]],
        of_outputs: Callable[[bool], OutputsHeard | None],
        others: OtherModels,
        *,
        stepping: bool = False,
        replanned: Callable[[], int] = lambda: 0,
    ) -> None:
        self.step, self.trained, self.stepping = step, tuple(trained), stepping
        self._judge, self._of_outputs, self._others = judge, of_outputs, others
        self._replanned, self._plans = replanned, replanned()
        self.calls = 0
        self._stop: Callable[[], None] | None = None
        self._stop_outputs: Callable[[], None] = lambda: None
        self._node: weakref.ref[Any] | None = None  # of the backward of the call whose outputs are watched
        self._data: list[int] | None = None  # the places of inputs that are no parameters
        self._largest = 0  # the most numbers that these had in a call that was measured, since others have their plans
        self._looks = False  # True if this call is looked at where allocations are not counted
        self._anew = False  # True if others have new plans, and nothing was measured since

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        changed = self._others.have_new_plans()
        if self._others.have_replaced_plans():
            self._anew, self._largest = True, 0
        before, self._plans = self._plans, self._replanned()
        changed |= self._has_larger(inputs) or before != self._plans
        self._looks = changed or self.calls < MOST_LOOKS
        measured = changed or (self.calls + 1) & self.calls == 0
        leaves = [x for x in inputs if _is_without_gradient(x)] if measured and not self.stepping else []
        self._unwatch()
        self._stop_outputs()
        meter = _recorder(inputs) if measured else None
        with contextlib.ExitStack() as failed:
            if meter is not None:
                failed.callback(meter.end)
            outputs = self.step(*inputs)
            self.calls += 1
            if self._others.exist and (node := self._node_of(outputs)) is not None:
                self._others.own_step_waits = _waiting_for(node)
            watched = self._watch_outputs(outputs, inputs, measured=measured)
            if measured and self._measure(outputs, watched, leaves, meter):
                failed.pop_all()
        return outputs

    def _watch_outputs(self, outputs: Sequence[Any], inputs: Sequence[Any], *, measured: bool) -> WatchedOutputs:
        """Tell what the caller does with the outputs, where that is of interest."""
        heard, node = self._of_outputs(measured), self._node_of(outputs)
        if node is None or heard is None:
            return WatchedOutputs(())
        watched, reached = WatchedOutputs.of(outputs, inputs), list[bool]()

        def begins(_: Sequence[Tensor | None]) -> None:
            handle.remove()
            heard.begins(watched)
            reached.append(True)

        def ended() -> None:
            if reached and sys.exc_info()[0] is None and not kept_graph():
                self._stop_outputs()
                heard.ended(watched)

        handle, stop = node.register_prehook(begins), watching_backward(lambda: None, ended)
        self._node = weakref.ref(node, lambda _: stop())  # the call may be dropped without a backward
        self._stop_outputs = stop
        return watched

    def _has_larger(self, inputs: Sequence[Any]) -> bool:
        """Tell whether inputs are larger than those of all calls since others have their plans, by more than `GROWTH`.
        """
        if self._data is None:
            self._data = [place for place, x in enumerate(inputs) if isinstance(x, Tensor) and not _is_parameter(x)]
        count, before = sum(int(inputs[place].numel()) for place in self._data), self._largest
        if count <= GROWTH * before:
            return False
        self._largest = count
        return True

    def _measure(
        self, outputs: Sequence[Any], watched: WatchedOutputs, leaves: Sequence[Tensor], meter: Recorded | None
    ) -> bool:
        """Measure the loss that follows; return True if the meter goes on."""
        node, trained = self._node_of(outputs), [outputs[position] for position in self.trained]
        others = [t for position, t in enumerate(outputs) if position not in self.trained and isinstance(t, Tensor)]
        tensors = [output for output in trained if output.dim() > 0]
        if node is None:
            return False
        device, known = trained[0].device, _Outputs.of(tensors, others if tensors else [])
        if (before := levels_of(device)) is None and not tensors:
            self._watch_beside(node, device, watched, leaves)
            return False
        if before is None:
            self._watch(node, known, watched, leaves, meter)
            return meter is not None
        look, judge, sizes, assumed = self._look(node, leaves), self._taking(), known.gradients, known.assumed

        def tell(gradients: Sequence[Tensor | None]) -> None:
            handle.remove()
            self._unwatch()
            if (now := levels_of(device)) is None or _is_differentiated_elsewhere(gradients):
                return
            (start, top), (level, highest) = before, now
            exact = highest > top
            peak = (highest if exact else max(level, start)) - start
            dropped, fixed = watched.dropped, look.found.others
            held = level - start - _arrived(sizes, gradients) + sum(dropped.values())
            loss = MeasuredLoss(assumed=assumed, peak=peak, held=held, early=0, fixed=fixed, exact=exact)
            judge(replace(loss, dropped=dropped, is_whole=_is_whole(sizes, gradients)))

        handle, self._stop = node.register_prehook(tell), watching_backward(look, lambda: None)
        return False

    def _taking(self) -> Callable[[MeasuredLoss], None]:
        """Return a function that takes the loss of the call that has just run."""
        judge, call = self._judge(), self.calls

        def take(loss: MeasuredLoss) -> None:
            anew, self._anew = self._anew and loss.peak is not None, self._anew and loss.peak is None
            judge(replace(loss, anew=anew, call=call))

        return take

    def _look(self, node: Any, leaves: Sequence[Tensor]) -> _Look:
        """Return a look at the gradients that the backward of the call that has just run makes; see `_Gradients`."""
        call = self.calls
        # a call may be dropped without a backward; if the step has called the model again, gradients may be that call's
        return _Look(weakref.ref(node, lambda _: self._unwatch()), leaves, lambda: call == self.calls)

    def _node_of(self, outputs: Sequence[Any]) -> Any:
        """Return the node of the step's backward; None if it has none."""
        nodes = (outputs[position].grad_fn for position in self.trained)
        return next((node for node in nodes if node is not None and is_compiled_backward(node)), None)

    def _watch(
        self,
        node: Any,
        outputs: _Outputs,
        watched: WatchedOutputs,
        leaves: Sequence[Tensor],
        meter: Recorded | None,
    ) -> None:
        """Measure the loss on a device without counters.

        If the program starts a profiler of its own, look for what stays of the loss when the model's backward begins,
        and for gradients of parameters that are there by then.

        Args:
            node: of the model's backward.
            leaves: the parameters.
            meter: has recorded the forward.
        """
        looks, look = self.calls == 1, self._look(node, leaves)
        judge = self._taking()
        assumed, sizes, known = outputs.assumed, outputs.gradients, {storage_of(t) for t in outputs.tensors}
        shapes, numbers = outputs.shapes, numbers_of_loss(outputs.tensors[0].device)
        leaves_forward = meter.border() if meter is not None else None
        # with the bytes of the gradients that arrive there, the outputs that are dropped by then, and `is_whole`
        reaches_backward = list[tuple[Border, int, Mapping[int, int], bool]]()
        if meter is not None:
            meter.leave(0)

        def reached(gradients: Sequence[Tensor | None]) -> None:
            handle.remove()
            if _is_differentiated_elsewhere(gradients):
                self._unwatch()
                return
            if meter is not None and meter.measures_loss and meter.is_here:
                border = meter.border(in_backward=True)
                arrived, whole = _arrived(sizes, gradients), _is_whole(sizes, gradients)
                reaches_backward.append((border, arrived, watched.dropped, whole))
                return
            self._unwatch()
            found = made_from(current_node()) if looks else ()
            held = {storage_of(each): each.untyped_storage().nbytes() for each in found}
            size = sum(count for storage, count in held.items() if storage not in known)
            size += numbers if size else 0
            loss = MeasuredLoss(assumed=assumed, peak=None, held=size, early=look.found.own, fixed=0, exact=False)
            judge(replace(loss, dropped=watched.dropped))

        def after() -> None:
            if not reaches_backward:
                return
            self._unwatch()
            ((end, arrived, dropped, whole),), start = reaches_backward, leaves_forward
            if start is not None and start.level is not None and end.level is not None and end.peak is not None:
                early, fixed = look.found
                peak, held = max(0, end.peak - start.level - early), end.level - start.level - arrived - early
                held += sum(dropped.values())
                loss = MeasuredLoss(assumed=assumed, peak=peak, held=held, early=early, fixed=fixed, exact=True)
                less = _left_out(end.alive(at_peak=True), shapes), _left_out(end.alive(), shapes)
                judge(replace(loss, dropped=dropped, is_whole=whole, left_out=less))

        handle, stop = node.register_prehook(reached), watching_backward(look, after)

        def unwatch() -> None:
            stop()
            if meter is not None:
                meter.end()

        self._stop = unwatch

    def _watch_beside(
        self, node: Any, device: torch.device, watched: WatchedOutputs, leaves: Sequence[Tensor]
    ) -> None:
        """Look for what the program keeps beside a loss that the model returns, on a device without counters.

        A record of allocations would not tell what is freed of earlier steps, such as what this one replaces. What is
        freed before the backward begins is not seen.
        """
        look, judge = self._look(node, leaves), self._taking()
        before = held_by_python(device) if self._looks else None

        def reached(gradients: Sequence[Tensor | None]) -> None:
            handle.remove()
            self._unwatch()
            if _is_differentiated_elsewhere(gradients):
                return
            dropped, early = watched.dropped, look.found.own
            loss = MeasuredLoss(assumed=0, peak=None, held=0, early=early, fixed=0, exact=False, dropped=dropped)
            if before is not None:
                made = held_by_python(device) - before
                loss = replace(loss, peak=max(0, made), held=made + sum(dropped.values()), exact=True)
            judge(loss)

        handle, self._stop = node.register_prehook(reached), watching_backward(look, lambda: None)

    def _unwatch(self) -> None:
        """End the watch for the backward of the last call that was measured."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


def _waiting_for(node: Any) -> Callable[[], bool]:
    """Return a function that tells whether a backward may still reach a node for the first time."""
    reached, reference = list[bool](), weakref.ref(node)
    node.register_prehook(lambda _: reached.append(True))
    return lambda: not reached and reference() is not None


def _is_differentiated_elsewhere(gradients: Sequence[Tensor | None]) -> bool:
    """Tell whether the step's backward gets no gradient: what ran before it is the step itself, as plain PyTorch.

    See `runtime.auxiliary_outputs`.
    """
    return all(gradient is None for gradient in gradients)


def _recorder(inputs: Sequence[Any]) -> Recorded | None:
    """Return a meter that records a step with these inputs, parameters among them; None where that cannot be."""
    devices = {x.device for x in inputs if isinstance(x, Tensor) and x.dim() > 0}
    return recorder_of(devices.pop()) if len(devices) == 1 else None


def _numbers_in_storage(tensor: Tensor) -> int:
    return storage_bytes(tensor) // tensor.element_size()


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.numel() > _numbers_in_storage(tensor)


def _is_parameter(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def _is_without_gradient(value: Any) -> bool:
    return _is_parameter(value) and value.grad is None


def held_by_python(device: torch.device) -> int:
    """Return the bytes of the tensors on a device that Python holds.

    Costs a look at every object of the process, some tens of milliseconds.
    """
    found = dict[int, int]()
    for each in gc.get_objects():
        if type(each) is Tensor and not is_transformed(each) and each.device == device and is_allocated(each):
            found[storage_of(each)] = each.untyped_storage().nbytes()
    return sum(found.values())


def made_from(node: Any) -> Iterator[Tensor]:
    """Yield the tensors, apart from single numbers, that Python holds and that were computed from a node's results.

    A loss may be a single number in a large storage: on a CPU, `mse_loss` returns its mean in the storage of all terms.
    Costs a look at every object of the process, some tens of milliseconds.
    """
    leads = {node: True}
    for each in gc.get_objects():
        if type(each) is not Tensor or is_transformed(each):
            continue
        if each.layout is not torch.strided or (made_by := history_of(each)) is None:
            continue
        if each.untyped_storage().nbytes() > each.element_size() and _leads(made_by, leads):
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
