"""Let the backward of a training BatchNorm alone with the running statistics, which it does not use.

In training mode that backward uses the batch statistics alone; reading the running ones, which the forward overwrites,
would only make autograd complain that they were "modified by an inplace operation".
"""

from __future__ import annotations

import torch
from torch import fx

TRAINING = 7  # the place of the flag among the arguments
RUNNING_MEAN, RUNNING_VARIANCE = 3, 4


def drop_running_statistics(graph: fx.Graph) -> None:
    """Give None for the running statistics to every backward of a BatchNorm in training mode. O(nodes)."""
    backward = torch.ops.aten.native_batch_norm_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        if node.args[TRAINING]:
            node.update_arg(RUNNING_MEAN, None)
            node.update_arg(RUNNING_VARIANCE, None)
