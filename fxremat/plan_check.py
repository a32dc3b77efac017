"""Checks the two fx graphs that a plan was lowered to: their results, their peak, and whether recomputed ops repeat.

    outputs     the graphs are evaluated on fake tensors: results have the shapes and types of the captured graph's
    peak        storages are counted from when a node makes them to the last use, as generated code frees them
    runs        each op that is recomputed runs several times on equal data: those whose bits differ are named
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fxremat.cost.made_up import call_of
from fxremat.errors import FxrematError
from fxremat.graphs.accounting import device_of, held
from fxremat.graphs.captured import Captured
from fxremat.graphs.nodes import is_number, storage_bytes
from fxremat.planned_step import PlannedStep
from fxremat.step.verify import verify
from fxremat.torch_private import real_tensors, storage_of
from fxremat.units import format_bytes, shortened

AGAIN = re.compile(r"__r\d+$")  # suffix of the name of a node that recomputes an op


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """The result of a check of a plan, which prints as a line."""

    outputs: int  # number of results that were compared with those of the captured graph
    # peak bytes counted on the lowered graphs; None: not countable, as with copies to the host, slices or
    # compiled regions
    peak: int | None
    predicted_peak: int  # bytes
    runs: int  # number of executions of each recomputed op that were compared; 1: none were
    # names of recomputed ops whose results differ bitwise between executions on the same data
    differing: tuple[str, ...]

    def __str__(self) -> str:
        counted = "" if self.peak is None else f", the peak is {format_bytes(self.peak)} as predicted"
        if self.runs < 2:
            repeats = ""
        elif self.differing:
            repeats = f"; bits differ from run to run in {', '.join(self.differing)}"
        else:
            repeats = f"; recomputed ops gave equal bits in {self.runs} runs"
        return f"{self.outputs} results have their shapes{counted}{repeats}"


def check(plan: PlannedStep, runs: int = 1) -> PlanCheck:
    """Check a plan's lowered forward and backward graph.

    Args:
        runs: 2 or more: also execute each recomputed op this many times, and compare the results bitwise.

    Raises:
        FxrematError: `runs` is no such number, a result differs in shape or dtype from that of the captured graph, or
            the peak differs from the predicted one.
    """
    if not isinstance(runs, int) or isinstance(runs, bool) or runs < 1:
        raise FxrematError(f"runs is {shortened(runs)}; it is the number of executions of a recomputed op, 1 or more")
    verify(plan.program)
    captured, (forward, backward) = plan.captured, plan.graphs
    evaluated = Evaluation(plan)
    results = evaluated.run(forward.graph, evaluated.inputs(forward.graph))
    count = len(captured.forward_outputs)
    _compare(captured.forward_outputs, results[:count])
    evaluated.at_split(results[:count], results[count:])
    handed_over = sorted(results[count:], key=lambda value: not is_number(value))
    given = [*handed_over, *(node.meta["val"] for node in captured.tangent_nodes)]
    gradients = evaluated.run(backward.graph, given)
    _compare(captured.backward_outputs, gradients)
    peak = evaluated.peak if _is_countable(plan) else None
    if peak is not None and peak != plan.predicted_peak:
        raise FxrematError(
            f"the emitted graphs need {peak} bytes by a count of their storages; {plan.predicted_peak} were predicted"
        )
    return PlanCheck(
        outputs=len(results[:count]) + len(gradients),
        peak=peak,
        predicted_peak=plan.predicted_peak,
        runs=runs,
        differing=tuple(_differing(plan, runs)) if runs > 1 else (),
    )


def _is_countable(plan: PlannedStep) -> bool:
    return not (plan.chosen.transfers or plan.chosen.communication or plan.slices or plan.compiled or plan.weights)


def _compare(expected: Sequence[object], found: Sequence[Any]) -> None:
    for node, value in zip(expected, found, strict=True):
        shown = node.meta.get("val") if isinstance(node, fx.Node) else node
        if _described(shown) != _described(value):
            raise FxrematError(f"{node} is {_described(value)} as emitted, and {_described(shown)} as captured")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return type(value).__name__


@dataclass
class Evaluation:
    """Runs the lowered graphs on fake tensors and counts the bytes of the storages that are in use."""

    plan: PlannedStep
    peak: int = 0
    sizes: dict[int, int] = field(default_factory=dict)  # storage -> its bytes; 0 for storages that do not count
    holders: Counter[int] = field(default_factory=Counter)  # storage -> number of live node values that are views of it
    # all tensors seen: keeping them alive prevents that a new storage gets the address of an old one
    keeping: list[Any] = field(default_factory=list)
    beside: int = 0  # bytes of a loss outside the model

    def __post_init__(self) -> None:
        graph = self.plan.captured
        self._value_of = {value.name: value.index for value in graph.values}
        self._op_of = {op.name: op for op in graph.ops}
        # (op, bytes of a result) -> bytes that the device of the plan allocates for it
        self._allocated = {
            (graph.ops[value.producer].name, value.bytes): self.plan.costs.sizes.values[value.index]
            for value in graph.values
            if value.producer is not None
        }

    def inputs(self, graph: fx.Graph) -> list[Any]:
        """Return the forward's inputs as fake tensors, and mark their storages as not counted."""
        given = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        constants = [node.meta.get("val") for node in self.plan.captured.module.graph.find_nodes(op="get_attr")]
        self.sizes |= dict.fromkeys(_storages([given, constants]), 0)
        return given

    def at_split(self, outputs: Sequence[Any], saved: Sequence[Any]) -> None:
        """Count the memory of a loss outside the model, and of the gradients that it passes to the backward."""
        graph, sizes = self.plan.graph, self.plan.costs.sizes
        self.holders.clear()
        for value in saved:
            self._hold(value)
        for shown, value in zip(self.plan.captured.forward_outputs, outputs, strict=True):
            if isinstance(shown, fx.Node) and self.plan.captured.value_of.get(shown) not in graph.updates:
                self._hold(value)  # outputs that update an input in place are freed after the copy
        tangents = sum(sizes.values[tangent] for tangent in graph.tangent_values)
        self.peak = max(self.peak, self._alive + sizes.of_loss)
        for shown, value in zip(self.plan.captured.forward_outputs, outputs, strict=True):
            if isinstance(shown, fx.Node) and self.plan.captured.value_of.get(shown) in graph.dropped_outputs:
                self._release(value)
        self.peak = max(self.peak, self._alive + tangents + sizes.root)
        self.beside = sizes.root
        for node in self.plan.captured.tangent_nodes:
            (storage,), value = _storages(node.meta["val"]), self.plan.captured.value_of[node]
            self.sizes[storage] = sizes.values[value]
            self.holders[storage] += 2 if value in graph.held_tangents else 1

    def run(self, graph: fx.Graph, given: Sequence[Any]) -> list[Any]:
        """Run a graph on inputs and return its results; each input is freed after its last use."""
        values = dict(zip(graph.find_nodes(op="placeholder"), given, strict=True))
        last = {used: node for node in graph.nodes for used in node.all_input_nodes}
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                break
            values[node] = self._value(node, values)
            self._hold(values[node])
            self._measure(node, values[node])
            self.peak = max(self.peak, self._alive + self._workspace(node))
            for used in {*node.all_input_nodes, node}:
                if last.get(used, node) is node:
                    self._release(values[used])
        results: Any = graph.output_node().args[0]
        return [values[result] if isinstance(result, fx.Node) else result for result in results]

    @property
    def _alive(self) -> int:
        return self.beside + sum(self.sizes[storage] for storage, count in self.holders.items() if count > 0)

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return node.meta.get("val")
        args: Any = fx.node.map_arg(node.args, values.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
        if node.target is operator.getitem:
            return args[0][args[1]]
        shown = node.meta["val"]
        like: Any = next((leaf for leaf in tree_leaves(shown) if isinstance(leaf, torch.Tensor)), None)
        if like is None:  # the value is a number
            return shown
        with like.fake_mode:
            if isinstance(node.target, torch._ops.OpOverload):
                return node.target(*args, **kwargs)
            # the node calls a function of fxremat, which fake tensors cannot run
            return tree_map_only(torch.Tensor, torch.empty_like, shown)

    def _hold(self, value: Any) -> None:
        self.keeping.append(value)
        for storage in _storages(value):
            self.holders[storage] += 1

    def _measure(self, node: fx.Node, value: Any) -> None:
        """Record the bytes of the storages that a node allocates."""
        if node.target is operator.getitem or isinstance(value, torch.Tensor):
            for storage in _storages(value):
                self._size(node, value, storage)
        else:
            name = AGAIN.sub("", node.name.removesuffix("_drawn"))
            for tensor in _tensors(value):
                taken = held(storage_bytes(tensor), device_of(self.plan.graph))
                self.sizes.setdefault(storage_of(tensor), self._allocated.get((name, storage_bytes(tensor)), taken))

    def _size(self, node: fx.Node, value: torch.Tensor, storage: int) -> None:
        sizes, name = self.plan.costs.sizes, AGAIN.sub("", node.name)
        if name in self._value_of and self.sizes.get(storage) != 0:
            self.sizes[storage] = sizes.values[self._value_of[name]]
        elif name.endswith("_seed"):
            self.sizes[storage] = sizes.seed
        else:
            self.sizes.setdefault(storage, held(storage_bytes(value), device_of(self.plan.graph)))

    def _release(self, value: Any) -> None:
        for storage in _storages(value):
            self.holders[storage] -= 1

    def _workspace(self, node: fx.Node) -> int:
        op = self._op_of.get(AGAIN.sub("", node.name.removesuffix("_drawn")))
        if op is None:
            return 0
        costs = self.plan.costs
        if op.overwrites is None or op.index in costs.fresh:
            return costs.sizes.workspace[op.index]
        # the costs' workspace of an op that overwrites an operand is reduced by the operand's bytes
        return costs.sizes.workspace[op.index] + costs.sizes.values[op.overwrites]


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _storages(value: Any) -> list[int]:
    return [*dict.fromkeys(storage_of(tensor) for tensor in _tensors(value))]


def _differing(plan: PlannedStep, runs: int) -> Iterable[str]:
    """Yield the names of recomputed ops whose results on equal data differ between `runs` executions.

    Random ops are left out, since their recomputation restores the generator's state.
    """
    captured: Captured = plan.captured
    with real_tensors(), torch.no_grad():
        for index in sorted(plan.program.repeated):
            if not captured.ops[index].random and not _repeats(call_of(captured.nodes[index]), runs):
                yield captured.ops[index].name


def _repeats(call: Callable[[], Any], runs: int) -> bool:
    first = [tensor.clone() for tensor in _tensors(call())]
    return all(all(map(_same, first, _tensors(call()))) for _ in range(runs - 1))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(torch.equal(one.isnan(), other.isnan()) and one.isnan().any())
