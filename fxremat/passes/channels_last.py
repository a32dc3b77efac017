"""A rewrite of convolutions, and the ops between them, to the channels_last memory format.

    y = convolution(x, w, ...)         ->    a = clone(x, channels_last);  b = clone(w, channels_last)
                                             y = convolution(a, b, ...)
    f = view(y, [n, -1])               ->    f = view(clone(y, contiguous_format), [n, -1])
    convolution_backward(g, x, w)      ->    convolution_backward(clone(g, channels_last), a, b)
    return y                           ->    return clone(y, contiguous_format)

Inductor keeps the layouts at the borders of each compiled region, so it cannot choose the format for the entire
graph. Here it is chosen before the graph is planned:

    a copy              is made where a convolution reads another layout, once for all readers of a value; of a
                        weight, once for a convolution and its backward, so that parallel branches that share weights
                        have no value in common
    every later op      gets a new fake value, from its fake kernel on the new layouts
    an op that cannot   read the new layout, or that has strides as arguments, reads a copy in the captured layout
    outputs             keep the captured layout, so that autograd and the caller see no difference

The graph must be functional: the pass runs after `drop_detach` and before `note_overwriting`. It is only for
graphs that Inductor compiles, since results come from other kernels, which round in another order.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxremat.graphs.nodes import is_random
from fxremat.graphs.overwriting import overwritten
from fxremat.graphs.symbolic import has_symbolic_sizes
from fxremat.passes.evaluate import evaluate
from fxremat.torch_private import copied, storage_of

log = logging.getLogger(__name__)
aten = torch.ops.aten

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# float64 is left out, since channels_last kernels for it are no faster on a CPU
DTYPES = {torch.float32, torch.bfloat16, torch.float16}

NODES_A_CONVOLUTION = 300  # graphs with more nodes per convolution are left unchanged, as in `torch._inductor`

ROLES = {  # for each op, argument indices of the output's gradient (if any), the activation and the weight
    aten.convolution.default: ((), 0, 1),
    aten.convolution_backward.default: ((0,), 1, 2),
}

TOLD_STRIDES = {  # ops that have strides among their arguments
    *(aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default),
    *(aten.new_empty_strided.default, aten.stride.int),
}
SHOWN_OTHERWISE = {  # ops whose CPU kernels return other layouts than their fake kernels (torch 2.11 and 2.13)
    *(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default, aten.glu_backward.default),
    *(aten.reflection_pad2d_backward.default, aten.replication_pad2d.default, aten.replication_pad2d_backward.default),
    *(aten.reflection_pad3d.default, aten.reflection_pad3d_backward.default),
    *(aten.replication_pad3d.default, aten.replication_pad3d_backward.default),
    *(aten.max_unpool2d.default, aten.max_unpool3d.default, aten.channel_shuffle.default),
}


def convolve_channels_last(graph: fx.Graph) -> None:
    """Convert a joint graph's convolutions to channels_last if that is faster; leave it unchanged if anything raises.

    O(nodes).
    """
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    try:
        if has_symbolic_sizes(graph) or not pays(convolutions):
            return
        if len(graph.nodes) >= NODES_A_CONVOLUTION * len(convolutions):
            return
        _Conversion(copied(graph)).run()
    except Exception as error:
        log.debug("convolutions keep their layouts: %s: %s", type(error).__name__, error)
    else:
        _Conversion(graph).run()


def pays(convolutions: Iterable[fx.Node]) -> bool:
    """Tell whether channels_last would make a graph's convolutions faster.

    On GPUs the rule is that of `torch._inductor`: it excludes graphs with grouped convolutions of several
    channels per group, or with convolutions that halve the channels, and those in which no convolution has many
    channels. On a CPU, by measurements, only groups of many channels are slower; such convolutions are not
    converted, and must not do more than half of all multiplications.
    """
    ours = [node for node in convolutions if _convertible(node)]
    if not ours:
        return False
    if any(_activation(node).device.type != "cpu" for node in ours):
        return not any(_slow_on_gpu(node) for node in ours) and not all(_few_channels(node) for node in ours)
    return 2 * sum(map(_multiplications, filter(_slow_on_cpu, ours))) <= sum(map(_multiplications, ours))


def _tensor(node: object) -> torch.Tensor:
    return cast(torch.Tensor, cast(fx.Node, node).meta["val"])


def _activation(node: fx.Node) -> torch.Tensor:
    return _tensor(node.args[ROLES[node.target][1]])  # type: ignore[index]


def _weight(node: fx.Node) -> torch.Tensor:
    return _tensor(node.args[ROLES[node.target][2]])  # type: ignore[index]


def _convertible(node: fx.Node) -> bool:
    x = _activation(node)
    return x.dim() in FORMATS and x.dtype in DTYPES and x.layout is torch.strided and x.numel() > 0


def _groups(node: fx.Node) -> int:
    return cast(int, node.args[8 if node.target is aten.convolution.default else 9])


def _slow_on_cpu(node: fx.Node) -> bool:
    """Tell whether channels_last makes a grouped convolution slower on a CPU.

    With oneDNN it takes 1.1 to 1.7 times as long with 8 or more channels per group, 0.3 to 0.5 times with up to
    4.
    """
    return _groups(node) > 1 and _weight(node).shape[1] > 4


def _slow_on_gpu(node: fx.Node) -> bool:
    outputs, inputs, *kernel = _weight(node).shape
    return (_groups(node) > 1 and inputs > 1) or (2 * outputs <= inputs and kernel[0] > 1)


def _few_channels(node: fx.Node) -> bool:
    return all(channels <= 64 for channels in _weight(node).shape[:2])


def _multiplications(node: fx.Node) -> int:
    """Return the number of multiplications of a convolution.

    Each element of its result (for a transposed convolution: of its input) is multiplied with one filter.
    """
    transposed = node.args[6]
    shown = _activation(node) if transposed else _tensor(node)
    return shown.numel() * math.prod(_weight(node).shape[1:])


def _lies_channels_last(tensor: torch.Tensor, *, activation: bool) -> bool:
    """Tell whether a convolution treats the tensor as channels_last.

    With one channel, or one pixel, both formats lay elements out alike; an activation of one channel must have the
    strides of channels_last all the same, from which kernels choose the format of their result.
    """
    if not tensor.is_contiguous(memory_format=FORMATS[tensor.dim()]):
        return False
    return not (activation and tensor.shape[1] == 1 and math.prod(tensor.shape[2:]) > 1 and tensor.is_contiguous())


def _is_image(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dim() in FORMATS


def _lies_otherwise(tensor: torch.Tensor, *, broadcast: bool) -> bool:
    """Tell whether a tensor is contiguous but not channels_last, or, if `broadcast`, has a dimension of stride 0."""
    if tensor.is_contiguous():
        return not tensor.is_contiguous(memory_format=FORMATS[tensor.dim()])
    return broadcast and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _element_by_element(node: fx.Node) -> bool:
    """Tell whether an op is pointwise or a backward op (not of attention), so that equal layouts of its operands help.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    name = node.target._schema.name
    return torch.Tag.pointwise in node.target.tags or (name.endswith("_backward") and "scaled_dot" not in name)


