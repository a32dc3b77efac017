"""Gradients of gradients: such a step runs again as plain PyTorch, and all others as planned."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat import Search
from fxremat.runtime.called_graph import saved_calls
from tests.steps import Step, differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = Search(seconds=0.0)
WIDTH = 8


class Critic(nn.Module):
    """A network whose gradient is penalized; `broken` makes two graphs of it."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32)
        self.second, self.last = nn.Linear(32, 32), nn.Linear(32, 1)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        if self.broken:
            torch._dynamo.graph_break()
        return self.last(nn.functional.dropout(self.second(x).tanh(), 0.2))


class Forces(nn.Module):
    """Differentiates its own energy in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        energy = self.energy(positions).sum()
        (force,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy.square() + force.square().sum()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))


def twins(model: nn.Module, **options: Any) -> tuple[Any, nn.Module]:
    return fxremat.compile(model, **{"mem": "1GiB", "search": QUICK, **options}), copy.deepcopy(model)


def penalty_of(critic: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def penalized(critic: nn.Module) -> Any:
    return step_of(critic, lambda: penalty_of(critic, rows().requires_grad_()), lambda loss: loss)


def assert_close(ours: Step, plain: Step) -> None:
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, gradient in ours.gradients.items():
        expected = plain.gradients[name]
        assert (gradient is None) == (expected is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, expected)


def critic(**options: Any) -> Critic:
    torch.manual_seed(0)
    return Critic(**options)


def test_a_gradient_penalty_has_the_bits_of_plain_training() -> None:
    ours, plain = twins(critic())
    with pytest.warns(UserWarning, match="gradients of gradients.*without a budget"):
        assert differences(penalized(ours), penalized(plain)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert differences(penalized(ours), penalized(plain)) == []
    assert all(torch.equal(buffer, dict(plain.named_buffers())[name]) for name, buffer in ours.named_buffers())
    x = rows(1)
    ours.zero_grad(), plain.zero_grad()
    of_both = [step_of(model, lambda model=model: model(x).sum(), lambda loss: loss) for model in (ours, plain)]
    assert differences(*of_both) == []


@pytest.mark.filterwarnings("ignore:the backward asks for gradients of gradients")
def test_a_critic_that_is_called_three_times_in_a_step() -> None:
    """Two calls are trained as planned, and the third is differentiated twice."""

    def step(model: nn.Module) -> Any:
        def loss() -> Tensor:
            return model(rows(1)).mean() - model(rows(2)).mean() + 10 * penalty_of(model, rows(3).requires_grad_())

        return step_of(model, loss, lambda loss: loss)

    ours, plain = twins(critic())
    for _ in range(2):
        assert_close(step(ours), step(plain))  # sums of three gradients, in another order


@pytest.mark.filterwarnings("ignore:the backward asks for gradients of gradients")
def test_across_graphs() -> None:
    ours, plain = twins(critic(broken=True))
    for _ in range(3):
        assert_close(penalized(ours), penalized(plain))
    gc.collect()
    assert not saved_calls


class Repeated(nn.Module):
    """Reads a parameter again in what is computed from it: in a second graph, or outside of the model."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.layer, self.broken = nn.Linear(WIDTH, WIDTH), broken

    def once(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3 if self.broken else 1):
            x = self.once(x)
            if self.broken:
                torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("broken", [True, False])
def test_an_input_that_is_computed_from_another(broken: bool) -> None:
    torch.manual_seed(0)
    model = Repeated(broken=broken)
    ours, plain = fxremat.compile(model, mem="100%", search=QUICK), copy.deepcopy(model)

    def penalized(model: nn.Module) -> Any:
        def loss_of(output: Tensor) -> Tensor:
            loss = output.square().mean()
            gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
            return loss + sum(gradient.square().sum() for gradient in gradients)

        return step_of(model, lambda: model(rows() @ model.layer.weight), loss_of)

    for _ in range(3):
        step_of(ours, lambda: ours(rows() @ ours.layer.weight), lambda output: output.square().mean())
    with pytest.warns(UserWarning, match="gradients of gradients"):
        assert_close(penalized(ours), penalized(plain))


def test_forces_that_the_model_computes_itself() -> None:
    torch.manual_seed(0)
    ours, plain = twins(Forces())
    for _ in range(2):
        both = [step_of(model, lambda model=model: model(rows()), lambda loss: loss) for model in (ours, plain)]
        assert differences(*both) == []


