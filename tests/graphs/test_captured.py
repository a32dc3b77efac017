"""The joint graph as ops and values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from benchmarks.capture import joint_graph
from fxremat.graphs.batch_norm import STATISTICS, again_call, again_inputs
from fxremat.graphs.captured import _has_places, read_joint
from fxremat.graphs.cudnn_batch_norm import CUDNN
from fxremat.passes.pipelines import PIPELINES, normalize
from fxremat.step.step_graph import Origin
from tests.dags import batch, capture

pytestmark = pytest.mark.usefixtures("torch_ready")
aten = torch.ops.aten


class Mixed(nn.Module):
    """BatchNorm, dropout, views, a mask that needs no gradient, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = (y > 0).float()
        x = F.dropout(self.norm(self.linear(x)), 0.2) * mask
        left, right = x.split(4, dim=1)
        return (self.linear(torch.cat([right, left], 1)) @ self.linear.weight.t()).square().mean()


def test_views_are_not_values_and_every_value_has_one_maker() -> None:
    joint = capture(Mixed(), *batch())
    makers = [value.producer for value in joint.values if value.origin in (Origin.FORWARD, Origin.BACKWARD)]
    assert all(maker is not None for maker in makers)
    views = {"split", "t", "view", "expand", "getitem", "detach"}
    assert views.isdisjoint(
        str(joint.nodes[op.index].target).split(".")[1] for op in joint.ops if "." in str(joint.nodes[op.index].target)
    )


def test_what_needs_no_gradient_is_anchored_and_dropout_is_random() -> None:
    joint = capture(Mixed(), *batch())
    assert {op.name for op in joint.forward_ops if op.anchored} >= {"gt", "_to_copy"}
    assert [op.name for op in joint.ops if op.random] == ["native_dropout"]


def test_running_statistics_are_updates_that_a_second_execution_leaves_alone() -> None:
    joint = capture(Mixed(), *batch())
    norm = next(op for op in joint.forward_ops if joint.nodes[op.index].target is STATISTICS)
    assert len(joint.updates) == 3  # mean, variance, and the count of batches
    assert len(norm.reads) - len(norm.again_reads) == 2
    assert len(norm.writes) - len(norm.again_writes) == 2
    node = joint.nodes[norm.index]
    assert again_call(node) == (STATISTICS, (node.args[0], None, None, *node.args[3:]))


def test_a_whole_batch_norm_runs_again_without_running_statistics() -> None:
    module, outputs = joint_graph(Mixed(), *batch())
    joint = read_joint(normalize(module, PIPELINES["any device"]), outputs)
    norm = next(op for op in joint.forward_ops if "batch_norm" in op.name)
    assert len(norm.reads) - len(norm.again_reads) == 2
    assert len(norm.writes) - len(norm.again_writes) == 2
    assert again_call(joint.nodes[norm.index])[0] is aten._native_batch_norm_legit.no_stats


def test_cudnn_batch_norm_runs_again_without_running_statistics() -> None:
    graph = fx.Graph()
    x, weight, bias, mean, var = (graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var"))
    node = graph.call_function(CUDNN, (x, weight, bias, mean, var, 0.1, 1e-5))
    assert again_call(node)[1] == (x, weight, bias, None, None, 0.1, 1e-5)
    assert again_inputs(node) == [x, weight, bias]


def test_a_tied_weight_has_one_gradient() -> None:
    joint = capture(Mixed(), *batch())
    returned = [value for value in joint.backward_outputs if value is not None]
    assert len(returned) == len(list(Mixed().parameters()))
    assert len(joint.returned) == len(returned)


@pytest.mark.parametrize(
    ("tensor", "has"),
    [
        (torch.ones(2, 3).t(), True),
        (torch.ones(2, 1, 3)[:, :, 1:], True),
        (torch.ones(1).expand(3), False),
        (torch.ones(9).as_strided((3, 3), (2, 2)), False),
        (torch.ones(()), True),
    ],
)
def test_each_element_has_a_place_of_its_own(tensor: torch.Tensor, has: bool) -> None:
    assert _has_places(tensor) is has
