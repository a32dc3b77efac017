"""Read a torch.fx graph as a `StepGraph`, and remember which nodes its ops and values come from: `read_joint`.

    torch.fx joint graph    placeholders, compute nodes, views, getitems, detaches
    Captured                a StepGraph; `nodes` has the node of each op, `shown` a node for each value, and
                            `value_of` the value for each node

A value is a storage: all views of it are the same value. Planning uses the numbers of ops and values; measuring
and lowering use the nodes. A graph that was read is never changed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx

from fxremat.errors import CaptureError, FxrematError
from fxremat.graphs.batch_norm import again_inputs, made_again
from fxremat.graphs.collectives import is_collective
from fxremat.graphs.handed_in import is_one_number, layout_of
from fxremat.graphs.names import model_of, parameter_of, sources_of
from fxremat.graphs.nodes import NUMBERS, is_random, storage_bytes, tangents_in, tensors_of
from fxremat.graphs.op_key import op_key
from fxremat.graphs.overwriting import called, overwritten
from fxremat.step.step_graph import Kind, Op, Origin, StepGraph, Value
from fxremat.torch_private import holds_gradients, is_effect_token, storage_of

DROPPED = "dropped"  # in `meta` of the output node of a joint graph: see `note_dropped`


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured(StepGraph):
    """A step graph together with the torch.fx graph that it was read from."""

    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]  # for each op, the fx node that computes it
    # for each value, the fx node of its tensor: a placeholder, an op, or the getitem that selects it from an
    # op's results
    shown: tuple[fx.Node, ...]
    # node of a tensor, views included -> number of the value (storage) that it belongs to
    value_of: Mapping[fx.Node, int]
    primals: tuple[fx.Node, ...]
    tangent_nodes: tuple[fx.Node, ...]
    forward_outputs: tuple[object, ...]  # fx nodes, or constants such as None
    backward_outputs: tuple[object, ...]
    output_descs: tuple[object, ...]
    # parameter that the step updates -> node of its gradient
    update_nodes: Mapping[int, fx.Node] = field(default_factory=dict)

    @property
    def passes(self) -> tuple[Any, ...]:
        """The effects of the passes that ran before the graph was read; see `passes.pipelines.Rewrite`."""
        rewrites: tuple[Any, ...] = self.module.meta.get("rewrites", ())
        return rewrites

    def dropping(self, places: Set[int]) -> Captured:
        """Return this step where the caller drops these of the outputs of the captured function before the backward.

        What is read from its module later, rewritten or at other sizes, says so, too.
        """
        note_dropped(self.module.graph, places)
        return replace(self, dropped_outputs=self.values_at(places))

    def values_at(self, places: Set[int]) -> frozenset[int]:
        """Return the values all of whose outputs are among those of the captured function with these indices."""
        return _values_at(places, self.value_of, self.forward_outputs, self.output_descs) & self.kept_outputs

    @cached_property
    def step(self) -> StepGraph:
        """The step graph without nodes of torch.fx."""
        return StepGraph(**{each.name: getattr(self, each.name) for each in fields(StepGraph)})

    @cached_property
    def outputs_needed(self) -> tuple[frozenset[int | None], ...]:
        """For each output of the backward, the indices of the forward outputs whose gradients it depends on.

        None among them stands for the gradient of something else, such as an input that is written to.
        """
        needed: dict[fx.Node, frozenset[int | None]] = {}
        for node in self.module.graph.nodes:
            if node in self.tangent_nodes:
                needed[node] = frozenset([_index_of(node)])
            else:
                needed[node] = frozenset().union(*(needed[parent] for parent in node.all_input_nodes))
        return tuple(
            needed[node] if isinstance(node, fx.Node) else frozenset() for node in self.backward_outputs
        )

    @cached_property
    def tangent_layouts(self) -> tuple[tuple[int, ...], ...]:
        """The traced layouts of the gradients that autograd passes in; see `layout_of`."""
        return tuple(layout_of(node.meta["val"]) for node in self.tangent_nodes)

    @cached_property
    def tangent_names(self) -> dict[int, str]:
        """For each forward output that gets a gradient, the name of the placeholder of that gradient."""
        places = map(_index_of, self.tangent_nodes)
        pairs = zip(places, self.tangent_nodes, strict=True)
        return {place: node.name for place, node in pairs if place is not None}

    @cached_property
    def gradients_apart(self) -> dict[int, int]:
        """The gradients that others may overwrite: index of the input -> value.

        Their memory is the backward's own, is not shared with another output, and each element has a place of its own.
        """
        places = [place for place, node in enumerate(self.backward_outputs) if isinstance(node, fx.Node)]
        values = [self.value_of[node] for node in self.backward_outputs if isinstance(node, fx.Node)]
        found = {place: value for place, value in zip(places, values, strict=True) if values.count(value) == 1}
        return {place: value for place, value in found.items() if self._is_apart(value, self.backward_outputs[place])}

    def _is_apart(self, value: int, node: Any) -> bool:
        tensor = node.meta.get("val")
        made_here = self.values[value].origin is Origin.BACKWARD and value not in self.kept_outputs
        return made_here and isinstance(tensor, torch.Tensor) and _has_places(tensor)

    @cached_property
    def untrained_outputs(self) -> tuple[fx.Node, ...]:
        """Outputs for which autograd passes no gradient to the backward, as one node for each storage."""
        trained = [_output_of(node) for node in self.tangent_nodes]
        shown: dict[int, fx.Node] = {}
        seen: set[int] = set()
        for node, desc in zip(self.forward_outputs, self.output_descs, strict=True):
            if isinstance(node, fx.Node):
                shown[self.value_of[node]] = node
                seen |= {self.value_of[node]} if desc in trained else set()
        return tuple(node for value, node in shown.items() if value in self.kept_outputs - seen)


def _output_of(tangent: fx.Node) -> Any:
    """Return AOTAutograd's description of the output that a tangent is the gradient of; None if it has none."""
    return getattr(tangent.meta.get("desc"), "output", None)


