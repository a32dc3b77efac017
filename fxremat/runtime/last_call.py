"""The last call of a model that is one graph, and whether its backward may still run when the model is called again.

What both calls saved is then in memory together. Contrastive losses, siamese networks and discriminators call a model
several times before one backward.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
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


class LastCall:
    """The last call of a model that is one graph, of which nothing is kept alive."""

    def __init__(self) -> None:
        self._node: Callable[[], Any] = _nothing  # weak reference to the autograd node of the call
        self._told = False  # True once a warning said that several calls before one backward exceed the budget

    @property
    def awaits_backward(self) -> bool:
        """True if the backward of the call has not begun, and something that it needs is alive."""
        return self._node() is not None

    def forget(self) -> None:
        """Do not await the backward of the call any more."""
        self._node = _nothing

    def note(self, outputs: Iterable[Any]) -> None:
        """Await the backward of the call that returned these outputs; those that are no tensors do not count."""
        self.forget()
        node = compiled_node(x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None)
        if node is None:
            return
        self._node = reference = weakref.ref(node)

        def begins(_: Sequence[Tensor | None]) -> None:
            if self._node is reference:
                self.forget()

        node.register_prehook(begins)

    def tell_once(self, name: str, reason: str, stacklevel: int) -> None:
        """Warn, at the first time, that a model is called again although its options need one graph."""
        if not self._told:
            self._told = True
            warnings.warn(CALLED_AGAIN.format(name=name, reason=reason), stacklevel=stacklevel + 1)


def _nothing() -> None:
    return None
