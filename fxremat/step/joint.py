"""The joint graph seen as what the planner needs: ops that compute, and values that occupy memory.

    torch.fx joint graph    placeholders, compute nodes, views of views, getitems, detaches
    Joint                   ops    in execution order, forward first, then backward
                            values one a storage; views are not values, they are made again where needed

A value is born by one op (or is a primal, a tangent or a constant) and is read through any number of views. A number
that an op reads from a tensor (`.item()`), and what is computed from it, are values of no bytes.
Everything downstream (cuts, options, schedules, liveness) speaks of op and value numbers only; the fx nodes come
back in `passes.lower`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import cast

import torch
from torch import fx

from fxremat.step.batch_norm import again_inputs, made_again
from fxremat.step.names import NOWHERE, Source, model_of, ops_inside, parameter_of, sources_of, span_of
from fxremat.torch_private import holds_gradients, is_effect_token, storage_of

aten = torch.ops.aten

SYMBOLS: tuple[type, ...] = (torch.SymInt, torch.SymFloat, torch.SymBool)
NUMBERS: tuple[type, ...] = (*SYMBOLS, int, float)


class Origin(Enum):
    """The part of the step that makes a value; only FORWARD values can be recomputed."""

    PRIMAL = "primal"  # a parameter, buffer, input or constant: outside the budget, always there
    TANGENT = "tangent"  # the gradient that autograd hands to the backward graph
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class JointValue:
    """One storage of the joint graph."""

    index: int
    name: str
    bytes: int  # of the storage; a primal's is outside the budget
    origin: Origin
    node: fx.Node  # the placeholder, the op's node, or the getitem that takes this output out of its op
    producer: int | None  # op number; None for placeholders and constants


@dataclass(frozen=True, slots=True)
class Op:
    """One node that computes, with the values it reads (through views) and writes."""

    index: int
    node: fx.Node
    backward: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    again_reads: tuple[int, ...]  # the same for a second execution, which must not touch running statistics
    again_writes: tuple[int, ...]
    random: bool  # draws from the generator: a second execution must replay the first one's state
    anchored: bool  # a forward op that depends on no differentiable input: masks, positions, frozen layers

    @property
    def name(self) -> str:
        """The name of the fx node."""
        return self.node.name


@dataclass(frozen=True, eq=False)
class Joint:
    """Forward and backward of one training step; op and value numbers index `ops` and `values`."""

    module: fx.GraphModule
    ops: tuple[Op, ...]
    values: tuple[JointValue, ...]
    value_of: dict[fx.Node, int]  # every tensor node (views included) to the storage it shows
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    forward_outputs: tuple[object, ...]  # fx nodes, or constants such as None
    backward_outputs: tuple[object, ...]
    output_descs: tuple[object, ...]
    forward_count: int  # ops[:forward_count] is the forward
    root_tangents: frozenset[int]  # gradients of a loss that the model returns
    kept_outputs: frozenset[int]  # values that the caller still holds after the forward
    mutated_primals: frozenset[int]  # primals that the step overwrites once the forward has run
    updates: frozenset[int]  # the values that overwrite them (running statistics, in-place inputs)
    returned: frozenset[int]  # values that the backward returns (gradients of parameters and inputs)
    updates_of: Mapping[int, fx.Node] = field(
        default_factory=dict
    )  # parameter that the step updates -> its gradient

    @property
    def forward_ops(self) -> tuple[Op, ...]:
        """The ops of the forward, in execution order."""
        return self.ops[: self.forward_count]

    @property
    def backward_ops(self) -> tuple[Op, ...]:
        """The ops of the backward, in execution order."""
        return self.ops[self.forward_count :]

    @cached_property
    def given(self) -> frozenset[int]:
        """The values that no op makes: primals, constants and tangents."""
        return frozenset(v.index for v in self.values if v.origin in (Origin.PRIMAL, Origin.TANGENT))

    @cached_property
    def gradients_read(self) -> tuple[tuple[int, ...], ...]:
        """The values made in the backward that each op reads."""
        backward = frozenset(v.index for v in self.values if v.origin is Origin.BACKWARD)
        return tuple(tuple(value for value in op.reads if value in backward) for op in self.ops)

    @cached_property
    def tangent_values(self) -> tuple[int, ...]:
        """The gradients that autograd hands in."""
        return tuple(v.index for v in self.values if v.origin is Origin.TANGENT)

    @cached_property
    def held_tangents(self) -> frozenset[int]:
        """Gradients that autograd hands in and holds until the backward has returned.

        That of a loss on every release of PyTorch; those of outputs beside it on some. What those hold of a loss
        outside the model is part of `Sizes.root`.
        """
        return frozenset(self.tangent_values) if self.root_tangents and holds_gradients() else self.root_tangents

    @cached_property
    def output_values(self) -> frozenset[int]:
        """What the forward returns, values that overwrite an input among them."""
        nodes = [node for node in self.forward_outputs if isinstance(node, fx.Node)]
        return frozenset(self.value_of[node] for node in nodes if node in self.value_of)

    @cached_property
    def outputs_needed(self) -> tuple[frozenset[int | None], ...]:
        """For each output of the backward, the forward's outputs whose gradients it is computed from.

        None stands for a gradient of something else, such as the base of several views.
        """
        needed: dict[fx.Node, frozenset[int | None]] = {}
        for node in self.module.graph.nodes:
            if node in self.tangents:
                output = getattr(node.meta.get("desc"), "output", None)
                needed[node] = frozenset([getattr(output, "idx", None)])
            else:
                needed[node] = frozenset().union(*(needed[parent] for parent in node.all_input_nodes))
        return tuple(
            needed[node] if isinstance(node, fx.Node) else frozenset() for node in self.backward_outputs
        )

    @cached_property
    def untrained_outputs(self) -> tuple[fx.Node, ...]:
        """Outputs that the caller is given and autograd hands no gradient in for: one node a storage."""
        trained = [getattr(node.meta.get("desc"), "output", None) for node in self.tangents]
        shown: dict[int, fx.Node] = {}
        seen: set[int] = set()
        for node, desc in zip(self.forward_outputs, self.output_descs, strict=True):
            if isinstance(node, fx.Node):
                shown[self.value_of[node]] = node
                seen |= {self.value_of[node]} if desc in trained else set()
        return tuple(node for value, node in shown.items() if value in self.kept_outputs - seen)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The module that each op belongs to, and the line where it was written."""
        return sources_of([op.node for op in self.ops])

    @cached_property
    def model(self) -> str:
        """The name of the model's class."""
        return model_of(self.primals)

    @cached_property
    def parameters(self) -> Mapping[int, str]:
        """The names of parameters in the model, by their values and by those of the gradients that are returned."""
        named = {self.value_of[node]: name for node in self.primals if (name := parameter_of(node))}
        pairs = [*zip(inputs_of(self), self.backward_outputs, strict=False)]
        pairs += [(self.values[value].node, gradient) for value, gradient in self.updates_of.items()]
        return named | {
            self.value_of[gradient]: named[self.value_of[primal]]
            for primal, gradient in pairs
            if isinstance(gradient, fx.Node) and self.value_of[primal] in named
        }

    @cached_property
    def value_sources(self) -> tuple[Source, ...]:
        """Where each value was made; of what the step is given, and of gradients of parameters, where that is read.

        The module of a parameter, and of its gradient, is the one that it belongs to.
        """
        made: dict[int, Source] = {}
        for op in self.ops:
            made |= dict.fromkeys(op.writes, self.sources[op.index])
            made |= {value: self.sources[op.index] for value in op.reads if value not in made}
        made |= {
            value: replace(made.get(value, NOWHERE), module=name.rpartition(".")[0])
            for value, name in self.parameters.items()
        }
        return tuple(made.get(value.index, NOWHERE) for value in self.values)

    def span(self, forward: Sequence[int]) -> str:
        """The modules that a block of forward ops goes through, as one name; the last op's where there are none."""
        modules = [self.sources[index].module for index in forward]
        return span_of(modules, self._inside) or self.ops[forward[-1]].name

    @cached_property
    def _inside(self) -> Counter[str]:
        return ops_inside(self.sources[index].module for index in range(self.forward_count))

    @cached_property
    def pinned(self) -> frozenset[int]:
        """What the caller holds when the step is over."""
        return self.kept_outputs | self.returned


