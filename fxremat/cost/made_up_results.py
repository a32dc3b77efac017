"""Made-up results of ops that a walk has run before in the same layouts, so that it need not run them again.

A walk through a step (`cost.walk`) runs every op, in order to measure each distinct one on real data and to compare
the layouts of real and traced results. An op whose key (`graphs.op_key`) was met before is known in both respects, and
most ops of a deep model are such; what they would compute is only what later ops are measured on, and it is made up
only if one of these reads it.

The result of an op is made up if its time is worth it, and if its first run returned nothing but floating-point tensors
that lie as they were traced, each in a storage of its own: no indices, masks or views, and nothing that lies in two
layouts at once, of which kernels read from the strides of dimensions of size 1 which one they work in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxremat.cost.cache import CostCache
from fxremat.cost.layouts import lies_in_two_layouts, otherwise_than_shown
from fxremat.cost.made_up import Call
from fxremat.graphs.captured import Captured
from fxremat.step.step_graph import Kind, Op
from fxremat.torch_private import storage_of

WORTH = 1e-4  # seconds; results of faster ops are not made up


class MadeUpResults:
    """The ops of one walk whose results can be made up, by key.

    Args:
        allowed: False: no result is made up, since made-up data made an op raise.
    """

    def __init__(self, joint: Captured, cache: CostCache, *, allowed: bool = True) -> None:
        self.joint, self.cache = joint, cache
        self.count = 0  # results that were made up
        self._ready: dict[str, bool] = {}
        self._allowed = allowed and not any(map(_may_check_data, joint.ops))

    def may_replace(self, op: Op) -> bool:
        """Tell whether the result of an op can be made up, since an equal one has run before; count it if so."""
        ready = op.overwrites is None and self._ready.get(op.key, False)
        self.count += ready
        return ready

    def note(self, op: Op, key: str, call: Call, result: Any) -> None:
        """Find out from the first run of an op whether results of further ones can be made up."""
        if key not in self._ready and self._allowed:
            cost = self.cache.op(key)
            worth = cost is not None and cost.seconds > WORTH
            self._ready[key] = worth and self._is_plain(op, call, result)

    def _is_plain(self, op: Op, call: Call, result: Any) -> bool:
        node, items = self.joint.nodes[op.index], result if isinstance(result, tuple | list) else [result]
        shown = node.meta["val"] if isinstance(result, tuple | list) else [node.meta["val"]]
        tensors = [item for item in items if isinstance(item, torch.Tensor)]
        read = {storage_of(item) for item in _tensors_of(call)}
        written = [storage_of(item) for item in tensors]
        return (
            op.kind is Kind.KERNEL
            and op.overwrites is None
            and otherwise_than_shown(node, result) is None
            and len(set(written) - read) == len(written) == len(items)
            and all(item.is_floating_point() and item.layout is torch.strided for item in tensors)
            and all(_bytes(item) == _bytes(fake) for item, fake in zip(tensors, shown, strict=True))
            and not any(map(lies_in_two_layouts, tensors))
        )


def _may_check_data(op: Op) -> bool:
    """Tell whether an op may be there to raise for wrong data: it returns nothing, or the token of an ordered effect.
    """
    return not (op.writes or op.communicates) or op.target == "with_effects"


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _tensors_of(call: Call) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, torch.Tensor)]
