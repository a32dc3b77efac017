"""Programs that torch's own partitioner proposes, for steps whose ops are compiled together.

Recomputing an op inside of a compiled region may cost less than reading its result from memory, so that a step with
recomputation is faster than one without. Costs of single ops do not show this: for them, recomputation always costs
time. The partitioner of torch.compile knows which ops Inductor fuses, and recomputes these.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from fxremat.graphs.captured import Captured
from fxremat.search.candidate import Candidate
from fxremat.step.costs import Costs
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Order
from fxremat.torch_private import min_cut_partition

log = logging.getLogger(__name__)
SHARES = (1.0, 0.6)  # shares of the default partition's saved bytes that the partitioner may save


def proposed(joint: Captured, keep_all: Candidate, costs: Costs) -> Iterator[Candidate]:
    """Yield the programs that torch's min-cut partitioner proposes for `SHARES`, without equal ones.

    Args:
        keep_all: the program that recomputes nothing; the proposals have its blocks.
    """
    index_of = {node.name: index for index, node in enumerate(joint.nodes)}
    block_of = {step.op: step.block for step in keep_all.program().executions}
    seen = {keep_all.order().ops}
    for share in SHARES:
        try:
            graphs = min_cut_partition(joint.module, len(joint.forward_outputs), share)
        except Exception as error:  # it knows the ops of torch.compile's graphs, and these may have others
            log.debug("torch's partitioner fails: %s: %s", type(error).__name__, error)
            return
        forward, backward = (
            [index_of[node.name] for node in graph.nodes if node.name in index_of] for graph in graphs
        )
        ops = (*forward, *backward)
        if ops in seen:
            continue
        seen.add(ops)
        blocks = tuple(block_of[op] for op in ops)
        order = Order(layout=keep_all.layout, ops=ops, blocks=blocks, split=len(forward))
        program = order.program()
        yield keep_all.refined_to(order, live_bytes(program, costs.sizes).peak, costs.time(program))
