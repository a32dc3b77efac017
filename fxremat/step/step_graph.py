"""One training step as numbers, without torch: ops that compute, and values that occupy memory.

    torch.fx joint graph    placeholders, compute nodes, views, getitems, detaches
    StepGraph               ops    in execution order, forward first, then backward
                            values one for each storage; views are not values, they are made again where needed

A value is written by one op (or is a parameter, an input, a constant or an incoming gradient) and read through
any number of views. Numbers that are read from a tensor (`.item()`), and what is computed from them, are values
of no bytes. Everything that plans refers to ops and values by number. `graphs.captured` reads a StepGraph from
a torch.fx graph, and knows the node of each op and value.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from fxremat.errors import FxrematError
from fxremat.step.as_json import Unreadable, read, written
from fxremat.step.source import NOWHERE, Frame, Source, ops_inside, span_of

if TYPE_CHECKING:
    import networkx as nx


class Origin(Enum):
    """The origin of a value; only FORWARD values can be recomputed."""

    PRIMAL = "primal"  # a parameter, buffer, input or constant: outside the budget, always in memory
    TANGENT = "tangent"  # a gradient that autograd passes into the backward graph
    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(Enum):
    """The way in which an op is executed."""

    KERNEL = "kernel"  # one of PyTorch's own kernels
    COLLECTIVE = "collective"  # communication that all ranks run in the same order
    GATHER = "gather"  # a collective that assembles the parts that all ranks have
    REGION = "region"  # several ops, compiled together by Inductor
    SLICED = "sliced"  # several ops that run on slices of their tensors, one slice after the other


@dataclass(frozen=True, slots=True)
class Value:
    """One storage that the step reads or writes."""

    index: int
    name: str
    bytes: int  # bytes of the storage
    origin: Origin
    producer: int | None  # index of the op that writes the value; None for placeholders and constants
    # index among the outputs of the op; None if the op has one output, or this output is never read
    position: int | None
    type: str  # dtype and shape of the first tensor on the storage, such as "float32[8, 512]"; "" if it holds no tensor
    whole: bool  # True if one tensor covers the whole storage


@dataclass(frozen=True, slots=True)
class Op:
    """One computing node of the graph, with the values that it reads (directly or through views) and writes."""

    index: int
    name: str
    target: str  # name of the function that the op calls, such as "aten.addmm.default"
    key: str  # equal for ops that cost the same; see `graphs.op_key`
    kind: Kind
    backward: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    # values that a recomputation reads; running statistics are left out, as it must not update them
    again_reads: tuple[int, ...]
    again_writes: tuple[int, ...]  # values that a recomputation writes
    overwrites: int | None  # the value among `reads` whose storage the result may reuse
    # True if the op draws random numbers, so that a recomputation must restore the generator's state
    random: bool
    # True for a forward op that depends on nothing that needs a gradient: masks, positions, frozen layers
    anchored: bool
    sequence: int | None  # autograd's sequence number, which a forward op shares with its backward ops

    @property
    def communicates(self) -> bool:
        """True if all ranks of a group have to run the op, in the same order."""
        return self.kind in (Kind.COLLECTIVE, Kind.GATHER)


class OpBits(NamedTuple):
    """The values that each op reads and writes, as sets of bits: bit v stands for value v.

    Values that no op computes are left out of what is read.
    """

    computed: int  # all values that ops compute
    reads: tuple[int, ...]
    again_reads: tuple[int, ...]  # what a recomputation reads
    writes: tuple[int, ...]
    again_writes: tuple[int, ...]
    gradients: int  # the values that the backward computes


def bits_of(numbers: Iterable[int]) -> int:
    """Return a set of numbers as the bits of an integer.

    >>> bin(bits_of([0, 3]))
    '0b1001'
    """
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def numbers_of(bits: int) -> list[int]:
    """Return the set of numbers that the bits of an integer are, in ascending order.

    >>> numbers_of(0b1001)
    [0, 3]
    """
    numbers = []
    while bits:
        numbers.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class StepGraph:
    """Forward and backward of one training step; op and value numbers index `ops` and `values`."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    forward_count: int  # ops[:forward_count] are the forward ops
    tangents: tuple[int, ...]  # values of the gradients that autograd passes in, in the order of the backward's inputs
    root_tangents: frozenset[int]  # gradients of a loss that the model itself returns
    # True if autograd keeps the gradients that it passes in alive until the backward has returned
    holds_gradients: bool
    output_values: frozenset[int]  # values that the forward graph returns, new values of overwritten inputs among them
    kept_outputs: frozenset[int]  # values that the caller gets from the forward
    # those of `kept_outputs` that the caller drops before the backward begins, such as logits beside a loss
    dropped_outputs: frozenset[int] = frozenset()
    mutated_primals: frozenset[int]  # inputs and buffers that the step overwrites once the forward has run
    updates: frozenset[int]  # the new values that overwrite inputs of the step, such as running statistics
    returned: frozenset[int]  # values that the backward returns: gradients of parameters and inputs
    updates_of: Mapping[int, int] = field(default_factory=dict)  # parameter that the step updates -> its gradient
    sources: tuple[Source, ...]  # for each op, its module and its source line
    parameters: Mapping[int, str]  # parameters, and gradients that are returned -> name of the parameter in the model
    model: str  # the name of the model's class
    device: str  # device of the largest parameter or input, such as "cuda:0"

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

        A captured graph's nodes of torch.fx are left out.
        """
        fields_of = {each.name: getattr(self, each.name) for each in fields(StepGraph)}
        return json.dumps(written(StepGraph(**fields_of)), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StepGraph:
        """Return the graph that `to_json` wrote. Raises `FxrematError` if the text is something else."""
        try:
            graph = read(json.loads(text), (StepGraph, Op, Value, Origin, Kind, Source, Frame))
        except (ValueError, Unreadable) as error:
            raise FxrematError(f"the text is no step graph as StepGraph.to_json writes it: {error}") from None
        if not isinstance(graph, StepGraph):
            raise FxrematError("the text is no step graph as StepGraph.to_json writes it")
        return graph

    def to_networkx(self) -> nx.DiGraph[tuple[str, int]]:
        """Return the step as a networkx graph, to inspect or to run algorithms on. O(ops + reads + writes).

        Nodes are ("op", 3) and ("value", 7), with the fields of `Op` and `Value` as attributes. Edges go from
        an op to the values that it writes, and from a value to the ops that read it.
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
        """A hash that is equal for graphs of the same ops on values of the same sizes, whatever they are called.

        O(ops).
        """
        left_out = ("name", "sequence")  # what the caller does with the outputs is no part of the graph, either
        rows = [[getattr(one, each.name) for each in fields(one) if each.name not in left_out] for one in self.ops]
        rows += [[getattr(one, each.name) for each in fields(one) if each.name not in left_out] for one in self.values]
        named = ("sources", "parameters", "model", "ops", "values", "dropped_outputs")
        sets = [getattr(self, each.name) for each in fields(StepGraph) if each.name not in named]
        text = repr((rows, [sorted(one) if isinstance(one, frozenset | Mapping) else one for one in sets]))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def given(self) -> frozenset[int]:
        """The values that no op computes: parameters, inputs, constants, and gradients that autograd passes in."""
        return frozenset(v.index for v in self.values if v.origin in (Origin.PRIMAL, Origin.TANGENT))

    @cached_property
    def bits(self) -> OpBits:
        """The values that each op reads and writes, as sets of bits."""
        computed, ops = bits_of(v.index for v in self.values if v.index not in self.given), self.ops
        return OpBits(
            computed=computed,
            reads=tuple(bits_of(op.reads) & computed for op in ops),
            again_reads=tuple(bits_of(op.again_reads) & computed for op in ops),
            writes=tuple(bits_of(op.writes) for op in ops),
            again_writes=tuple(bits_of(op.again_writes) for op in ops),
            gradients=bits_of(v.index for v in self.values if v.origin is Origin.BACKWARD),
        )

    def shares_gradient(self, parameter: int) -> bool:
        """Tell whether others have the memory of a gradient that the step uses itself: the caller, or parameters.

        Args:
            parameter: the value of the parameter whose gradient it is.
        """
        gradient = self.updates_of[parameter]
        made_here = self.values[gradient].origin is Origin.BACKWARD
        return not made_here or gradient in self.returned or list(self.updates_of.values()).count(gradient) > 1

    @cached_property
    def tangent_values(self) -> tuple[int, ...]:
        """The gradients that autograd passes into the backward, without duplicates."""
        return tuple(v.index for v in self.values if v.origin is Origin.TANGENT)

    @cached_property
    def held_tangents(self) -> frozenset[int]:
        """The gradients that autograd passes into the backward and keeps alive until it has returned.

        Every release of PyTorch keeps that of a loss; some keep those of other outputs too. What a loss outside
        the model keeps is part of `Sizes.root`.
        """
        return frozenset(self.tangent_values) if self.root_tangents and self.holds_gradients else self.root_tangents

    @cached_property
    def value_sources(self) -> tuple[Source, ...]:
        """The source of each value: that of the op that computes it; for an input, that of the first op that reads it.

        For a parameter and its gradient, the module is the one that owns the parameter.
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
        """Return one name for the modules of a block of forward ops, or the name of the last op if no module is known.
        """
        modules = [self.sources[index].module for index in forward]
        return span_of(modules, self._inside) or (self.ops[forward[-1]].name if forward else "views")

    @cached_property
    def _inside(self) -> Counter[str]:
        return ops_inside(self.sources[index].module for index in range(self.forward_count))

    @cached_property
    def pinned(self) -> frozenset[int]:
        """The values that the caller still holds after the step: outputs and returned gradients."""
        return (self.kept_outputs - self.dropped_outputs) | self.returned

    @cached_property
    def freed_at_split(self) -> frozenset[int]:
        """The values that stay at least to the end of the forward: outputs that are dropped then, and new buffers."""
        return self.dropped_outputs | self.updates
