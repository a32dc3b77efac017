"""Backward ops that overwrite what they alone read: the same bits, less memory, and never what somebody else holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxremat.graphs.accounting import costs_from
from fxremat.graphs.captured import Captured
from fxremat.graphs.collectives import Collective
from fxremat.graphs.overwriting import BACKWARDS, METHODS, SELF_FIRST, overwritten
from fxremat.step.costs import OpCost
from fxremat.step.step_graph import Origin
from tests.dags import capture

pytestmark = pytest.mark.usefixtures("torch_ready")

SHAPES = [(3, 5), (64, 33), (2, 3, 8, 8)]
OTHERS: dict[Any, Callable[[Tensor], tuple[Any, ...]]] = {
    torch.ops.aten.add.Tensor: lambda x: (x,),
    torch.ops.aten.mul.Tensor: lambda x: (x,),
    torch.ops.aten.div.Tensor: lambda x: (x,),
    torch.ops.aten.neg.default: lambda x: (),
    torch.ops.aten.threshold_backward.default: lambda x: (x, 0),
    torch.ops.aten.gelu_backward.default: lambda x: (x,),
    torch.ops.aten.silu_backward.default: lambda x: (x,),
    torch.ops.aten.tanh_backward.default: lambda x: (x.tanh(),),
    torch.ops.aten.sigmoid_backward.default: lambda x: (x.sigmoid(),),
    torch.ops.aten.hardtanh_backward.default: lambda x: (x, -1.0, 1.0),
    torch.ops.aten.leaky_relu_backward.default: lambda x: (x, 0.1, False),
    torch.ops.aten.elu_backward.default: lambda x: (1.0, 1.0, 1.0, False, x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", [op for op in (*METHODS, *BACKWARDS) if not isinstance(op, Collective)], ids=str)
def test_overwriting_gives_the_same_bits_in_the_same_storage(op: Any, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for layout in (
            (torch.contiguous_format, torch.channels_last) if len(shape) == 4 else (torch.contiguous_format,)
        ):
            generator = torch.Generator().manual_seed(0)
            gradient, x = (
                torch.randn(shape, generator=generator).to(dtype).to(memory_format=layout) for _ in range(2)
            )
            rest = OTHERS[op](x)
            wanted, storage = op(gradient, *rest), gradient.data_ptr()
            if op in METHODS:
                found = METHODS[op](gradient, *rest)
            else:
                found = BACKWARDS[op](gradient, *rest, grad_input=gradient)
            assert found.data_ptr() == storage
            assert torch.equal(found, wanted)
            assert found.stride() == wanted.stride()


@pytest.mark.parametrize("op", [op for op in (*METHODS, *BACKWARDS) if not isinstance(op, Collective)], ids=str)
def test_a_new_result_lies_as_the_first_operand_does_or_as_the_other(op: Any) -> None:
    rows, columns = torch.randn(3, 5), torch.randn(5, 3).t()
    for gradient, x in ((rows, columns), (columns, rows)):
        rest = [item if not isinstance(item, Tensor) or item.stride() == x.stride() else x for item in OTHERS[op](x)]
        assert op(gradient, *rest).stride() == (x if op in SELF_FIRST else gradient).stride()


def overwriting(joint: Captured) -> dict[str, fx.Node]:
    """The operand that each op overwrites, by the op's name before it did: `add`, `threshold_backward`."""
    return {
        str(node.target).split(".")[1]: taken for node in joint.nodes if (taken := overwritten(node)) is not None
    }


class Residual(nn.Module):
    """x + relu(linear(x)), twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return x.square().mean()


def test_sums_of_gradients_and_relus_overwrite_the_branch_that_ends_in_them() -> None:
    joint = capture(Residual(), torch.ones(4, 8))
    found = [op for op in joint.ops if op.overwrites is not None]
    assert all(op.backward for op in found)
    assert "add" in overwriting(joint)
    for op in found:
        taken = op.overwrites
        assert taken is not None
        assert joint.values[taken].origin is Origin.BACKWARD
        assert [other.index for other in joint.ops if taken in other.reads] == [op.index]
        assert taken not in joint.returned


def test_a_linear_layer_s_view_of_its_gradient_is_overwritten_too() -> None:
    class Sequences(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.unflatten(0, (2, 2)))

    assert "add" in overwriting(capture(Sequences(), torch.ones(4, 8, requires_grad=True)))


def test_a_gradient_that_autograd_hands_in_is_left_alone() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.tanh(x)
            return y, y.square().sum()

    joint = capture(Sum(), torch.ones(4, 8, requires_grad=True))
    (total,) = [joint.nodes[op.index] for op in joint.backward_ops if "aten.add" in str(joint.nodes[op.index].target)]
    assert set(joint.tangent_nodes) & set(total.all_input_nodes)
    assert overwritten(total) not in joint.tangent_nodes


def test_what_is_read_twice_or_shown_in_part_is_left_alone() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left, right = torch.cat([torch.tanh(x), torch.sin(x)], 1).relu().split(8, 1)
            return (left * right).sum() + x.exp().sum()

    joint = capture(Shared(), torch.ones(4, 8, requires_grad=True))
    readers = {v.index: [op.index for op in joint.ops if v.index in op.reads] for v in joint.values}
    taken = {op.index: joint.value_of[t] for op in joint.ops if (t := overwritten(joint.nodes[op.index])) is not None}
    assert taken
    assert all(readers[value] == [op] for op, value in taken.items())


@pytest.mark.parametrize(("device", "block"), [("cpu", 1), ("cuda", 512)])
def test_an_op_that_overwrites_needs_no_memory_for_its_result(device: str, block: int) -> None:
    joint = capture(Residual(), torch.ones(4, 8))
    costs = costs_from(joint, [OpCost(1.0, 0)] * len(joint.ops), torch.device(device))
    op = next(op for op in joint.ops if op.overwrites is not None)
    (result,) = op.writes
    rounded = -(-joint.values[result].bytes // block) * block
    assert costs.sizes.values[result] == rounded
    assert costs.sizes.workspace[op.index] == -rounded
