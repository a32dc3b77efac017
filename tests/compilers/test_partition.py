"""The partition function for joint graphs of others: bits, budgets, and what is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch.partitioners import default_partition

import fxremat
from benchmarks import meter
from fxremat.errors import CaptureError
from fxremat.passes import partitioner
from fxremat.torch_private import copied
from tests.compilers.models import EVERY_DAY, case, joint_graph, joint_step

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.2, progress=False)


@pytest.mark.parametrize("budgets", [("60%", "min"), pytest.param(("100%", "40%"), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", EVERY_DAY)
def test_bits_are_those_of_no_recomputation_and_budgets_hold(name: str, budgets: tuple[str, ...]) -> None:
    one = case(name)
    expected = joint_step(one, default_partition)()
    for mem in budgets:
        within = partitioner(mem, costs="measure", search=QUICK)
        try:
            step = joint_step(one, within)
        except fxremat.BudgetTooSmall:
            assert mem in ("60%", "40%")
            continue
        found = step()
        assert all(map(torch.equal, found, expected)), mem
        plan = within.plan
        assert plan is not None
        assert plan.predicted_peak <= plan.budget
        del found
        measured = meter.peak_bytes(lambda step=step: step() and None)  # type: ignore[misc]
        assert plan.predicted_peak * 0.98 <= measured <= plan.predicted_peak, mem


def test_the_given_graph_is_left_as_it_is_and_what_is_handed_out_is_nobody_elses() -> None:
    joint = joint_graph(case("resnet"))
    before = joint.print_readable(print_output=False)
    within = partitioner("min", search=QUICK)
    forward, _ = within(joint, (), num_fwd_outputs=_forward_outputs(joint))
    assert joint.print_readable(print_output=False) == before
    assert not any("fxremat" in str(node.meta.keys()) for node in joint.graph.nodes)
    forward.graph.erase_node(forward.graph.output_node())
    assert within.plan is not None
    within.plan.forward_graph.graph.lint()


def _forward_outputs(joint: fx.GraphModule) -> int:
    descs: Any = joint.graph.output_node().meta["desc"]
    return [type(desc).__name__ for desc in descs].index("GradAOTOutput")


def test_emitted_nodes_keep_what_is_noted_on_them() -> None:
    joint = joint_graph(case("gpt"))
    for node in joint.graph.nodes:
        node.meta["custom"] = {"stage": 3}
    forward, backward = partitioner("min", search=QUICK)(joint, (), num_fwd_outputs=1)
    ops = [node for graph in (forward, backward) for node in graph.graph.nodes if node.op == "call_function"]
    assert any(node.name.endswith("__r1") for node in ops)
    assert all("val" in node.meta and node.meta["custom"]["stage"] == 3 for node in ops)


def test_inputs_that_the_graph_overwrites_are_overwritten() -> None:
    """Inductor's joint graphs end their forward with copies to buffers; the running statistics are such."""
    graph = fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fakes = {"x": torch.zeros(8), "buffer": torch.zeros(8), "tangents_1": torch.zeros(8)}
    x, buffer, tangent = (graph.placeholder(name) for name in fakes)
    aten = torch.ops.aten
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    new = graph.call_function(aten.add.Tensor, (buffer, doubled))
    out = graph.call_function(aten.sin.default, (doubled,))
    graph.call_function(aten.copy_.default, (buffer, new))
    gradient = graph.call_function(aten.mul.Tensor, (tangent, graph.call_function(aten.cos.default, (doubled,))))
    graph.output((out, gradient, None))
    for node in graph.nodes:
        node.meta["val"] = fakes.get(node.name) if node.op == "placeholder" else fakes["x"].clone()
    joint = fx.GraphModule({}, graph)
    forward, backward = partitioner("min", search=QUICK)(joint, (), num_fwd_outputs=1)
    x, buffer = torch.rand(8), torch.ones(8)
    result, *saved = forward(x, buffer)
    assert torch.equal(buffer, 1 + 2 * x)
    assert torch.equal(result, (2 * x).sin())
    assert torch.equal(backward(*saved, torch.ones(8))[0], (2 * x).cos())


PLANNED = """
from tests.compilers.models import case, joint_graph
from fxremat.passes import partitioner
from fxremat.torch_private import copied
import fxremat, hashlib
within = partitioner("60%", costs="H100", search=fxremat.Search(seconds=0.2, progress=False))
graphs = within(joint_graph(case("gpt")), (), num_fwd_outputs=1)
print(hashlib.sha256("".join(str(graph.graph) for graph in graphs).encode()).hexdigest())
"""


@pytest.mark.long
def test_the_same_graph_gives_the_same_plan_in_another_process() -> None:
    options = {"mem": "60%", "costs": "H100", "search": QUICK}
    graphs = partitioner(**options)(joint_graph(case("gpt")), (), num_fwd_outputs=1)  # type: ignore[arg-type]
    mine = hashlib.sha256("".join(str(graph.graph) for graph in graphs).encode()).hexdigest()
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PLANNED], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == mine, done.stderr


def test_what_cannot_be_planned_is_named() -> None:
    joint = joint_graph(case("experts"))
    within = partitioner("min", search=QUICK)
    with pytest.raises(CaptureError, match=r"num_fwd_outputs is 99, and the graph has 1[0-9] outputs"):
        within(joint, (), num_fwd_outputs=99)
    with pytest.raises(CaptureError, match=r"output 1, .*, depends on a tangent.* num_fwd_outputs is 1 at most"):
        within(joint, (), num_fwd_outputs=3)
    bare = fx.GraphModule(joint, copied(joint.graph))
    node = next(node for node in bare.graph.nodes if node.name == "tanh")
    del node.meta["val"]
    with pytest.raises(CaptureError, match=r'tanh \(aten.tanh.default\) has no fake tensor in meta\["val"\]'):
        within(bare, (), num_fwd_outputs=1)
    node = next(node for node in joint.graph.nodes if node.name == "tanh")
    node.target = torch.ops.aten.tanh.out
    with pytest.raises(CaptureError, match=r"tanh \(aten.tanh.out\) overwrites an argument"):
        within(joint, (), num_fwd_outputs=1)
