"""The last call of a model that is one graph, and whether its backward may still run when the model is called again.

What both calls saved is then in memory together. Contrastive losses, siamese networks and discriminators call a model
several times before one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxremat.runtime.double_backward import compiled_node

SEVERAL_CALLS = (
    "%s is called several times before one backward: these calls share the budget from now on, and are planned after a "
    "few steps, which recompute most; this step may exceed it"
)
CALLED_AGAIN = (
    "{name} is called again before the backward of its last call: the budget is for each call alone, since {reason} "
    "needs one. Concatenate what the calls are given, where that is the same, or give each call a share of the budget"
)


class Pending:
    """A call of a compiled step, which keeps nothing of it alive.

    Args:
        outputs: the tensors that the call returned.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._ran = False
        node = compiled_node(x.grad_fn for x in outputs if x.grad_fn is not None)
        self._node: Callable[[], Any] = lambda: None
        if node is not None:
            self._node = weakref.ref(node)
            node.register_prehook(self._begin)

    @property
    def may_run(self) -> bool:
        """True if the backward of the call has not begun, and something that it needs is alive."""
        return not self._ran and self._node() is not None

    def _begin(self, _: Sequence[Tensor | None]) -> None:
        self._ran = True