def inputs_of(joint: Joint) -> tuple[fx.Node, ...]:
    """The primals that the caller hands in, in order: `backward_outputs` begins with a gradient of each.

    The others are tokens, which put ops with effects (such as the check in `linalg.cholesky`) in order.
    """
    return _inputs(joint.primals)


def _inputs(primals: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(primal for primal in primals if not is_effect_token(primal))


def with_updates_inside(joint: Joint, trained: Set[int]) -> Joint:
    """The joint graph of a step that updates these parameters (primal values) itself, and keeps their gradients."""
    outputs = list(joint.backward_outputs)
    gradients: dict[int, fx.Node] = {}
    for place, (primal, gradient) in enumerate(zip(inputs_of(joint), joint.backward_outputs, strict=False)):
        if joint.value_of[primal] in trained and isinstance(gradient, fx.Node):
            gradients[joint.value_of[primal]] = gradient
            outputs[place] = None
    returned = frozenset(joint.value_of[node] for node in outputs if isinstance(node, fx.Node))
    return replace(joint, backward_outputs=tuple(outputs), returned=returned, updates_of=gradients)


def tensors_of(node: fx.Node) -> list[torch.Tensor | None]:
    """The outputs of a node as a list; None where an output is no tensor."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [item if isinstance(item, torch.Tensor) else None for item in value]
    return []


def is_random(node: fx.Node) -> bool:
    """True where the op draws random numbers (a dropout in eval mode does not)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target is aten.native_dropout.default:
        return node.args[2] is not False
    return node.kwargs.get("dropout_p", _argument(node, "dropout_p")) != 0.0


def _argument(node: fx.Node, name: str) -> object:
    """The value of the argument `name` of an op node, by position; None where there is none."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[position] if position < len(node.args) else argument.default_value
    return None


def is_number(value: object) -> bool:
    """True for what a node shows that is a number of Python's, known or not before the step runs."""
    return isinstance(value, NUMBERS)


def _is_scalar(node: fx.Node) -> bool:
    return any(tensor is not None and tensor.numel() == 1 for tensor in tensors_of(node))


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage behind a (fake) tensor; of indices and values, where it is sparse."""
    if tensor.layout is torch.sparse_coo:
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return int(tensor.untyped_storage().nbytes())


def tangents_in(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders of the gradients that autograd hands in."""
    return [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")]


def read_joint(module: fx.GraphModule, forward_outputs: int) -> Joint:
    """Read a joint graph as AOTAutograd hands it to a partition function. O(nodes).

    Args:
        module: the joint graph, functional and undecomposed, with fake tensors in `meta["val"]`.
        forward_outputs: how many of its outputs belong to the forward.

    Raises:
        CaptureError: a size depends on data.
    """
    return _Reader(module, forward_outputs).read()


class _Reader:
    def __init__(self, module: fx.GraphModule, forward_outputs: int) -> None:
        self.module = module
        nodes = list(module.graph.nodes)
        output = nodes[-1]
        outputs: list[object] = list(cast(Sequence[object], output.args[0]))
        descs = output.meta.get("desc") or [None] * len(outputs)
        self.nodes = nodes[:-1]
        self.forward_outputs = tuple(outputs[:forward_outputs])
        self.backward_outputs = tuple(outputs[forward_outputs:])
        self.descs = tuple(descs[:forward_outputs])
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.tangents = tuple(tangents_in(module.graph))
        tangents = set(self.tangents)
        self.primals = tuple(node for node in placeholders if node not in tangents)
        self.values: list[JointValue] = []
        self.value_of: dict[fx.Node, int] = {}
        self.late = self._late()

    def _late(self) -> set[fx.Node]:
        """The nodes of the backward: the first that autograd made there, and all that follow it.

        AOTAutograd traces the forward first. A node of the backward depends on a tangent or is tagged; what a custom
        `torch.autograd.Function` computes there from saved tensors alone is neither, but stands behind such a node.
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

    def read(self) -> Joint:
        compute: list[tuple[fx.Node, tuple[int, ...]]] = []
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._new_value(node, node, Origin.TANGENT if node in self.tangents else Origin.PRIMAL, None)
            elif node.target is operator.getitem and node.args[0] in self.value_of:
                self.value_of[node] = self.value_of[node.args[0]]  # an item of a tuple of views
            elif node.target is operator.getitem:
                pass  # named by its op below
            elif (base := self._base_of_view(node)) is not None:
                self.value_of[node] = base
            else:
                compute.append((node, self._outputs(node)))
        return self._joint(compute)

    def _new_value(self, node: fx.Node, shown: fx.Node, origin: Origin, producer: int | None) -> int:
        tensor = next((t for t in tensors_of(shown) if t is not None), None)
        index = len(self.values)
        size = 0 if tensor is None else storage_bytes(tensor)
        self.values.append(JointValue(index, node.name, size, origin, shown, producer))
        self.value_of[shown] = index
        return index

    def _base_of_view(self, node: fx.Node) -> int | None:
        """The value that all outputs of `node` alias, or None where the node computes something new."""
        outputs = [tensor for tensor in tensors_of(node) if tensor is not None]
        parents = [parent for parent in node.all_input_nodes if parent in self.value_of]
        if not outputs or len(parents) != 1:
            return None
        storages = {storage_of(tensor) for tensor in tensors_of(parents[0]) if tensor is not None}
        aliases = all(storage_of(tensor) in storages for tensor in outputs)
        return self.value_of[parents[0]] if aliases else None

    def _outputs(self, node: fx.Node) -> tuple[int, ...]:
        """Make the values that a compute node gives birth to; producer numbers are filled in by `_joint`."""
        origin = Origin.BACKWARD if node in self.late else Origin.FORWARD
        if isinstance(node.meta.get("val"), (torch.Tensor, *NUMBERS)):
            return (self._new_value(node, node, origin, None),)
        written: list[int] = []
        seen: dict[int, int] = {}
        for item in [user for user in node.users if user.target is operator.getitem]:
            position = item.args[1]
            if not isinstance(position, int) or not isinstance(item.meta.get("val"), torch.Tensor):
                continue
            if position in seen:
                self.value_of[item] = seen[position]
                continue
            seen[position] = self._new_value(item, item, origin, None)
            written.append(seen[position])
        unread = [t for k, t in enumerate(tensors_of(node)) if t is not None and k not in seen]
        for tensor in unread:  # occupies memory while the op runs and until its outputs are taken apart
            index = len(self.values)
            self.values.append(JointValue(index, f"{node.name}_unread", storage_bytes(tensor), origin, node, None))
            written.append(index)
        return tuple(written)

    def _joint(self, compute: Sequence[tuple[fx.Node, tuple[int, ...]]]) -> Joint:
        ordered = [item for item in compute if item[0] not in self.late]
        forward_count = len(ordered)
        ordered += [item for item in compute if item[0] in self.late]
        ops = self._ops(ordered)
        returned = {node for node in self.backward_outputs if isinstance(node, fx.Node)}
        kept, updates = self._split_outputs()
        return Joint(
            module=self.module,
            ops=ops,
            values=tuple(self.values),
            value_of=self.value_of,
            primals=self.primals,
            tangents=self.tangents,
            forward_outputs=self.forward_outputs,
            backward_outputs=self.backward_outputs,
            output_descs=self.descs,
            forward_count=forward_count,
            root_tangents=frozenset(self.value_of[node] for node in self.tangents if _is_scalar(node)),
            kept_outputs=frozenset(kept),
            mutated_primals=frozenset(self._mutated()),
            updates=frozenset(updates),
            returned=frozenset(self.value_of[node] for node in returned),
        )

    def _ops(self, ordered: Sequence[tuple[fx.Node, tuple[int, ...]]]) -> tuple[Op, ...]:
        """The ops in execution order; the values they write learn their producers."""
        moving = {  # values that depend on a differentiable input
            self.value_of[primal]
            for primal, gradient in zip(_inputs(self.primals), self.backward_outputs, strict=False)
            if gradient is not None
        }
        ops: list[Op] = []
        for index, (node, writes) in enumerate(ordered):
            reads = self._values_of(node.all_input_nodes)
            anchored = node not in self.late and moving.isdisjoint(reads)
            if not anchored:
                moving.update(writes)
            again_writes = tuple(write for write in writes if made_again(node, self.values[write].node))
            again_reads = self._values_of(again_inputs(node))
            late, random = node in self.late, is_random(node)
            ops.append(Op(index, node, late, reads, writes, again_reads, again_writes, random, anchored))
            for write in writes:
                self.values[write] = replace(self.values[write], producer=index)
        return tuple(ops)

    def _values_of(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.value_of[node] for node in nodes if node in self.value_of))

    def _split_outputs(self) -> tuple[set[int], set[int]]:
        """What the forward returns: values the caller holds on to, and values that overwrite an input."""
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
