"""BatchNorms of a captured graph in training.

    native_batch_norm_backward(g, x, w, running, ...)    ->    native_batch_norm_backward(g, x, w, None, ...)

In training mode the backward uses the batch statistics alone; reading the running ones, which the forward overwrites,
would only make autograd complain that they were "modified by an inplace operation".

    y, mean, rstd, running' = batch_norm(x, w, b, running)    ->    mean, rstd, running' = batch_statistics(x, running)
                                                                    y = batch_normalized(x, w, b, mean, rstd)

The statistics are a few numbers a channel, which plans keep; what is large is made again from them without another
look for statistics, which takes most of the time: see `step.batch_norm`.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import Tensor, fx

from fxremat.step.batch_norm import NORMALIZED, STATISTICS

aten = torch.ops.aten

TRAINING = 7  # the place of the flag among the arguments of the backward
RUNNING_MEAN, RUNNING_VARIANCE = 3, 4
KEPT = {torch.float32, torch.float64}  # types of statistics; of others, those that are kept have rounded


def drop_running_statistics(graph: fx.Graph) -> None:
    """Give None for the running statistics to every backward of a BatchNorm in training mode. O(nodes)."""
    backward = aten.native_batch_norm_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        if node.args[TRAINING]:
            node.update_arg(RUNNING_MEAN, None)
            node.update_arg(RUNNING_VARIANCE, None)


def halve_exactly(graph: fx.Graph) -> None:
    """Put two ops in the place of every BatchNorm of a CPU that updates its running statistics. O(nodes)."""
    _halve_all(graph, exact=True)


def halve(graph: fx.Graph) -> None:
    """The same on every device, with halves that may round in another order than the whole. O(nodes)."""
    _halve_all(graph, exact=False)


def _halve_all(graph: fx.Graph, *, exact: bool) -> None:
    for node in graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_functional.default):
        if node.args[5] and _may_be_halved(node, exact=exact):
            _halve(node, exact=exact)


def _may_be_halved(node: fx.Node, *, exact: bool) -> bool:
    x, weight, _, running = (None if given is None else _tensor(given) for given in node.args[:4])
    output, mean, *_ = cast(tuple[Tensor, ...], node.meta["val"])
    assert x is not None
    if exact and x.device.type != "cpu":
        return False
    wanted = torch.float64 if x.dtype == torch.float64 else torch.float32
    types = {tensor.dtype for tensor in (mean, weight, running) if tensor is not None}
    return types == {wanted} and any(item.args[1] == 0 for item in node.users) and output.dtype == x.dtype


def _tensor(node: object) -> Tensor:
    return cast(Tensor, cast(fx.Node, node).meta["val"])


def _halve(node: fx.Node, *, exact: bool) -> None:
    x, weight, bias, mean, var, _, momentum, eps = node.args
    graph, (shown, *others) = node.graph, cast(tuple[Tensor, ...], node.meta["val"])
    with graph.inserting_before(node):
        statistics = graph.create_node(
            "call_function", STATISTICS, (x, mean, var, momentum, eps, exact), name="batch_statistics"
        )
        statistics.meta = {**node.meta, "val": tuple(others)}
        items = [graph.call_function(operator.getitem, (statistics, place)) for place in range(len(others))]
        normalized = graph.create_node(
            "call_function", NORMALIZED, (x, weight, bias, *items[:2], eps), name="batch_norm"
        )
    for item, value in zip((*items, normalized), (*others, shown), strict=True):
        item.meta = {**node.meta, "val": value}
    for made, item in ((cast(int, item.args[1]), item) for item in list(node.users)):
        item.replace_all_uses_with(items[made - 1] if made else normalized)
        graph.erase_node(item)
    graph.erase_node(node)
