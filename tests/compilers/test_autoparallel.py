"""AutoParallel's call of the partition function: a joint graph with collectives, on one rank of a simulated job.

The collectives of torch's fake process group send nothing: a gather repeats the rank's own part, and a reduction
returns it. Bits can be compared, then, and memory is that of real collectives, but for what these hold themselves.
"""

from __future__ import annotations

import hashlib
import operator
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx, nn
from torch._functorch.partitioners import default_partition

import fxremat
from benchmarks import meter
from fxremat.passes import partitioner
from tests.compilers.models import Case, joint_graph, joint_step

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.skipif(
        not hasattr(funcol, "all_gather_single"), reason="collectives have gradients since torch 2.13"
    ),
]

RANKS = 8
WIDTH, HIDDEN, ROWS = 64, 32, 32  # of one rank
BUDGETS = ("100%", "60%", "min")
QUICK = fxremat.Search(seconds=1, progress=False)
WAIT = torch.ops._c10d_functional.wait_tensor.default


class TensorParallel(nn.Module):
    """MLPs whose hidden units are divided among the ranks, as are the rows between one MLP and the next."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(blocks))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            rows = funcol.all_gather_single(norm(x), 0, group)
            x = x + funcol.reduce_scatter_single(down(nn.functional.gelu(up(rows))), "sum", 0, group)
        return funcol.all_reduce(x.square().mean(), "sum", group)


@contextmanager
def simulated(rank: int) -> Iterator[Case]:
    """Be one rank of a job without others; yield its model and data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        torch.manual_seed(0)
        yield Case(TensorParallel(), torch.randn(ROWS, WIDTH))
    finally:
        dist.destroy_process_group()


def test_bits_are_those_of_no_recomputation_and_budgets_hold() -> None:
    with simulated(rank=0) as case:
        expected = joint_step(case, default_partition)()
        for mem in BUDGETS:
            within = partitioner(mem, costs="measure", search=QUICK)
            step = joint_step(case, within)
            assert all(map(torch.equal, step(), expected)), mem
            plan = within.plan
            assert plan is not None
            plan.check()
            assert bool(plan.program.repeated) == (mem != "100%")
            measured = meter.peak_bytes(lambda step=step: step() and None)  # type: ignore[misc]
            assert plan.predicted_peak * 0.98 <= measured <= plan.predicted_peak <= plan.budget, mem


def test_collectives_are_ops_of_pytorch_in_the_given_order() -> None:
    with simulated(rank=0) as case:
        joint = joint_graph(case)
        given = [node.name for node in joint.graph.nodes if _is_start(node)]
        for mem in BUDGETS:
            forward, backward = partitioner(mem, costs="H100", search=QUICK)(joint, (), num_fwd_outputs=1)
            nodes = [node for graph in (forward, backward) for node in graph.graph.nodes]
            ops = [node for node in nodes if node.op == "call_function"]
            assert all(isinstance(op.target, torch._ops.OpOverload) or op.target is operator.getitem for op in ops)
            assert all("val" in op.meta for op in ops)
            starts = [op for op in ops if _is_start(op)]
            assert [op.name for op in starts if "__r" not in op.name] == given
            assert all([user.target for user in start.users] == [WAIT] for start in starts)


def test_a_wait_is_tagged_like_its_start() -> None:
    with simulated(rank=0) as case:
        joint = joint_graph(case)
        fxremat.passes.tag(joint, fxremat.capture(joint, num_fwd_outputs=1, search=QUICK).plan("60%"))
        forward = [node for node in joint.graph.nodes if _is_start(node) and "recompute" in node.meta]
        assert len({node.meta["recompute"] for node in forward}) == 2
        for start in forward:
            assert [user.meta["recompute"] for user in start.users] == [start.meta["recompute"]]


def _is_start(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not WAIT


PLANNED = """
import sys
from tests.compilers.test_autoparallel import digests
print(*digests(int(sys.argv[1])))
"""


def digests(rank: int) -> list[str]:
    """Return, for each budget, a digest of the text of both graphs."""
    found = []
    with simulated(rank) as case:
        joint = joint_graph(case)
        for mem in BUDGETS:
            graphs = partitioner(mem, costs="H100", search=QUICK)(joint, (), num_fwd_outputs=1)
            text = "".join(str(graph.graph) for graph in graphs)
            found.append(hashlib.sha256(text.encode()).hexdigest())
    return found


def test_ranks_plan_the_same_without_asking_each_other() -> None:
    """A fake process group cannot be asked."""
    found = []
    for rank in range(2):
        env = {**os.environ, "PYTHONHASHSEED": str(rank), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PLANNED, str(rank)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found[0] == found[1]
    assert len(set(found[0])) == len(BUDGETS)
