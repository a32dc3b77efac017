"""cuDNN's BatchNorm, which stays what runs where eager PyTorch takes it; cuDNN is pretended on a CPU here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.graphs import cudnn_batch_norm as module
from fxremat.settings import Search
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready", "cudnn")
RESERVED = 8  # bytes
FAST: Any = {"search": Search(seconds=0.0)}


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """A BatchNorm in double precision, whose bits are no native kernel's."""
    dims, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    nothing = x.new_empty(0)
    if training:
        batch_var, batch_mean = torch.var_mean(x.double(), dims, correction=0)
        for running, now in ((mean, batch_mean), (var, batch_var)):
            if running is not None:
                running.mul_(1 - momentum).add_(now, alpha=momentum)
    else:
        assert mean is not None
        assert var is not None
        batch_mean, batch_var = mean.double(), var.double()
    rstd = torch.rsqrt(batch_var + eps)
    y = (x.double() - batch_mean.view(shape)) * (rstd * weight).view(shape) + bias.view(shape)
    y = torch.empty_like(x).copy_(y)
    if not training:
        return y, nothing, nothing, nothing
    return y, batch_mean.float(), rstd.float(), torch.ones(RESERVED, dtype=torch.uint8)


def backward(
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    _: Tensor | None,
    __: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    reserve: Tensor,
) -> tuple[Tensor, ...]:
    """Its gradients; cuDNN may use up what was reserved."""
    assert reserve.tolist() == [1] * RESERVED
    reserve.zero_()
    dims, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    g, n = gradient.double(), x.numel() // x.shape[1]
    normal = (x.double() - mean.view(shape)) * rstd.view(shape)
    of_bias, of_weight = g.sum(dims), (g * normal).sum(dims)
    of_x = (weight * rstd).view(shape) * (g - of_bias.view(shape) / n - normal * of_weight.view(shape) / n)
    return torch.empty_like(x).copy_(of_x), of_weight.float(), of_bias.float()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_batch_norm", forward, "CPU")
    library.impl("cudnn_batch_norm_backward", backward, "CPU")
    monkeypatch.setattr(module, "cudnn_reserve_bytes", lambda _: RESERVED)
    yield
    library._destroy()


class Normalized(nn.Module):
    """Layers of convolution, BatchNorm of cuDNN and ReLU; the loss is returned."""

    def __init__(self, *, tracked: bool = True) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, track_running_stats=tracked) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            assert isinstance(norm, nn.BatchNorm2d)
            kept = norm.running_mean, norm.running_var
            x = convolution(x)
            x = torch.cudnn_batch_norm(x, norm.weight, norm.bias, *kept, norm.training, 0.1, 1e-5)[0].relu()
        return x.square().mean()


def batch(rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def results(model: nn.Module, x: Tensor, *, twice: bool = False) -> list[Tensor | None]:
    model.zero_grad()
    loss = model(x)
    loss.backward(retain_graph=twice)
    if twice:
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_trains_alike(plain: nn.Module, compiled: nn.Module, *inputs: Tensor, twice: bool = False) -> None:
    for x in inputs:
        wanted, found = (results(model, x, twice=twice) for model in (plain, compiled))
        assert all(same(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.fixture
def plain() -> Normalized:
    torch.manual_seed(0)
    return Normalized()


def targets(plan: fxremat.Plan) -> list[str]:
    return [plan.graph.ops[step.op].target for step in plan.program.executions if step.op is not None]


def test_its_bits_are_eagers_also_where_it_runs_again(plain: Normalized) -> None:
    keeps = fxremat.compile(copy.deepcopy(plain), mem="100%", **FAST)
    assert_trains_alike(plain, keeps, batch(), batch())
    assert keeps.plan is not None
    assert targets(keeps.plan).count("fxremat.cudnn_batch_norm.default") == 5
    assert not any("native_batch_norm" in target for target in targets(keeps.plan))
    again = fxremat.compile(copy.deepcopy(plain), mem=keeps.plan.minimum, **FAST)
    assert_trains_alike(plain, again, batch(), batch())
    assert again.plan is not None
    assert targets(again.plan).count("fxremat.cudnn_batch_norm.default") > 5


def test_a_backward_may_run_twice(plain: Normalized) -> None:
    compiled = fxremat.compile(copy.deepcopy(plain), mem="100%", **FAST)
    assert_trains_alike(plain, compiled, batch(), twice=True)


def test_without_running_statistics() -> None:
    plain = Normalized(tracked=False)
    compiled = fxremat.compile(copy.deepcopy(plain), mem="70%", **FAST)
    assert_trains_alike(plain, compiled, batch(), batch())


@pytest.mark.parametrize("trained", [True, False])
def test_evaluation_takes_the_running_statistics(trained: bool, plain: Normalized) -> None:
    for norm in plain.norms:
        norm.eval().requires_grad_(trained)
        norm.running_mean.sub_(0.1)  # type: ignore[operator, union-attr]
    compiled = fxremat.compile(copy.deepcopy(plain), mem="70%", **FAST)
    assert_trains_alike(plain, compiled, batch(), batch())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_layouts_are_eagers(layout: torch.memory_format, plain: Normalized) -> None:
    plain = plain.to(memory_format=layout)  # type: ignore[call-overload]
    compiled = fxremat.compile(copy.deepcopy(plain), mem="70%", **FAST)
    assert_trains_alike(plain, compiled, batch().to(memory_format=layout))


def test_for_sizes_that_change(plain: Normalized) -> None:
    compiled = fxremat.compile(copy.deepcopy(plain), mem="100%", dynamic=True, **FAST)
    assert_trains_alike(plain, compiled, batch(6), batch(9))
    assert len(compiled.fxremat.plans) == 2
