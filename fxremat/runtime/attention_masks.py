"""Attention masks of transformers that mask nothing: captured graphs leave them out, as eager mode does.

In eager mode transformers reads a padding mask's values, and ignores one that masks nothing. Without a padding mask
and without a cache it reads the position ids: rows that count up by one are one sequence each, else several are
packed in a row, and a mask keeps them apart. Where nothing is masked, attention is simply causal, groups of heads
share keys and values, and CUDA has flash attention. Traced code cannot read values, and makes the mask; with grouped
heads its gradients round differently. So this is decided before a call is traced:

    before the call       `left_out` looks whether masks and position ids among the inputs are such, as eager mode does
    while it is traced    transformers is told that there is no mask, and that no sequences are packed;
                          `fxremat::masks_nothing` and `fxremat::counts_up` mark the tensors that it would have read
    the captured graph    `unmark` checks that every marked tensor is one of those inputs, or made by `torch.arange` or,
                          in a model that is given no mask, by `torch.ones`; if not, capture is repeated
    later calls           dynamo guards on the answer: a call with padding is another graph, with a plan of its own
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxremat.errors import FxrematError
from fxremat.torch_private import has_data, input_and_dimension, torch_release

# dynamo guards on both
_nothing_masked = False  # True during a call whose padding masks mask nothing
_nothing_packed = False  # True during a call whose position ids are one sequence in each row

# What keeps a full mask full, and what keeps rows that count up by one such rows.
SAME_TRUTH = (operator.getitem, "to", "bool", "int", "long", "contiguous", "view", "reshape", "expand", "clone")
SAME_ROWS = (operator.getitem, "to", "int", "long", "contiguous", "view", "reshape", "expand", "clone", "unsqueeze")
SHIFTS = (operator.add, "add", torch.add)
IN_PLACE = (
    *(operator.setitem, operator.iadd, operator.isub, operator.imul, operator.ifloordiv, operator.imod),
    *(operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.ipow),
)


class ComputedMask(FxrematError):
    """Raised if a mask, or position ids, that were not read are computed by the model.

    Capture is repeated with masks; users do not see it.
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


@torch.library.custom_op("fxremat::counts_up", mutates_args=())
def counts_up(positions: Tensor) -> Tensor:
    """Tell whether position ids count up by one in each row.

    In traced graphs, this op stands for a search for packed sequences that was left out; it is never run there.
    """
    return (positions.diff() == 1).all()


@counts_up.register_fake
def _(positions: Tensor) -> Tensor:
    return positions.new_empty((), dtype=torch.bool)


