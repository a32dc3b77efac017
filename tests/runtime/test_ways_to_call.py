"""Ways to call a compiled module that a plan does not cover, or that once broke it, beside plain PyTorch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.settings import Search

pytestmark = pytest.mark.usefixtures("torch_ready")
QUICK: dict[str, Any] = {"search": Search(seconds=0.0, progress=False)}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))


def test_several_gradients_at_once_are_those_of_the_plain_model() -> None:
    model, x = layers(), torch.randn(5, 8, requires_grad=True)
    ours = fxremat.compile(model, mem="min", **QUICK)
    given, ones = [x, *model.parameters()], torch.eye(4)
    found = []
    with pytest.warns(UserWarning, match="is_grads_batched=True"):
        found.append(torch.autograd.grad(ours(x)[0], given, ones, is_grads_batched=True))
    found.append(torch.autograd.grad(model(x)[0], given, ones, is_grads_batched=True))
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_dual_numbers_run_the_plain_model() -> None:
    model, x = layers(), torch.randn(5, 8)
    ours = fxremat.compile(model, mem="100%", **QUICK)
    found = []
    with forward_ad.dual_level():
        given = forward_ad.make_dual(x, x)
        with pytest.warns(UserWarning, match="forward-mode"):
            found.append(ours(given))
        found.append(model(given))
        assert torch.equal(*(forward_ad.unpack_dual(each).tangent for each in found))


def test_modules_without_sizes_are_refused_in_one_line() -> None:
    with pytest.raises(fxremat.FxrematError, match=r"0\.weight has no sizes yet .* call the model once"):
        fxremat.compile(nn.Sequential(nn.LazyLinear(4)), mem="100%", **QUICK)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_compiled_module_in_eval_mode_can_be_scripted() -> None:
    model, x = layers(), torch.randn(5, 8)
    scripted = torch.jit.script(fxremat.compile(model, mem="100%", **QUICK).eval())
    assert torch.equal(scripted(x), model(x))


def test_a_model_compiled_with_two_budgets_is_trained_through_one() -> None:
    model = layers()
    first, _ = (fxremat.compile(model, mem=mem, **QUICK) for mem in ("100%", "min"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first(torch.randn(5, 8)).sum().backward()


class Counting(nn.Module):
    """More than one graph, and another list at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.detach().max().item() > 1e6:
            x = x / 2
        self.calls.append(1)
        return self.second(x)


def test_a_model_whose_first_steps_go_on_capturing_gets_its_plan() -> None:
    ours = fxremat.compile(Counting(), mem="100%", example_inputs=torch.randn(4, 8), **QUICK)
    assert isinstance(ours.plan, fxremat.PlanOfGraphs)


class Unpooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y, places = nn.functional.max_pool2d(self.first(x).relu(), 2, return_indices=True)
        return self.last(nn.functional.max_unpool2d(y, places, 2)).square().mean()


def test_unpooled_images_in_channels_last_are_within_the_budget() -> None:
    torch.manual_seed(0)
    model = Unpooling().to(memory_format=torch.channels_last)
    x = torch.randn(4, 4, 32, 32).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, mem="min", **QUICK)
    for each in (ours, plain):
        each(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model.zero_grad()
    assert peak_bytes(lambda: ours(x).backward()) <= ours.plan.budget


class Manual(nn.Module):
    """A model whose `training_step` runs its own backward, with an optimizer or without."""

    def __init__(self, optimizer: bool, broken: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(32, 32), nn.GELU())))
        # products with powers of two are exact: torch.compile of torch 2.11 rounds them otherwise
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.125, momentum=0.5) if optimizer else None
        self.broken = broken

    def training_step(self, x: Tensor) -> Tensor:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        if self.broken:
            torch._dynamo.graph_break()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize(("optimizer", "broken"), [(True, False), (False, True), (False, False)])
def test_a_planned_method_may_run_its_own_backward(optimizer: bool, broken: bool) -> None:
    plain, model = Manual(optimizer, broken), Manual(optimizer, broken)
    ours = fxremat.compile(model, mem="60%", method="training_step", **QUICK)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            _manual_step(plain, ours, model)
    assert not [each for each in told if "callback" in str(each.message)], "memory was measured in the backward"
    assert ours.plan is not None
    x = torch.randn(256, 32)
    if not optimizer:
        model.zero_grad()
    peak = peak_bytes(lambda: ours.training_step(x))
    assert peak <= ours.plan.budget
    assert peak <= ours.plan.predicted_peak <= 1.02 * peak


def _manual_step(plain: Manual, ours: Any, model: Manual) -> None:
    x = torch.randn(256, 32)
    losses = []
    for each in (plain, ours):
        if plain.optimizer is None:
            each.zero_grad()
        losses.append(each.training_step(x))
    assert torch.equal(*losses)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def gradients(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.net(x).square().mean(), (self.net[0].weight, self.net[2].weight))


def test_gradients_that_a_planned_method_takes_itself_are_told_to_have_no_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = Inner(), torch.randn(5, 8)
    ours = fxremat.compile(model, mem="min", method="gradients", **QUICK)
    assert all(map(torch.equal, ours.gradients(x), model.gradients(x)))
    assert "calls torch.autograd.grad" in caplog.text
