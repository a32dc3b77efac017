"""Steps run although torch's fake results lie otherwise than real ones: by known rules, and by what a walk observed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fxremat
from fxremat.runtime import real_layouts as rules
from fxremat.runtime.real_layouts import real_layouts
from fxremat.settings import Search
from tests.toys import assert_as_plain

pytestmark = pytest.mark.usefixtures("torch_ready")
aten = torch.ops.aten

OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "softplus": lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0),
    "elu": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0),
    "hardswish": aten.hardswish_backward,
    "hardsigmoid": aten.hardsigmoid_backward,
    "logit": lambda g, x: aten.logit_backward(g, x.sigmoid(), None),
    "rrelu": lambda g, x: aten.rrelu_with_noise_backward(g, x, x, 0.1, 0.3, True, False),
    "mse": lambda g, x: aten.mse_loss_backward(g, g, x, 0),
    "mse mean": lambda g, x: aten.mse_loss_backward(torch.ones(()), g, x, 1),
    "smooth l1": lambda g, x: aten.smooth_l1_loss_backward(g, g, x, 0, 1.0),
    "huber": lambda g, x: aten.huber_loss_backward(torch.ones(()), g, x, 1, 1.0),
    "log softmax": lambda g, x: aten._log_softmax_backward_data(g, x, -1, torch.float32),
    "log softmax 1": lambda g, x: aten._log_softmax_backward_data(g, x, 1, torch.float32),
    "dropout": lambda g, x: aten.native_dropout_backward(g, x > 0, 1.1),
    "layer norm": lambda g, x: aten.native_layer_norm_backward(
        g, x, x.shape[-1:], *[x.mean(-1, keepdim=True)] * 2, *[torch.ones(x.shape[-1])] * 2, [True] * 3
    ),
    "group norm": lambda g, x: aten.native_group_norm(
        x, *[torch.ones(x.shape[1])] * 2, x.shape[0], x.shape[1], x[0, 0].numel(), x.shape[1], 1e-5
    ),
    "group norm backward": lambda g, x: aten.native_group_norm_backward(
        g, x, *[torch.ones(x.shape[0], x.shape[1])] * 2, torch.ones(x.shape[1]),
        x.shape[0], x.shape[1], x[0, 0].numel(), x.shape[1], [True] * 3,
    ),
    "batch norm": lambda g, x: aten.native_batch_norm(
        x, *[torch.ones(x.shape[1])] * 2, None, None, True, 0.1, 1e-5
    ),
    "batch norm backward": lambda g, x: aten.native_batch_norm_backward(
        g, x, torch.ones(x.shape[1]), None, None, *[torch.ones(x.shape[1])] * 2, True, 1e-5, [True] * 3
    ),
}  # fmt: skip


COPIED = {(0, 1, 2), (0, 1, 2, 3), (0, 2, 3, 1)}  # layouts to one of which a GroupNorm copies


def laid_out(shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """A tensor whose dimensions lie in memory in this order, the outermost first."""
    return torch.randn([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def strides(results: Any) -> list[Any]:
    listed = [results] if isinstance(results, Tensor) else results
    return [result.stride() if isinstance(result, Tensor) else None for result in listed]


@pytest.mark.parametrize("name", OPS)
def test_fake_results_lie_as_real_ones(name: str) -> None:
    shapes = {3: (3, 7, 4), 4: (2, 3, 5, 4)}
    orders = [*itertools.permutations(range(3)), (0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2), (1, 0, 2, 3)]
    for first, second in itertools.product(orders, orders):
        if len(first) != len(second) or (name.startswith("group norm") and not {first, second} <= COPIED):
            continue
        g, x = (laid_out(shapes[len(order)], order) for order in (first, second))
        with real_layouts({}, cpu=True), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            shown = OPS[name](mode.from_tensor(g), mode.from_tensor(x))
        assert strides(shown) == strides(OPS[name](g, x)), (first, second)


class Between(nn.Module):
    """A function between a linear layer, whose result it gives on transposed, and a convolution."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.convolution, self.function = nn.Linear(16, 4), nn.Conv1d(4, 4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.convolution(self.function(self.linear(x)).transpose(1, 2)).exp()
        return result


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "elu": F.elu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "dropout": lambda x: F.dropout(x, 0.3),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
}


class All(nn.Module):
    """Modules that all read the input, by name: the name of a gradient that differs says which it is."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleDict(modules)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [module(x) for module in self.each.values()]


def test_transposed_gradients_have_the_bits_of_plain_training() -> None:
    make = lambda: All({name: Between(function) for name, function in ACTIVATIONS.items()})  # noqa: E731
    assert_as_plain(make, torch.randn(3, 7, 16))


class Permuted(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(16, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        permuted = self.linear(x).view(3, 7, 2, 4).permute(0, 2, 1, 3)
        return self.loss(permuted, torch.full_like(permuted, 0.5))


def test_losses_of_permuted_predictions() -> None:
    losses = (F.mse_loss, F.smooth_l1_loss, F.huber_loss)
    assert_as_plain(lambda: All({loss.__name__: Permuted(loss) for loss in losses}), torch.randn(3, 7, 16))


def without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "EVERYWHERE", {})
    monkeypatch.setattr(rules, "CPU", {})
    monkeypatch.setattr(rules, "CPU_BATCH_NORM", {})


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_the_walk_observed_is_traced_again(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_rules(monkeypatch)
    torch.manual_seed(0)
    plain, model, x = Between(F.elu), Between(F.elu), torch.randn(3, 7, 16)
    model.load_state_dict(plain.state_dict())
    compiled = fxremat.compile(model, mem="100%", dynamic=dynamic, search=Search(seconds=0))
    warned = pytest.warns(UserWarning, match="sizes are taken as fixed") if dynamic else contextlib.nullcontext()
    with caplog.at_level("INFO", "fxremat"), warned:
        compiled(x).sum().backward()
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert "results of aten.elu_backward.default lie otherwise" in caplog.text


def test_what_cannot_be_traced_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rules(monkeypatch)
    monkeypatch.setattr(rules, "_strides_of", lambda *_: None)
    with pytest.raises(fxremat.CaptureError, match="the results of aten"):
        fxremat.compile(Between(F.elu), mem="100%", fullgraph=True, search=Search(seconds=0))(torch.randn(3, 7, 16))
