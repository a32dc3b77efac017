"""Outputs that the loss does not use: parameters that only they depend on get no gradient, as in eager PyTorch.

If the caller uses some outputs of a step and not others, autograd passes zeros for the others, and parameters
that only those depend on would get gradients of zeros, to which weight decay and momentum apply. So

    call        a hook before the step's backward sees which outputs got no gradient
    backward    it runs next, on the same thread, adds nothing for those outputs, and returns None for gradients that
                depend only on them
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from fxremat.graphs.region import runnable
from fxremat.passes.unused_tangents import without_tangents
from fxremat.runtime.auxiliary_outputs import ancestors
from fxremat.torch_private import is_compiled_backward

_NONE: frozenset[int] = frozenset()
_seen = threading.local()  # .unused: indices of outputs without a gradient, passed from the hook to the backward


def telling_unused(step: Callable[..., Sequence[Any]], trained: Sequence[int]) -> Callable[..., Sequence[Any]]:
    """Wrap a compiled step, so that its backward learns which of the trained outputs got no gradient.

    Args:
        trained: indices of the outputs that require grad. Of several that AOTAutograd makes outside of the step, as
            views of one tensor, all count as used if one is.
    """

    def call(*inputs: Any) -> Sequence[Any]:
        outputs = step(*inputs)
        places: dict[Any, dict[int, list[int]]] = {}
        for position in trained:
            output = outputs[position]
            if output._base is not None and not is_compiled_backward(output.grad_fn):
                output = output._base
            if is_compiled_backward(output.grad_fn):
                places.setdefault(output.grad_fn, {}).setdefault(output.output_nr, []).append(position)
        for node, positions in places.items():
            node.register_prehook(partial(_remember, positions))
        return outputs

    return call


def without_unread(step: Callable[..., Any], module: fx.GraphModule) -> Callable[..., Any]:
    """Wrap the step of a captured graph, so that parameters which no output needs have no part in its backward.

    Autograd calls the `register_post_accumulate_grad_hook` of every parameter that a step takes, also of one that gets
    no gradient, such as an unused pooler's. In the plain model it does not reach that one.

    Args:
        module: the graph as dynamo captured it.
    """
    needed = set(ancestors(module.graph.find_nodes(op="output")))
    inputs = module.graph.find_nodes(op="placeholder")
    unread = [place for place, node in enumerate(inputs) if node not in needed]
    if not unread:
        return step

    def call(*given: Any) -> Any:
        arguments = list(given)
        for place in unread:
            if type(given[place]) is nn.Parameter:
                arguments[place] = given[place].detach()
        return step(*arguments)

    return call


def _remember(positions: dict[int, list[int]], gradients: Sequence[Tensor | None]) -> None:
    _seen.unused = frozenset(
        position for place, shared in positions.items() if gradients[place] is None for position in shared
    )


def unused_outputs() -> frozenset[int]:
    """Return the indices of outputs that got no gradient, for the backward that begins now, and forget them."""
    unused: frozenset[int] = getattr(_seen, "unused", _NONE)
    _seen.unused = _NONE
    return unused


class Backward:
    """A backward graph, and what is left of it where outputs got no gradient, as a function of one list.

    Args:
        module: the graph.
        tangents: output -> the name of the placeholder of its gradient.
    """

    def __init__(self, module: fx.GraphModule, tangents: Mapping[int, str]) -> None:
        self._module, self._tangents = module, tangents
        self._versions = {_NONE: runnable(module)}

    def of(self, unused: frozenset[int]) -> Callable[[list[Any]], Any]:
        """Return the function to run if these outputs got no gradient; a list that it gets has zeros for them."""
        if unused not in self._versions:
            names = {self._tangents[output] for output in unused & self._tangents.keys()}
            found = without_tangents(self._module, names)
            self._versions[unused] = self._versions[_NONE] if found is None else runnable(found)
        return self._versions[unused]


def without(
    gradients: Sequence[Any], needs: Sequence[Set[int | None]], unused: Set[int | None]
) -> Sequence[Any]:
    """Replace gradients that depend only on unused outputs by None.

    Args:
        needs: for each gradient, the indices of the outputs whose gradients it depends on.
        unused: indices of the outputs that got no gradient.
    """
    if not unused:
        return gradients
    pairs = zip(gradients, needs, strict=True)
    return tuple(None if needed and needed <= unused else gradient for gradient, needed in pairs)
