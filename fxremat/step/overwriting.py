"""Ops that write their result over an operand: which there are, and which operand an op takes.

`passes.in_place` rewrites to them, `step.costs` accounts for them. Forms with a Scalar round otherwise in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxremat.step.collectives import collective

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

METHODS: dict[Any, Any] = {  # the first argument is overwritten
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.neg.default: aten.neg_.default,
    collective(_c10d.all_reduce.default): collective(_c10d.all_reduce_.default),
}
BACKWARDS: dict[Any, Any] = {  # the first argument is given as `grad_input` as well
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
    aten.gelu_backward.default: aten.gelu_backward.grad_input,
    aten.silu_backward.default: aten.silu_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
    aten.sigmoid_backward.default: aten.sigmoid_backward.grad_input,
    aten.hardtanh_backward.default: aten.hardtanh_backward.grad_input,
    aten.leaky_relu_backward.default: aten.leaky_relu_backward.grad_input,
    aten.elu_backward.default: aten.elu_backward.grad_input,
}
SELF_FIRST = {aten.threshold_backward.default, aten.leaky_relu_backward.default}
"""Ops whose new result lies as the other operand does, where the two lie otherwise; of others, as the first does."""
NEW_RESULT = {target: original for original, target in (METHODS | BACKWARDS).items()}


SWAPPED = "fxremat_swapped"  # in a node's meta: whether the operand that is overwritten came second before


def new_result(
    target: Any, swapped: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments of an overwriting op as it was captured, when it made a new result."""
    first, *rest = args
    if swapped:
        args = (rest[0], first)
    return NEW_RESULT[target], args, {key: value for key, value in kwargs.items() if key != "grad_input"}


def overwritten(op: fx.Node) -> fx.Node | None:
    """The node whose storage the op's result takes over; None for an op that makes a new one."""
    if op.target not in NEW_RESULT:
        return None
    taken = op.args[0]
    assert isinstance(taken, fx.Node)
    return taken
