"""Graph passes of others beside fxremat's, on the same joint graphs, with the same costs: none of them runs.

    python -m benchmarks.policies                    measures, and writes benchmarks/results/policies.json
    python -m benchmarks.alternatives --page         puts them into docs/alternatives.md

Each pass cuts a joint graph into a forward and a backward. Peak and time of these are counted in the same way for all:
storages from when they are made to their last use, and estimated seconds of every op that runs.

    fxremat             `fxremat.passes.partitioner`
    greedy, ILP         torchtitan's `auto_perf_maxing` (pytorch/torchtitan#3975, #4636) as its authors describe it,
                        without offloading: a linear program shares a budget among layers, and inside of each the
                        tensors that cost least time a byte are recomputed, or those that an integer program chooses;
                        random ops, and all outside of layers, are kept; torch's partitioner follows the marks
    knapsack            torch's `activation_memory_budget` with its "dp" solver, given the same seconds
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from torch import fx
from torch._functorch import config
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
)
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator
from torch.utils.checkpoint import CheckpointPolicy

from fxremat.compilers.partition import Partitioner
from fxremat.compilers.planning import pass_options
from fxremat.errors import BudgetTooSmall
from fxremat.plan_check import AGAIN, Evaluation
from fxremat.plans import Plan
from fxremat.torch_private import copied

from . import models
from .policy_table import BUDGETS, policy_table
from .readme import RESULTS

NAMES = ("gpt", "encoder_decoder", "mixer", "resnet", "deep_chain")
SHRINKING = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # of a budget: what others are asked for in turn
SWEEP = [step / 10 for step in range(10, -1, -1)]  # torch's ratios
LAYER = re.compile(r"^(.*?\.\d+|\w+?\d+)(?:\.|$)")  # a module that is one of several
Graphs = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The result of a pass at a budget."""

    percent: int
    peak: float | None  # of the peak of keeping everything; None: nothing fits
    time: float | None  # of the seconds of keeping everything
    seconds: float  # of the pass
    at_its_time: float | None = None  # the least peak of fxremat's plans that take no longer, as `peak`


@dataclass(frozen=True, kw_only=True)
class Record:
    """The points of all passes on one graph."""

    model: str
    ops: int
    points: Mapping[str, Sequence[Point]]  # by pass


class Step:
    """A joint graph with its costs."""

    def __init__(self, name: str) -> None:
        case = models.get(name)
        torch.manual_seed(0)
        model, batch = case.model(), case.batch(0)
        found: list[tuple[fx.GraphModule, Any]] = []

        def keep(joint: fx.GraphModule, inputs: Any, **options: Any) -> Graphs:
            found.append((fx.GraphModule(joint, copied(joint.graph)), inputs))
            self.options = options
            graphs: Graphs = default_partition(joint, inputs, **options)
            return graphs

        with contextlib.ExitStack() as stack:
            exported = aot_export_joint_with_descriptors(stack, model, tuple(batch))
            aot_compile_joint_with_descriptors(exported, partition_fn=keep)
        (self._joint, self._inputs) = found[0]
        self.everything = self.plan("100%")
        graph = self.everything.graph
        self.seconds = {op.name: s for op, s in zip(graph.ops, self.everything.costs.seconds, strict=True)}

    def joint(self) -> fx.GraphModule:
        """A copy, for a pass to change."""
        return fx.GraphModule(self._joint, copied(self._joint.graph))

    def plan(self, mem: int | str) -> Plan:
        """fxremat's plan of the graph as it is: BatchNorms stay whole, since others keep them so."""
        within = Partitioner(pass_options(mem, {}), pipeline="for compilers")
        within(self._joint, self._inputs, num_fwd_outputs=self.options["num_fwd_outputs"])
        return within.plans[0]

    def partitioned(self, by: Callable[..., Any], joint: fx.GraphModule) -> Graphs:
        """The two graphs that a partition function of torch makes."""
        shown = next(v for node in joint.graph.nodes if isinstance(v := node.meta.get("val"), torch.Tensor))
        with torch._guards.tracing(torch._guards.TracingContext(shown.fake_mode)):  # type: ignore[attr-defined]
            graphs: Graphs = by(joint, self._inputs, **self.options)
        return graphs

    def counted(self, graphs: Graphs) -> tuple[int, float]:
        """Peak in bytes and seconds of two graphs, with the costs of the joint graph's ops."""
        forward, backward = (each.graph for each in graphs)
        evaluation = Evaluation(self.everything)
        results = evaluation.run(forward, evaluation.inputs(forward))
        count = len(self.everything.captured.forward_outputs)
        evaluation.at_split(results[:count], results[count:])
        names = [node.name for node in forward.output_node().args[0][count:]]  # type: ignore[index, union-attr]
        known = dict(zip(names, results[count:], strict=True))
        known |= {node.name: node.meta["val"] for node in self.everything.captured.tangent_nodes}
        evaluation.run(backward, [known[str(node.target)] for node in backward.find_nodes(op="placeholder")])
        ran = [node.name.removesuffix("_drawn") for graph in (forward, backward) for node in _ops(graph)]
        return evaluation.peak, sum(self.seconds.get(AGAIN.sub("", name), 0.0) for name in ran)


