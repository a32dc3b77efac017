"""Costs of a step at new input sizes, computed from costs measured at other sizes: bytes exactly, seconds roughly.

    values       bytes as the graph states them at the new sizes
    workspace    measured by one run of the op by itself, on made-up data; 0 without a run if the op had none at the old
                 sizes and is not larger now
    seconds      the measured ones, scaled by the ratio of estimates at both sizes: they only rank programs

The process remembers the results of these runs, for each environment (`cost.environment`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import fx

from fxremat.cost.devices import Device
from fxremat.cost.environment import environment, name_of
from fxremat.cost.estimate import cost_of
from fxremat.cost.measure import alone, quiet_world
from fxremat.graphs.accounting import costs_from, device_of, rounded
from fxremat.graphs.captured import Captured
from fxremat.graphs.op_key import op_key
from fxremat.step.costs import Costs, OpCost
from fxremat.step.step_graph import Op
from fxremat.torch_private import unrecorded

FEW = 256  # bytes; a smaller workspace is a number or a flag, and does not grow with the sizes
AT_MOST = 10_000  # number of ops whose runs are remembered
# (environment, key of the op) -> measured cost, of which only the bytes are used
_took: dict[tuple[str, str], OpCost] = {}
_estimated: WeakKeyDictionary[Captured, Sequence[OpCost]] = WeakKeyDictionary()


def resized(joint: Captured, known: Captured, costs: Costs) -> Costs:
    """Return the costs of a joint graph, computed from `costs` of the graph `known` with the same ops at other sizes.

    O(ops); ops that are larger than in `known`, or need a workspace, are run once each.
    """
    device = device_of(joint)
    rough = Device.like(device)
    before, now = _estimates(known, rough), _estimates(joint, rough)
    by_op = [
        OpCost(costs.seconds[op.index] * now[op.index].seconds / before[op.index].seconds, _workspace(op, costs))
        for op in known.ops
    ]
    grown = [now[op.index].seconds > before[op.index].seconds for op in joint.ops]
    unknown = [
        op.index
        for op in known.ops
        if grown[op.index] or by_op[op.index].workspace > FEW or not _as_shown(op, known, costs, device)
    ]
    nodes = {index: joint.nodes[index] for index in unknown}
    for index, cost in run_once(nodes, device, costs.fresh).items():
        safe = cost or cost_of(joint.ops[index], joint, rough, safe=True)
        by_op[index] = replace(safe, seconds=by_op[index].seconds)
    return costs_from(joint, by_op, device, costs.fresh)


def _estimates(joint: Captured, device: Device) -> Sequence[OpCost]:
    if joint not in _estimated:
        _estimated[joint] = [cost_of(op, joint, device) for op in joint.ops]
    return _estimated[joint]


def _workspace(op: Op, costs: Costs) -> int:
    """Return the workspace of an op in bytes; for one that overwrites an operand, without subtracting its result."""
    taken = costs.sizes.values[op.writes[0]] if _overwrites(op, costs) else 0
    return costs.sizes.workspace[op.index] + taken


def _overwrites(op: Op, costs: Costs) -> bool:
    return op.overwrites is not None and op.index not in costs.fresh


def _as_shown(op: Op, joint: Captured, costs: Costs, device: torch.device) -> bool:
    """Tell whether the op's outputs took no more bytes than the graph states; True if it overwrites an operand."""
    shown = [rounded(joint.values[value].bytes, device) for value in op.writes]
    return _overwrites(op, costs) or shown == [costs.sizes.values[value] for value in op.writes]


def run_once(ops: Mapping[int, fx.Node], device: torch.device, fresh: Set[int]) -> dict[int, OpCost | None]:
    """Return the bytes that ops take, each from one run on made-up data; None for ops that cannot run on such data.

    Args:
        ops: the number of each op, and its node.
        fresh: ops that must not overwrite an operand.
    """
    return unrecorded(lambda: _run(ops, device, fresh))


def _run(ops: Mapping[int, fx.Node], device: torch.device, fresh: Set[int]) -> dict[int, OpCost | None]:
    where, found = name_of(environment(device)), {}
    with quiet_world(device):
        for index, node in ops.items():
            key = (where, op_key(node, fresh=index in fresh))
            if key not in _took and (cost := alone(node, device, timed=False, fresh=index in fresh)) is not None:
                if len(_took) >= AT_MOST:
                    _took.clear()
                _took[key] = cost
            found[index] = _took.get(key)
    return found
