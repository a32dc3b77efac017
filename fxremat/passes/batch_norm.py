"""Rewrites of the BatchNorms of a captured graph in training mode.

    native_batch_norm_backward(g, x, w, running, ...)    ->    native_batch_norm_backward(g, x, w, None, ...)

In training mode the backward uses only the statistics of the batch. If it read the running statistics, which
the forward overwrites, autograd would raise that they were "modified by an inplace operation".

    y, mean, rstd, running' = batch_norm(x, w, b, running)    ->    mean, rstd, running' = batch_statistics(x, running)
                                                                    y = batch_normalized(x, w, b, mean, rstd)

The statistics are a few numbers per channel, which plans keep. Most of the time of a BatchNorm goes into them,
so that recomputing only the large output is cheap: see `graphs.batch_norm`.
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

TRAINING = 7  # index of the argument `train` of the backward op
RUNNING_MEAN, RUNNING_VARIANCE = 3, 4  # indices of the running mean and variance among the arguments of the backward op
HALVED = (aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats)


def drop_running_statistics(graph: fx.Graph) -> None:
    """Replace the running statistics by None in every backward of a BatchNorm in training mode. O(nodes)."""
    backward = aten.native_batch_norm_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        if node.args[TRAINING]:
            node.update_arg(RUNNING_MEAN, None)
            node.update_arg(RUNNING_VARIANCE, None)


def halve_exactly(graph: fx.Graph) -> None:
    """Split every CPU BatchNorm in training into statistics and normalization, bit-identical to the original. O(nodes).

    BatchNorms with statistics in half precision are not split, nor those whose input is neither contiguous nor in
    channels_last.
    """
    _halve_all(graph, exact=True)


def halve(graph: fx.Graph) -> None:
    """Split every BatchNorm in training into two ops, on every device and in every layout. O(nodes).

    The two may round in another order than the original op. BatchNorms with statistics in half precision are not split.
    """
    _halve_all(graph, exact=False)


def _halve_all(graph: fx.Graph, *, exact: bool) -> None:
    for target in HALVED:
        for node in graph.find_nodes(op="call_function", target=target):
            if _may_be_halved(node, exact=exact):
                _halve(node, exact=exact)


def _may_be_halved(node: fx.Node, *, exact: bool) -> bool:
    """Tell whether a BatchNorm can be split: it is in training mode, and its statistics are float32 or wider.

    The dtype of parameters and running statistics decides that, or without any, that of the input; the fake
    statistics have misleading dtypes on a CPU (torch 2.13).

    Args:
        exact: the two ops must give the same bits as the original op.
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
