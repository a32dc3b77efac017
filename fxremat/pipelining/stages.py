"""Exports a model and its loss as a list of ops, finds where it can be cut, and makes modules of consecutive ops.

torch.export captures the forward in train mode, with dropout and batch norm. The list can be cut before an op
if only one tensor crosses:

    crosses      values computed before the cut and read after it; exactly one, and it has a gradient
    made again   values that depend on no input, parameter or random number (positions, masks, constants);
                 each stage computes its own
    owned        parameters, and buffers that ops write; all readers, also of tied weights, are on one side
    target       the loss's second argument; it is passed to the last stage

A value that crosses must not be written in place after the cut, since the next stage receives a copy of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from fxremat.errors import CaptureError

Loss = Callable[[Any, Tensor], Tensor]  # (outputs, target) -> a scalar
MODEL = "model."


class WithLoss(nn.Module):
    """A model and its loss as one module."""

    def __init__(self, model: nn.Module, loss_fn: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss_fn

    def forward(self, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Return the loss of one micro-batch."""
        return self.loss(self.model(*inputs), target)


class StageModule(nn.Module):
    """A module of consecutive ops with the parameters and buffers they read, under the model's own names.

    A GraphModule would wrap errors raised inside of it, which dynamo cannot trace; this class only has its
    forward.
    """

    graph: fx.Graph

    @classmethod
    def of(cls, module: fx.GraphModule) -> StageModule:
        """Return a module with the forward, parameters and buffers of a GraphModule."""
        stage: StageModule = type("StageModule", (cls,), {"forward": type(module).forward, "__module__": __name__})()
        for name in ("_parameters", "_buffers", "_modules"):
            stage.__dict__[name] = module.__dict__[name]
        stage.__dict__["graph"] = module.graph
        return stage


@dataclass(frozen=True, kw_only=True, eq=False)
class Ops:
    """The forward of a model and its loss as a list of ops, and where it can be cut."""

    nodes: tuple[fx.Node, ...]  # the ops, in order
    inputs: tuple[fx.Node, ...]  # placeholders of the model's inputs
    target: fx.Node
    loss: fx.Node
    held: Mapping[fx.Node, str]  # node of a parameter, buffer or constant -> its name
    values: Mapping[str, Any]  # name of a parameter, buffer or constant -> its value
    again: frozenset[fx.Node]  # values that each stage computes for itself if it reads them
    cuts: Mapping[int, fx.Node]  # index of an op before which the list can be cut -> the value that crosses the cut

    def module(self, first: int, last: int) -> StageModule:
        """Return ops `first` to `last` - 1 as a module.

        Its inputs are the model's inputs, or the value that crosses before op `first`; and the target if it has
        the last op. It returns the value that crosses after its last op, or the loss.
        """
        return _Builder(self, first, last).module()

    @property
    def end(self) -> int:
        """The number of ops, which is the end of the last range of ops."""
        return len(self.nodes)

    @cached_property
    def device(self) -> torch.device:
        """The device of the largest parameter."""
        tensors = [value for value in self.values.values() if isinstance(value, Tensor)]
        return max(tensors, key=lambda tensor: tensor.nbytes).device

    @property
    def read(self) -> list[Any]:
        """The parameters, buffers and constants that at least one op reads."""
        return [self.values[name] for node, name in self.held.items() if node.users]


def capture(model: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, loss_fn: Loss) -> Ops:
    """Export the forward of one micro-batch with its loss as a list of ops; the model is neither run nor changed.

    Raises `CaptureError` if torch.export cannot export it, or if the loss is not one number.
    """
    if not model.training:
        raise CaptureError("the model is in eval mode, and a pipeline trains; call model.train() first")
    try:
        # cloned, since torch.export treats a tensor that is passed twice as one input
        examples = (tuple(value.clone() for value in inputs), target.clone())
        program = torch.export.export(WithLoss(model, loss_fn), examples, strict=False)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CaptureError(
            f"torch.export cannot write this model and its loss down as one graph: {reason[0]}"
        ) from error
    return _read(program, len(inputs))


