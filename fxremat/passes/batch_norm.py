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

from fxremat.graphs.batch_norm import (
    NORMALIZED,
    STATISTICS,
    batch_norm_arguments,
    dtype_of_statistics,
    is_dense,
)
from fxremat.passes.evaluate import evaluate

aten = torch.ops.aten

TRAINING = 7  # the place of the flag among the arguments of the backward
RUNNING_MEAN, RUNNING_VARIANCE = 3, 4
HALVED = (aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)


def drop_running_statistics(graph: fx.Graph) -> None:
    """Give None for the running statistics to every backward of a BatchNorm in training mode. O(nodes)."""
    backward = aten.native_batch_norm_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        if node.args[TRAINING]:
            node.update_arg(RUNNING_MEAN, None)
            node.update_arg(RUNNING_VARIANCE, None)


def halve_exactly(graph: fx.Graph) -> None:
    """Put two ops, with its bits, in the place of every BatchNorm in training of a CPU. O(nodes).

    Those whose statistics are of half precision, or whose input lies otherwise than by channels, stay whole.
    """
    _halve_all(graph, exact=True)


def halve(graph: fx.Graph) -> None:
    """Put two ops in the place of every BatchNorm in training, on every device and in every layout. O(nodes).

    They may round in another order than the whole; those whose statistics are of half precision stay whole.
    """
    _halve_all(graph, exact=False)


def _halve_all(graph: fx.Graph, *, exact: bool) -> None:
    for target in HALVED:
        for node in graph.find_nodes(op="call_function", target=target):
            if _may_be_halved(node, exact=exact):
                _halve(node, exact=exact)


def _may_be_halved(node: fx.Node, *, exact: bool) -> bool:
    """Whether a BatchNorm is in training, and its kernels keep statistics in full precision.

    Parameters and running statistics decide that, and without any the type of the input; what is shown of statistics
    on a CPU does not (2.13).
    """
    x, weight, _, mean, _, training, _, _ = batch_norm_arguments(node)
    if not training or not any(item.args[1] == 0 for item in node.users):
        return False
    shown = cast(Tensor, x.meta["val"])
    types = {given.meta["val"].dtype for given in (weight, mean) if given is not None} or {shown.dtype}
    return types == {dtype_of_statistics(shown)} and not (exact and (shown.device.type != "cpu" or not is_dense(shown)))


def _halve(node: fx.Node, *, exact: bool) -> None:
    x, weight, bias, mean, var, _, momentum, eps = batch_norm_arguments(node)
    graph = node.graph
    with graph.inserting_before(node):
        arguments = (x, mean, var, momentum, eps, exact)
        statistics = graph.create_node("call_function", STATISTICS, arguments, name="batch_statistics")
        statistics.meta = dict(node.meta)
        statistics.meta["val"] = evaluate(statistics)
        items = [graph.call_function(operator.getitem, (statistics, place)) for place in range(4)]
        for item in items:
            item.meta = {**node.meta, "val": evaluate(item)}
        read = (x, weight, bias, *items[:2], eps)
        normalized = graph.create_node("call_function", NORMALIZED, read, name="batch_norm")
        normalized.meta = {**node.meta, "val": cast(tuple[Tensor, ...], node.meta["val"])[0]}
    for item in list(node.users):
        made = cast(int, item.args[1])
        item.replace_all_uses_with(items[made - 1] if made else normalized)
        graph.erase_node(item)
    graph.erase_node(node)
