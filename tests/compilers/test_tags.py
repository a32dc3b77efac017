"""Plans as marks of selective checkpointing, which torch's own partitioner follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch.partitioners import default_partition
from torch.utils.checkpoint import CheckpointPolicy

import fxremat
from fxremat.errors import PlanMismatch
from fxremat.passes import tag
from tests.compilers.models import case, joint_graph, joint_step

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.2, progress=False)


def test_marks_say_what_a_plan_keeps_and_recomputes() -> None:
    joint = joint_graph(case("gpt"))
    plan = fxremat.capture(joint, num_fwd_outputs=1, search=QUICK).plan("min")
    assert tag(joint, plan) is joint
    marks = {node.name: node.meta.get("recompute") for node in joint.graph.nodes}
    again = {plan.captured.nodes[op].name for op in plan.program.repeated}
    recomputed = {name for name, mark in marks.items() if mark is CheckpointPolicy.MUST_RECOMPUTE}
    saved = {name for name, mark in marks.items() if mark is CheckpointPolicy.MUST_SAVE}
    assert recomputed
    assert recomputed & again
    assert saved & {node.name for node in plan.backward_graph.graph.nodes if node.op == "placeholder"}
    on_host = fxremat.capture(joint_graph(case("gpt")), num_fwd_outputs=1, search=QUICK, offload=True).plan("80%")
    hosted = tag(joint, on_host)
    assert any(node.meta.get("recompute") is CheckpointPolicy.MUST_CPU_OFFLOAD for node in hosted.graph.nodes)


def test_a_partitioner_of_torch_that_follows_them_saves_less_and_has_the_same_bits() -> None:
    one = case("gpt")
    expected = joint_step(one, default_partition)()
    saved: list[int] = []

    def follow(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        plan = fxremat.capture(joint, num_fwd_outputs=num_fwd_outputs, search=QUICK).plan("min")
        return keep(tag(joint, plan), inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def keep(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        graphs = default_partition(joint, inputs, **options)
        saved.append(sum(_bytes_made(node) for node in graphs[0].graph.output_node().args[0]))  # type: ignore[union-attr]
        return graphs

    joint_step(one, keep)()
    found = joint_step(one, follow)()
    assert saved[1] < 0.7 * saved[0]
    assert all(map(torch.equal, found, expected))


def _bytes_made(node: object) -> int:
    made = isinstance(node, fx.Node) and node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    return node.meta["val"].nbytes if made else 0  # type: ignore[union-attr]


def test_a_graph_of_something_else_is_refused() -> None:
    plan = fxremat.capture(joint_graph(case("gpt")), num_fwd_outputs=1, search=QUICK).plan("min")
    with pytest.raises(PlanMismatch, match="none of the ops"):
        tag(fx.symbolic_trace(torch.nn.Tanh()), plan)
