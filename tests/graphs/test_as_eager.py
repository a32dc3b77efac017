"""Ops that torch.compile's capture rounds otherwise than eager PyTorch are put right before they are planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict

import fxremat
from tests.toys import WIDTH, Stack, assert_as_plain, rows, under_autocast

pytestmark = pytest.mark.usefixtures("torch_ready")


def dropouts() -> Stack:
    """A stack with a probability of its own in each block."""
    stack = Stack()
    for block, p in zip(stack.blocks, (0.04, 0.1, 0.15, 0.45, 0.5, 0.1), strict=True):
        block[2].p = p  # type: ignore[index]
    return stack


def test_dropout_in_single_precision() -> None:
    """At the least budget, where the dropouts run again."""
    assert_as_plain(dropouts, rows())


def test_dropout_in_half_precision() -> None:
    assert_as_plain(dropouts, rows(), body=under_autocast)


def test_dropout_inside_of_attention() -> None:
    class Attends(Stack):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (block(x).view(4, -1, 4, 8).transpose(1, 2) for block in self.blocks[:3])
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.15).transpose(1, 2)

    assert_as_plain(Attends, rows())


class Applies(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)).reshape(-1, WIDTH))


def test_interpolation() -> None:
    """It stays one op, as in eager PyTorch; taken apart it would add in another order."""
    modes = ("nearest", "nearest-exact", "bilinear", "bicubic")

    def resize(x: Tensor) -> Tensor:
        return torch.cat([F.interpolate(x.view(4, 4, 16, 16), size=(24, 20), mode=mode) for mode in modes])

    compiled = assert_as_plain(lambda: Applies(resize), rows())
    ops = [op.target for op in compiled.plan.graph.ops]
    assert sum("upsample" in op for op in ops) == 2 * len(modes)  # there and back


def test_losses_with_a_decomposition_of_their_own() -> None:
    def lose(x: Tensor) -> Tensor:
        first_three = torch.where(torch.arange(WIDTH) < 3, torch.arange(WIDTH), -1).expand(len(x), WIDTH)
        losses = F.multi_margin_loss(x, torch.arange(len(x)) % WIDTH), F.multilabel_margin_loss(x, first_three)
        return torch.cat([x * loss for loss in losses])

    assert_as_plain(lambda: Applies(lose), rows())


def test_the_backward_of_a_model_under_autocast_is_outside_of_it() -> None:
    """So that the products in the gradient of an inverse are in single precision."""

    def invert(x: Tensor) -> Tensor:
        return torch.linalg.inv(x.float().view(-1, 8, 8) + 5 * torch.eye(8))

    assert_as_plain(lambda: Applies(invert), rows(), body=under_autocast)


class Convolves(nn.Module):
    """A feed-forward block that convolves its tokens as an image, as in vision transformers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.depthwise = nn.Conv2d(4 * WIDTH, 4 * WIDTH, 3, padding=1, groups=4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).transpose(1, 2)
        image = self.depthwise(x.view(*x.shape[:2], 4, -1))
        return self.down(F.gelu(image.flatten(2).transpose(1, 2)))


@pytest.mark.parametrize("batch", [1, 2])
def test_layouts_of_a_batch_of_one(batch: int) -> None:
    """The strides of sizes of 1 decide what is channels-last, and how the products of a backward are computed."""
    compiled = assert_as_plain(Convolves, torch.randn(batch, 16, WIDTH))
    assert compiled.plan is not None
    ops = {str(node.target): node for node in compiled.plan.captured.nodes}
    image = torch.empty(batch, 16, 4 * WIDTH).transpose(1, 2).view(batch, 4 * WIDTH, 4, 4)
    convolved = F.conv2d(image, torch.empty(4 * WIDTH, 1, 3, 3), padding=1, groups=4 * WIDTH)
    assert ops["aten.convolution.default"].meta["val"].stride() == convolved.stride()


def test_tracing_leaves_torch_as_it_was() -> None:
    """The decompositions that are taken away while tracing are there again, after a failure too."""
    key = torch._C.DispatchKey
    registered = (
        (torch.ops.aten.upsample_bilinear2d.vec.py_kernels, key.Autograd),
        (torch.ops.aten.view.default.py_kernels, key.Meta),
        (op_implementations_dict, torch.ops.aten.view.default),
        (op_implementations_dict, torch.ops.aten._unsafe_view.default),
    )
    before = [where[what] for where, what in registered]
    fxremat.plan(Applies(torch.relu), rows(), mem="100%", costs="estimate")
    with pytest.raises(fxremat.BudgetTooSmall):
        fxremat.plan(Applies(torch.relu), rows(), mem=1, costs="estimate")
    assert all(where[what] is kernel for (where, what), kernel in zip(registered, before, strict=True))
