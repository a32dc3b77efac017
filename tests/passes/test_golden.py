"""Each pass on a small graph, before and after, as text in tests/golden.

    python -m pytest tests/passes/test_golden.py --update-golden      writes them anew; review the diff
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

from benchmarks.capture import joint_graph
from fxremat.chains.schedule import Schedule
from fxremat.graphs.captured import read_joint
from fxremat.graphs.names import note_names
from fxremat.graphs.overwriting import called
from fxremat.linearize.lay_out import lay_out
from fxremat.ops.gathered import Sharing, gather
from fxremat.passes.lower import lower
from fxremat.passes.numbers import copy_views_by_number
from fxremat.passes.pipelines import PASSES, PIPELINES, normalize
from fxremat.step.order import rematerialize
from fxremat.torch_private import torch_release

pytestmark = pytest.mark.usefixtures("torch_ready")
GOLDEN = Path(__file__).parents[1] / "golden"


class Model(nn.Module):
    """A model for one pass: what it does to `x` of 4 rows and 3 columns, given a number."""

    def __init__(self, forward: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.25)
        self.drop_all = nn.Dropout(1.0)
        self.convolution = nn.Conv2d(3, 2, 2, padding=1)
        self.body = forward

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return self.body(self, x, number)


def row(m: Model, x: Tensor, number: Tensor) -> Tensor:
    place = number.item()
    torch._check(place >= 0)
    torch._check(place < 4)
    return m.linear(x)[place].sum()


def gathered(m: Model, x: Tensor, _: Tensor) -> Tensor:
    """Two reads of a parameter of 5 rows, of which this rank of 2 has 3, and one of another."""
    sharing = Sharing(5, torch.float32, None, "0", "", "avg", 1.0, 1.0, 0)
    once, again = (gather(m.linear.weight, None, True, *sharing) for _ in range(2))
    bias = gather(m.norm.bias, None, True, *sharing)
    return (x @ once.t() + x @ again.t() + bias).sum()


def reduced(m: Model, x: Tensor, _: Tensor) -> Tensor:
    started = torch.ops._c10d_functional.all_reduce(x, "sum", "0")
    return m.linear(torch.ops._c10d_functional.wait_tensor(started)).sum()


def channels_last(x: Tensor) -> Tensor:
    return x.view(1, 2, 2, 3).permute(0, 3, 1, 2)


MODELS: dict[str, Callable[[Model, Tensor, Tensor], Tensor]] = {
    "share": gathered,
    "wait_at_once": reduced,
    "drop_detach": lambda m, x, _: (m.linear(x).relu() * m.linear(x).detach()).sum(),
    "drop_running_statistics": lambda m, x, _: m.norm(m.linear(x)).sum(),
    "reshape_gradients": lambda m, x, _: m.linear(x).view(12),
    "copy_gradients_of_other_layouts": lambda m, x, _: F.group_norm(m.linear(x), 3),
    "lay_out_gradients": lambda m, x, _: m.convolution(channels_last(x)).sum(),
    "halve_exactly": lambda m, x, _: m.norm(m.linear(x)).sum(),
    "drop_as_eager": lambda m, x, _: m.drop_all(m.dropout(m.linear(x))).sum(),
    "copy_views_by_number": row,
    "convolve_channels_last": lambda m, x, _: m.convolution(x.view(1, 3, 2, 2)).relu().flatten(1).square().sum(),
    "lower": lambda m, x, _: m.linear(m.dropout(m.linear(x)).tanh()).sum(),
    "note_overwriting": lambda m, x, _: (m.linear(x).relu() + m.linear(x).tanh()).sum(),
}


def text_of(graph: fx.Graph) -> str:
    """One line a node: its name, what it calls with which arguments, and the shape of what it shows."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = f" : {list(value.shape)}" if isinstance(value, Tensor) else ""
        made, args, kwargs = called(node)
        options = [f"{key}={value}" for key, value in kwargs.items()]
        target = made if isinstance(made, str) else getattr(made, "__name__", str(made))
        arguments = ["..." if isinstance(argument, str) else str(argument) for argument in args]
        lines.append(f"{node.name} = {target}({', '.join([*arguments, *options])}){shape}")
    return "\n".join(lines) + "\n"


def check(name: str, found: str, *, update: bool) -> None:
    file = GOLDEN / f"{name}.txt"
    if update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    wanted = file.read_text()
    difference = "\n".join(difflib.unified_diff(wanted.splitlines(), found.splitlines(), "golden", "now", lineterm=""))
    assert not difference, f"{difference}\n--update-golden writes what is now"


@contextlib.contextmanager
def two_ranks() -> Iterator[None]:
    """A job of two ranks, of which this process is the first, and whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def joint_of(name: str) -> tuple[fx.GraphModule, int]:
    module, outputs = joint_graph(Model(MODELS[name]).train(), torch.ones(4, 3), torch.tensor(2))
    inputs = [node for node in module.graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], Tensor)]
    note_names([(node, "convolution.weight" if node.meta["val"].dim() == 4 else None) for node in inputs], "Model")
    return module, outputs


# a CPU captures no Triton kernel, `keep_checks` changes only what is known of numbers, and recurrent layers, which are
# made ops in dynamo's graph, have their own tests (`tests/runtime/test_recurrent.py`)
ELSEWHERE = ("launch_as_ops", "keep_checks", "sum_recurrent_gradients")
CAPTURED_HERE = [name for name in PIPELINES["eager"] if name not in ELSEWHERE]


@pytest.mark.parametrize("name", [*CAPTURED_HERE, "convolve_channels_last"])
def test_a_pass_rewrites_its_graph_as_reviewed(name: str, pytestconfig: pytest.Config) -> None:
    rewrite = PASSES[name].rewrite
    if rewrite is copy_views_by_number and torch_release() < (2, 13):
        pytest.skip("torch 2.11 does not check that the number is a place")
    with two_ranks():
        module, _ = joint_of(rewrite.__name__)
        check_pass(rewrite, module, pytestconfig)


def check_pass(
    rewrite: Callable[[fx.Graph], None], module: fx.GraphModule, pytestconfig: pytest.Config
) -> None:
    before = text_of(module.graph)
    rewrite(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    after = text_of(module.graph)
    assert after != before, "a graph for a pass is one that it changes"
    difference = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", n=99, lineterm="")
    check(rewrite.__name__, "\n".join(difference) + "\n", update=pytestconfig.getoption("--update-golden"))


def test_lowering_emits_recomputations_as_reviewed(pytestconfig: pytest.Config) -> None:
    module, outputs = joint_of("lower")
    joint = read_joint(normalize(module), outputs)
    tanh = next(op.index for op in joint.forward_ops if op.name == "tanh")
    layout = lay_out(joint, [tanh])
    program = rematerialize(layout, Schedule.parse("Fck1 Fall2 B2 Fall1 B1"))
    forward, backward = lower(program)
    found = f"forward\n{text_of(forward.graph)}\nbackward\n{text_of(backward.graph)}"
    check("lower", found, update=pytestconfig.getoption("--update-golden"))
