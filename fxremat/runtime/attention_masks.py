"""Padding masks of transformers that mask nothing: captured graphs leave them out, as eager mode does.

In eager mode transformers reads a padding mask's values, and ignores one that masks nothing: then attention is
simply causal, groups of heads share keys and values, and CUDA has flash attention. Traced code cannot read
values, and keeps the mask; with grouped heads its gradients round differently. So this is decided before a call
is traced:

    before the call       `left_out` looks whether all masks among the inputs are full, as eager mode does
    while it is traced    transformers is told that there is no mask; `fxremat::masks_nothing` marks the one there was
    the captured graph    `unmark` checks that every marked mask is one of those inputs; if not, capture is repeated
    later calls           dynamo guards on the answer: a call with padding is another graph, with a plan of its own
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxremat.errors import FxrematError
from fxremat.torch_private import has_data, input_and_dimension, torch_release

_nothing_masked = False  # True during a call whose padding masks mask nothing; dynamo guards on it

SAME_TRUTH = (operator.getitem, "to", "bool", "int", "long", "contiguous", "view", "reshape", "expand", "clone")


class ComputedMask(FxrematError):
    """Raised if a mask that was left out is computed by the model: capture is repeated with masks; users do not see it.
    """


@torch.library.custom_op("fxremat::masks_nothing", mutates_args=())
def masks_nothing(mask: Tensor) -> Tensor:
    """Tell whether a mask is all true.

    In traced graphs, this op stands for a mask that was left out; it is never run there.
    """
    return mask.all()


@masks_nothing.register_fake
def _(mask: Tensor) -> Tensor:
    return mask.new_empty((), dtype=torch.bool)


def padding_masks(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arguments that may be padding masks: "mask" in the name, two dimensions, integers or booleans."""
    return {name: value for name, value in given.items() if "mask" in name and _is_padding_mask(value)}


def _is_padding_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()


@contextlib.contextmanager
def left_out(masks: Sequence[Tensor]) -> Iterator[None]:
    """Within this context, let traced code ignore padding masks if none of `masks` masks anything, as eager mode does.

    Before torch 2.13 transformers would keep a purely causal mask even for calls without padding masks: it asks
    whether the model is being exported, and dynamo answers yes (read in torch 2.11). Within this context the
    answer is no.
    """
    global _nothing_masked
    library: Any = sys.modules.get("transformers.masking_utils")
    replaced = {name: getattr(library, name) for name in REPLACED if hasattr(library, name)}
    before, _nothing_masked = _nothing_masked, bool(masks and replaced) and all(map(_is_full, masks))
    for name, function in replaced.items():
        setattr(library, name, REPLACED[name](function))
    try:
        yield
    finally:
        _nothing_masked = before
        for name, function in replaced.items():
            setattr(library, name, function)


def leaves_masks_out() -> bool:
    """Tell whether traced code currently leaves out padding masks, so that `ComputedMask` may be raised for a graph."""
    return _nothing_masked


def _is_full(mask: Tensor) -> bool:
    return has_data(mask) and bool(mask.all())


@functools.cache
def _without_mask(ignores: Callable[..., bool], *, causal: bool) -> Callable[..., bool]:
    """Wrap the function of transformers that decides whether to ignore a mask, so that it gets None for a full one.

    Args:
        ignores: the function; its arguments are the padding mask, and the numbers of queries and of keys.
        causal: True: a mask is left out only if there are as many queries as keys.
    """

    def ignores_it(padding_mask: Tensor | None, *sizes: Any, **named: Any) -> bool:
        square = not causal or (len(sizes) > 1 and sizes[0] == sizes[1])
        if _nothing_masked and padding_mask is not None and square:
            masks_nothing(padding_mask)
            padding_mask = None
        return ignores(padding_mask, *sizes, **named)

    return ignores_it


def _not_exporting(is_exporting: Callable[..., bool]) -> Callable[..., bool]:
    return _no if torch_release() < (2, 13) else is_exporting


def _no() -> bool:
    return False


REPLACED: Mapping[str, Callable[[Callable[..., bool]], Callable[..., bool]]] = {
    "_ignore_causal_mask_sdpa": functools.partial(_without_mask, causal=True),
    "_ignore_bidirectional_mask_sdpa": functools.partial(_without_mask, causal=False),
    "is_torchdynamo_exporting": _not_exporting,
}


def unmark(graph: fx.Graph, names: Sequence[str]) -> list[int]:
    """Remove the ops that stand for left-out masks from dynamo's graph.

    Return the indices of the inputs that are masks.

    Args:
        names: names of the model's inputs that may be passed by position.

    Raises:
        ComputedMask: a marked mask is not (a cast or reshape of) an input whose values were checked before the call,
            or the model has written to that input.
    """
    marks = graph.find_nodes(op="call_function", target=torch.ops.fxremat.masks_nothing.default)
    placeholders = graph.find_nodes(op="placeholder")
    places = []
    written = {_origin(node) for node in graph.nodes if marks and _writes(node)}
    for mark in marks:
        given = _origin(mark.args[0])
        name = input_and_dimension(given, names)[0] if given.op == "placeholder" else ""
        known = name.isidentifier() and padding_masks({name: given.meta.get("example_value")})
        if not known or given in written:
            raise ComputedMask(f"{given.name} is a mask that the model computes")
        graph.erase_node(mark)
        places.append(placeholders.index(given))
    return places


def checking(run: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Wrap one of a model's several graphs to check at each call that the masks it left out still mask nothing.

    Masks are recognized by their names. After a graph break, an input with such a name may be computed by the
    model.

    Args:
        places: indices of the inputs that are such masks.

    Raises:
        ComputedMask: at a call in which one of these inputs masks something.
    """

    def call(*inputs: Any) -> Any:
        if not all(_is_full(inputs[place]) for place in places):
            raise ComputedMask("the model computes a mask that was left out")
        return run(*inputs)

    return call if places else run


def _origin(node: fx.Node) -> fx.Node:
    """Follow conversions, reshapes and slices, after which a full mask is still full, back to the mask they start from.
    """
    while node.target in SAME_TRUTH or _writes(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _writes(node: fx.Node) -> bool:
    """Tell whether a node of dynamo's graph writes into its first argument."""
    target = node.target
    return target is operator.setitem or (node.op == "call_method" and str(target).endswith("_"))
