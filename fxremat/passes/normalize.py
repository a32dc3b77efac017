"""The passes that a captured joint graph goes through before it is read, each checked before and after.

    sharding        reads of shared parameters are collectives, in buckets
    collectives     each is one op, from its start to its end
    detach          chains of `detach` go
    batch_norm      the backward of a training BatchNorm reads no running statistics
    tangents        gradients of a loss outside the model are taken as they lie in memory
    dropout         drops as eager PyTorch does; or, for compiled regions,
    seeded_dropout  draws from seeds, which are a value of the graph
    channels_last   convolutions in that layout, for compiled regions alone
    numbers         views that begin at a number of the data are copies
    batch_norm      its forward is in two halves, on a CPU or for compiled regions
    in_place        notes which backward ops may overwrite gradients that they alone read

The graph stays functional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from fxremat.passes.batch_norm import drop_running_statistics, halve, halve_exactly
from fxremat.passes.channels_last import convolve_channels_last
from fxremat.passes.collectives import wait_at_once
from fxremat.passes.detach import drop_detach
from fxremat.passes.dropout import drop_as_eager
from fxremat.passes.in_place import note_overwriting
from fxremat.passes.numbers import copy_views_by_number, refuse_symbols
from fxremat.passes.seeded_dropout import draw_from_seeds
from fxremat.passes.sharding import share
from fxremat.passes.tangents import reshape_gradients

FIRST = (share, wait_at_once, drop_detach, drop_running_statistics, reshape_gradients)
WHOLE = (*FIRST, drop_as_eager, copy_views_by_number, note_overwriting)  # as a step of any device is captured
PASSES = (*WHOLE[:-1], halve_exactly, note_overwriting)
FOR_REGIONS = (*FIRST, drop_as_eager, copy_views_by_number, convolve_channels_last, halve, note_overwriting)
FOR_REGIONS_FROM_SEEDS = (*FIRST, draw_from_seeds, *FOR_REGIONS[len(FIRST) + 1 :])

Pass = Callable[[fx.Graph], None]


def normalize(module: fx.GraphModule, passes: Sequence[Pass] = PASSES) -> fx.GraphModule:
    """Run passes on a joint graph, in place. O(nodes).

    Args:
        passes: all of them, in order; `FOR_REGIONS` where regions of the step are to be compiled.

    Raises:
        CaptureError: a size depends on data.
    """
    graph = module.graph
    refuse_symbols(graph)
    for rewrite in passes:
        rewrite(graph)
        graph.eliminate_dead_code()  # lints the graph first
    return module