def _ops(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


# --- torchtitan's auto_perf_maxing, as described ---


@dataclass(frozen=True)
class Tensor:
    """An activation that may be recomputed."""

    layer: int
    bytes: int
    seconds: float
    names: tuple[str, ...]  # of the nodes that show it


def _layers(plan: Plan) -> list[int | None]:
    """The layer of each op: that of the parameter which was read last before it; None outside of layers."""
    graph = plan.graph
    names: list[str] = []
    found: list[int | None] = []
    current: int | None = None
    of_sequence: dict[int | None, int | None] = {}
    for op in graph.ops:
        if op.backward:
            found.append(of_sequence.get(op.sequence))
            continue
        for value in op.reads:
            if name := graph.parameters.get(value):
                match = LAYER.match(name)
                if match and match[1] not in names:
                    names.append(match[1])
                current = names.index(match[1]) if match else None
        found.append(current)
        of_sequence[op.sequence] = current
    return found


class Marked:
    """The policy: a linear program over layers, then a choice inside of each."""

    def __init__(self, step: Step, *, exact: bool) -> None:
        self.step, self.exact = step, exact
        plan = step.everything
        graph, sizes = plan.graph, plan.costs.sizes
        late = {value for op in graph.backward_ops for value in op.reads}
        layer_of = _layers(plan)
        self.layers = 1 + max((layer for layer in layer_of if layer is not None), default=0)
        self.tensors = [
            Tensor(
                layer,
                sum(sizes.values[value] for value in op.writes if value in late),
                plan.costs.seconds[op.index],
                (op.name, *(graph.values[value].name for value in op.writes)),
            )
            for op in graph.forward_ops
            if (layer := layer_of[op.index]) is not None
            and not late.isdisjoint(op.writes)
            and torch.Tag.nondeterministic_seeded not in getattr(plan.captured.nodes[op.index].target, "tags", ())
        ]
        self.peaks = self._peaks(layer_of)

    def _peaks(self, layer_of: Sequence[int | None]) -> list[int]:
        """The peak of keeping everything while the backward of each layer runs."""
        plan = self.step.everything
        peaks = [plan.memory.at_split] * self.layers
        for during, each in zip(plan.memory.during, plan.program.steps, strict=True):
            layer = layer_of[each.op] if each.op is not None else None
            if layer is not None and plan.graph.ops[each.op or 0].backward:
                peaks[layer] = max(peaks[layer], during)
        return peaks

    def graphs(self, budget: int) -> Graphs:
        """The graphs that torch's partitioner makes of the marks for a budget in bytes."""
        chosen = self._chosen(budget)
        again = {name for tensor in chosen for name in tensor.names}
        joint, captured = self.step.joint(), self.step.everything.captured
        ops = {op.name for op in captured.forward_ops}
        ops |= {captured.values[value].name for op in captured.forward_ops for value in op.writes}
        late = {node.name for node in captured.nodes[captured.forward_count :]}
        for node in joint.graph.nodes:
            if node.op == "call_function" and node.name not in late:
                kept = node.name in ops and node.name not in again
                policy = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
                node.meta |= {"recompute": policy, "ac_graph_id": 0}
        return self.step.partitioned(default_partition, joint)

    def _chosen(self, budget: int) -> list[Tensor]:
        shares = self._shares(budget)
        found: list[Tensor] = []
        for layer in range(self.layers):
            mine = [tensor for tensor in self.tensors if tensor.layer == layer]
            wanted = sum(t.bytes * s for t, s in zip(self.tensors, shares, strict=True) if t.layer == layer)
            found += self._exactly(mine, wanted) if self.exact else self._greedily(mine, wanted)
        return found

    def _shares(self, budget: int) -> Sequence[float]:
        """The share of each tensor that is recomputed, such that every layer's backward fits."""
        cost = [tensor.seconds for tensor in self.tensors]
        before = np.array([[-t.bytes * (t.layer < layer) for t in self.tensors] for layer in range(self.layers)])
        room = np.array([budget - peak for peak in self.peaks])
        solved = linprog(cost, A_ub=before, b_ub=np.maximum(room, before.sum(axis=1)), bounds=(0, 1))
        return [1.0] * len(cost) if solved.x is None else [float(share) for share in solved.x]

    def _greedily(self, tensors: Sequence[Tensor], wanted: float) -> Iterator[Tensor]:
        for tensor in sorted(tensors, key=lambda t: t.seconds / max(1, t.bytes)):
            if wanted > 1:
                wanted -= tensor.bytes
                yield tensor

    def _exactly(self, tensors: Sequence[Tensor], wanted: float) -> list[Tensor]:
        if wanted <= 1:
            return []
        sizes = np.array([[tensor.bytes for tensor in tensors]])
        solved = milp(
            [tensor.seconds for tensor in tensors],
            constraints=LinearConstraint(sizes, lb=min(wanted, sizes.sum())),
            integrality=np.ones(len(tensors), dtype=int),
            bounds=Bounds(0, 1),
        )
        taken = [False] * len(tensors) if solved.x is None else [share > 0.5 for share in solved.x]
        return [tensor for tensor, again in zip(tensors, taken, strict=True) if again]


# --- torch's knapsack ---


class Seconds(CustomRuntimeEstimator):
    """The costs of the step, for torch's partitioner."""

    def __init__(self, step: Step) -> None:
        self._seconds = step.seconds

    def __call__(self, node: fx.Node) -> float:
        return self._seconds.get(node.name, 0.0) * 1e3

    def uuid(self) -> Any:
        return None


def knapsack(step: Step) -> list[tuple[int, float, float]]:
    """Peak, seconds, and seconds of the pass, for each of torch's ratios."""
    found = []
    for ratio in SWEEP:
        began = time.monotonic()
        with config.patch(
            activation_memory_budget=ratio,
            activation_memory_budget_runtime_estimator=Seconds(step),
            activation_memory_budget_solver="dp",
        ):
            graphs = step.partitioned(min_cut_rematerialization_partition, step.joint())
        took = time.monotonic() - began
        found.append((*step.counted(graphs), took))
    return found


# --- the comparison ---


def compared(name: str) -> Record:
    """The points of all passes on the joint graph of a model."""
    step = Step(name)
    peak, seconds = step.everything.predicted_peak, step.everything.predicted_time
    frontier: list[tuple[int, float]] = []

    def point(percent: int, found: tuple[int, float] | None, took: float) -> Point:
        if found is None:
            return Point(percent=percent, peak=None, time=None, seconds=round(took, 3))
        mine = [p for p, t in frontier if t <= found[1] * (1 + 1e-9)]
        return Point(
            percent=percent,
            peak=round(found[0] / peak, 4),
            time=round(found[1] / seconds, 4),
            seconds=round(took, 3),
            at_its_time=round(min(mine) / peak, 4) if mine else None,
        )

    ours = []
    for percent in BUDGETS:
        began = time.monotonic()
        try:
            plan = step.plan(peak * percent // 100)
        except BudgetTooSmall:
            ours.append(point(percent, None, time.monotonic() - began))
            continue
        took = time.monotonic() - began
        found = step.counted(plan.graphs)
        assert found[0] == plan.predicted_peak
        frontier += [found, *plan.frontier]
        ours.append(point(percent, found, took))
    points = {"fxremat": [replace(each, at_its_time=None) for each in ours]}
    for label, exact in (("greedy", False), ("ILP", True)):
        policy = Marked(step, exact=exact)
        points[label] = [point(p, *_within(policy, step, peak * p // 100)) for p in BUDGETS]
    swept = knapsack(step)
    took = sum(each[2] for each in swept)
    points["knapsack"] = [
        point(p, min(((m, t) for m, t, _ in swept if m <= peak * p // 100), key=lambda e: e[1], default=None), took)
        for p in BUDGETS
    ]
    return Record(model=name, ops=len(step.everything.graph.ops), points=points)


def _within(policy: Marked, step: Step, budget: int) -> tuple[tuple[int, float] | None, float]:
    """The first of the policy's results, asked for less and less, that fits; and the seconds of that one pass."""
    for factor in SHRINKING:
        began = time.monotonic()
        graphs = policy.graphs(int(budget * factor))
        took = time.monotonic() - began
        found = step.counted(graphs)
        if found[0] <= budget:
            return found, took
    return None, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES))
    names = parser.parse_args().models.split(",")
    records = []
    for name in names:
        records.append(asdict(compared(name)))
        print("\n".join(policy_table(records[-1:])), flush=True)
    if tuple(names) == NAMES:
        (RESULTS / "policies.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
