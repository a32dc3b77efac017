"""Gradients of parameters that several graph calls read are added as they are computed, with autograd's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat import Search
from fxremat.ops import gradient_sums
from fxremat.runtime.called_graph import saved_calls
from fxremat.torch_private import holds_gradients
from tests.dags import few
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = Search(seconds=0.0)
WIDTH = 24
KINDS = ("wide", "scaled", "alike", "shifted", "frozen")


class Wide(nn.Module):
    def __init__(self, width: int = WIDTH, inside: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Scaled(nn.Module):
    """The gradient of `bias` is the one that arrives, and that of `mean` has one element for all."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.mean = nn.Parameter(torch.randn(8, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean() + 1) + self.mean.sum() + self.bias


class Alike(nn.Module):
    """Two parameters have the same gradient, which the backward computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(8, WIDTH)), nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.one + self.other)


class Shifted(nn.Module):
    """The gradients of two parameters are slices of one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(WIDTH, 8)), nn.Parameter(torch.randn(WIDTH, WIDTH - 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ torch.cat([self.one, self.other], dim=1)) + x


class Shared(nn.Module):
    """Runs modules in a given order, each as often as it is named, with a break of the graph after each."""

    def __init__(self, order: Sequence[str] = (), between: Callable[[nn.Module, int, Tensor], Tensor] | None = None):
        super().__init__()
        self.wide, self.scaled, self.shifted, self.frozen = Wide(), Scaled(), Shifted(), Wide()
        self.alike = Alike()
        self.frozen.requires_grad_(requires_grad=False)
        self.order, self.between = [*order], between

    def forward(self, x: Tensor) -> Tensor:
        for number, name in enumerate(self.order):
            x = getattr(self, name)(x)
            torch._dynamo.graph_break()
            if self.between is not None:
                x = self.between(self, number, x)
        return x.square().mean()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def twins(order: Sequence[str], between: Any = None, **options: Any) -> tuple[Any, nn.Module]:
    """A compiled model and an equal plain one."""
    torch.manual_seed(0)
    model = Shared(order, between)
    return fxremat.compile(model, **{"mem": "min", "search": QUICK, **options}), copy.deepcopy(model)


def a_step(model: nn.Module, seed: int = 0) -> Any:
    return step_of(model, lambda: model(rows(seed)), lambda loss: loss)


def assert_equal_steps(ours: Any, plain: nn.Module, steps: int = 4) -> None:
    for seed in range(steps):
        assert differences(a_step(ours, seed), a_step(plain, seed)) == []


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inputs whose gradients were added to sums."""
    found: list[int] = []
    add = gradient_sums.add

    def noting(sums: dict[int, Tensor], place: int, gradient: Tensor) -> Tensor | None:
        found.extend([place] if place in sums else [])
        return add(sums, place, gradient)

    monkeypatch.setattr(gradient_sums, "add", noting)
    return found


@few(12)
@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=6), st.sampled_from(["min", "100%"]))
def test_random_orders_of_shared_modules_have_plain_bits(order: list[str], mem: str) -> None:
    ours, plain = twins([*order, "wide"], mem=mem)
    assert_equal_steps(ours, plain)
    assert not saved_calls


def test_gradients_that_share_memory_are_not_overwritten() -> None:
    """Compare what hooks have seen, and gradients of parameters that have the same one."""
    seen: dict[nn.Module, list[Tensor]] = {}

    def between(model: nn.Module, _: int, x: Tensor) -> Tensor:
        x.register_hook(seen.setdefault(model, []).append)
        return x

    ours, plain = twins(["scaled", "alike", "shifted"] * 3, between)
    assert_equal_steps(ours, plain)
    (mine, its) = seen.values()
    assert len(mine) == len(its) == 4 * 9
    assert all(map(torch.equal, mine, its))


class Loop(nn.Module):
    """Six calls of a graph, with parameters that take much more memory than all else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = Wide(width=64, inside=512)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.module(x)
            torch._dynamo.graph_break()
        return x.square().mean()


FEW = torch.randn(4, 64)


def peak_of(model: nn.Module, *, keeping: bool = False) -> int:
    def step() -> None:
        model(FEW).backward(retain_graph=keeping)

    model.zero_grad(set_to_none=True)
    return meter.peak_bytes(step)


def trained(model: nn.Module, mem: str | int, steps: int = 5, *, keeping: bool = False) -> Any:
    """The compiled model after some steps, in each of which the gradients have the bits of the plain one."""
    ours = fxremat.compile(copy.deepcopy(model), mem=mem, search=QUICK)
    for _ in range(steps):
        for one in (ours, model):
            one.zero_grad(set_to_none=True)
            one(FEW).backward(retain_graph=keeping)
        pairs = zip(ours.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    return ours


def test_only_one_set_of_gradients_is_in_memory() -> None:
    model = Loop()
    ours = trained(model, "min")
    peak = peak_of(ours)
    gradients, largest = sum(p.nbytes for p in model.parameters()), max(p.nbytes for p in model.parameters())
    assert peak <= ours.plan.predicted_peak <= 1.005 * peak + (FEW.nbytes if holds_gradients() else 0)
    assert gradients + largest < peak < 1.7 * gradients
    again = trained(model, ours.plan.minimum)  # from its first step on, for which nothing is known
    assert peak_of(again) <= ours.plan.minimum


def test_a_backward_that_may_run_again_has_sums_and_gradients_of_its_own() -> None:
    """Let autograd add, to sums beside all gradients of a call."""
    model = Loop()
    both = 2 * sum(p.nbytes for p in model.parameters())
    ours = trained(model, "min", keeping=True)
    assert both < ours.plan.predicted_peak < 1.03 * peak_of(ours, keeping=True)
    ours = trained(model, "min")
    assert ours.plan.predicted_peak < both
    for _ in range(3):
        ours(FEW).backward(retain_graph=True)
    assert both < ours.plan.predicted_peak


def test_a_hook_of_a_parameter_sees_the_whole_sum_once(counted: list[int]) -> None:
    ours, plain = twins(["wide"] * 4)
    assert_equal_steps(ours, plain)
    seen: list[dict[str, list[Tensor]]] = []
    for model in (ours, plain):
        found: dict[str, list[Tensor]] = {"up": [], "down": []}
        seen.append(found)
        model.wide.up.weight.register_hook(lambda x, found=found: found["up"].append(x.clone()) or 2 * x)
        model.wide.down.weight.register_post_accumulate_grad_hook(
            lambda p, found=found: found["down"].append(p.grad.clone())
        )
    assert_equal_steps(ours, plain, 2)
    for name in ("up", "down"):
        assert len(seen[0][name]) == 2
        assert all(map(torch.equal, seen[0][name], seen[1][name]))
    assert counted


def penalized(model: nn.Module, number: int, x: Tensor) -> Tensor:
    """Eager ops between the graphs that read a parameter, too: autograd's buffer is then another tensor."""
    return x + 1e-2 * model.wide.up.weight.square().sum() if number == 1 else x


def test_a_parameter_that_eager_ops_read_too(counted: list[int]) -> None:
    ours, plain = twins(["wide"] * 4, penalized)
    assert_equal_steps(ours, plain)
    assert counted


def test_gradients_of_two_forwards_in_one_backward(counted: list[int]) -> None:
    ours, plain = twins(["wide", "scaled", "wide"])
    assert_equal_steps(ours, plain)

    def both(model: nn.Module) -> Any:
        return step_of(model, lambda: [model(rows(1)), model(rows(2))], lambda losses: losses[0] + losses[1])

    for _ in range(3):
        assert differences(both(ours), both(plain)) == []
    assert counted


def test_gradients_that_are_asked_for_by_name(counted: list[int]) -> None:
    ours, plain = twins(["wide"] * 3)
    assert_equal_steps(ours, plain)
    found = [torch.autograd.grad(model(rows()), [*model.wide.parameters()]) for model in (ours, plain)]
    assert all(map(torch.equal, *found))
    assert counted


def test_gradients_are_added_over_steps_and_to_what_is_there(counted: list[int]) -> None:
    ours, plain = twins(["wide", "shifted", "wide", "scaled", "wide"])
    seen = []
    for model in (ours, plain):
        calls: list[Tensor] = []
        seen.append(calls)
        model.wide.up.weight.register_hook(calls.append)
        for step in range(6):
            if step % 2 == 0:
                model.zero_grad(set_to_none=step < 3)
            model(rows(step)).backward()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs if other.grad is not None)
    assert len(seen[0]) == len(seen[1]) == 6
    assert counted


class Apart(nn.Module):
    """The second of two values gets a gradient in the last call alone, which is a negative zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.apart = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.ones(4))

    def both(self, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x @ self.weight), self.apart * factor

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.both(x, torch.ones(4))
        torch._dynamo.graph_break()
        x, last = self.both(x, -torch.zeros(4))
        torch._dynamo.graph_break()
        return x.square().mean() + last.sum() + 0.0 * first.detach().sum()


def test_a_gradient_that_a_call_does_not_have_is_not_added() -> None:
    torch.manual_seed(0)
    model = Apart()
    ours, plain = fxremat.compile(model, mem="min", search=QUICK), copy.deepcopy(model)
    for seed in range(4):
        assert differences(a_step(ours, seed), a_step(plain, seed)) == []
        assert torch.signbit(plain.apart.grad).all()
        assert torch.signbit(ours.apart.grad).all()


def test_two_models_that_share_a_module(counted: list[int]) -> None:
    torch.manual_seed(0)
    first = Shared(["wide"] * 3)
    second = Shared(["wide"] * 2)
    second.wide = first.wide
    plain = copy.deepcopy((first, second))
    ours = [fxremat.compile(model, mem="min", search=QUICK) for model in (first, second)]
    for seed in range(4):
        for one, other in (ours, plain):
            one.zero_grad(set_to_none=True)
            (one(rows(seed)) + other(rows(seed + 1))).backward()
        pairs = zip(ours[0].wide.parameters(), plain[0].wide.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert counted


def test_gradients_of_gradients_are_those_of_plain_pytorch() -> None:
    ours, plain = twins(["wide"] * 3)
    assert_equal_steps(ours, plain)
    found = []
    for model in (ours, plain):
        model.zero_grad(set_to_none=True)
        gradients = torch.autograd.grad(model(rows()), [*model.wide.parameters()], create_graph=True)
        sum(gradient.square().sum() for gradient in gradients).backward()
        found.append([*gradients, *(p.grad for p in model.wide.parameters())])
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in zip(*found, strict=True))
