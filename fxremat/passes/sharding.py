"""A rewrite of gathers and reductions of sharded or replicated parameters to collectives, several in one bucket.

    merge      equal gathers become one (tied weights); gradients are added before they are reduced, not after
    gather     shard -> [cast] -> [pad] -> all_gather -> [rows]          one collective for all gathers of a bucket
    reduce     gradient -> [cast] -> [pack] -> reduce_scatter -> [all_reduce over replicas] -> [cast] -> [rows]

A bucket of gathers starts where the first of its parameters is read, a bucket of gradients where the last of
its gradients is computed. Gathers of a bucket are coalesced: each parameter has a storage of its own, which is
freed by itself. Gradients of a bucket are packed into one buffer, which is reduced; the reduced gradients are
views of it.

Graphs without `fxremat::gather` are not rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from fxremat.graphs.collectives import collective
from fxremat.ops.gathered import Sharing
from fxremat.torch_private import group_named, storage_of

aten = torch.ops.aten
GATHER = torch.ops.fxremat.gather.default
REDUCE = torch.ops.fxremat.reduce.default
SAME = (aten.detach.default, aten.view.default, aten.alias.default)
BUCKET = 25 * 2**20  # largest size of a bucket in bytes, as in DistributedDataParallel
# minimum number of buckets into which gradients of replicated parameters are divided, so that communication
# overlaps
SHARES = 8


def share(graph: fx.Graph) -> None:
    """Replace all gathers and reductions of sharded or replicated parameters by collectives. O(nodes)."""
    gathers = _found(graph, GATHER)
    if not gathers:
        return
    _merge_gathers(gathers)
    for node in _found(graph, REDUCE):
        _drop_views_of_itself(node)
    while _merge_reductions(graph):
        pass
    for bucket in _buckets(_found(graph, GATHER), _sharing_of_gather):
        _gather(bucket)
    for bucket in _buckets(_found(graph, REDUCE), _sharing_of_reduce):
        _reduce(bucket)
    graph.eliminate_dead_code()


def _found(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is target]


def _sharing_of_gather(node: fx.Node) -> Sharing:
    return Sharing(*node.args[3:])  # type: ignore[arg-type]


def _sharing_of_reduce(node: fx.Node) -> Sharing:
    return Sharing(*node.args[2:-2])  # type: ignore[arg-type]


def _merge_gathers(gathers: Sequence[fx.Node]) -> None:
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in gathers:
        shard, _, *rest = node.args
        known = first.setdefault((_viewed(shard), *rest), node)
        if known is not node:
            node.replace_all_uses_with(known)
            node.graph.erase_node(node)


def _viewed(shard: object) -> object:
    """Return the node that a shard is a view of, following views and aliases that keep the shape."""
    while isinstance(shard, fx.Node) and shard.target in SAME:
        parent = shard.args[0]
        if not isinstance(parent, fx.Node) or parent.meta["val"].shape != shard.meta["val"].shape:
            break
        shard = parent
    return shard


def _drop_views_of_itself(node: fx.Node) -> None:
    """Replace views of a node in its own shape, which DTensor inserts, by the node."""
    for view in [user for user in node.users if user.target in SAME]:
        if view.meta["val"].shape == node.meta["val"].shape:
            view.replace_all_uses_with(node)
            node.graph.erase_node(view)
            _drop_views_of_itself(node)


def _merge_reductions(graph: fx.Graph) -> bool:
    """Rewrite one reduce(a) + reduce(b) to reduce(a + b); return whether the graph had such a sum."""
    for total in _found(graph, aten.add.Tensor):
        one, other = total.args if len(total.args) == 2 else (None, None)
        if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)) or one is other:
            continue
        if one.target is not REDUCE or other.target is not REDUCE or one.args[1:] != other.args[1:]:
            continue
        if set(one.users) != {total} or set(other.users) != {total}:
            continue
        write = _Writer(total)
        gradients = write(aten.add.Tensor, one.args[0], other.args[0])
        total.replace_all_uses_with(write(REDUCE, gradients, *one.args[1:]))
        for node in (total, one, other):
            graph.erase_node(node)
        return True
    return False


def _buckets(nodes: Sequence[fx.Node], sharing: Callable[[fx.Node], Sharing]) -> Iterator[list[fx.Node]]:
    """Yield groups of gathers or reductions that one collective can do: equal `Sharing`, dtype and device."""
    most = BUCKET
    if nodes and not sharing(nodes[0]).group:
        most = min(most, sum(map(_bytes_of_whole, nodes)) // SHARES)
    open_: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in nodes:
        kind = (sharing(node)._replace(rows=0), node.target is REDUCE and node.args[-1], _device(node))
        bucket = open_.setdefault(kind, [])
        if bucket and sum(map(_bytes_of_whole, [*bucket, node])) > most:
            yield open_.pop(kind)
            bucket = open_.setdefault(kind, [])
        bucket.append(node)
    yield from open_.values()


def _bytes_of_whole(node: fx.Node) -> int:
    shown: Any = node if node.target is GATHER else node.args[0]
    return int(shown.meta["val"].nbytes)


def _device(node: fx.Node) -> torch.device:
    device: torch.device = node.meta["val"].device
    return device


def _gather(bucket: Sequence[fx.Node]) -> None:
    """Insert one collective at the first gather of a bucket, and replace all gathers by its results."""
    sharing = _sharing_of_gather(bucket[0])
    group = group_named(sharing.group) if sharing.group else None
    write = _Writer(bucket[0])
    parts = [_part_to_send(write, node, 1 if group is None else group.size()) for node in bucket]
    if group is None:
        wholes: list[fx.Node] = parts
    elif len(parts) == 1:
        op = collective(torch.ops._c10d_functional.all_gather_into_tensor.default)
        wholes = [write(op, parts[0], group.size(), sharing.group)]
    else:
        op = collective(torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default)
        wholes = write.items(write(op, parts, group.size(), sharing.group))
    wholes = [_without_padding(write, node, whole) for node, whole in zip(bucket, wholes, strict=True)]
    for node, whole in zip(bucket, wholes, strict=True):
        _replace(node, whole)  # the new nodes have been inserted before the first gather


def _without_padding(write: _Writer, gather: fx.Node, whole: fx.Node) -> fx.Node:
    rows = _sharing_of_gather(gather).rows
    if whole.meta["val"].dim() and whole.meta["val"].shape[0] != rows:
        return write(aten.slice.Tensor, whole, 0, 0, rows)
    return whole


def _part_to_send(write: _Writer, gather: fx.Node, ranks: int) -> fx.Node:
    """Return the shard as it is sent: cast to the model's compute dtype, padded to the number of rows of rank 0."""
    sharing = _sharing_of_gather(gather)
    shard = gather.args[0]
    assert isinstance(shard, fx.Node)
    if shard.op != "placeholder":
        shard = write.moved_up(shard)
    if sharing.rows % ranks:
        missing = -(-sharing.rows // ranks) - shard.meta["val"].shape[0]
        shard = write(aten.constant_pad_nd.default, shard, [0, 0] * (shard.meta["val"].dim() - 1) + [0, missing])
    if shard.meta["val"].dtype != sharing.dtype:
        shard = write(aten._to_copy.default, shard, dtype=sharing.dtype)
    if ranks > 1 and not shard.meta["val"].is_contiguous():
        shard = write(aten.clone.default, shard, memory_format=torch.contiguous_format)
    return shard


def _reduce(bucket: Sequence[fx.Node]) -> None:
    """Replace the reductions of a bucket by one collective at the place of the last reduction."""
    sharing = _sharing_of_reduce(bucket[0])
    write = _Writer(bucket[-1])
    group, replicas = (group_named(name) if name else None for name in (sharing.group, sharing.replicas))
    ranks = 1 if group is None else group.size()
    gradients = [_as_reduced(write, node) for node in bucket]
    sizes = [_padded(node, ranks) for node in bucket]
    flat = _packed(write, gradients, ranks)
    if sharing.before != 1:
        flat = write(aten.div.Tensor, flat, sharing.before)
    if group is not None:
        op = collective(torch.ops._c10d_functional.reduce_scatter_tensor.default)
        flat = write(op, flat, sharing.op, ranks, sharing.group)
    if replicas is not None:
        op = collective(torch.ops._c10d_functional.all_reduce.default)
        flat = write(op, flat, sharing.op, sharing.replicas)
    if sharing.after != 1:
        flat = write(aten.div.Tensor, flat, sharing.after)
    stored = bucket[0].args[-1]
    if flat.meta["val"].dtype != stored:
        flat = write(aten._to_copy.default, flat, dtype=stored)
    _move_readers(bucket)
    for node, piece in zip(bucket, _pieces(write, flat, sizes), strict=True):
        mine = node.args[-2]
        if piece.meta["val"].dim() and piece.meta["val"].shape[0] != mine:
            piece = write(aten.slice.Tensor, piece, 0, 0, mine)
        _replace(node, piece)


def _replace(node: fx.Node, new: fx.Node) -> None:
    """Replace a node by a new one; the fake values of its views become views of the new node's value."""
    _show(node, node.meta["val"], new.meta["val"])
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _show(node: fx.Node, old: torch.Tensor, new: torch.Tensor) -> None:
    """Give the views of a node new fake values, which are views of `new` instead of `old`."""
    for view in node.users:
        value = view.meta.get("val")
        if isinstance(value, torch.Tensor) and storage_of(value) == storage_of(old):
            moved = new.as_strided(value.shape, value.stride(), new.storage_offset() + value.storage_offset())
            view.meta = dict(view.meta) | {"val": moved}
            _show(view, old, new)


def _move_readers(bucket: Sequence[fx.Node]) -> None:
    """Move nodes that read results of a bucket's reductions after its last reduction."""
    late, end = set(bucket), bucket[-1]
    node = bucket[0]
    while node is not bucket[-1]:
        following = node.next
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            end.append(node)
            end = node
        node = following


def _as_reduced(write: _Writer, node: fx.Node) -> fx.Node:
    """Return the gradient cast to the dtype of the reduction, plus unreduced gradients of earlier steps."""
    gradient: Any = node.args[0]
    dtype = _sharing_of_reduce(node).reduced_in
    if dtype is not None and gradient.meta["val"].dtype != dtype:
        gradient = write(aten._to_copy.default, gradient, dtype=dtype)
    earlier = node.args[1]
    return gradient if earlier is None else write(aten.add.Tensor, gradient, earlier)


def _padded(node: fx.Node, ranks: int) -> torch.Size:
    """Return the shape of a rank's part of a reduced gradient, padded to the rows of rank 0."""
    gradient: Any = node.args[0]
    shape = gradient.meta["val"].shape
    return torch.Size((-(-shape[0] // ranks), *shape[1:])) if shape else shape


def _packed(write: _Writer, gradients: Sequence[fx.Node], ranks: int) -> fx.Node:
    """Return one buffer with all gradients, in which the part of each rank is contiguous.

    A single contiguous gradient whose rows divide evenly among the ranks is returned as it is.
    """
    if len(gradients) == 1:
        value = gradients[0].meta["val"]
        if value.is_contiguous() and value.dim() and value.shape[0] % ranks == 0:
            return gradients[0]
    if ranks > 1:
        return write(aten._chunk_cat.default, list(gradients), 0, ranks)
    flat = [write(aten.reshape.default, gradient, [-1]) for gradient in gradients]
    return write(aten.cat.default, flat) if len(flat) > 1 else flat[0]


def _pieces(write: _Writer, flat: fx.Node, shapes: Sequence[torch.Size]) -> Iterator[fx.Node]:
    """Yield the reduced gradients: views of the buffer `flat`, one for each shape."""
    if len(shapes) == 1 and flat.meta["val"].shape == shapes[0]:
        yield flat
        return
    flat = write(aten.view.default, flat, [-1])
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + shape.numel())
    for shape, (begin, end) in zip(shapes, pairwise(ends), strict=True):
        piece = write(aten.slice.Tensor, flat, 0, begin, end)
        yield write(aten.view.default, piece, list(shape))


class _Writer:
    """A function that inserts nodes before a given node, with that node's `meta` and their own fake values."""

    class Place(NamedTuple):
        """The node before which new ones are inserted, and its fake mode."""

        node: fx.Node
        mode: Any

    def __init__(self, node: fx.Node) -> None:
        self.place = self.Place(node, node.meta["val"].fake_mode)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node, mode = self.place
        with node.graph.inserting_before(node):
            made = node.graph.call_function(target, args, kwargs)
        shown, options = fx.node.map_arg((args, kwargs), lambda parent: parent.meta["val"])
        with mode:
            start = getattr(target, "start", target)
            made.meta = dict(node.meta) | {"val": start(*shown, **options)}
        return made

    def items(self, several: fx.Node) -> list[fx.Node]:
        """Insert a getitem node for each output of a node that has several, and return them."""
        import operator

        found = []
        for place, value in enumerate(several.meta["val"]):
            with several.graph.inserting_before(self.place.node):
                item = several.graph.call_function(operator.getitem, (several, place))
            item.meta = dict(self.place.node.meta) | {"val": value}
            found.append(item)
        return found

    def moved_up(self, view: fx.Node) -> fx.Node:
        """Copy a chain of views of a placeholder, inserted before this writer's node."""
        parent = view.args[0]
        assert isinstance(parent, fx.Node)
        base = parent if parent.op == "placeholder" else self.moved_up(parent)
        return self(view.target, base, *view.args[1:], **view.kwargs)
