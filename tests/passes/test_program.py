"""The recompute pass and its exact liveness, on random models and by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from fxremat.chains.schedule import Schedule
from fxremat.errors import InvalidSchedule
from fxremat.graphs.batch_norm import NORMALIZED, STATISTICS
from fxremat.graphs.captured import Captured
from fxremat.linearize.crossings import crossings
from fxremat.linearize.lay_out import lay_out
from fxremat.passes.lower import lower
from fxremat.search.survey import survey
from fxremat.step.liveness import live_bytes
from fxremat.step.order import rematerialize
from fxremat.step.program import Program, Role
from fxremat.step.step_graph import StepGraph
from tests.dags import Dag, Recipe, batch, capture, estimated, few, recipes
from tests.draws import everyday
from tests.saved_steps import saved
from tests.toys import FourLayers

pytestmark = pytest.mark.usefixtures("torch_ready")
FEW = few(everyday(20, least=4))


def chain_program(schedule: str, joint: StepGraph | None = None) -> Program:
    joint = joint or saved("four_layers").graph
    ends = [op.index for op in joint.forward_ops if op.name.startswith("tanh")]
    return rematerialize(lay_out(joint, ends), Schedule.parse(schedule))


def names(program: Program, start: int = 0) -> list[str]:
    ops = program.layout.graph.ops
    mark = {Role.RECOMPUTE: "again ", Role.FORWARD: "", Role.BACKWARD: ""}
    return [mark[step.role] + ops[step.op].name for step in program.steps[start:]]


def test_keeping_everything_runs_nothing_twice() -> None:
    program = chain_program("Fall1 Fall2 Fall3 Fall4 Fall5 B5 B4 B3 B2 B1")
    assert program.recomputed == 0
    assert names(program)[: program.split] == [
        "addmm", "tanh", "addmm_1", "tanh_1", "addmm_2", "tanh_2", "addmm_3", "tanh_3", "pow_1", "mean",
    ]  # fmt: skip


def test_a_checkpoint_reruns_its_segment_up_to_what_is_needed() -> None:
    program = chain_program("Fck1 Fnone2 Fall3 Fall4 Fall5 B5 B4 B3 Fall1 Fall2 B2 B1")
    again = [name for name in names(program, program.split) if name.startswith("again")]
    assert again == ["again addmm", "again tanh", "again addmm_1", "again tanh_1"]


def test_a_dropped_input_is_rebuilt_before_the_backward_that_reads_it() -> None:
    program = chain_program("Fck1 Fall2 Drop(a1) Fall3 Fall4 Fall5 B5 B4 B3 Fall1 B2 B1")
    assert [name for name in names(program) if name.startswith("again")] == ["again addmm", "again tanh"]


def test_a_schedule_that_lacks_an_input_is_refused() -> None:
    with pytest.raises(InvalidSchedule, match="block 2 needs"):
        chain_program("Fnone1 Fnone2 Fall3 Fall4 Fall5 B5 B4 B3 Fall2 B2 B1")


def test_copies_are_named_after_their_original_and_say_their_block() -> None:
    forward, backward = lower(
        chain_program(
            "Fck1 Fnone2 Fall3 Fall4 Fall5 B5 B4 B3 Fall1 Fall2 B2 B1", capture(FourLayers(), torch.ones(4, 8))
        )
    )
    copy = next(node for node in backward.graph.nodes if node.name == "addmm_1__r1")
    assert copy.meta["fxremat"] == {"block": 2, "name": "layers.1", "role": "recompute", "module": "layers.1"}
    code = backward.print_readable(print_output=False)
    assert "'block': '2 layers.1', 'role': 'recompute', 'module': 'layers.1'" in code
    assert all("fxremat" in n.meta for n in forward.graph.nodes if n.op == "call_function")


def graph_memory(module: fx.GraphModule, given: dict[fx.Node, int]) -> list[int]:
    """Bytes alive at each node of a graph, by its own rules: storages of fake tensors, freed after their last use.

    Written apart from `passes.liveness`, which never sees a graph.
    """

    def storages(node: fx.Node) -> dict[int, int]:
        value: Any = None if on_the_host(node) else node.meta.get("val")
        tensors = (
            [value] if isinstance(value, torch.Tensor) else list(value or ()) if value is not None else []
        )
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}

    def written_argument(node: fx.Node) -> fx.Node | None:
        """Return the argument that the op writes to, as its schema says; None where it writes to none."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        arguments = node.target._schema.arguments
        given = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
        written = [given[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        return written[0] if written else None

    nodes = list(module.graph.nodes)
    owner: dict[fx.Node, set[tuple[fx.Node, int]]] = {}
    size: dict[tuple[fx.Node, int], int] = {}
    taken: dict[int, tuple[fx.Node, int]] = {}
    for node in nodes:
        parents = {key for parent in node.all_input_nodes for key in owner[parent]}
        by_storage = {storage: (maker, storage) for maker, storage in parents}
        owner[node] = set()
        for storage, count in storages(node).items() if node.op != "output" else ():
            if (written := written_argument(node)) is not None:
                (taken[storage],) = owner[written]  # the graph's meta shows another storage
            key = (taken | by_storage).get(storage, (node, storage))
            if node.op == "placeholder":
                count = given.get(node, 0)
            size.setdefault(key, count)
            owner[node].add(key)
    last = {key: index for index, node in enumerate(nodes) for p in node.all_input_nodes for key in owner[p]}
    live = {key for node in given for key in owner[node]}
    totals = []
    for index, node in enumerate(nodes):
        if node.op == "call_function":
            live |= {key for key in owner[node] if key[0] is node or key in live}
        totals.append(sum(size[key] for key in live))
        live = {
            key
            for key in live
            if last.get(key, -1) > index or (key[0].op == "placeholder" and key not in last)
        }
    return totals


@FEW
@given(recipes, st.integers(0, 100), st.booleans())
def test_liveness_of_the_emitted_graphs_is_what_was_planned(recipe: Recipe, share: int, holds: bool) -> None:
    joint = replace(capture(Dag(recipe), *batch()), holds_gradients=holds)  # on some releases of PyTorch it does
    costs = estimated(joint)
    frontier = survey(joint, costs, slots=60, effort=0).candidates
    for faster, smaller in itertools.pairwise(frontier):
        assert faster.peak > smaller.peak
        assert faster.time <= smaller.time
    candidate = frontier[share * (len(frontier) - 1) // 100]
    program = candidate.program()
    planned = live_bytes(program, costs.sizes)
    if any(joint.ops[op].random for op in program.repeated) or program.preserved:
        return  # generator states and preserved inputs are not storages of the joint graph
    forward, backward = lower(program)
    assert max(graph_memory(forward, {})) == max(planned.during[: program.split])
    own = saved_bytes(forward, backward, joint) | tangent_bytes(backward, joint)
    held = sum(joint.values[value].bytes for value in (*joint.kept_outputs, *joint.held_tangents))
    held += costs.sizes.root  # of a loss outside that reads outputs beside one
    ours = max(graph_memory(backward, own)) + held
    assert ours == max(planned.during[program.split :])


def on_the_host(node: fx.Node) -> bool:
    return node.meta.get("fxremat", {}).get("role") in ("offload", "release")


def saved_bytes(forward: fx.GraphModule, backward: fx.GraphModule, joint: Captured) -> dict[fx.Node, int]:
    """Bytes that each saved tensor brings into the backward; inputs, and storages seen before, bring none."""
    outputs = forward.graph.output_node().args[0]
    saved = list(outputs)[len(joint.forward_outputs) :]  # type: ignore[arg-type]
    kept = {
        _storage(node) for node in list(outputs)[: len(joint.forward_outputs)] if isinstance(node, fx.Node)
    }  # type: ignore[arg-type]
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    brought: dict[fx.Node, int] = {}
    for node, placeholder in zip(saved, placeholders, strict=False):
        storage = _storage(node)
        own = node.op != "placeholder" and storage not in kept and not on_the_host(node)
        brought[placeholder] = node.meta["val"].untyped_storage().nbytes() if own else 0
        kept.add(storage)
    return brought


def tangent_bytes(backward: fx.GraphModule, joint: Captured) -> dict[fx.Node, int]:
    """Bytes of the gradients that are handed in and that die with their last reader: autograd holds the others."""
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    tangents = [node for node in placeholders if node.name.startswith("tangents")]
    return {
        node: node.meta["val"].untyped_storage().nbytes()
        for node, value in zip(tangents, joint.tangents, strict=True)
        if value not in joint.held_tangents
    }


def _storage(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def test_crossings_ignore_what_nothing_reads() -> None:
    joint = saved("four_layers").graph
    assert [len(values) for values in crossings(joint).at] == [1] * (joint.forward_count - 1) + [0]


class Normed(nn.Module):
    """Three times linear, BatchNorm, tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_a_batch_norm_that_runs_again_reads_and_writes_no_running_statistics() -> None:
    joint = capture(Normed(), torch.ones(4, 8))
    ends = [op.index for op in joint.forward_ops if op.name.startswith("tanh")]
    schedule = Schedule.parse("Fck1 Fnone2 Fall3 Fall4 B4 B3 Fall1 Fall2 B2 B1")
    program = rematerialize(lay_out(joint, ends), schedule)
    assert program.preserved == frozenset()
    again = {program.version_of[v] for s in program.steps if s.role is Role.RECOMPUTE for v in s.writes}
    assert not again & joint.updates
    backward = lower(program)[1]
    called = [node.target for node in backward.graph.nodes]
    assert torch.ops.aten._native_batch_norm_legit.no_stats in called, "the halves run as one again"
    assert not {STATISTICS, NORMALIZED} & set(called)


def test_a_batch_norm_without_parameters_has_its_statistics_in_full_precision_again() -> None:
    """The type of what a kernel keeps follows that of parameters, or of running statistics, which it is not given."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
            self.norm = nn.BatchNorm1d(8, affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.norm(torch.tanh(x * self.scale))).square().mean()

    joint = capture(Plain(), torch.ones(4, 8, dtype=torch.bfloat16))
    ends = [op.index for op in joint.forward_ops if op.name.startswith("tanh")]
    program = rematerialize(lay_out(joint, ends), Schedule.parse("Fck1 Fnone2 Fall3 B3 Fall1 Fall2 B2 B1"))
    targets = [[node.target for node in module.graph.nodes] for module in lower(program)]
    whole = torch.ops.aten._native_batch_norm_legit_functional.default
    assert [targets[0].count(whole), targets[1].count(STATISTICS), targets[1].count(NORMALIZED)] == [1, 1, 1]