def _read(program: torch.export.ExportedProgram, count: int) -> Ops:
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    given, held, values = [], {}, {}
    for spec in program.graph_signature.input_specs:
        node = placeholders[getattr(spec.arg, "name", "")]
        if spec.kind is InputKind.USER_INPUT:
            given.append(node)
            continue
        assert spec.target is not None
        held[node] = spec.target.removeprefix(MODEL)
        known = program.state_dict if spec.target in program.state_dict else program.constants
        values[held[node]] = known[spec.target]
    for node in program.graph.nodes:  # get_attr nodes refer to the graphs of autocast, no_grad and similar regions
        if node.op == "get_attr":
            held[node] = str(node.target)
            values[held[node]] = getattr(program.graph_module, str(node.target))
    (output,) = program.graph.find_nodes(op="output")
    (results,) = output.args
    shown = results[0].meta.get("val") if isinstance(results[0], fx.Node) else None
    if len(results) != 1 or not isinstance(shown, Tensor) or shown.dim():
        raise CaptureError("the loss is not one number; loss_fn(outputs, target) has to return a scalar")
    nodes = tuple(node for node in program.graph.nodes if node.op == "call_function")
    sharing = _Sharing(nodes, held, values)
    again = _made_again(nodes, held, values, sharing)
    found = _Cuts(nodes, tuple(given[:count]), given[count], results[0], held, values, again, sharing)
    return Ops(
        nodes=nodes, inputs=tuple(given[:count]), target=given[count], loss=results[0], held=held, values=values,
        again=again, cuts=dict(found.all()),
    )  # fmt: skip


class _Sharing:
    """For each node, the node that it is a view of; for each storage, the last op that writes to it in place."""

    def __init__(self, nodes: Sequence[fx.Node], held: Mapping[fx.Node, str], values: Mapping[str, Any]):
        self._shown: dict[fx.Node, fx.Node] = {}
        first: dict[int, fx.Node] = {}
        for node, name in held.items():  # the names of tied weights share one tensor
            self._shown[node] = first.setdefault(_memory(values[name]), node)
        # base node, as `of` returns it -> index of the last op that writes to it in place
        self.written: dict[fx.Node, int] = {}
        for place, node in enumerate(nodes):
            for argument, writes, shows in _aliases(node):
                if writes:
                    self.written[self.of(argument)] = place
                if shows:
                    self._shown.setdefault(node, self.of(argument))

    def of(self, node: fx.Node) -> fx.Node:
        """Return the node that this node is a view of, or the node itself if it is no view."""
        return self._shown.get(node, node)


def _memory(value: Any) -> int:
    """Return an id of a tensor's storage, which is equal for two names of one weight.

    For other values, an id of the object.
    """
    return (value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0) or id(value)


def _aliases(node: fx.Node) -> Iterator[tuple[fx.Node, bool, bool]]:
    """Yield (argument, whether it is written in place, whether the result is a view of it) for aliased arguments."""
    if node.target is operator.getitem:
        yield node.all_input_nodes[0], False, True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    returned = {
        alias for value in schema.returns if value.alias_info for alias in value.alias_info.before_set
    }
    named = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    for argument in schema.arguments:
        if argument.alias_info is None:
            continue
        shows = bool(argument.alias_info.before_set & returned)
        given = named.get(argument.name)
        for read in given if isinstance(given, list | tuple) else (given,):
            if isinstance(read, fx.Node):
                yield read, argument.alias_info.is_write, shows


def _made_again(
    nodes: Sequence[fx.Node], held: Mapping[fx.Node, str], values: Mapping[str, Any], sharing: _Sharing
) -> frozenset[fx.Node]:
    """Return the values that each stage can compute for itself: they depend on no input, parameter or random number."""
    free = {node for node, name in held.items() if not _is_owned(node, values[name], sharing)}
    for node in nodes:
        written = sharing.of(node) in sharing.written
        if not written and not _is_random(node) and all(read in free for read in node.all_input_nodes):
            free.add(node)
    return frozenset(free)