def test_the_log_names_the_line_or_what_dynamo_names_in_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxremat"):
        fxremat.compile(Forces(), mem="100%", search=QUICK)(rows()).backward()
    (told,) = [text for text in caplog.messages if "is trained as several graphs" in text]
    assert "test_double_backward.py:" in told or "at requires_grad_() on a tensor that forward makes" in told
    assert "compile a submodule" not in told  # it is trained, and nothing is to be done


@pytest.mark.filterwarnings("ignore:the backward asks for gradients of gradients")
def test_a_backward_that_may_run_again_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    ours, plain = twins(Critic())
    with caplog.at_level(logging.WARNING, "fxremat"):
        for _ in range(3):
            steps = []
            for model in (ours, plain):
                steps.append(step_of(model, lambda model=model: model(rows()), kept_and_again))
            assert differences(*steps) == []
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "a backward with retain_graph=True keeps what plans free as it runs"
    ]


def kept_and_again(output: Tensor) -> Tensor:
    loss = output.square().mean()
    loss.backward(retain_graph=True)
    return loss


def test_under_torch_compile() -> None:
    model = critic()
    plain = copy.deepcopy(model)
    ours = torch.compile(model, backend="fxremat", options={"mem": "1GiB", "search": QUICK})
    penalties = [step_of(plain, lambda: penalty_of(plain, rows().requires_grad_()), lambda loss: loss)]
    penalties += [step_of(model, lambda: penalty_of(ours, rows().requires_grad_()), lambda loss: loss)]
    assert differences(*penalties) == []


class Several(nn.Module):
    """Returns two losses, and what else is computed of rows; `broken` makes two graphs of it."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.broken = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), broken

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.first(x).tanh()
        if self.broken:
            torch._dynamo.graph_break()
        out = self.second(x)
        return out.square().mean(), out.sin().sum(), out.exp().mean(1), out


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2]])
def test_outputs_without_a_gradient(used: list[int], broken: bool) -> None:
    ours, plain = twins(Several(broken=broken), loss=fxremat.Loss(gradients="all"))
    for _ in range(2):
        found = []
        for model in (ours, plain):
            outputs, parameters = model(rows()), list(model.parameters())
            loss = sum(outputs[place].sum() for place in used)
            gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            penalty = sum(gradient.square().sum() for gradient in gradients if gradient is not None)
            found.append((*gradients, *torch.autograd.grad(penalty, parameters, allow_unused=True)))
        torch.testing.assert_close(*found, rtol=1e-5 * broken, atol=1e-6 * broken)


def test_of_outputs_beside_the_loss_it_is_refused_in_one_line() -> None:
    ours, _ = twins(Several())
    said = "backward asks for gradients of gradients .* but the loss reads outputs beside"
    with pytest.raises(fxremat.CaptureError, match=said):
        torch.autograd.grad(ours(rows())[3].sum(), list(ours.parameters()), create_graph=True)


def test_an_input_that_was_changed_or_freed_before_the_backward_is_an_error() -> None:
    class Weighted(Critic):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * weight.tanh()

    torch.manual_seed(0)
    ours, _ = twins(Weighted())
    x, weight = rows().requires_grad_(), torch.ones(16, 1)
    loss = ours(x, weight).sum()
    weight.add_(1)
    with pytest.raises(fxremat.CaptureError, match="modified in place after the forward; use the uncompiled model"):
        torch.autograd.grad(loss, x, create_graph=True)
    loss = ours(x, torch.ones(16, 1)).sum()
    with pytest.raises(fxremat.CaptureError, match="freed already: hold it until then"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_nothing_is_kept_alive_for_it() -> None:
    ours, _ = twins(critic())
    ours(rows()).sum().backward()
    x = rows()
    alive = weakref.ref(x)
    loss = ours(x * 1.0).sum()
    del x
    assert alive() is None
    loss.backward()


def test_a_step_that_updates_weights_itself_refuses(tmp_path: Any) -> None:
    model = critic()
    optimizer = torch.optim.SGD(model.parameters())
    ours = fxremat.compile(
        model, mem="1GiB", search=QUICK, optimizer=optimizer, offload=fxremat.Offload(weights=True)
    )
    x = rows().requires_grad_()
    with pytest.raises(fxremat.CaptureError, match="its weights may be on the host"):
        torch.autograd.grad(ours(x).sum(), x, create_graph=True)