def _index_of(tangent: fx.Node) -> int | None:
    """Return the index of the output that a tangent is the gradient of; None if it is that of something else.

    For the base of several outputs, which are views of it, this is one of them.
    """
    return place_of_output(_output_of(tangent))


def place_of_output(desc: Any) -> int | None:
    """Return the index of an output of the captured function, from AOTAutograd's description of it; None: it is none.

    For the base of several outputs, which are views of it, this is one of them.
    """
    index: int | None = getattr(getattr(desc, "base_of", desc), "idx", None)
    return index


def lie_as_traced(gradients: Sequence[object], captured: Captured) -> bool:
    """Tell whether the gradients that autograd passes in lie in memory as they were traced.

    So does one that repeats a single number, as that of a sum does: it takes no memory, so that a copy takes its place.
    """
    pairs = zip(gradients, captured.tangent_layouts, strict=True)
    return all(is_one_number(gradient) or layout_of(gradient) == traced for gradient, traced in pairs)


def places_of(graph: Captured, values: Set[int]) -> frozenset[int]:
    """Return the indices of the outputs of the captured function that are tensors on these values."""
    pairs = zip(graph.forward_outputs, graph.output_descs, strict=True)
    places = (place_of_output(desc) for node, desc in pairs if graph.value_of.get(cast(Any, node)) in values)
    return frozenset(place for place in places if place is not None)


def note_dropped(graph: fx.Graph, places: Set[int]) -> None:
    """Record in a joint graph which outputs of the captured function its caller drops before the backward begins."""
    graph.output_node().meta[DROPPED] = frozenset(places)