def _is_owned(node: fx.Node, value: Any, sharing: _Sharing) -> bool:
    return isinstance(value, nn.Parameter) or sharing.of(node) in sharing.written


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@dataclass(frozen=True, eq=False)
class _Cuts:
    """Finds the ops before which the forward can be cut into stages, since exactly one tensor crosses there."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    target: fx.Node
    loss: fx.Node
    held: Mapping[fx.Node, str]
    values: Mapping[str, Any]
    again: frozenset[fx.Node]
    sharing: _Sharing

    def all(self) -> Iterator[tuple[int, fx.Node]]:
        """Yield (index of an op that can be cut before, the value that crosses), one for each different value."""
        place_of = {node: place for place, node in enumerate(self.nodes)}
        last = {node: self._last_reader(node, place_of) for node in (*self.inputs, *self.nodes)}
        first_use, last_use = self._uses(place_of)
        trained = self._trained()
        crossing: set[fx.Node] = set(self.inputs)
        crossed: set[fx.Node] = set()
        for place, node in enumerate(self.nodes):
            crossing = {value for value in crossing if last[value] >= place}
            split = any(first_use[value] < place <= last_use[value] for value in last_use)
            if len(crossing) == 1 and not split:
                (value,) = crossing
                shown = self.sharing.of(value)
                if value in trained and shown not in crossed and self.sharing.written.get(shown, -1) < place:
                    crossed.add(shown)
                    yield place, value
            if node not in self.again:
                crossing.add(node)

    def _last_reader(self, node: fx.Node, place_of: Mapping[fx.Node, int]) -> int:
        if node is self.loss:
            return len(self.nodes)
        return max((place_of[user] for user in node.users if user in place_of), default=-1)

    def _uses(self, place_of: Mapping[fx.Node, int]) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """Return the first and the last op that reads each parameter, written buffer, and the target."""
        first: dict[fx.Node, int] = {}
        last: dict[fx.Node, int] = {}
        for node in (*self.held, self.target):
            if node in self.again:
                continue
            shown = self.sharing.of(node)
            places = [place_of[user] for user in node.users if user in place_of]
            if places:
                first[shown] = min([*places, first.get(shown, len(self.nodes))])
                last[shown] = max([*places, last.get(shown, -1)])
        if self.target in last:
            last[self.target] = len(self.nodes)
        return first, last

    def _trained(self) -> set[fx.Node]:
        """Return all tensors that a gradient may flow through."""
        found = {
            node for node, name in self.held.items() if getattr(self.values[name], "requires_grad", False)
        }
        for node in self.nodes:
            value = node.meta.get("val")
            several = isinstance(value, tuple | list)
            if (several or (isinstance(value, Tensor) and value.is_floating_point())) and any(
                read in found for read in node.all_input_nodes
            ):
                found.add(node)
        return {node for node in found if isinstance(node.meta.get("val"), Tensor)}


@dataclass(frozen=True, eq=False)
class _Builder:
    ops: Ops
    first: int
    last: int

    def module(self) -> StageModule:
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in self._arguments()}
        wanted = set(self.ops.nodes[self.first : self.last])
        for node in self._in_order(wanted):
            if node in self.ops.held:
                copies[node] = graph.get_attr(self._attribute(node))
                copies[node].meta = dict(node.meta)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        result = self.ops.loss if self.last == self.ops.end else self.ops.cuts[self.last]
        value = copies[result]
        # The loss is kept until the step ends, and mse_loss returns it in the storage of all its terms.
        if result is self.ops.loss:
            value = graph.call_function(torch.ops.aten.clone.default, (value,))
        elif not result.meta["val"].is_contiguous():  # tensors have to be contiguous to be sent
            value = graph.call_function(torch.ops.aten.contiguous.default, (value,))
        graph.output(value)
        values = {
            self._attribute(node): self.ops.values[self.ops.held[node]]
            for node in copies
            if node in self.ops.held
        }
        return StageModule.of(fx.GraphModule(values, graph))

    def _attribute(self, node: fx.Node) -> str:
        return self.ops.held[self.shown(node)]

    def shown(self, node: fx.Node) -> fx.Node:
        """Return the first node that stands for the same tensor as `node`; nodes of a tied weight share a tensor."""
        value = self.ops.values[self.ops.held[node]]
        return next(other for other, name in self.ops.held.items() if self.ops.values[name] is value)

    def _arguments(self) -> Iterator[fx.Node]:
        if self.first:
            yield self.ops.cuts[self.first]
        else:
            yield from self.ops.inputs
        if self.last == self.ops.end:
            yield self.ops.target

    def _in_order(self, wanted: set[fx.Node]) -> Iterator[fx.Node]:
        """Yield the ops of this stage and all that they read, including values that each stage computes for itself."""
        given = set(self._arguments())
        kept = {node for node in wanted if node not in self.ops.again}
        if self.last == self.ops.end:
            kept.add(self.ops.loss)
        needed, todo = set(kept), list(kept)
        while todo:
            for read in todo.pop().all_input_nodes:
                if read not in needed and read not in given:
                    needed.add(read)
                    todo.append(read)
        yield from (node for node in self.ops.held if node in needed)
        yield from (node for node in self.ops.nodes if node in needed)
