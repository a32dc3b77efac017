"""A model that `torch.compile` broke into several graphs: each would take the whole budget, so the second is refused.

The first graph, where it ends at a graph break, marks what it returns; a later graph of the same `torch.compile` call
whose inputs were computed from that would train together with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from fxremat.errors import CaptureError

MARK = "fxremat graph break"


def marking_part(
    step: Callable[..., Sequence[Any]], place: str, settings: object
) -> Callable[..., Sequence[Any]]:
    """A step whose outputs tell that the graph was broken after it, at a place, under these settings."""

    def call(*inputs: Any) -> Sequence[Any]:
        outputs = step(*inputs)
        for output in outputs:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.metadata[MARK] = (settings, place)
        return outputs

    return call


def refuse_second_part(inputs: Iterable[Any], settings: object) -> None:
    """Raise `CaptureError` if inputs were computed by a part that the same settings were given for. O(graph so far)."""
    stack = [x.grad_fn for x in inputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        mark = node.metadata.get(MARK)
        if mark is not None and mark[0] is settings:
            raise CaptureError(
                f"the model is not one graph: it is broken at {mark[1]}, and each part would take the whole budget; "
                "take that out of forward, or compile submodules apart, each with a budget of its own"
            )
        before = [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
        seen.update(before)
        stack += before
