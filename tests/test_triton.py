"""Kernels of the user in Triton: recomputed like any op, with the same bits, within the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat.settings import Search

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("torch_ready")]


@triton.jit
def _squares_kernel(x, y, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < count
    values = tl.load(x + places, mask=inside)
    tl.store(y + places, values * values, mask=inside)


def _squares(x: Tensor) -> Tensor:
    y, count = torch.empty_like(x), x.numel()
    _squares_kernel[(triton.cdiv(count, 1024),)](x, y, count, block=1024)
    return y


class _Squares(torch.autograd.Function):
    """A kernel that is launched in a function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Square."""
        ctx.save_for_backward(x)
        return _squares(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Double."""
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def _launched(x: Tensor) -> Tensor:
    squares: Tensor = _Squares.apply(x)
    return squares


class _SquaresInPlace(_Squares):
    """The kernel reads and writes the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Square a copy."""
        ctx.save_for_backward(x)
        y, count = x * 1.0, x.numel()
        _squares_kernel[(triton.cdiv(count, 1024),)](y, y, count, block=1024)
        return y


def _launched_in_place(x: Tensor) -> Tensor:
    squares: Tensor = _SquaresInPlace.apply(x)
    return squares


_tuned_kernel = triton.autotune([triton.Config({"block": 512}), triton.Config({"block": 1024})], key=["count"])(
    _squares_kernel
)


class _SquaresTuned(_Squares):
    """The first launch of the kernel tries configurations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Square."""
        ctx.save_for_backward(x)
        y, count = torch.empty_like(x), x.numel()
        _tuned_kernel[lambda meta: (triton.cdiv(count, meta["block"]),)](x, y, count)
        return y


def _tuned(x: Tensor) -> Tensor:
    squares: Tensor = _SquaresTuned.apply(x)
    return squares


@torch.library.triton_op("fxremat_tests::squares", mutates_args={})
def _squares_op(x: Tensor) -> Tensor:
    y, count = torch.empty_like(x), x.numel()
    torch.library.wrap_triton(_squares_kernel)[(triton.cdiv(count, 1024),)](x, y, count, block=1024)
    return y


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _double(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return 2 * x * gradient


_squares_op.register_autograd(_double, setup_context=_keep)


class Layers(nn.Module):
    """Linear layers with squares between them."""

    def __init__(self, squares: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.squares = squares
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = torch.sigmoid(self.squares(layer(x)).tanh())
        return x.mean()


@pytest.mark.parametrize(
    "squares",
    [_launched, _squares_op, _launched_in_place, _tuned],
    ids=["launched", "triton_op", "in place", "tuned"],
)
def test_a_kernel_in_triton_is_recomputed(squares: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Layers(squares).cuda()
    x = torch.randn(4096, 256, device="cuda")

    def gradients(module: nn.Module) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        module(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients(model)
    try:
        compiled = fxremat.compile(model, mem=1, example_inputs=(x,), search=Search(progress=False))
    except fxremat.BudgetTooSmall as error:
        compiled = fxremat.compile(model, mem=error.minimum, example_inputs=(x,), search=Search(progress=False))
    assert compiled.plan.predicted_time > compiled.plan.keep_all_time  # something is recomputed
    ours = gradients(compiled)
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))
    model.zero_grad(set_to_none=True)
    measured = meter.model_peak(compiled, (x,), "cuda")
    assert measured <= compiled.plan.budget
    assert abs(compiled.plan.predicted_peak - measured) <= 0.02 * measured
