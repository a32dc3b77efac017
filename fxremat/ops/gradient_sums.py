"""Add gradients to sums as they are computed, in a model that calls several graphs with the same parameters.

Autograd adds the gradients of a parameter from all calls that read it, but only after a call's backward has returned
all of its gradients: the sums and the gradients of one call are in memory together. A backward whose gradients are
passed through `add` holds only one of them beside the sums.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def add(sums: Mapping[int, Tensor], place: int, gradient: Tensor) -> Tensor | None:
    """Add a gradient to its sum in place, and return None; if there is no sum, return the gradient.

    The sum has the bits of autograd's own, which adds in the same order.

    Args:
        sums: sums of gradients, by their indices among the results of the backward.
        place: the index of this gradient.
    """
    total = sums.get(place)
    if total is None:
        return gradient
    total.add_(gradient)
    return None