def strides_of(value: object) -> list[tuple[int, ...]]:
    """Return the strides of each tensor in a value, except those of dimensions of size 1, where strides mean nothing.

    >>> strides_of(torch.empty(4, 8, 1, 1, 2))
    [(16, 2, 1)]
    """
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    return [tuple(s for s, size in zip(t.stride(), t.shape, strict=True) if size != 1) for t in tensors]


def _shapes(value: object) -> list[torch.Size | None]:
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(value)]


def _storages(value: object) -> set[int]:
    return {storage_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}


class _Conversion:
    """Walks once over a graph in execution order, and converts it to channels_last."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.views = {node for node in graph.nodes if node.op == "call_function" and _is_view(node)}
        self.captured: dict[fx.Node, Any] = {}  # node -> fake value as captured, for nodes whose fake value was changed
        self.source: dict[fx.Node, fx.Node] = {}  # copy in channels_last -> the node that it copies
        self.copies: dict[fx.Node, fx.Node] = {}  # node -> its copy in channels_last, except for weights
        # (weight, activation) -> the weight's copy in channels_last
        self.weights: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.instead: dict[fx.Node, fx.Node] = {}  # node -> the copy that later ops read instead
        self.originals: dict[fx.Node, fx.Node] = {}  # node -> a node with the same elements in the captured layout

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._return(node)
        self.graph.lint()

    def _call(self, node: fx.Node) -> None:
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.instead.get(n, n))
        if node.target in ROLES and _convertible(node) and not _slow_here(node):
            self._convolve(node)
        elif _element_by_element(node):
            self._even_out(node)
        if not any(map(self._is_new, node.all_input_nodes)):
            return
        if overwritten(node) is not None or _writes(node):
            raise NotImplementedError(f"{node.name} overwrites what it reads")
        if not _follows(node):
            self._as_captured(node)
            return
        try:
            shown = evaluate(node)
        except Exception:  # raised for example by a view that is impossible with channels_last strides
            self._as_captured(node)
        else:
            self._show(node, shown)

    def _is_new(self, node: fx.Node) -> bool:
        return node in self.captured or node in self.source

    def _convolve(self, node: fx.Node) -> None:
        """Make a convolution, or its backward, read channels_last copies of its operands.

        Later ops read the same copies.
        """
        gradients, activation, weight = ROLES[node.target]  # type: ignore[index]
        for place in (*gradients, activation):
            read = cast(fx.Node, node.args[place])
            if not _lies_channels_last(_tensor(read), activation=True):
                self.instead[read] = self._copy(read, node)
                node.update_arg(place, self.instead[read])
        read = cast(fx.Node, node.args[weight])
        if not _lies_channels_last(_tensor(read), activation=False):
            use = read, cast(fx.Node, node.args[activation])
            if use not in self.weights:
                self.weights[use] = self._new_copy(read, node)
            node.update_arg(weight, self.weights[use])

    def _even_out(self, node: fx.Node) -> None:
        """Make an op that reads channels_last tensors read all of its operands in that format.

        Kernels are slow on operands of different layouts, fake kernels do not always return the real layout of
        such results, and a later convolution would copy them anyway. The layout of a broadcast operand does not
        matter to a pointwise op.
        """
        read = [n for n in node.all_input_nodes if _is_image(n.meta.get("val"))]
        leaders = [n for n in read if self._is_new(n) and _lies_channels_last(_tensor(n), activation=True)]
        leaders = [n for n in leaders if not _tensor(n).is_contiguous()]
        for other in read:
            alike = any(_tensor(other).shape[:2] == _tensor(n).shape[:2] for n in leaders)
            if alike and _lies_otherwise(_tensor(other), broadcast=torch.Tag.pointwise not in node.target.tags):  # type: ignore[union-attr]
                self.instead[other] = self._copy(other, node)
                node.replace_input_with(other, self.instead[other])

    def _copy(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        if node not in self.copies:
            self.copies[node] = self._new_copy(node, reader)
        return self.copies[node]

    def _new_copy(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Insert a copy of a node in channels_last before its first reader."""
        format_ = FORMATS[_tensor(node).dim()]
        with self.graph.inserting_before(reader):
            copy = self._new(reader, aten.clone.default, (node,), {"memory_format": format_})
        self.source[copy] = node
        return copy

    def _new(self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Insert a node with the metadata of `like` (source line, forward or backward) and a fake value of its own."""
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {key: value for key, value in like.meta.items() if key != "tensor_meta"}
        made.meta["val"] = evaluate(made)
        return made

    def _show(self, node: fx.Node, shown: Any) -> None:
        """Set a node's new fake value if its layout changed, or if the node is a view or a getitem."""
        old = node.meta["val"]
        if _shapes(shown) != _shapes(old):
            raise AssertionError(f"{node.name} shows other shapes in another layout")
        if strides_of(shown) != strides_of(old) or node in self.views:
            self.captured[node] = old
        elif node.target is not operator.getitem:
            return
        node.meta["val"] = shown
        node.meta.pop("tensor_meta", None)

    def _as_captured(self, node: fx.Node) -> None:
        """Make a node read its inputs in the captured layouts, from copies where necessary."""
        read = {n: self._original(n, node, before=node) for n in node.all_input_nodes}
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), read.__getitem__)
        if node in self.views:
            self._show(node, evaluate(node))

    def _original(self, node: fx.Node, like: fx.Node, *, before: fx.Node) -> fx.Node:
        """Return a node with the elements of `node` in the captured layout, inserting it if necessary.

        A view becomes a view of its base in the captured layout, so that outputs that share memory still do.

        Args:
            like: the node whose metadata new nodes get.
            before: the node before which they are inserted.
        """
        if node in self.source:
            return self._original(self.source[node], like, before=before)
        if node not in self.captured:
            return node
        if node not in self.originals:
            if node in self.views:
                read = {n: self._original(n, like, before=before) for n in node.all_input_nodes}
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), read.__getitem__)
                with self.graph.inserting_before(before):
                    self.originals[node] = self._new(like, node.target, args, kwargs)
            else:
                with self.graph.inserting_before(before):
                    self.originals[node] = self._laid_out(node, self.captured[node], like)
        return self.originals[node]

    def _laid_out(self, node: fx.Node, wanted: torch.Tensor, like: fx.Node) -> fx.Node:
        """Insert a copy of a node in the layout of `wanted`, which must have no gaps and offset 0."""
        for format_ in (torch.contiguous_format, FORMATS.get(wanted.dim())):
            if format_ and wanted.is_contiguous(memory_format=format_):
                made = self._new(like, aten.clone.default, (node,), {"memory_format": format_})
                if strides_of(made.meta["val"]) == strides_of(wanted):
                    return made
        sizes = list(zip(wanted.stride(), wanted.shape, strict=True))
        order = sorted(range(wanted.dim()), key=sizes.__getitem__, reverse=True)
        if not wanted.permute(order).is_contiguous() or wanted.storage_offset():
            raise NotImplementedError(f"{node.name} has strides {wanted.stride()}")
        turned = self._new(like, aten.permute.default, (node, order), {})
        copy = self._new(like, aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
        return self._new(like, aten.as_strided.default, (copy, list(wanted.shape), list(wanted.stride())), {})

    def _return(self, output: fx.Node) -> None:
        """Make the graph return outputs in the captured layouts; outputs that shared memory still share it."""
        returned = [node for node in output.all_input_nodes if node in self.captured]
        moved = [n for n in returned if strides_of(n.meta["val"]) != strides_of(self.captured[n])]
        stale = set().union(*(_storages(self.captured[node]) for node in moved))
        for node in returned:
            if not stale.isdisjoint(_storages(self.captured[node])):
                output.replace_input_with(node, self._original(node, node, before=node.next))


def _slow_here(node: fx.Node) -> bool:
    return _activation(node).device.type == "cpu" and _slow_on_cpu(node)


def _follows(node: fx.Node) -> bool:
    """Tell whether an op may read any layout: an aten op that is not random and returns tensors of known sizes.

    Random numbers are drawn in memory order, so the number that an element gets would depend on the layout.
    """
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    sized_by_data = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    if node.target in TOLD_STRIDES | SHOWN_OTHERWISE or is_random(node) or sized_by_data & set(node.target.tags):
        return False
    return all(isinstance(leaf, torch.Tensor | None) for leaf in tree_leaves(node.meta["val"]))


def _is_view(node: fx.Node) -> bool:
    """Tell whether a node's result shares memory with an input of the node, or for a getitem, of the op it belongs to.
    """
    if node.target is operator.getitem:
        return _is_view(cast(fx.Node, node.args[0]))
    read = set().union(*(_storages(parent.meta.get("val")) for parent in node.all_input_nodes))
    return not read.isdisjoint(_storages(node.meta.get("val")))


def _writes(node: fx.Node) -> bool:
    """Tell whether an op writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
