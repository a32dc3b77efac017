"""A rewrite of dropouts to masks computed from seeds, which are a value of the graph: for steps that Inductor compiles.

    output, mask = native_dropout(x, p, True)      ->    seeds  = seeds(n)                       once a device
                                                         seed   = select(seeds, 0, i)            a view
                                                         mask   = seeded_mask(seed, ...)         pure
                                                         output = masked(x, mask, p)

See `ops.seeded`. The seeds are drawn at the first dropout and numbered in graph order, as Inductor does for the
graph of an entire model: with the same seed of torch the masks are those of `torch.compile(model)`. They may
differ if another op draws from the same generator (Inductor gives `rand` and similar ops seeds among those of
dropouts; here they stay random ops), or if Inductor recognizes attention written out op by op and calls an
attention kernel that contains the dropout.

A mask is drawn in the memory order of `x`, and permuted by a view if that is not the order of dimensions.
Backward ops stay `native_dropout_backward`, with the exact scale: this pass replaces `dropout.drop_as_eager`,
which would round it. A dropout with p = 1 draws nothing, and is rewritten as `drop_as_eager` does it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
from torch import fx

import fxremat.ops.seeded  # noqa: F401 - registers the ops
from fxremat.passes.dropout import call_like, drop_everything, replace_dropout, tensor_read
from fxremat.torch_private import memory_order

aten = torch.ops.aten


def draw_from_seeds(graph: fx.Graph) -> None:
    """Rewrite every dropout of a joint graph so that its mask is a function of a seed. O(nodes)."""
    drop_everything(graph)
    dropouts: dict[torch.device, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        _, p, training = node.args
        if training and 0 < cast(float, p) < 1:
            dropouts[tensor_read(node).device].append(node)
    for device, nodes in dropouts.items():
        with graph.inserting_before(nodes[0]):
            seeds = call_like(nodes[0], torch.ops.fxremat.seeds.default, len(nodes), device=device)
        for index, node in enumerate(nodes):
            _draw_from(seeds, index, node)


def _draw_from(seeds: fx.Node, index: int, node: fx.Node) -> None:
    x, p, _ = cast(tuple[fx.Node, float, Any], node.args)
    order = memory_order(tensor_read(node))
    with node.graph.inserting_before(node):
        shape = [_size(node, x, dimension) for dimension in order]
        seed = call_like(node, aten.select.int, seeds, 0, index)
        mask = call_like(
            node, torch.ops.fxremat.seeded_mask.default, seed, shape, p, tensor_read(node).dtype
        )
        if order != sorted(order):
            mask = call_like(node, aten.permute.default, mask, [order.index(place) for place in range(len(order))])
        output = call_like(node, torch.ops.fxremat.masked.default, x, mask, p)
    replace_dropout(node, output, mask)


def _size(node: fx.Node, x: fx.Node, dimension: int) -> int | fx.Node:
    """Return the size of a dimension of `x`: an int, or, if it is symbolic, a new node that reads the size."""
    size = tensor_read(node).shape[dimension]
    return size if isinstance(size, int) else call_like(node, aten.sym_size.int, x, dimension)
