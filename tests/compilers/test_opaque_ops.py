"""Ops that are not PyTorch's own kernels: custom ops, control flow, regions that are compiled once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import fxremat
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.0, progress=False)


@torch.library.custom_op("fxremat_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    """Return a multiple, as an op that PyTorch knows nothing of."""
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _note(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(lambda ctx, gradient: (scaled(gradient, ctx.factor), None), setup_context=_note)


@torch.compiler.nested_compile_region
def gelu_of(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(layer(x))


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.kind == "custom op":
                x = torch.tanh(scaled(layer(x), 2.0))
            elif self.kind == "region":
                x = gelu_of(layer, x)
            else:
                x = layer(x)
                x = torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() * 3, (x,))
        return x.square().mean()


@pytest.mark.parametrize("kind", ["custom op", "region", "cond"])
def test_they_are_kept_and_recomputed_like_others(kind: str) -> None:
    torch.manual_seed(0)
    plain, x = Stack(kind), torch.randn(64, 16)
    ours = fxremat.compile(copy.deepcopy(plain), mem="min", search=QUICK)
    steps = [step_of(model, lambda model=model: model(x), lambda loss: loss) for model in (ours, plain)]  # type: ignore[misc]
    assert differences(*steps) == []
    plan = ours.plan
    assert plan.check(runs=2).peak == plan.predicted_peak
    if kind != "region":  # which is so small that nothing is gained
        again = {str(plan.captured.nodes[op].target) for op in plan.program.repeated}
        assert {"custom op": "fxremat_tests.scaled.default", "cond": "cond"}[kind] in again


def test_what_pytorch_cannot_differentiate_is_said_as_pytorch_says_it() -> None:
    class Flex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, 128, 3, 2, 8).permute(2, 0, 3, 1, 4)
            return flex_attention(q, k, v).square().mean()  # type: ignore[union-attr]

    for costs in ("estimate", "H100"):
        with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
            fxremat.plan(Flex(), (torch.randn(2, 128, 16),), mem="100%", costs=costs, search=QUICK)
