"""Bits of executors that follow tags, and of planned text, on four kinds of models at four budgets; and what holds for
every door: the given graph stays as it is, and the same graph gives the same plan in another process.

The bits of other doors are tested in test_partition.py, test_whole_step.py and test_inductor.py.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.partitioners import default_partition

import fxremat
import fxremat.ops.random
from fxremat.__main__ import main
from fxremat.passes import InductorPartitioner, partitioner, step_pass, tag, to_text
from tests.compilers.models import NAMES, Case, case, full_step, inputs_of, joint_graph, joint_step
from tests.compilers.test_whole_step import run

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.2, progress=False)
TOO_SMALL = ("60%", "40%")  # budgets that are below the least of some of the small models
ALL = ("100%", "60%", "40%", "min")
EVERY_DAY = ("resnet", "experts")  # which take the least time
cases = pytest.mark.parametrize(
    ("name", "budgets"),
    [
        *(pytest.param(name, ("60%", "min"), id=name) for name in EVERY_DAY),
        *(pytest.param(name, ALL, marks=pytest.mark.long, id=f"{name}, all") for name in NAMES),
    ],
)


@cases
def test_an_executor_that_follows_tags_has_the_same_bits(name: str, budgets: tuple[str, ...]) -> None:
    one = case(name)
    expected = joint_step(one, default_partition)()
    for mem in budgets:
        tagged: list[fx.Node] = []

        def follow(
            joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, mem: str = mem, **options: Any
        ) -> Any:
            tag(joint, fxremat.capture(joint, num_fwd_outputs=num_fwd_outputs, search=QUICK).plan(mem))
            tagged.extend(node for node in joint.graph.nodes if "recompute" in node.meta)  # noqa: B023
            return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

        try:
            step = joint_step(one, follow)
        except fxremat.BudgetTooSmall:
            assert mem in TOO_SMALL
            continue
        assert tagged
        assert all(map(torch.equal, step(), expected)), mem


def functions_of(text: str) -> dict[str, Any]:
    """The functions that planned text defines, which PyTorch runs as they are."""
    names: dict[str, Any] = {"torch": torch, "fxremat": fxremat, "inf": math.inf, "nan": math.nan}
    exec(text, names)
    return names


def opt(folder: Path, graph: fx.GraphModule, outputs: int | None, mem: str) -> dict[str, Any] | None:
    """Plan a file by `fxremat opt`; return the functions of the new file, None if the budget is too small."""
    given, planned = folder / "given.py", folder / "planned.py"
    given.write_text(to_text(graph, outputs))
    if main(["opt", str(given), "--mem", mem, "--effort", "0.2", "-o", str(planned)]) != 0:
        assert mem in TOO_SMALL
        return None
    return functions_of(planned.read_text())


def inputs_for(joint: fx.GraphModule, one: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs of a joint graph: of the forward, and gradients of its outputs."""
    given = [tensor.detach().clone() for tensor in inputs_of(one)]
    names = [node.name for node in joint.graph.find_nodes(op="placeholder")]
    late = [node for node in joint.graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]
    assert len(given) + len(late) == len(names)
    return given, [torch.ones(node.meta["val"].shape) for node in late]


@cases
def test_planned_text_has_the_bits_of_the_graph(name: str, budgets: tuple[str, ...], tmp_path: Path) -> None:
    one = case(name)
    joint, whole = joint_graph(one), full_step(one)
    descs: Any = joint.graph.output_node().meta["desc"]
    outputs = [type(desc).__name__ for desc in descs].index("GradAOTOutput")
    given, tangents = inputs_for(joint, one)
    torch.manual_seed(1)
    with torch.no_grad():
        expected = [each for each in joint(*given, *tangents) if each is not None]
    inputs = [tensor.detach().clone() for tensor in inputs_of(one)]
    of_step = run(whole, inputs)
    for mem in budgets:
        if made := opt(tmp_path, joint, outputs, mem):
            torch.manual_seed(1)
            with torch.no_grad():
                results = made["forward"](*inputs_for(joint, one)[0])
                found = [*results[:outputs], *made["backward"](*results[outputs:], *tangents)]
            assert all(map(torch.equal, [each for each in found if each is not None], expected)), mem
        if made := opt(tmp_path, whole, None, mem):
            torch.manual_seed(1)
            with torch.no_grad():
                found = made["forward"](*[tensor.detach().clone() for tensor in inputs_of(one)])
            assert all(map(torch.equal, found, of_step)), mem


def state_of(module: fx.GraphModule) -> list[Any]:
    """All that a graph consists of: nodes, arguments, the very objects in their `meta`, attributes, and code."""
    nodes = [
        (node, node.op, node.target, str(node.args), str(node.kwargs), {key: id(node.meta[key]) for key in node.meta})
        for node in module.graph.nodes
    ]
    metas = [{key: str(value) for key, value in node.meta.items()} for node in module.graph.nodes]
    return [nodes, metas, sorted(dict(module.named_children())), sorted(vars(module)), module.code, dict(module.meta)]


def test_the_given_graph_is_the_same_behind_every_door() -> None:
    from tests.compilers.test_opaque_ops import case as opaque

    joint, whole, called = joint_graph(case("experts")), full_step(case("experts")), joint_graph(opaque("cond"))
    before = [*map(state_of, (joint, whole, called))]
    inner = [state_of(each) for each in called.children() if isinstance(each, fx.GraphModule)]
    for graph in (joint, called):
        for within in (partitioner("min", search=QUICK), InductorPartitioner("min", search=QUICK)):
            within(graph, (), num_fwd_outputs=1)
        fxremat.capture(graph, num_fwd_outputs=1, search=QUICK).plan("min").check()
        to_text(graph, 1)
    step_pass("min", search=QUICK)(whole)
    with pytest.raises(fxremat.BudgetTooSmall):
        step_pass(16, search=QUICK)(whole)
    with pytest.raises(fxremat.CaptureError):
        partitioner("min", search=QUICK)(joint, (), num_fwd_outputs=3)
    assert [*map(state_of, (joint, whole, called))] == before
    assert [state_of(each) for each in called.children() if isinstance(each, fx.GraphModule)] == inner
    tag(joint, fxremat.capture(joint, num_fwd_outputs=1, search=QUICK).plan("min"))
    assert state_of(joint) != before[0]  # which was asked for


PLANNED = """
import sys
from fxremat.__main__ import main
given, out, *budgets = sys.argv[1:]
for mem in budgets:
    assert main(["opt", given, "--mem", mem, "--costs", "H100", "--effort", "0.2", "-o", out]) == 0
"""


@pytest.mark.long
def test_fxremat_opt_writes_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    """Budgets that were planned before, what is on disk, and the order of hashes make no difference."""
    given, written = tmp_path / "given.py", []
    given.write_text(to_text(joint_graph(case("experts")), 1))
    for number, budgets in enumerate((["min"], ["80%", "100%", "min"], ["80%"])):
        out = tmp_path / f"{number}.py"
        env = {**os.environ, "PYTHONHASHSEED": str(number), "PYTHONPATH": os.pathsep.join(sys.path)}
        env["FXREMAT_CACHE"] = str(tmp_path / f"cache{number}")
        command = [sys.executable, "-c", PLANNED, str(given), str(out), *budgets]
        done = subprocess.run(command, capture_output=True, env=env)
        assert done.returncode == 0, done.stderr
        written.append(out.read_bytes())
    assert written[0] == written[1] != written[2]
