"""Ops that a region cannot cut as they stand, written out: the same bits where promised, else equal up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxremat.slices.explicit import make_explicit
from fxremat.slices.rules import name_of
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")

aten = torch.ops.aten
ROWS, CLASSES = 7, 11
Run = Callable[..., Any]


def written_out(run: Run, *inputs: torch.Tensor) -> fx.GraphModule:
    """The graph of a function with all that `make_explicit` writes out."""
    module = make_fx(run, tracing_mode="fake")(*inputs)
    make_explicit(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def names(module: fx.GraphModule) -> list[str]:
    return [name_of(node) for node in module.graph.nodes if node.op == "call_function"]


def assert_values_are_shown(module: fx.GraphModule, *inputs: torch.Tensor) -> None:
    """Every node has a fake value of the shape, type and layout that it makes."""
    recorded = fx.Interpreter(module, garbage_collect_values=False)
    recorded.run(*inputs)
    for node in module.graph.nodes:
        made, shown = recorded.env.get(node), node.meta.get("val")
        if isinstance(made, torch.Tensor) and node.op == "call_function":
            assert (made.shape, made.dtype, made.stride()) == (shown.shape, shown.dtype, shown.stride()), node


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).log_softmax(1)


def targets(*shape: int, ignored: int = -100) -> torch.Tensor:
    """Classes, some of them ignored."""
    found = torch.randint(0, CLASSES, shape)
    return torch.where(torch.rand(shape) < 0.3, ignored, found)


def nll(reduction: int, ignored: int = -100) -> Run:
    """The loss and the weight of its targets."""

    def loss(x: torch.Tensor, y: torch.Tensor, *weight: torch.Tensor) -> Any:
        op = aten.nll_loss_forward if x.dim() == 2 else aten.nll_loss2d_forward
        return op(x, y, weight[0] if weight else None, reduction, ignored)

    return loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("ignored", [-100, 3, pytest.param(-1, marks=pytest.mark.long)])
@pytest.mark.parametrize("rows", [ROWS, 1003, pytest.param(1, marks=pytest.mark.long)])
def test_a_loss_without_class_weights_keeps_its_bits(
    dtype: torch.dtype, reduction: int, ignored: int, rows: int
) -> None:
    x, y = logits(rows, CLASSES, dtype=dtype), targets(rows, ignored=ignored)
    run = nll(reduction, ignored)
    module = written_out(run, x, y)
    for ours, plain in zip(module(x, y), run(x, y), strict=True):
        assert same(ours, plain)
    assert_values_are_shown(module, x, y)


@pytest.mark.parametrize("reduction", [1, 2])
def test_a_loss_of_images_keeps_its_bits(reduction: int) -> None:
    x, y = logits(3, CLASSES, 4, 5), targets(3, 4, 5)
    run = nll(reduction)
    module = written_out(run, x, y)
    for ours, plain in zip(module(x, y), run(x, y), strict=True):
        assert same(ours, plain)


@pytest.mark.parametrize("reduction", [1, 2])
def test_a_loss_whose_targets_are_all_ignored_is_that_of_plain(reduction: int) -> None:
    x, y, weight = logits(ROWS, CLASSES), torch.full((ROWS,), -100), torch.rand(CLASSES)
    for inputs in ((x, y), (x, y, weight)):
        run = nll(reduction)
        for ours, plain in zip(written_out(run, *inputs)(*inputs), run(*inputs), strict=True):
            torch.testing.assert_close(ours, plain, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("shape", [(1003,), (3, 4, 5)])
def test_a_loss_with_class_weights_is_as_near_to_the_exact_one_as_plain(
    reduction: int, shape: tuple[int, ...]
) -> None:
    x, y, weight = logits(shape[0], CLASSES, *shape[1:]), targets(*shape), torch.rand(CLASSES)
    run = nll(reduction)
    module = written_out(run, x, y, weight)
    exact = run(x.double(), y, weight.double())
    for ours, plain, right in zip(module(x, y, weight), run(x, y, weight), exact, strict=True):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, right.float(), rtol=2e-7, atol=0)
        torch.testing.assert_close(ours, plain, rtol=2e-6, atol=0)
    assert_values_are_shown(module, x, y, weight)


def test_a_loss_of_one_row_without_a_dimension_and_one_without_a_sum_stay() -> None:
    assert names(written_out(nll(1), logits(1, CLASSES)[0:1], targets(1))).count("nll_loss_forward") > 1
    assert names(written_out(nll(0), logits(ROWS, CLASSES), targets(ROWS)))[0] == "nll_loss_forward"
    alone = written_out(
        lambda x, y: aten.nll_loss_forward(x, y, None, 1, -100), torch.randn(CLASSES), torch.tensor(2)
    )
    assert names(alone).count("nll_loss_forward") == 1


LOSSES: dict[str, Run] = {
    "mse": F.mse_loss,
    "smooth l1": lambda x, y, **how: F.smooth_l1_loss(x, y, beta=0.5, **how),
    "huber": lambda x, y, **how: F.huber_loss(x, y, delta=0.5, **how),
    "binary": lambda x, y, **how: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **how),
    "soft margin": F.soft_margin_loss,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_elements_and_their_gradients_are_equal_up_to_rounding(name: str, reduction: str) -> None:
    x, y = torch.randn(9, 31), torch.randn(9, 31)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        loss = LOSSES[name](x, y, reduction=reduction)
        return loss.detach(), *torch.autograd.grad(3 * loss.sum(), x)

    module = written_out(step, x, y)
    for ours, plain in zip(module(x, y), step(x, y), strict=True):
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype)
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    assert_values_are_shown(module, x, y)
    left = [n for n in module.graph.nodes if "loss" in n.name or "entropy" in n.name]
    assert left
    for node in left:
        forward = not name_of(node).endswith("_backward")
        assert 1 not in node.args[2:4] if forward else 1 not in node.args[3:5]  # no mean is left


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mean_is_a_sum_over_the_number_of_elements(dtype: torch.dtype) -> None:
    x = torch.randn(17, 5).to(dtype)
    module = written_out(lambda x: x.mean(), x)
    assert "mean" not in names(module)
    assert module(x).dtype == dtype
    torch.testing.assert_close(module(x), x.mean())
    assert_values_are_shown(module, x)


def test_a_mean_of_one_dimension_stays() -> None:
    """There is nothing large that it could be a slice of."""
    assert names(written_out(lambda x: x.mean(), torch.randn(17))) == ["mean"]


@pytest.mark.parametrize(
    ("fill", "number"),
    [
        (lambda x: x.new_zeros(2, 3), 0),
        (lambda x: x.new_ones(2, 3), 1),
        (lambda x: x.new_full((2, 3), 1.5), 1.5),
        (lambda x: aten.new_zeros(x, [2, 3], dtype=torch.int64), 0),
    ],
)
def test_a_fill_takes_its_type_from_nothing(fill: Run, number: float) -> None:
    x = torch.randn(4, dtype=torch.float64)
    module = written_out(lambda x: fill(x), x)
    assert names(module) == ["full"]
    assert same(module(x), fill(x))
    assert bool((module(x) == number).all())
    filled = next(node for node in module.graph.nodes if node.op == "call_function")
    assert filled.all_input_nodes == []


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_dropout_draws_the_mask_of_plain_and_leaves_the_generator_as_plain_does(
    p: float, dtype: torch.dtype, turned: bool
) -> None:
    x = torch.randn(33, 17).to(dtype)
    x = x.t() if turned else x

    def drop(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result, mask = aten.native_dropout(x, p, True)
        return result, mask

    module = written_out(drop, x)
    assert ("native_dropout" in names(module)) is turned  # its mask is drawn in an order that only it knows
    torch.manual_seed(5)
    plain = drop(x)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    ours = module(x)
    assert torch.equal(torch.get_rng_state(), state)
    for mine, right in zip(ours, plain, strict=True):
        assert same(mine, right)
        assert mine.stride() == right.stride()
    assert_values_are_shown(module, x)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (1.0, True), (0.5, False)])
def test_dropout_that_draws_nothing_stays(p: float, training: bool) -> None:
    module = written_out(lambda x: aten.native_dropout(x, p, training)[0], torch.randn(4, 5))
    assert "bernoulli" not in names(module)


def test_whole_steps_that_are_written_out_make_the_same_numbers() -> None:
    """Gradients read the weight of the targets too."""

    def step(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> Any:
        weight = weight.detach().requires_grad_()
        loss = F.cross_entropy(x @ weight, y, ignore_index=3)
        return loss.detach(), *torch.autograd.grad(loss, weight)

    x, weight, y = torch.randn(ROWS, 5), torch.randn(5, CLASSES), targets(ROWS, ignored=3)
    module = written_out(step, x, weight, y)
    for ours, plain in zip(module(x, weight, y), step(x, weight, y), strict=True):
        assert same(ours, plain)
