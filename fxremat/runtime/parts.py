"""Refusal of models that `torch.compile` breaks into several graphs, each of which would use the full budget.

Every graph marks its outputs. A graph of another function, under the same `torch.compile` call, whose inputs were
computed from marked outputs, would train together with the graph that marked them, and is refused. (A second graph of
the same function is another step, such as a recurrent one.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxremat.errors import CaptureError

MARK = "fxremat part"


@dataclass(frozen=True, eq=False)
class Part:
    """A graph that came through the dynamo backend."""

    settings: object  # the options given to `torch.compile`: one object for all graphs of that call
    frame: int | None  # identifies the function that the graph was captured from; None: not known
    broken_at: str | None  # the line at which tracing stopped after this graph; None: not known

    def marking(self, step: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """Wrap the step of this graph, so that the `grad_fn` of each output is marked with this part."""

        def call(*inputs: Any) -> Sequence[Any]:
            outputs = step(*inputs)
            for output in outputs:
                if isinstance(output, Tensor) and output.grad_fn is not None:
                    _metadata(output.grad_fn)[MARK] = self
            return outputs

        return call

    def refuse_if_second(self, inputs: Iterable[Any]) -> None:
        """Raise `CaptureError` if an input was computed by another part of the model. O(nodes of autograd's graph)."""
        stack = [x.grad_fn for x in inputs if isinstance(x, Tensor) and x.grad_fn is not None]
        seen = set(stack)
        while stack:
            node = stack.pop()
            other = _metadata(node).get(MARK)
            if other is not None and other.settings is self.settings and other.frame != self.frame:
                where = other.broken_at or "some line (TORCH_LOGS=graph_breaks shows it)"
                raise CaptureError(
                    f"the model is not one graph: it is broken at {where}, and each part would take the whole budget; "
                    "fxremat.compile(model, mem=...) trains it as several graphs within one budget"
                )
            before = [parent for parent, _ in node.next_functions if parent is not None]
            stack += [parent for parent in before if parent not in seen]
            seen.update(before)


def _metadata(node: Any) -> dict[str, Any]:
    """Return the dictionary in which Python code may keep data with a node of autograd's graph."""
    found: dict[str, Any] = node.metadata
    return found
