"""Handling of numbers that a model reads from its data (`.item()`), which are values of no bytes.

A view whose offset depends on such a number becomes a copy. A tensor size that depends on one is refused, since
a plan in bytes is made for fixed sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat.errors import CaptureError, NotSymbolic
from fxremat.graphs.names import place_of, source_of
from fxremat.graphs.nodes import SYMBOLS, is_number
from fxremat.graphs.symbolic import is_size
from fxremat.torch_private import depends_on_data, depends_on_float, expression_of, unknown_like

aten = torch.ops.aten


def copy_views_by_number(graph: fx.Graph) -> None:
    """Replace a view that begins at a number read from data (`x[i.item()]`) by a copy, which is a value. O(nodes)."""
    for node in graph.nodes:
        shown = node.meta.get("val")
        parents = [parent.meta.get("val") for parent in node.all_input_nodes]
        numbers = [value for value in parents if is_number(value) and not is_size(value)]
        if isinstance(shown, torch.Tensor) and _begins_at_number(node, shown):
            node.meta["val"] = shown.new_empty_strided([*map(_plain, shown.shape)], [*map(_plain, shown.stride())])
        if not numbers or not isinstance(shown, torch.Tensor) or not node.target.is_view:
            continue
        packet = node.target.overloadpacket
        node.target = getattr(getattr(aten, f"{packet.__name__}_copy"), node.target._overloadname)
        node.meta["val"] = shown.new_empty([*map(_plain, shown.shape)])


def keep_checks(graph: fx.Graph) -> None:
    """Take numbers that come from numbers read from data as unknown, even if the model checks them. O(nodes).

    Tracing notes what a check (`assert (ids >= 0).all().item()`) tells, and then takes the checked number for a
    constant. Emitted so, the check would compare constants, and never fail.
    """
    for node in graph.nodes:
        shown = node.meta.get("val")
        if not isinstance(shown, SYMBOLS) or not is_size(shown):
            continue
        parents = [parent.meta.get("val") for parent in node.all_input_nodes]
        reads = node.target is aten._local_scalar_dense.default
        if reads or any(is_number(value) and not is_size(value) for value in parents):
            node.meta["val"] = unknown_like(shown)


def _begins_at_number(node: fx.Node, shown: torch.Tensor) -> bool:
    """Tell whether a node makes a new tensor whose storage offset depends on data, as `aten.copy` of a view does."""
    offset, target = shown.storage_offset(), node.target
    made = isinstance(target, torch._ops.OpOverload) and not target.is_view
    return made and isinstance(offset, torch.SymInt) and depends_on_data(offset)


def _plain(size: Any) -> Any:
    """Return a constant symbolic size as an int, and any other size unchanged."""
    return int(size) if isinstance(size, torch.SymInt) and expression_of(size).is_Integer else size


def refuse_symbols(graph: fx.Graph, example: str = "val") -> None:
    """Raise `CaptureError` for a graph with a tensor size that depends on data; the error names a line of the model.

    A size that depends on a float input raises `NotSymbolic`, so that the float is treated as a constant. Numbers that
    depend on data are allowed, as long as no tensor has them as a size.

    Args:
        example: the key of fake values in `meta`: "val" in AOTAutograd's graphs, "example_value" in dynamo's.
    """
    # ops first, since their source line can be named
    for node in sorted(graph.nodes, key=lambda node: node.op == "placeholder"):
        _refuse_symbols(node, node.meta.get(example))


def _refuse_symbols(node: fx.Node, value: object) -> None:
    shapes = [t for t in (value if isinstance(value, tuple | list) else [value]) if isinstance(t, torch.Tensor)]
    sizes = [size for t in shapes for size in t.shape if isinstance(size, SYMBOLS)]
    if any(map(depends_on_float, sizes)):
        raise NotSymbolic("a size that is computed from a float")
    if any(map(depends_on_data, sizes)):
        raise CaptureError(
            f"the size of {node.name} depends on data{source_of(node)}, and a plan in bytes needs fixed sizes: keep "
            "the op out of the model, give it a fixed size (such as output_size=, a mask instead of a selection), or "
            "compile the submodules around it instead",
            place_of(node),
        )
