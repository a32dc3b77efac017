"""Ops whose results lie alike, in whatever layout the gradient comes that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat.graphs.handed_in import OWN_LAYOUT, OWN_LAYOUT_ON_CPU, PRODUCTS, layout_of
from fxremat.settings import Search

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("torch_ready")


def layouts(x: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in several layouts."""
    yield x
    places = list(reversed(range(x.dim())))
    yield x.permute(places).contiguous().permute(places)
    if x.dim() == 4:
        yield x.to(memory_format=torch.channels_last)


def of_convolution(op: Any) -> Iterator[tuple[Callable[[Tensor], Any], Tensor]]:
    for groups in (1, 4):
        for weight in layouts(torch.randn(4, 4 // groups, 3, 3)):
            for x in layouts(torch.randn(2, 4, 6, 6)):
                for transposed in (False, True):
                    rest = [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups
                    y = aten.convolution(x, weight, None, *rest)
                    yield lambda g, x=x, w=weight, r=rest: op(g, x, w, [4], *r, [True, True, True]), y


def of_batch_norm(op: Any) -> Iterator[tuple[Callable[[Tensor], Any], Tensor]]:
    ones = torch.ones(4)
    for x in (*layouts(torch.randn(2, 4, 6, 6)), *layouts(torch.randn(8, 4))):
        for training in (True, False):
            y, *saved = aten.native_batch_norm(x, ones, ones, ones, ones, training, 0.1, 1e-5)
            yield lambda g, x=x, s=saved, t=training: op(g, x, ones, ones, ones, *s, t, 1e-5, [True, True, True]), y


def of_layer_norm(op: Any) -> Iterator[tuple[Callable[[Tensor], Any], Tensor]]:
    ones = torch.ones(6)
    for x in layouts(torch.randn(2, 4, 6)):
        y, *saved = aten.native_layer_norm(x, [6], ones, ones, 1e-5)
        yield lambda g, x=x, s=saved: op(g, x, [6], *s, ones, ones, [True, True, True]), y


def of_softmax(op: Any) -> Iterator[tuple[Callable[[Tensor], Any], Tensor]]:
    for y in layouts(torch.randn(2, 4, 6).softmax(1)):
        for dim in range(3):
            yield lambda g, y=y, dim=dim: op(g, y, dim, torch.float32), y


def of_pooling(op: Any) -> Iterator[tuple[Callable[[Tensor], Any], Tensor]]:
    for x in layouts(torch.randn(2, 4, 6, 6)):
        if op is aten.max_pool2d_with_indices_backward.default:
            y, places = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
            yield lambda g, x=x, p=places: op(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, p), y
        elif op is aten.avg_pool2d_backward.default:
            yield lambda g, x=x: op(g, x, [2, 2], [2, 2], [0, 0], False, True, None), aten.avg_pool2d(x, [2, 2])
        else:
            yield lambda g, x=x: op(g, x), aten._adaptive_avg_pool2d(x, [2, 2])


def of_attention(op: Any) -> Iterator[tuple[Callable[[Tensor], Any], Tensor]]:
    for q in layouts(torch.randn(2, 4, 16, 8)):
        y, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
        yield lambda g, q=q, y=y, s=sums: op(g, q, q, q, y, s, 0.0, False), y


def of_embedding(op: Any) -> Iterator[tuple[Callable[[Tensor], Any], Tensor]]:
    yield lambda g: op(g, torch.zeros(2, 4, dtype=torch.long), 5, -1, False), torch.randn(2, 4, 6)


def of_product(op: Any) -> Iterator[tuple[Callable[[Tensor], Any], Tensor]]:
    shape = (2, 4, 4) if "bmm" in str(op) else (4, 4)
    for x in layouts(torch.randn(shape)):
        before = (torch.zeros(shape),) if "add" in str(op) else ()
        yield lambda g, x=x, b=before: op(*b, g, x), x


CALLS = {
    "convolution": of_convolution,
    "batch_norm": of_batch_norm,
    "layer_norm": of_layer_norm,
    "softmax": of_softmax,
    "pool2d": of_pooling,
    "attention": of_attention,
    "embedding": of_embedding,
    "mm": of_product,
}


@pytest.mark.parametrize("op", sorted(PRODUCTS | OWN_LAYOUT | OWN_LAYOUT_ON_CPU, key=str), ids=str)
def test_results_lie_alike_for_gradients_in_any_layout(op: Any) -> None:
    (calls,) = (of for name, of in CALLS.items() if name in str(op))
    for call, y in calls(op):
        seen = set()
        for gradient in (*layouts(torch.randn(y.shape)), torch.ones(()).expand(y.shape)):
            made = call(gradient)
            seen.add(tuple(map(layout_of, made if isinstance(made, tuple) else (made,))))
        assert len(seen) == 1


def test_gradients_that_are_laid_out_by_a_convolution_are_not_counted_as_copied() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for number in range(2):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 3 if number else 16, 3, padding=1)]
    model: nn.Module = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    ours = fxremat.compile(model, "min", search=Search(seconds=0.0))
    x, target = torch.randn(2, 4, 3, 24, 24)

    def step() -> None:
        nn.functional.mse_loss(ours(x), target).backward()

    for _ in range(4):
        step()
    ours.zero_grad(set_to_none=True)
    peak = meter.peak_bytes(step)
    assert peak <= ours.plan.predicted_peak <= 1.02 * peak
