"""One of several captured graphs that a step calls, in the form in which AOTAutograd calls it.

    forward     (*primals)                    -> (*outputs, token, *sizes)
    backward    (*sizes, token, *tangents)    -> gradients

Autograd saves the token, a CPU tensor with the number of the call, and the sizes of the call. The tensors that
a call has saved for its backward are kept by the coordinator under that number. So each call may run another
program, and its saved tensors can be dropped and recomputed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import fx

from fxremat.cost.at_sizes import CostsAtSizes, SizedCosts
from fxremat.errors import FxrematError
from fxremat.graphs.captured import Captured, captured_of, inputs_of
from fxremat.graphs.symbolic import Dims, Numbers, Size, SymbolicGraph
from fxremat.planning.graph_programs import SizedPrograms
from fxremat.runtime.auxiliary_outputs import runs_again
from fxremat.runtime.contract import Contract
from fxremat.runtime.emitted import Emitted, EmittedPrograms
from fxremat.search.call_programs import CallProgram
from fxremat.step.costs import Costs
from fxremat.step.program import Program
from fxremat.step.source import common_module
from fxremat.torch_private import any_batched, real_tensors, taking_a_list

EMITTED = 16  # generated fx graphs are cached for this many programs of a graph
GROWN, MOST_SEARCHES = 1.4, 5  # programs are searched for again where values are larger by this factor, so many times
REMEMBERED = 256  # numbers and programs are cached for this many combinations of sizes
AGAIN = (
    "Trying to backward through the graph a second time: what its calls had saved is freed; specify retain_graph=True "
    "if you need to backward through the graph a second time"
)


class Runner(Protocol):
    """The object that runs the calls of a step."""

    def forward(self, graph: CalledGraph, dims: Dims, primals: list[Any]) -> tuple[list[Any], torch.Tensor]:
        """Run the forward of a call; return its outputs and its token, the tensor by which the backward finds the call.
        """


class SavedCall(Protocol):
    """A call whose backward has not run yet."""

    def backward(self, tangents: list[Any]) -> Sequence[Any]:
        """Run the backward; return the gradients."""


BATCHED = (
    "is_grads_batched=True computes several gradients at once, which a model of several graphs cannot: compute them "
    "one by one, or with the uncompiled model"
)

saved_calls: dict[int, SavedCall] = {}
"""Calls whose backward may still run: number in the token -> call."""


class _Current(threading.local):
    runner: Runner | None = None


current = _Current()
"""The coordinator of the step that this thread is running: several models may share a graph, but not a step."""


class CalledGraph:
    """A captured graph with the ways to run it (its programs: orders of ops with recomputations), at any input sizes.

    Args:
        joint: the graph at the sizes of the call that it was captured from.
        symbolic: the graph with symbolic sizes; None: all its sizes are fixed.
        costs: the costs of the ops of `joint`.
        programs: the programs of `joint`, fastest first.
        keep_all: the program of single ops that recomputes nothing.
        tier: the name of the host tier to which programs copy values; "": they copy none.
        may_run_again: False if the forward has an op that is not to run again, so that what is saved stays.
        search: returns programs for the costs at larger sizes, for which those of `joint` may not be the best.
        hosted: the parameters that live on the host, as indices of primals -> their bytes.
    """

    def __init__(
        self,
        joint: Captured,
        symbolic: SymbolicGraph | None,
        costs: Costs,
        programs: Sequence[CallProgram],
        keep_all: CallProgram,
        tier: str = "",
        *,
        may_run_again: bool = True,
        search: Callable[[Costs], Sequence[CallProgram]] | None = None,
        hosted: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.joint, self.costs = joint, costs
        self.input_values = [joint.value_of.get(node) for node in joint.primals]
        self.hosted = frozenset(hosted)
        values = ((self.input_values[place], size) for place, size in hosted.items())
        self._fetched = {value: size for value, size in values if value is not None}
        self._search, self._searched = search, [sum(costs.sizes.values)]  # bytes of all values, at each search
        self._sizes = symbolic
        self._symbolic = symbolic.as_captured(joint) if symbolic else joint
        self._outputs = len(self._symbolic.forward_outputs)
        self._programs, self._keep_all = programs, keep_all
        tangents = self._symbolic.tangent_names
        self._emitted = EmittedPrograms(self._outputs, tangents, EMITTED, costs.fresh, tier, sums=True)
        self._numbers: Callable[[Dims], Numbers] | None = None
        if symbolic is not None:
            self._numbers = lru_cache(REMEMBERED)(symbolic.numbers)
        now = symbolic.shaping_of(symbolic.dims) if symbolic else ()
        # by the sizes that shape tensors
        self._at: dict[Dims, SizedPrograms] = {
            now: SizedPrograms.of(joint, SizedCosts.of(joint, costs), programs, keep_all, self._fetched)
        }
        self._costs = CostsAtSizes(symbolic, joint, costs) if symbolic else None
        self.random = any(op.random for op in joint.ops)
        self.runs_again = may_run_again and runs_again(joint)
        self.output_values = [
            joint.value_of.get(node) if isinstance(node, fx.Node) else None for node in joint.forward_outputs
        ]
        self.behind_numbers = _behind_numbers(joint)
        written = [joint.value_of.get(node) in joint.mutated_primals for node in joint.primals]
        self.overwritten = [*itertools.compress(range(len(written)), written)]  # indices of primals
        self.unwritten = [place for place, is_written in enumerate(written) if not is_written]
        self.outputs_needed = self._symbolic.outputs_needed
        sizes = symbolic.places if symbolic else ()
        # for each primal, the index of its gradient among those that the backward returns, which has sizes, too, and
        # tokens of effects behind them
        returned = (k for k in range(len(self._symbolic.backward_outputs)) if k not in sizes)
        self._gradient_at = [*itertools.islice(returned, len(joint.primals))]
        self.gradients_apart = self._gradients_apart()
        # of the primals whose gradients these are, the index with that of the gradient
        self._apart_at = [(place, at) for place, at in enumerate(self._gradient_at) if at in self.gradients_apart]

    def _gradients_apart(self) -> dict[int, int]:
        """Return the gradients that others may overwrite, whichever program runs: index of the gradient -> value."""
        if len(inputs_of(self.joint)) < len(self.joint.primals) or any(each.fused for each in self._programs):
            return {}  # what a compiled backward returns may share memory with what it is given
        others = {captured_of(each.order.layout.graph) for each in self._programs if each.another}
        apart = self.joint.gradients_apart.items()
        found = {place: value for place, value in apart if all(place in other.gradients_apart for other in others)}
        return {at: found[place] for place, at in enumerate(self._gradient_at) if place in found}

    def with_gradients_apart(self, primals: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the leaves among the primals of a call whose gradients others may overwrite, by the gradient's index.

        Not those of parameters that live on the host.
        """
        given = ((at, primals[place]) for place, at in self._apart_at if place not in self.hosted)
        return {at: x for at, x in given if x.is_leaf and x.requires_grad}

    def gradients_of(self, places: Iterable[int]) -> list[tuple[int, int]]:
        """Return, for primals with these indices, the index and that of the gradient."""
        return [(place, self._gradient_at[place]) for place in places]

    def name_with(self, parameters: Iterable[str | None]) -> str:
        """Return a name for a call: the module that contains all of these parameters, else the graph's first code line.
        """
        if modules := [name.rpartition(".")[0] for name in parameters if name]:
            return common_module(modules) or "several modules"
        frame = next((source.frame for source in self.joint.sources if source.frame), None)
        return f"{os.path.basename(frame.file)}:{frame.line}" if frame else "ops"

    def knows(self, dims: Dims) -> bool:
        """Tell whether `at` has been asked for these input sizes before."""
        return self._shaping(dims) in self._at

    def _shaping(self, dims: Dims) -> Dims:
        """Return those of the input sizes that shape tensors."""
        return self._sizes.shaping_of(dims) if self._sizes else dims

    def at(self, dims: Dims) -> SizedPrograms:
        """Return the programs, in the same order, with their bytes and seconds at these input sizes.

        At sizes that are larger than all before by `GROWN`, more programs are searched for, and are the last.
        """
        shaping = self._shaping(dims)
        if shaping not in self._at:
            assert self._costs is not None
            sized = self._costs.at(dims)
            self._emitted.never_overwriting(sized.costs.fresh)
            self._search_at(sized.costs)
            if len(self._at) > REMEMBERED:
                del self._at[next(reversed(self._at))]
            known = self._programs, self._keep_all
            self._at[shaping] = SizedPrograms.of(self.joint, sized, *known, self._fetched)
        return self._at[shaping]

    def _search_at(self, costs: Costs) -> None:
        """Search for more programs if values are larger than at all searches before."""
        size = sum(costs.sizes.values)
        if self._search is None or size < GROWN * self._searched[-1] or len(self._searched) > MOST_SEARCHES:
            return
        self._searched.append(size)
        known = {program.key for program in self._programs}
        more = [program for program in self._search(costs) if program.key not in known]
        self._programs = [*self._programs, *more]
        self._at.clear()  # which has fewer programs

    def emitted(self, number: int) -> Emitted:
        """Return the fx graphs generated for the program with index `number`."""
        another = self._programs[number].another
        fresh = another.costs.fresh if another else None
        with contextlib.nullcontext() if number in self._emitted else real_tensors():
            return self._emitted.of(number, partial(self._symbolically, number), fresh)

    def _symbolically(self, number: int) -> Program:
        """Return the program with index `number`, of the graph with symbolic sizes, unless it is for one size."""
        program = self._programs[number].program
        if self._programs[number].another is not None:
            return program
        return replace(program, layout=replace(program.layout, graph=self._symbolic))

    def run_forward(self, emitted: Emitted, dims: Dims, primals: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the outputs and the tensors saved for the backward; the list of primals is emptied."""
        if emitted.forward_sizes:
            primals += self._values(emitted.forward_sizes, dims)
        results = list(emitted.forward(primals))
        return results[: self._outputs], results[self._outputs :]

    def run_backward(
        self,
        emitted: Emitted,
        dims: Dims,
        saved: list[Any],
        tangents: list[Any],
        sums: Mapping[int, torch.Tensor],
        unused: frozenset[int] = frozenset(),
    ) -> Sequence[Any]:
        """Return the gradients; both lists are emptied.

        Args:
            unused: the outputs that got no gradient, for which `tangents` have zeros.
            sums: sums of gradients, by the gradient's index: gradients are added to these, and not returned.
        """
        given = self._values(emitted.backward_sizes, dims) if emitted.backward_sizes else []
        given += saved[emitted.tensors :]
        given += saved[: emitted.tensors]
        given += tangents
        given.append(sums)
        saved.clear()
        tangents.clear()
        gradients: Sequence[Any] = emitted.backward.of(unused)(given)
        return gradients

    def _values(self, sizes: Sequence[Size], dims: Dims) -> list[Any]:
        assert self._numbers is not None
        numbers = self._numbers(dims)
        return [numbers.of(size) for size in sizes]


    def forward_of(self, _: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that AOTAutograd calls as the forward, instead of the first graph of `contract`."""
        return self._forward

    def backward_of(self, _: fx.GraphModule) -> Callable[..., Any]:
        """Return the function that AOTAutograd calls as the backward, instead of the second graph of `contract`."""
        return taking_a_list(self._backward)

    def _forward(self, arguments: list[Any]) -> list[Any]:
        places = self._sizes.places if self._sizes else ()
        dims = tuple(int(arguments[place]) for place in places)
        primals = [argument for place, argument in enumerate(arguments) if place not in places]
        arguments.clear()
        assert current.runner is not None, "a graph was called outside of a step"
        outputs, token = current.runner.forward(self, dims, primals)
        return [*outputs, token, *dims]

    def _backward(self, arguments: list[Any]) -> Sequence[Any]:
        count = len(self._sizes.places) if self._sizes else 0
        token, tangents = arguments[count], list(arguments[count + 1 :])
        if any_batched(tangents):
            raise FxrematError(BATCHED)
        arguments.clear()
        if (call := saved_calls.get(int(token))) is None:
            raise RuntimeError(AGAIN)
        # with `create_graph`, torch 2.11 leaves gradients enabled here, as no argument requires one
        with torch.no_grad():
            return call.backward(tangents)

    def contract(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return two graphs, never run, from which AOTAutograd reads the inputs and outputs of forward and backward."""
        joint, sizes = self._symbolic, self._sizes.inputs if self._sizes else ()
        tensors = (node.meta.get("val") for node in joint.module.graph.nodes)
        like: Any = next(value for value in tensors if isinstance(value, torch.Tensor))
        with like.fake_mode:
            token = torch.zeros(1, dtype=torch.int64)
        forward, backward = Contract(), Contract()
        for node in joint.module.graph.nodes:
            if node.op == "placeholder" and node not in joint.tangent_nodes:
                forward.take(node.name, node.meta, node)
        outputs = [forward.made(node) for node in joint.forward_outputs]
        forward.graph.output((*outputs, forward.new(token), *(forward.nodes[node] for node in sizes)))
        for node in sizes:
            backward.take(node.name, node.meta, node)
        backward.take("token", {"val": token})
        for node in joint.tangent_nodes:
            backward.take(node.name, node.meta, node)
        backward.graph.output(tuple(backward.made(node) for node in joint.backward_outputs))
        return fx.GraphModule({}, forward.graph), fx.GraphModule({}, backward.graph)


def _behind_numbers(joint: Captured) -> frozenset[int]:
    """Return the values of the forward that single numbers among its outputs, such as losses, are computed from."""
    numbers = {
        joint.value_of[node]
        for node in joint.forward_outputs
        if isinstance(node, fx.Node) and node in joint.value_of and _is_number(node.meta.get("val"))
    }
    found = set(numbers)
    for op in reversed(joint.ops[: joint.forward_count]):
        if not found.isdisjoint(op.writes):
            found |= set(op.reads)
    return frozenset(found - numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1
