"""Real strides of ops' results, for tracing a step whose fake tensors would have other strides.

What autograd runs depends on strides: whether a gradient is viewed or copied, and how a product is computed.
torch derives the strides of fake results from decompositions and meta functions, some of which disagree with
the kernels:

    rules       strides of ops whose fake result has other strides than any kernel gives it
    observed    strides that were measured when the ops ran, where a traced view was impossible (`cost.layouts`)

Without them, the backward traced from `F.elu(x).transpose(1, 2)` has a view where plain PyTorch copies, and the
step fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxremat.cost.layouts import Strides, key_of
from fxremat.torch_private import elementwise_strides, with_fake_strides

aten = torch.ops.aten

Rule = Callable[..., Sequence[Any]]  # arguments of an op -> strides of its first output


def _of_operands(*places: int) -> Rule:
    """Return the rule for an op that is implemented with TensorIterator.

    Args:
        places: the indices of the op's arguments that are operands, in the order in which TensorIterator gets them.
    """
    return lambda *args, **_: elementwise_strides(*(args[place] for place in places))


def _contiguous(place: int) -> Rule:
    return lambda *args, **_: _compact(args[place].shape, range(args[place].dim()))


def _suggested(place: int) -> Rule:
    """Return the rule for an op whose result is channels_last if the argument with index `place` is, else contiguous.
    """

    def rule(*args: Any, **_: Any) -> Sequence[Any]:
        shape, tensor = args[place].shape, args[place]
        if tensor.dim() in (4, 5) and not tensor.is_contiguous():
            order = (0, *range(2, tensor.dim()), 1)
            if tensor.is_contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d):
                return _compact(shape, order)
        return _compact(shape, range(tensor.dim()))

    return rule


def _unpooled(x: Tensor, indices: Tensor, size: Sequence[Any], **_: Any) -> Sequence[Any]:
    """Return the strides of a result of `size`, which is channels_last if the input is."""
    shape = (*x.shape[:-2], *size)
    last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return _compact(shape, (0, 2, 3, 1) if last else range(len(shape)))


def _compact(shape: Sequence[Any], order: Iterable[int]) -> list[Any]:
    """Return strides without gaps for a tensor whose dimensions are stored in this order, the outermost first."""
    strides: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in reversed(list(order)):
        strides[dim] = step
        step = step * torch.sym_max(shape[dim], 1)
    return strides


ITERATED = _of_operands(0, 1)

EVERYWHERE: Mapping[Any, Rule] = {
    aten.softplus_backward.default: ITERATED,
    aten.elu_backward.default: _of_operands(0, 5),
    aten.hardtanh_backward.default: ITERATED,
    aten.hardswish_backward.default: ITERATED,
    aten.hardsigmoid_backward.default: ITERATED,
    aten.logit_backward.default: ITERATED,
    aten.rrelu_with_noise_backward.default: _of_operands(2, 0),
    aten.mse_loss_backward.default: _contiguous(1),
    aten.smooth_l1_loss_backward.default: _contiguous(1),
    aten.huber_loss_backward.default: _contiguous(1),
    aten._log_softmax_backward_data.default: _contiguous(0),
}
"""Op -> rule for its strides on every device: all devices use these parts of ATen (TensorIterator, `Loss.cpp`, ...)."""

CPU: Mapping[Any, Rule] = {
    aten.native_dropout_backward.default: ITERATED,
    aten.native_layer_norm_backward.default: _contiguous(1),
    aten.native_group_norm.default: _suggested(0),
    aten.native_group_norm_backward.default: _suggested(1),
    aten.max_unpool2d.default: _unpooled,
}
CPU_BATCH_NORM: Mapping[Any, Rule] = {
    aten.native_batch_norm.default: _suggested(0),
    aten._native_batch_norm_legit.default: _suggested(0),
    aten._native_batch_norm_legit.no_stats: _suggested(0),
    aten.native_batch_norm_backward.default: _suggested(1),
}
"""Op -> rule for its strides in CPU kernels of BatchNorm; not used if Inductor compiles ops, since it chooses layouts.
"""


_known: dict[tuple[bool, bool], dict[Any, Any]] = {}  # (cpu, compiled) -> fake results, cached for later captures


def real_layouts(
    observed: Mapping[str, Strides], *, cpu: bool, compiled: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Return a context for tracing a step in which the fake results of ops have the strides of real results.

    Args:
        observed: key of a call (see `cost.layouts.key_of`) -> strides of its outputs; they take precedence over the
            rules.
        cpu: True if ops that are traced on CPU tensors will run in CPU kernels.
        compiled: True if Inductor will compile ops.
    """
    rules = {**EVERYWHERE, **(CPU if cpu else {}), **(CPU_BATCH_NORM if cpu and not compiled else {})}
    known = {} if observed else _known.setdefault((cpu, compiled), {})
    return with_fake_strides(partial(_strides_of, rules, observed), known)


def _strides_of(
    rules: Mapping[Any, Rule], observed: Mapping[str, Strides], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Strides | None:
    if observed and (seen := observed.get(key_of(op, args, kwargs))) is not None:
        return seen
    rule = rules.get(op)
    if rule is None or (op not in EVERYWHERE and _device(args) != "cpu"):
        return None
    return (tuple(rule(*args, **kwargs)),)


def _device(args: Iterable[Any]) -> str | None:
    return next((arg.device.type for arg in args if isinstance(arg, Tensor)), None)
