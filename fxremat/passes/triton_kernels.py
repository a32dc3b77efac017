"""A rewrite of launches of users' Triton kernels to ops that return a tuple.

    y = empty_like(x); r = triton_kernel_wrapper_functional({x: x, y: y}, clone [y]); r["y"]    ->    launch(x)[0]

PyTorch captures a launch as an op that returns a dict of copies of what the kernel writes. A buffer without content
that only the kernel reads is allocated by the op: it is not copied.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_map

from fxremat.ops.triton_kernels import Buffer, Launch, Operand
from fxremat.torch_private import TritonLaunch, captured_triton_launches

aten = torch.ops.aten

EMPTY = (aten.empty_like.default, aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default)


def launch_as_ops(graph: fx.Graph) -> None:
    """Replace each launch of a Triton kernel by an op that returns the tensors it writes as a tuple. O(nodes)."""
    for node, launch in captured_triton_launches(graph):
        _replace(node, launch)


def _replace(node: fx.Node, launch: TritonLaunch) -> None:
    options: Any = node.kwargs
    given: dict[str, Any] = dict(options["kwargs"])
    written = [name for name in given if name in options["tensors_to_clone"]]
    buffers = {name: Buffer.like(given[name].meta["val"]) for name in written if _is_buffer(given[name], node)}
    operands: dict[fx.Node, Operand] = {}

    def held(value: Any) -> Any:
        return operands.setdefault(value, Operand(len(operands))) if isinstance(value, fx.Node) else value

    grid = tree_map(held, options["grid"])
    arguments = {name: None if name in buffers else held(value) for name, value in given.items()}
    with node.graph.inserting_before(node):
        made = node.graph.call_function(Launch(launch, grid, arguments, written, buffers), tuple(operands))
    made.meta = dict(node.meta) | {"val": tuple(node.meta["val"][name] for name in written)}
    for item in list(node.users):
        name: Any = item.args[1]
        item.args = (made, written.index(name))
    node.graph.erase_node(node)


def _is_buffer(value: fx.Node, node: fx.Node) -> bool:
    """Tell whether an argument is a tensor of known sizes that was allocated for this argument alone."""
    shown, options = value.meta["val"], cast(Any, node.kwargs)
    known = not any(isinstance(size, torch.SymInt) for size in (*shown.shape, *shown.stride()))
    given = [*options["kwargs"].values()]
    return known and value.target in EMPTY and [*value.users] == [node] and given.count(value) == 1
