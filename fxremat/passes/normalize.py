"""The passes that a captured joint graph goes through before it is read, each checked before and after.

    sharding        reads of shared parameters are collectives, in buckets
    collectives     each is one op, from its start to its end
    detach          chains of `detach` go
    batch_norm      the backward of a training BatchNorm reads no running statistics
    dropout         drops as eager PyTorch does; or, for compiled regions,
    seeded_dropout  draws from seeds, which are a value of the graph
    numbers         views that begin at a number of the data are copies
    in_place        backward ops overwrite gradients that they alone read

The graph stays functional but for the last one, whose overwritten values have one reader each.
"""

from __future__ import annotations

from torch import fx

from fxremat.passes.batch_norm import drop_running_statistics
from fxremat.passes.collectives import wait_at_once
from fxremat.passes.detach import drop_detach
from fxremat.passes.dropout import drop_as_eager
from fxremat.passes.in_place import overwrite_gradients
from fxremat.passes.numbers import copy_views_by_number, refuse_symbols
from fxremat.passes.seeded_dropout import draw_from_seeds
from fxremat.passes.sharding import share

PASSES = (
    *(share, wait_at_once, drop_detach, drop_running_statistics),
    *(drop_as_eager, copy_views_by_number, overwrite_gradients),
)


def normalize(module: fx.GraphModule, *, seeded: bool = False) -> fx.GraphModule:
    """Run all passes on a joint graph, in place. O(nodes).

    Args:
        seeded: let dropouts draw from seeds; else as eager PyTorch.

    Raises:
        CaptureError: a size depends on data.
    """
    graph = module.graph
    refuse_symbols(graph)
    for rewrite in PASSES:
        if seeded and rewrite is drop_as_eager:
            rewrite = draw_from_seeds
        rewrite(graph)
        graph.eliminate_dead_code()  # lints the graph first
    return module