def dropped_in(graph: fx.Graph) -> frozenset[int]:
    """Return what `note_dropped` has recorded in a joint graph."""
    found: frozenset[int] = graph.output_node().meta.get(DROPPED, frozenset())
    return found


def _values_at(
    places: Set[int], value_of: Mapping[fx.Node, int], outputs: Sequence[object], descs: Sequence[object]
) -> frozenset[int]:
    found = dict[int, bool]()
    for node, desc in zip(outputs, descs, strict=True) if places else ():
        if isinstance(node, fx.Node):
            value = value_of[node]
            found[value] = place_of_output(desc) in places and found.get(value, True)
    return frozenset(value for value, is_dropped in found.items() if is_dropped)


def _has_places(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has fixed sizes, and a place in memory for each element."""
    if not all(isinstance(size, int) for size in tensor.shape):
        return False
    sized = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    pairs = itertools.pairwise([(1, 1), *sized])
    return all(stride >= before * size for (before, size), (stride, _) in pairs)


def captured_of(graph: StepGraph) -> Captured:
    """Return the graph as a `Captured`, whose nodes allow to measure or run it.

    Raises `FxrematError` for a graph that was read from a file, and has no nodes.
    """
    if not isinstance(graph, Captured):
        raise FxrematError(
            "this plan was read from a file, and has no graphs yet: give it to fxremat.compile(model, plan=...)"
        )
    return graph


def inputs_of(joint: Captured) -> tuple[fx.Node, ...]:
    """Return the primals that the caller passes, in order; `backward_outputs` begins with their gradients.

    The other primals are tokens, which keep ops with side effects in order (such as the check in
    `linalg.cholesky`).
    """
    return _inputs(joint.primals)


def _inputs(primals: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(primal for primal in primals if not is_effect_token(primal))


def with_updates_inside(joint: Captured, trained: Set[int]) -> Captured:
    """Return the graph of a step that updates some parameters itself, and does not return their gradients.

    Args:
        trained: the values (numbers) of these parameters.
    """
    outputs = list(joint.backward_outputs)
    gradients: dict[int, fx.Node] = {}
    for place, (primal, gradient) in enumerate(zip(inputs_of(joint), joint.backward_outputs, strict=False)):
        if joint.value_of[primal] in trained and isinstance(gradient, fx.Node):
            gradients[joint.value_of[primal]] = gradient
            outputs[place] = None
    returned = frozenset(joint.value_of[node] for node in outputs if isinstance(node, fx.Node))
    updates = {value: joint.value_of[gradient] for value, gradient in gradients.items()}
    return replace(
        joint,
        backward_outputs=tuple(outputs),
        returned=returned,
        updates_of=updates,
        update_nodes=gradients,
    )


def without_updates_inside(joint: Captured) -> Captured:
    """Return the graph that `with_updates_inside` was given: one that returns the gradients of all parameters."""
    outputs = list(joint.backward_outputs)
    for place, primal in enumerate(inputs_of(joint)[: len(outputs)]):
        outputs[place] = joint.update_nodes.get(joint.value_of[primal], outputs[place])
    returned = joint.returned | {joint.value_of[node] for node in joint.update_nodes.values()}
    return replace(joint, backward_outputs=tuple(outputs), returned=returned, updates_of={}, update_nodes={})


def inputs_across(one: Captured, other: Captured) -> dict[int, int]:
    """Return value in one graph -> value in another that computes the same, for the inputs of both."""
    pairs = zip(one.primals, other.primals, strict=True)
    return {one.value_of[a]: other.value_of[b] for a, b in pairs if a in one.value_of and b in other.value_of}


def _is_scalar(node: fx.Node) -> bool:
    return any(tensor is not None and tensor.numel() == 1 for tensor in tensors_of(node))


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes, and all nodes that they are computed from."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def read_joint(
    module: fx.GraphModule, forward_outputs: int, differentiable: Iterable[fx.Node] | None = None
) -> Captured:
    """Read a joint graph as AOTAutograd passes it to a partition function. O(nodes).

    Args:
        module: the joint graph, functional, with fake tensors in `meta["val"]`.
        forward_outputs: the number of outputs that belong to the forward.
        differentiable: the inputs and constants for which gradients may be computed. None: the remaining outputs are
            one gradient, or None, for each input in order.

    Raises:
        CaptureError: a size depends on data.
    """
    return _Reader(module, forward_outputs, differentiable).read()


class _Reader:
    def __init__(
        self, module: fx.GraphModule, forward_outputs: int, differentiable: Iterable[fx.Node] | None
    ) -> None:
        self.module = module
        nodes = list(module.graph.nodes)
        output = nodes[-1]
        outputs: list[object] = list(cast(Sequence[object], output.args[0]))
        descs = output.meta.get("desc") or [None] * len(outputs)
        self.nodes = nodes[:-1]
        self.forward_outputs = tuple(outputs[:forward_outputs])
        self.backward_outputs = tuple(outputs[forward_outputs:])
        self.descs = tuple(descs[:forward_outputs])
        self.dropped = dropped_in(module.graph)
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.tangents = tuple(tangents_in(module.graph))
        tangents = set(self.tangents)
        self.primals = tuple(node for node in placeholders if node not in tangents)
        self.gradient_of = self._gradients() if differentiable is None else dict.fromkeys(differentiable)
        self.values: list[Value] = []
        self.shown: list[fx.Node] = []  # for each value, the fx node of its tensor
        self.value_of: dict[fx.Node, int] = {}
        self.late = self._late()

    def _gradients(self) -> dict[fx.Node, object]:
        """Return input -> its gradient, for inputs that have one."""
        pairs = zip(_inputs(self.primals), self.backward_outputs, strict=False)
        return {primal: gradient for primal, gradient in pairs if gradient is not None}

    def _late(self) -> set[fx.Node]:
        """Return the nodes of the backward.

        They are the first node that autograd made, and all later ones that no forward output needs: AOTAutograd
        traces the forward first. A node of the backward depends on an incoming gradient or is tagged; a node
        that a custom `torch.autograd.Function` computes there from saved tensors alone is neither, but comes
        after such nodes.
        """
        forward = _ancestors(node for node in self.forward_outputs if isinstance(node, fx.Node))
        late = set(self.tangents)
        begun = False
        for node in self.nodes:
            if node.op == "placeholder":
                continue
            begun = begun or (
                node not in forward
                and (
                    node.meta.get("partitioner_tag") == "is_backward"
                    or not late.isdisjoint(node.all_input_nodes)
                )
            )
            if begun and node not in forward and node.op != "get_attr":
                late.add(node)
        return late

    def read(self) -> Captured:
        compute: list[tuple[fx.Node, tuple[int, ...]]] = []
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._new_value(node, Origin.TANGENT if node in self.tangents else Origin.PRIMAL)
            elif node.target is operator.getitem and node.args[0] in self.value_of:
                self.value_of[node] = self.value_of[node.args[0]]  # the node selects an item from a tuple of views
            elif node.target is operator.getitem:
                pass  # a getitem's value is recorded together with the op that it selects from
            elif (base := self._base_of_view(node)) is not None:
                self.value_of[node] = base
            else:
                compute.append((node, self._outputs(node)))
        return self._joint(compute)

    def _new_value(self, node: fx.Node, origin: Origin, position: int | None = None) -> int:
        tensor = next((t for t in tensors_of(node) if t is not None), None)
        self.value_of[node] = index = self._add(node.name, node, tensor, origin, position)
        return index

    def _add(
        self, name: str, shown: fx.Node, tensor: torch.Tensor | None, origin: Origin, position: int | None = None
    ) -> int:
        value = Value(
            index=len(self.values),
            name=name,
            bytes=0 if tensor is None else storage_bytes(tensor),
            origin=origin,
            producer=None,
            position=position,
            type=_type(shown.meta.get("val")),
            whole=_is_whole(shown.meta.get("val")),
        )
        self.values.append(value)
        self.shown.append(shown)
        return value.index

    def _base_of_view(self, node: fx.Node) -> int | None:
        """Return the value that all outputs of `node` are views of; None if the node computes something new."""
        outputs = [tensor for tensor in tensors_of(node) if tensor is not None]
        parents = [parent for parent in node.all_input_nodes if parent in self.value_of]
        if not outputs or len(parents) != 1:
            return None
        storages = {storage_of(tensor) for tensor in tensors_of(parents[0]) if tensor is not None}
        aliases = all(storage_of(tensor) in storages for tensor in outputs)
        return self.value_of[parents[0]] if aliases else None

    def _outputs(self, node: fx.Node) -> tuple[int, ...]:
        """Create and return the values that an op's node writes; `_ops` fills in their producers."""
        origin = Origin.BACKWARD if node in self.late else Origin.FORWARD
        if isinstance(node.meta.get("val"), (torch.Tensor, *NUMBERS)):
            return (self._new_value(node, origin),)
        if isinstance(node.meta.get("val"), Mapping):
            raise CaptureError(
                f"{node.name} ({node.target}) returns a dict; of such ops only launches of Triton kernels can be "
                "planned, and not for another compiler"
            )
        written: list[int] = []
        seen: dict[int, int] = {}
        for item in [user for user in node.users if user.target is operator.getitem]:
            position = item.args[1]
            if not isinstance(position, int) or not isinstance(item.meta.get("val"), torch.Tensor):
                continue
            if position in seen:
                self.value_of[item] = seen[position]
                continue
            seen[position] = self._new_value(item, origin, position)
            written.append(seen[position])
        unread = [t for k, t in enumerate(tensors_of(node)) if t is not None and k not in seen]
        for tensor in unread:  # outputs that no node reads occupy memory until the op has ended
            written.append(self._add(f"{node.name}_unread", node, tensor, origin))
        return tuple(written)

    def _joint(self, compute: Sequence[tuple[fx.Node, tuple[int, ...]]]) -> Captured:
        ordered = [item for item in compute if item[0] not in self.late]
        forward_count = len(ordered)
        ordered += [item for item in compute if item[0] in self.late]
        ops = self._ops(ordered)
        nodes = tuple(node for node, _ in ordered)
        returned = {node for node in self.backward_outputs if isinstance(node, fx.Node)}
        outputs = [node for node in self.forward_outputs if isinstance(node, fx.Node)]
        kept, updates = self._split_outputs()
        return Captured(
            module=self.module,
            ops=ops,
            values=tuple(self.values),
            nodes=nodes,
            shown=tuple(self.shown),
            value_of=self.value_of,
            primals=self.primals,
            tangent_nodes=self.tangents,
            tangents=tuple(self.value_of[node] for node in self.tangents),
            holds_gradients=holds_gradients(),
            output_values=frozenset(self.value_of[node] for node in outputs if node in self.value_of),
            sources=sources_of(nodes),
            parameters=self._parameters(),
            model=model_of(self.primals),
            device=_device_of(self.primals),
            forward_outputs=self.forward_outputs,
            backward_outputs=self.backward_outputs,
            output_descs=self.descs,
            forward_count=forward_count,
            root_tangents=frozenset(self.value_of[node] for node in self.tangents if _is_scalar(node)),
            kept_outputs=frozenset(kept),
            dropped_outputs=_values_at(self.dropped, self.value_of, self.forward_outputs, self.descs) & kept,
            mutated_primals=frozenset(self._mutated()),
            updates=frozenset(updates),
            returned=frozenset(self.value_of[node] for node in returned),
        )

    def _ops(self, ordered: Sequence[tuple[fx.Node, tuple[int, ...]]]) -> tuple[Op, ...]:
        """Return the ops in execution order, and set the producers of the values that they write."""
        # values that depend on an input for which gradients are computed
        moving = {self.value_of[given] for given in self.gradient_of}
        numbers = sorted({number for node, _ in ordered if (number := node.meta.get("seq_nr")) is not None})
        # renumbered from 0, so that equal captures have equal numbers
        sequence = {number: place for place, number in enumerate(numbers)}
        ops: list[Op] = []
        for index, (node, writes) in enumerate(ordered):
            reads = self._values_of(node.all_input_nodes)
            anchored = node not in self.late and moving.isdisjoint(reads)
            if not anchored:
                moving.update(writes)
            again_writes = tuple(write for write in writes if made_again(node, self.shown[write]))
            again_reads = self._values_of(again_inputs(node))
            taken = overwritten(node)
            op = Op(
                index=index,
                name=node.name,
                target=str(called(node)[0]),
                key=op_key(node),
                kind=_kind(node),
                backward=node in self.late,
                reads=reads,
                writes=writes,
                again_reads=again_reads,
                again_writes=again_writes,
                overwrites=None if taken is None else self.value_of[taken],
                random=is_random(node),
                anchored=anchored,
                sequence=sequence.get(node.meta.get("seq_nr")),
            )
            ops.append(op)
            for write in writes:
                self.values[write] = replace(self.values[write], producer=index)
        return tuple(ops)

    def _parameters(self) -> dict[int, str]:
        """Return value -> name of the parameter, for parameters and for their gradients if these are returned."""
        named = {self.value_of[node]: name for node in self.primals if (name := parameter_of(node))}
        return named | {
            self.value_of[gradient]: named[self.value_of[primal]]
            for primal, gradient in self.gradient_of.items()
            if isinstance(gradient, fx.Node) and self.value_of[primal] in named
        }

    def _values_of(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.value_of[node] for node in nodes if node in self.value_of))

    def _split_outputs(self) -> tuple[set[int], set[int]]:
        """Return the values that the caller gets as forward outputs, and the new values of overwritten inputs."""
        kept: set[int] = set()
        updates: set[int] = set()
        for node, desc in zip(self.forward_outputs, self.descs, strict=True):
            if isinstance(node, fx.Node):
                overwrites = getattr(desc, "mutated_input", None) is not None
                (updates if overwrites else kept).add(self.value_of[node])
        return kept, updates - kept

    def _mutated(self) -> Iterable[int]:
        places = {str(node.meta.get("desc")): self.value_of[node] for node in self.primals}
        for desc in self.descs:
            source = getattr(desc, "mutated_input", None)
            if source is not None and str(source) in places:
                yield places[str(source)]


def _kind(node: fx.Node) -> Kind:
    """Return the kind of a node's op; functions that are not PyTorch's kernels have it as an attribute."""
    kind = getattr(node.target, "kind", Kind.KERNEL)
    if isinstance(kind, Kind) and kind is not Kind.KERNEL:
        return kind
    return Kind.COLLECTIVE if is_collective(node) else Kind.KERNEL


def _type(shown: object) -> str:
    """Return dtype and shape of a tensor, such as "float32[8, 64]"; "" for anything else."""
    if not isinstance(shown, torch.Tensor):
        return ""
    return f"{str(shown.dtype).removeprefix('torch.')}[{', '.join(map(str, shown.shape))}]"


def _is_whole(shown: object) -> bool:
    """Tell whether a tensor fills its storage."""
    return isinstance(shown, torch.Tensor) and shown.layout is torch.strided and shown.nbytes == storage_bytes(shown)


def _device_of(primals: Iterable[fx.Node]) -> str:
    """Return the first device of parameters and inputs that is not a CPU; "cpu" if there is none."""
    tensors = [tensor for node in primals if isinstance(tensor := node.meta.get("val"), torch.Tensor)]
    return next((str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"), "cpu")
