"""Ops that may write their result over an operand: which ops, which operand, and the op to call for that.

The captured graph is functional: `passes.in_place` records on a node which operand it may overwrite. Measuring
then shows which of these ops must not (`Costs.fresh`), and `called` gets that as `fresh`. Overloads with a
Scalar, such as `add.Scalar`, are left out: they round differently in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fxremat.graphs.collectives import collective

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

METHODS: dict[Any, Any] = {  # op -> in-place op, which overwrites the first argument
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.neg.default: aten.neg_.default,
    collective(_c10d.all_reduce.default): collective(_c10d.all_reduce_.default),
}
BACKWARDS: dict[Any, Any] = {  # op -> overload with a `grad_input` argument; the first argument is passed for it
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
"""Ops whose new result has the layout of their second operand; other ops' results have that of the first."""
PLACE = "fxremat_overwrites"  # key in a node's meta: the index of the operand that it may overwrite


def overwritten(op: fx.Node) -> fx.Node | None:
    """Return the operand whose storage the op's result may reuse; None for an op that always allocates a new result."""
    if PLACE not in op.meta:
        return None
    taken = op.args[op.meta[PLACE]]
    assert isinstance(taken, fx.Node)
    return taken


def overwriting(
    target: Any, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return function and arguments of the call that overwrites an operand of an op.

    Args:
        place: the index of that operand in `args`, 0 or 1; the call has it first.
    """
    if place:
        args = (args[1], args[0])
    if target in BACKWARDS:
        return BACKWARDS[target], args, {**kwargs, "grad_input": args[0]}
    return METHODS[target], args, dict(kwargs)


def called(op: fx.Node, *, fresh: bool = False) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return function and arguments with which an op is called: those that overwrite an operand, if it may.

    Args:
        fresh: True: the op must not overwrite an operand.
    """
    if fresh or PLACE not in op.meta:
        return op.target, op.args, op.kwargs
    return overwriting(op.target, op.meta[PLACE], op.args, op.kwargs)