def position_ids(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arguments that may be position ids: so named, two dimensions or more, integers."""
    return {name: value for name, value in given.items() if "position_ids" in name and _are_position_ids(value)}


def _are_position_ids(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and not value.is_floating_point()


def padding_masks(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arguments that may be padding masks: "mask" in the name, two dimensions, integers or booleans."""
    return {name: value for name, value in given.items() if "mask" in name and _is_padding_mask(value)}


def _is_padding_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()


@contextlib.contextmanager
def left_out(masks: Sequence[Tensor] | None, positions: Sequence[Tensor] | None) -> Iterator[None]:
    """Within this context, let traced code make no attention masks where nothing is masked, as in eager mode.

    Before torch 2.13 transformers would keep a purely causal mask even for calls without padding masks: it asks
    whether the model is being exported, and dynamo answers yes (read in torch 2.11). Within this context the
    answer is no.

    Args:
        masks: the padding masks that the call is given; if all of them mask nothing they are left out, and so are those
            that the model makes of ones. None: masks are kept.
        positions: the position ids that the call is given. None: traced code looks for packed sequences.
    """
    global _nothing_masked, _nothing_packed
    library: Any = sys.modules.get("transformers.masking_utils")
    replaced = {name: getattr(library, name) for name in REPLACED if hasattr(library, name)}
    before = _nothing_masked, _nothing_packed
    _nothing_masked = bool(replaced) and masks is not None and all(map(_is_full, masks))
    _nothing_packed = bool(replaced) and positions is not None and all(map(_counts_up, positions))
    for name, function in replaced.items():
        setattr(library, name, REPLACED[name](function))
    try:
        yield
    finally:
        _nothing_masked, _nothing_packed = before
        for name, function in replaced.items():
            setattr(library, name, function)


def leaves_masks_out() -> bool:
    """Tell whether traced code currently leaves out masks, so that `ComputedMask` may be raised for a graph."""
    return _nothing_masked or _nothing_packed


def _is_full(mask: Tensor) -> bool:
    return has_data(mask) and bool(mask.all())


def _counts_up(positions: Tensor) -> bool:
    return has_data(positions) and bool((positions.diff() == 1).all())


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


@functools.cache
def _without_packing(finds: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Wrap the function of transformers that finds packed sequences, so that it finds none where there are none."""

    def finds_them(position_ids: Tensor) -> Tensor | None:
        if _nothing_packed:
            counts_up(position_ids)
            return None
        return finds(position_ids)

    return finds_them


def _not_exporting(is_exporting: Callable[..., bool]) -> Callable[..., bool]:
    return _no if torch_release() < (2, 13) else is_exporting


def _no() -> bool:
    return False


REPLACED: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "_ignore_causal_mask_sdpa": functools.partial(_without_mask, causal=True),
    "_ignore_bidirectional_mask_sdpa": functools.partial(_without_mask, causal=False),
    "find_packed_sequence_indices": _without_packing,
    "is_torchdynamo_exporting": _not_exporting,
}


@dataclass(frozen=True)
class Check:
    """An input of a graph that must be as it was when the graph was captured, or the graph computes something else."""

    place: int  # index of the input
    holds: Callable[[Tensor], bool]


def unmark(graph: fx.Graph, names: Sequence[str]) -> list[Check]:
    """Remove the ops that stand for tensors that were not read from dynamo's graph; return the inputs among these.

    Args:
        names: names of the model's inputs that may be passed by position.

    Raises:
        ComputedMask: a marked tensor is not (a cast or reshape of) an input whose values were checked before the call,
            nor a mask that `torch.ones` or position ids that `torch.arange` has made, or the model has written to it.
    """
    return [
        *_unmarked(graph, names, masks_nothing, _origin, _is_ones, padding_masks, _is_full),
        *_unmarked(graph, names, counts_up, _origin_of_rows, _is_range, position_ids, _counts_up),
    ]


def _unmarked(
    graph: fx.Graph,
    names: Sequence[str],
    op: Any,
    origin_of: Callable[[fx.Node], fx.Node],
    is_made: Callable[[fx.Node], bool],
    known: Callable[[Mapping[str, Any]], Mapping[str, Tensor]],
    holds: Callable[[Tensor], bool],
) -> Iterator[Check]:
    """Remove the marks of one op; yield the inputs that they mark."""
    marks = graph.find_nodes(op="call_function", target=op._opoverload)
    placeholders = graph.find_nodes(op="placeholder")
    written = {origin_of(node) for node in graph.nodes if marks and _writes(node)}
    for mark in marks:
        given = origin_of(mark.args[0])
        name = input_and_dimension(given, names)[0] if given.op == "placeholder" else ""
        is_known = name.isidentifier() and bool(known({name: given.meta.get("example_value")}))
        if not (is_known or is_made(given)) or given in written:
            raise ComputedMask(f"the model computes {given.name}, whose values decide about an attention mask")
        graph.erase_node(mark)
        if is_known:
            yield Check(placeholders.index(given), holds)


def checking(run: Callable[..., Any], checks: Sequence[Check]) -> Callable[..., Any]:
    """Wrap one of a model's several graphs to check at each call that what it left out still masks nothing.

    Masks and position ids are recognized by their names. After a graph break, an input with such a name may be
    computed by the model.

    Raises:
        ComputedMask: at a call in which one of these inputs masks something, or has packed sequences.
    """

    def call(*inputs: Any) -> Any:
        if not all(check.holds(inputs[check.place]) for check in checks):
            raise ComputedMask("the model computes a mask that was left out")
        return run(*inputs)

    return call if checks else run


def _origin(node: fx.Node) -> fx.Node:
    """Follow conversions, reshapes and slices, after which a full mask is still full, back to the mask they start from.
    """
    while node.target in SAME_TRUTH or _writes(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _origin_of_rows(node: fx.Node) -> fx.Node:
    """Follow ops after which rows that count up by one still do, back to the tensor that they start from."""
    while True:
        if node.target in SHIFTS and len(tensors := [each for each in node.args if _rank(each)]) == 1:
            node = tensors[0]  # type: ignore[assignment]
        elif _writes(node) or (node.target in SAME_ROWS and _keeps_rows(node)):
            node = node.args[0]  # type: ignore[assignment]
        else:
            return node


def _keeps_rows(node: fx.Node) -> bool:
    """Tell whether the rows of what a node reshapes or indexes are rows, or parts of rows, of its result."""
    given = node.args[0]
    if node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if isinstance(index[0], int) and len(index) == 1:
            return _rank(given) > 1
        parts = all(each in (None, ...) or (isinstance(each, slice) and each.step in (None, 1)) for each in index)
        return parts and (index[-1] is not None or len(index) == 1)
    return _length(given) == _length(node)


def _rank(node: Any) -> int:
    """Return the number of dimensions of a node's tensor; 0 for scalars and for what is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.dim() if isinstance(value, Tensor) else 0


def _length(node: Any) -> str:
    """Return the length of the rows of a node's tensor, as text, since comparing symbolic sizes would add guards."""
    return str(node.meta["example_value"].shape[-1]) if _rank(node) else ""


def _is_ones(node: fx.Node) -> bool:
    """Tell whether a node makes a tensor of ones."""
    return node.target in (torch.ones, torch.ones_like, "new_ones")


def _is_range(node: fx.Node) -> bool:
    """Tell whether a node is a `torch.arange` with a step of one."""
    if node.target is not torch.arange:
        return False
    step: Any = node.kwargs.get("step", node.args[2] if len(node.args) > 2 else 1)
    dtype: Any = node.kwargs.get("dtype", torch.int64)
    return bool(step == 1) and not dtype.is_floating_point


def _writes(node: fx.Node) -> bool:
    """Tell whether a node of dynamo's graph writes into its first argument."""
    target = node.target
    return target in IN_PLACE or (node.op == "call_method" and str(target).endswith("_"))
