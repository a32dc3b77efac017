"""Ops that may write their result over an operand: which there are, which operand, and how they are called then.

The captured graph is functional: `passes.in_place` notes on a node which operand it may overwrite. Whether it does is
one of the step's costs (`Costs.fresh` has those that must not), which `called` is told: measuring, accounting and
lowering ask it. Forms with a Scalar round otherwise in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxremat.graphs.collectives import collective

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
PLACE = "fxremat_overwrites"  # in a node's meta: the place of the operand that it may overwrite


def overwritten(op: fx.Node) -> fx.Node | None:
    """The node whose storage the op's result may take over; None for an op that makes a new one in any case."""
    if PLACE not in op.meta:
        return None
    taken = op.args[op.meta[PLACE]]
    assert isinstance(taken, fx.Node)
    return taken


def overwriting(
    target: Any, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments of an op that overwrites its operand at a place, 0 or 1; that comes first."""
    if place:
        args = (args[1], args[0])
    if target in BACKWARDS:
        return BACKWARDS[target], args, {**kwargs, "grad_input": args[0]}
    return METHODS[target], args, dict(kwargs)


def called(op: fx.Node, *, fresh: bool = False) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Target and arguments of an op as it runs: overwriting what it may, unless its result is to be a new one."""
    if fresh or PLACE not in op.meta:
        return op.target, op.args, op.kwargs
    return overwriting(op.target, op.meta[PLACE], op.args, op.kwargs)
