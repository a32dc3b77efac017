"""One training step as numbers: ops that compute, and values that occupy memory. Needs no torch.

    torch.fx joint graph    placeholders, compute nodes, views of views, getitems, detaches
    StepGraph               ops    in execution order, forward first, then backward
                            values one a storage; views are not values, they are made again where needed

A value is born by one op (or is a primal, a tangent or a constant) and is read through any number of views. A number
that an op reads from a tensor (`.item()`), and what is computed from it, are values of no bytes.
Cuts, options, schedules, searches and liveness speak of op and value numbers only. `graphs.captured` reads a
StepGraph from a graph of torch.fx, and knows the node of each op and value.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from fxremat.errors import FxrematError
from fxremat.step.as_json import Unreadable, read, written
from fxremat.step.source import NOWHERE, Frame, Source, ops_inside, span_of

if TYPE_CHECKING:
    import networkx as nx


class Origin(Enum):
    """The part of the step that makes a value; only FORWARD values can be recomputed."""

    PRIMAL = "primal"  # a parameter, buffer, input or constant: outside the budget, always in memory
    TANGENT = "tangent"  # the gradient that autograd hands to the backward graph
    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(Enum):
    """The engine that runs an op."""

    KERNEL = "kernel"  # PyTorch's own
    COLLECTIVE = "collective"  # communicates: all ranks run it, in the same order
    GATHER = "gather"  # a collective that puts the parts of all ranks together
    REGION = "region"  # several ops, compiled together
    SLICED = "sliced"  # several ops, one slice of their tensors after the other


@dataclass(frozen=True, slots=True)
class Value:
    """One storage of the step."""

    index: int
    name: str
    bytes: int  # bytes of the storage; those of primals are outside the budget
    origin: Origin
    producer: int | None  # op number; None for placeholders and constants
    position: int | None  # among the outputs of its op; None: the op has one output, or nothing reads this one
    type: str  # data type and shape of the first tensor on it, as "float32[8, 512]"; "" if it holds no tensor
    whole: bool  # one tensor covers all of the storage


@dataclass(frozen=True, slots=True)
class Op:
    """One node that computes, with the values it reads (through views) and writes."""

    index: int
    name: str
    target: str  # what is called, such as "aten.addmm.default"
    key: str  # equal for ops of equal cost: see `graphs.op_key`
    kind: Kind
    backward: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    again_reads: tuple[int, ...]  # what a recomputation reads, which must not touch running statistics
    again_writes: tuple[int, ...]  # what a recomputation writes
    overwrites: int | None  # value read whose storage the result may take over
    random: bool  # draws from the generator: a second execution must replay the first one's state
    anchored: bool  # a forward op that depends on no differentiable input: masks, positions, frozen layers
    sequence: int | None  # autograd's number, which an op shares with its backward

    @property
    def communicates(self) -> bool:
        """True if all ranks of a group have to run the op, in the same order."""
        return self.kind in (Kind.COLLECTIVE, Kind.GATHER)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepGraph:
    """Forward and backward of one training step; op and value numbers index `ops` and `values`."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    forward_count: int  # ops[:forward_count] is the forward
    tangents: tuple[int, ...]  # the gradients that autograd hands in, in the order of the backward's inputs
    root_tangents: frozenset[int]  # gradients of a loss that the model returns
    holds_gradients: bool  # autograd holds gradients that it hands in until the backward has returned
    output_values: frozenset[int]  # what the forward returns, values that overwrite an input among them
    kept_outputs: frozenset[int]  # values that the caller still holds after the forward
    mutated_primals: frozenset[int]  # primals that the step overwrites once the forward has run
    updates: frozenset[int]  # the values that overwrite them (running statistics, in-place inputs)
    returned: frozenset[int]  # values that the backward returns (gradients of parameters and inputs)
    updates_of: Mapping[int, int] = field(default_factory=dict)  # parameter that the step updates -> its gradient
    sources: tuple[Source, ...]  # the module that each op belongs to, and the line where it was written
    parameters: Mapping[int, str]  # names in the model, by values of parameters and of gradients that are returned
    model: str  # the name of the model's class
    device: str  # where the step runs, as "cuda:0": the device of the largest parameter or input

    @property
    def forward_ops(self) -> tuple[Op, ...]:
        """The ops of the forward, in execution order."""
        return self.ops[: self.forward_count]

    @property
    def backward_ops(self) -> tuple[Op, ...]:
        """The ops of the backward, in execution order."""
        return self.ops[self.forward_count :]

    def to_json(self) -> str:
        """Return the graph as JSON text, which `from_json` reads. O(ops + values).

        The nodes of torch.fx that a captured graph was read from are left out.
        """
        fields_of = {each.name: getattr(self, each.name) for each in fields(StepGraph)}
        return json.dumps(written(StepGraph(**fields_of)), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StepGraph:
        """Return the graph that `to_json` wrote. Raises `FxrematError` if the text is no such graph."""
        try:
            graph = read(json.loads(text), (StepGraph, Op, Value, Origin, Kind, Source, Frame))
        except (ValueError, Unreadable) as error:
            raise FxrematError(f"the text is no step graph as StepGraph.to_json writes it: {error}") from None
        if not isinstance(graph, StepGraph):
            raise FxrematError("the text is no step graph as StepGraph.to_json writes it")
        return graph

    def to_networkx(self) -> nx.DiGraph[tuple[str, int]]:
        """Return the step as a graph of networkx, to inspect or to run algorithms on. O(ops + reads + writes).

        Nodes are ("op", 3) and ("value", 7), with a name, and the other fields of `Op` and `Value` as attributes; edges
        go from an op to the values that it writes, and from a value to the ops that read it.
        """
        import networkx as nx

        graph: nx.DiGraph[tuple[str, int]] = nx.DiGraph(model=self.model)
        for value in self.values:
            graph.add_node(("value", value.index), **{each.name: getattr(value, each.name) for each in fields(value)})
        for op in self.ops:
            graph.add_node(("op", op.index), **{each.name: getattr(op, each.name) for each in fields(op)})
            graph.add_edges_from((("value", value), ("op", op.index)) for value in op.reads)
            graph.add_edges_from((("op", op.index), ("value", value)) for value in op.writes)
        return graph

    @cached_property
    def digest(self) -> str:
        """A hash that is equal for graphs of the same ops on values of the same sizes, whatever their names. O(ops)."""
        left_out = ("name", "sequence")
        rows = [[getattr(one, each.name) for each in fields(one) if each.name not in left_out] for one in self.ops]
        rows += [[getattr(one, each.name) for each in fields(one) if each.name not in left_out] for one in self.values]
        named = ("sources", "parameters", "model", "ops", "values")
        sets = [getattr(self, each.name) for each in fields(StepGraph) if each.name not in named]
        text = repr((rows, [sorted(one) if isinstance(one, frozenset | Mapping) else one for one in sets]))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def given(self) -> frozenset[int]:
        """The values that no op makes: primals, constants and tangents."""
        return frozenset(v.index for v in self.values if v.origin in (Origin.PRIMAL, Origin.TANGENT))

    @cached_property
    def gradients_read(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the values made in the backward that it reads."""
        backward = frozenset(v.index for v in self.values if v.origin is Origin.BACKWARD)
        return tuple(tuple(value for value in op.reads if value in backward) for op in self.ops)

    @cached_property
    def tangent_values(self) -> tuple[int, ...]:
        """The gradients that autograd hands in, each once."""
        return tuple(v.index for v in self.values if v.origin is Origin.TANGENT)

    @cached_property
    def held_tangents(self) -> frozenset[int]:
        """Gradients that autograd hands in and holds until the backward has returned.

        Every release of PyTorch holds that of a loss; some hold those of other outputs too. What these hold of a loss
        outside the model is part of `Sizes.root`.
        """
        return frozenset(self.tangent_values) if self.root_tangents and self.holds_gradients else self.root_tangents

    @cached_property
    def value_sources(self) -> tuple[Source, ...]:
        """The source of each value: that of the op that makes it; of an input, that of the first op that reads it.

        The module of a parameter, and of its gradient, is the one that owns the parameter.
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
        """Return one name for the modules of a block of forward ops; if they have none, the name of the last op."""
        modules = [self.sources[index].module for index in forward]
        return span_of(modules, self._inside) or (self.ops[forward[-1]].name if forward else "views")

    @cached_property
    def _inside(self) -> Counter[str]:
        return ops_inside(self.sources[index].module for index in range(self.forward_count))

    @cached_property
    def pinned(self) -> frozenset[int]:
        """The values that the caller holds after the step."""
        return self.kept_outputs | self.returned
