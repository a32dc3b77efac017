"""Code for one op of a region on a slice: the same op, with sizes among its arguments adapted to the slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxremat.slices.labels import Part, Place, place, slice_shape
from fxremat.slices.rules import FILLS, VIEWS, name_of, shape_of

aten = torch.ops.aten

SIZES: dict[str, str] = {  # op -> name of the argument that states the size of the tensor that is cut
    **dict.fromkeys((*FILLS, "expand"), "size"),
    **dict.fromkeys(("slice_backward", "select_backward"), "input_sizes"),
    "upsample_nearest2d_backward": "input_size",
    "upsample_bilinear2d_backward": "input_size",
    "upsample_bicubic2d_backward": "input_size",
    "upsample_nearest1d_backward": "input_size",
    "_upsample_nearest_exact2d_backward": "input_size",
}
CONTIGUOUS = {  # op -> arguments that its kernel reads as if they were contiguous (torch 2.13)
    "native_layer_norm_backward": ("mean", "rstd"),
    "_fused_rms_norm_backward": ("rstd",),
}
# op -> name of the argument that states the batch size
COUNTS = {"native_group_norm": "N", "native_group_norm_backward": "N"}


def emitted(
    node: fx.Node,
    made: Callable[[fx.Node], Any],
    labels: Mapping[fx.Node, Part | tuple[Part, ...]],
    count: int,
    rows: int,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return function, arguments and keyword arguments of a node for a slice of `rows` rows.

    Args:
        node: the node in the region (the group of ops that runs in slices).
        made: returns the slice's node for a node of the region.
        labels: how every node is cut: see `slices.labels`.
        count: number of rows of the entire axis.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), made)
    name, at = name_of(node), _place(node, labels, count)
    if name in VIEWS:
        shape = list(shape_of(node)) if at is None else slice_shape(shape_of(node), at, rows)
        return aten.reshape.default, (args[0], shape), {}
    if at is not None and name in SIZES:
        args, kwargs = _with(node, args, kwargs, SIZES[name], lambda size: _cut_size(size, at, rows))
    if name in COUNTS:
        args, kwargs = _with(node, args, kwargs, COUNTS[name], lambda number: number // count * rows)
    return node.target, tuple(args), dict(kwargs)


def _cut_size(size: Any, at: Place, rows: int) -> list[int]:
    """Return a size adapted to a slice; -1, as in `expand`, stays."""
    return slice_shape(size, at, rows)


def _place(node: fx.Node, labels: Mapping[fx.Node, Part | tuple[Part, ...]], count: int) -> Place | None:
    part = labels.get(node)
    if not isinstance(part, int) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    return place(shape_of(node), part, count)


def _with(
    node: fx.Node, args: Any, kwargs: Any, name: str, change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a node's arguments, with `change` applied to the argument of this name, if it is given."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if name in kwargs:
        return tuple(args), {**kwargs, name: change(kwargs[name])}
    for position, each in enumerate(node.target._schema.arguments):
        if each.name == name and position < len(args):
            return (*args[:position], change(args[position]), *args[position + 1 :]), dict(kwargs)
    return tuple(args), dict(kwargs)
