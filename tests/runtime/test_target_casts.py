"""Autocast as CUDA casts, for plans that a CPU makes for a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat.cost.devices import Device
from fxremat.runtime.target_casts import LOWER, PROMOTED, SINGLE, SINGLE_UNLESS_ASKED, casts_of
from fxremat.settings import Search
from fxremat.torch_private import autocast_ops

H100, CPU = Device.named("H100"), Device.named("cpu")


class Under(nn.Module):
    """A linear layer and a function of its output, under autocast to bfloat16."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.function(self.linear(x)).sum()


def entropy(y: Tensor) -> Tensor:
    """Return the cross entropy of class 0."""
    return F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))


def type_of(function: Callable[[Tensor], Tensor], op: str, costs: str) -> str:
    """Return the type of the result of an op in the planned step."""
    plan = fxremat.plan(Under(function), (torch.randn(4, 8),), mem="100%", costs=costs, search=Search(seconds=0))
    (found,) = {node.meta["val"].dtype for node in plan.captured.nodes if str(node.target).startswith(op)}
    return str(found).removeprefix("torch.")


def test_every_op_that_cuda_alone_casts_has_a_rule() -> None:
    tables = [LOWER, SINGLE, SINGLE_UNLESS_ASKED, PROMOTED]
    assert sum(map(len, tables)) == len(frozenset().union(*tables))
    cuda_alone = autocast_ops("AutocastCUDA").keys() - autocast_ops("AutocastCPU").keys()
    by_name = {op for op in cuda_alone if "Dimname" in op or ".dimname" in op or ".names" in op}  # up to torch 2.11
    assert cuda_alone - by_name <= frozenset().union(*tables)


@pytest.mark.parametrize(
    ("function", "op", "here", "there"),
    [
        (lambda y: torch.softmax(y, -1), "aten._softmax.", "bfloat16", "float32"),
        (lambda y: torch.exp(y), "aten.exp.", "bfloat16", "float32"),
        (entropy, "aten._log_softmax.", "float32", "bfloat16"),
        (lambda y: torch.softmax(y, -1, dtype=torch.bfloat16), "aten._softmax.", "bfloat16", "bfloat16"),
        (lambda y: torch.einsum("ij,kj->ik", y.float(), y.float()), "aten.bmm", "bfloat16", "bfloat16"),
        (lambda y: torch.addcmul(y.float(), y, y), "aten.addcmul", "float32", "float32"),
    ],
    ids=["softmax", "exp", "cross entropy", "softmax in a type", "einsum", "addcmul"],
)
def test_results_have_the_types_that_cuda_gives_them(
    function: Callable[[Tensor], Tensor], op: str, here: str, there: str
) -> None:
    assert type_of(function, op, "cpu") == here
    assert type_of(function, op, "H100") == there
    assert type_of(function, op, "estimate") == here


def test_autocast_is_as_before_afterwards() -> None:
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="inside"), casts_of(H100):
        raise ValueError("inside")
    with casts_of(CPU), torch.autocast("cpu", torch.bfloat16):
        assert torch.softmax(x, -1).dtype is torch.bfloat16
        assert F.cross_entropy(x, torch.zeros(4, dtype=torch.long)).dtype is torch.float32
    assert torch.softmax(x, -1).dtype is torch.bfloat16


def test_a_compiled_model_runs_with_the_casts_of_its_own_device() -> None:
    """Costs of another device change the plan alone."""
    torch.manual_seed(0)
    model, x = Under(lambda y: torch.softmax(y, -1).exp()), torch.randn(4, 8)
    plain = model(x)
    compiled = fxremat.compile(model, mem="100%", costs="H100", search=Search(seconds=0))
    assert torch.equal(compiled(x), plain)
