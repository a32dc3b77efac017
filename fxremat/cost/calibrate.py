"""One factor between the sum of the ops' times and the time of a whole step, from running the planned graphs.

The graphs are functional (AOTAutograd applies updates outside of them), so they run on the user's own inputs and
parameters without touching the model; what has no data yet is made up. The run needs the memory that the plan says; on
CUDA it is left out where that, with what is made up, is not free. The factor is cached with the costs.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fxremat.agreement import ALONE, Agreement
from fxremat.cost.cache import CostCache
from fxremat.cost.made_up import value_like, weights_like
from fxremat.cost.measure import quiet_world
from fxremat.cost.walk import given_inputs
from fxremat.passes.lower import lower
from fxremat.step.costs import Costs, device_of, op_key
from fxremat.step.joint import Origin
from fxremat.step.liveness import live_bytes
from fxremat.step.program import Program
from fxremat.torch_private import boxed, unprofiled

log = logging.getLogger(__name__)
RUNS = 3  # of a step, of which the fastest counts
LONG = 1.0  # seconds of all runs so far, after which two are enough


def calibration(
    program: Program, costs: Costs, inputs: Sequence[Any] = (), ranks: Agreement = ALONE
) -> float:
    """The measured time of a step over the predicted one; 1 where it cannot be measured. Costs a few steps, once.

    Args:
        inputs: what the captured graph was called with.
        ranks: those that run the program together; the factor is that of the slowest.
    """
    joint = program.layout.joint
    device = device_of(joint)
    cache = CostCache.of_device(device)
    digest = hashlib.sha256("\n".join(op_key(op.node) for op in joint.ops).encode()).hexdigest()
    known = cache.numbers(f"factor {digest}", 1)
    if None in ranks.gathered(known, "comparing times"):
        run = partial(_run, program, costs, inputs, device, ranks)
        seconds = ranks.together("timing a step", lambda: unprofiled(run), meeting=True)
        if seconds is None:
            return 1.0
        known = [seconds / costs.time(program)]
        cache.keep(f"factor {digest}", known)
        cache.save()
    assert known is not None
    return ranks.maximum(known[:1], "comparing times")[0]


def _run(
    program: Program, costs: Costs, inputs: Sequence[Any], device: torch.device, ranks: Agreement
) -> float | None:
    """Seconds of one step of a program's graphs; None where there is no room for it, or where it fails."""
    joint, alone = program.layout.joint, len(ranks.ranks) == 1
    given = given_inputs(joint, inputs)
    made = sum(v.bytes for v in joint.values if v.origin is Origin.PRIMAL and v.index not in given)
    peak = live_bytes(program, costs.sizes).peak
    if alone and device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 1.2 * (made + peak):
        return None
    forward, backward = (boxed(graph) for graph in lower(program))
    returned = len(joint.forward_outputs)
    try:
        with quiet_world(device):
            primals = [
                given[value].detach() if (value := joint.value_of[node]) in given else weights_like(node)
                for node in joint.primals
            ]
            tangents = [value_like(node) for node in joint.tangents]
            runs = list[float]()
            while len(runs) < RUNS and (len(runs) < 2 or not alone or sum(runs) < LONG):
                ranks.meet("timing a step")
                runs.append(_step(forward, backward, primals, tangents, returned, device))
    except Exception as error:  # no plan fails for want of a factor; the real step says what is wrong, if it is
        log.debug("calibration failed: %s: %s", type(error).__name__, error)
        if not alone:
            raise
        return None
    return min(runs)


def _step(
    forward: Any, backward: Any, primals: list[Any], tangents: list[Any], returned: int, device: torch.device
) -> float:
    start = time.perf_counter()
    results = list(forward(list(primals)))
    saved = results[returned:]
    del results[returned:]
    arguments = [*saved, *tangents]
    del saved
    gradients = backward(arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    del gradients, results
    return seconds
