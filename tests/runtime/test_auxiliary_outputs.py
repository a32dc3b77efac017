"""A model that returns more than its loss: as plain PyTorch where nobody uses the rest, and where somebody does."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.errors import BudgetTooSmall
from fxremat.graphs.names import NAME
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.runtime.auxiliary_outputs import AuxiliaryOutputs
from fxremat.runtime.dynamo import Backend
from fxremat.settings import Loss
from tests.toys import QUICK, WIDTH, Stack, assert_as_plain, record, rows
from tests.training import same, unequal

pytestmark = pytest.mark.usefixtures("torch_ready")


class Returning(nn.Module):
    """Loss, logits and a hidden value; `spare` is a layer that only the logits' own head reads."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stack = Stack()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.norm(self.stack(x))
        logits = self.head(hidden)
        return F.cross_entropy(logits, torch.arange(len(x)) % 50), logits, hidden


def only_loss(model: nn.Module, x: Tensor) -> Any:
    outputs = model(x)
    outputs[0].backward()
    return outputs


def loss_and_logits(model: nn.Module, x: Tensor) -> Any:
    outputs = model(x)
    (outputs[0] + outputs[1].square().mean()).backward()
    return outputs


def test_no_gradient_is_made_for_what_nobody_uses() -> None:
    compiled = assert_as_plain(Returning, rows(), body=only_loss)
    assert [t.meta["val"].numel() for t in compiled.plan.captured.tangent_nodes] == [1]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.filterwarnings("ignore:the loss reads outputs")
def test_a_loss_that_reads_another_output(norm: bool) -> None:
    """At first the step runs again as it was written, then it is planned for."""

    def body(model: nn.Module, x: Tensor) -> Any:
        outputs = [loss_and_logits(model, part) for part in (x, 2 * x)]
        outputs.append(only_loss(model, 3 * x))
        return outputs

    compiled = assert_as_plain(lambda: Returning(norm), rows(), body=body, mem="100%")
    tangents = [len(plan.graph.tangents) for plan in compiled.fxremat.plans]
    assert tangents == [1, 3]
    compiled.zero_grad()
    measured = peak_bytes(lambda: loss_and_logits(compiled, rows()))
    assert measured <= compiled.plan.budget + 3 * 128 * 50 * 4  # the loss outside is the test's own


class ActorAndCritic(nn.Module):
    """Loss, scores and values of a deep network, whose step takes much more memory than a loss of these."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
        self.layers, self.actor, self.critic = nn.Sequential(*layers), nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.layers(x)
        scores = self.actor(x)
        return F.cross_entropy(scores, torch.arange(len(x)) % 10), scores, self.critic(x)


@pytest.mark.filterwarnings("ignore:the loss reads outputs")
def test_the_step_that_runs_again_does_not_count_as_its_loss() -> None:
    compiled, x = fxremat.compile(ActorAndCritic(), mem="min", **QUICK), torch.randn(256, 64)
    least = []
    for _ in range(3):
        compiled.zero_grad()
        loss, scores, values = compiled(x)
        (loss + values.square().mean() + scores.softmax(-1).square().mean()).backward()
        least.append(compiled.plan.minimum)
    assert max(least) < 1.1 * least[0], "the forward and backward that ran as plain PyTorch are taken for the loss"


def test_the_first_time_it_says_so() -> None:
    compiled = fxremat.compile(Returning(), mem="100%", **QUICK)
    with pytest.warns(UserWarning, match='gradients="all"'):
        loss_and_logits(compiled, rows())


@pytest.mark.parametrize("dynamic", [False, None])
def test_it_says_so_once_for_all_captures(dynamic: bool | None, recwarn: pytest.WarningsRecorder) -> None:
    """Other sizes are captured before and after the loss reads another output."""
    model = Returning()
    compiled = fxremat.compile(copy.deepcopy(model), mem="100%", dynamic=dynamic, **QUICK)
    steps = [(rows()[:32], only_loss), *((rows()[:count], loss_and_logits) for count in (64, 32, 48, 64, 40))]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for x, body in steps:
            expected, got = (record(m, (x,), {}, body) for m in (model, compiled))
            assert unequal(got.gradients, expected.gradients) == []
    assert sum("the loss reads outputs" in str(warning.message) for warning in recwarn) == 1


def test_every_output_from_the_start() -> None:
    """No warning: they are errors here."""
    model = Returning()
    compiled = fxremat.compile(copy.deepcopy(model), mem="100%", loss=Loss(gradients="all"), **QUICK)
    expected, got = (record(m, (rows(),), {}, loss_and_logits) for m in (model, compiled))
    assert unequal(got.gradients, expected.gradients) == []
    assert len(compiled.fxremat.plans) == 1


def test_the_loss_may_be_changed_in_place() -> None:
    def body(model: nn.Module, x: Tensor) -> Any:
        outputs = model(x)
        loss = outputs[0]
        loss /= 4
        loss.backward()
        return outputs

    assert_as_plain(Returning, rows(), body=body)


def test_an_output_that_the_backward_reads_may_not() -> None:
    class Squares(Returning):
        def forward(self, x: Tensor) -> Any:
            hidden = self.stack(x)
            return hidden.square().mean(), hidden

    def body(model: nn.Module) -> None:
        loss, hidden = model(rows())
        hidden.mul_(2)
        loss.backward()

    for model in (Squares(), fxremat.compile(Squares(), mem="100%", **QUICK)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            body(model)


def test_a_step_that_counts_itself_is_planned_whole() -> None:
    """It cannot run again: the count it starts from is gone."""

    class Counting(Returning):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return super().forward(x * self.calls)

    compiled = assert_as_plain(Counting, rows(), body=loss_and_logits, mem="100%")
    assert len(compiled.plan.graph.tangents) == 3


@pytest.mark.filterwarnings("ignore:the loss reads outputs")
def test_a_second_backward_through_another_output() -> None:
    def body(model: nn.Module, x: Tensor) -> Any:
        outputs = model(x)
        outputs[0].backward(retain_graph=True)
        outputs[2].sum().backward()
        return outputs

    assert_as_plain(Returning, rows(), body=body, mem="100%")


@pytest.mark.filterwarnings("ignore:the loss reads outputs")
def test_running_again_under_autocast() -> None:
    def body(model: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x)
        (outputs[0] + outputs[1].float().square().mean()).backward()
        return outputs

    assert_as_plain(Returning, rows(), body=body, mem="100%")


@pytest.mark.filterwarnings("ignore:the loss reads outputs")
def test_gradients_asked_for_one_by_one() -> None:
    def body(model: nn.Module, x: Tensor) -> Any:
        loss, logits, _ = model(x)
        of_loss = torch.autograd.grad(loss, list(model.parameters())[2:4], retain_graph=True)
        return of_loss, torch.autograd.grad(logits.sum(), list(model.parameters())[:2])

    assert_as_plain(Returning, rows(), body=body, mem="100%")


def tangents_of(plan: Any) -> int:
    """The number of gradients that a step's graph is given; of calls before one backward, the largest."""
    graphs = [call.graph for call in plan.calls] if isinstance(plan, PlanOfGraphs) else [plan.graph]
    return max(len(graph.tangents) for graph in graphs)


def test_an_output_that_the_loss_is_not_computed_from_may_be_used() -> None:
    """It is given its gradient from the start, and the value beside the loss still costs none."""

    class Pooled(Returning):
        def __init__(self) -> None:
            super().__init__()
            self.pooler = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Any:
            loss, logits, hidden = super().forward(x)
            return loss, logits, self.pooler(hidden)

    def body(model: nn.Module, x: Tensor) -> Any:
        outputs = model(x)
        (outputs[0] + outputs[2].mean()).backward()
        return outputs

    compiled = assert_as_plain(Pooled, rows(), body=body)
    assert len(compiled.plan.graph.tangents) == 2


def test_a_scalar_that_is_no_loss() -> None:
    """It is not computed from the other output, so that a gradient for both is expected from the start."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack, self.scale = Stack(), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Any:
            return self.stack(x), self.scale.exp()

    def body(model: nn.Module, x: Tensor) -> Any:
        outputs = model(x)
        (outputs[0].mean() * outputs[1]).backward()
        return outputs

    compiled = assert_as_plain(Scaled, rows(), body=body)
    assert len(compiled.plan.graph.tangents) == 2


def test_as_a_backend_of_torch_compile() -> None:
    model = Returning()
    compiled = torch.compile(copy.deepcopy(model), backend="fxremat", options={"mem": "100%"})
    expected = record(model, (rows(),), {}, loss_and_logits)
    with pytest.warns(UserWarning, match='gradients="all"'):
        got = record(compiled, (rows(),), {}, loss_and_logits)  # type: ignore[arg-type]
    assert all(map(same, got.gradients.values(), expected.gradients.values()))


class Recurrent(nn.Module):
    """Loss, and a state for the next call that the loss is not computed from.

    A gradient of zeros for the state would change the layout in which the gradient of `hidden` lies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.gate = nn.Linear(96, 80), nn.Linear(64, 50), nn.Linear(80, 80)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        scores = self.head((hidden.t() * 1.5).contiguous())
        return F.cross_entropy(scores, torch.arange(80) % 50), self.gate(hidden).tanh()


def through_time(model: nn.Module, x: Tensor) -> Any:
    (first, state), (second, last) = model(x), model(x + 1)
    (first + second + state.square().mean()).backward()
    return first, state, second, last


def gradients_of_steps(model: nn.Module, x: Tensor, body: Any, steps: int = 3) -> list[list[Tensor | None]]:
    found = []
    for _ in range(steps):
        model.zero_grad()
        body(model, x)
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


def test_a_state_without_gradient_is_captured_so_from_the_second_step_on() -> None:
    model, x = Recurrent(), torch.randn(64, 96)
    compiled = fxremat.compile(copy.deepcopy(model), mem="100%", **QUICK)
    expected = gradients_of_steps(model, x, only_loss)
    got = gradients_of_steps(compiled, x, only_loss)
    torch.testing.assert_close(got[0], expected[0])
    assert all(map(same, got[1], expected[1]))
    assert all(map(same, got[2], expected[2]))
    assert len(compiled.plan.graph.tangents) == 1
    assert "first.weight" in [node.meta.get(NAME) for node in compiled.plan.captured.primals]


def test_a_state_without_gradient_keeps_zeros_where_nothing_fits_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Recurrent(), torch.randn(64, 96)
    compiled = fxremat.compile(copy.deepcopy(model), mem="100%", **QUICK)
    only_loss(compiled, x)
    refused = []

    def refuse(*_: Any) -> None:
        refused.append(BudgetTooSmall(minimum=2, budget=1))
        raise refused[-1]

    monkeypatch.setattr(AuxiliaryOutputs, "_plan", refuse)
    expected, got = gradients_of_steps(model, x, only_loss), gradients_of_steps(compiled, x, only_loss)
    assert all(map(same, itertools.chain(*got), itertools.chain(*expected)))
    assert len(refused) == 1


def test_a_state_that_one_of_two_calls_takes_keeps_its_gradient() -> None:
    model, x = Recurrent(), torch.randn(64, 96)
    compiled = fxremat.compile(copy.deepcopy(model), mem="100%", **QUICK)
    expected = gradients_of_steps(model, x, through_time)
    got = gradients_of_steps(compiled, x, through_time)
    torch.testing.assert_close(got, expected)
    assert tangents_of(compiled.plan) == 2


@pytest.mark.filterwarnings("ignore:the loss reads outputs")
def test_a_state_that_gets_a_gradient_later() -> None:
    model, x = Recurrent(), torch.randn(64, 96)
    compiled = fxremat.compile(copy.deepcopy(model), mem="100%", **QUICK)
    for body, tangents in ((only_loss, 1), (through_time, 2)):
        expected = gradients_of_steps(model, x, body, steps=2)
        torch.testing.assert_close(gradients_of_steps(compiled, x, body, steps=2), expected)
        assert tangents_of(compiled.plan) == tangents


@pytest.mark.filterwarnings("ignore:the loss reads outputs")
def test_a_backward_that_runs_twice_after_the_step_was_planned_again() -> None:
    model, x = Returning(), rows()
    compiled = fxremat.compile(copy.deepcopy(model), mem="100%", **QUICK)

    def twice(model: nn.Module, x: Tensor) -> Any:
        outputs = model(x)
        outputs[0].backward(retain_graph=True)
        outputs[0].backward()

    for body in (loss_and_logits, only_loss, twice):
        torch.manual_seed(0)
        got = gradients_of_steps(compiled, x, body, steps=1)
        torch.manual_seed(0)
        torch.testing.assert_close(got, gradients_of_steps(model, x, body, steps=1))


@pytest.mark.filterwarnings("ignore:the loss reads outputs")
def test_parameters_that_only_the_loss_reads_get_no_gradient_from_a_state() -> None:
    """Not one of zeros, to which weight decay would apply."""
    model, x = Recurrent(), torch.randn(64, 96)
    compiled = fxremat.compile(copy.deepcopy(model), mem="100%", **QUICK)

    def only_state(model: nn.Module, x: Tensor) -> Any:
        model(x)[1].sum().backward()

    for body, steps in ((only_loss, 2), (only_state, 1)):
        got, expected = (gradients_of_steps(m, x, body, steps=steps) for m in (compiled, model))
        assert [g is None for g in got[-1]] == [g is None for g in expected[-1]]


class _Pooled(nn.Module):
    """Returns its loss, its logits, which the caller drops, and a pooled state that the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.pool = Stack(), nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        logits = self.head(hidden)
        return {"loss": logits.logsumexp(1).mean(), "logits": logits, "pooled": self.pool(hidden).tanh()}


def test_what_got_no_gradient_and_what_was_dropped_is_known_to_the_second_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures, call = list[object](), Backend.__call__

    def counted(backend: Backend, *args: Any, **given: Any) -> Any:
        captures.append(given)
        return call(backend, *args, **given)

    monkeypatch.setattr(Backend, "__call__", counted)
    compiled, x, made = fxremat.compile(_Pooled(), mem="88%", **QUICK), rows(64), []
    for _ in range(6):
        compiled(x)["loss"].backward()
        made.append(len(captures))
    assert made[-1] <= 2
    compiled.zero_grad()
    assert compiled.plan.predicted_peak <= 1.01 * peak_bytes(lambda: compiled(x)["loss"].backward())


class _Recurrent(nn.Module):
    """Returns its loss, logits that the caller drops, and a pooled state, of a loop over the columns of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pool = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 16 * WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        state = x[:, 0]
        for column in range(1, x.shape[1]):
            state = self.layer(state + x[:, column]).tanh()
        logits = self.head(state)
        return {"loss": logits.logsumexp(1).mean(), "logits": logits, "pooled": self.pool(state).tanh()}


def test_what_got_no_gradient_and_what_was_dropped_is_known_of_a_longer_loop() -> None:
    compiled = fxremat.compile(_Recurrent(), mem="4MB", **QUICK)
    for length in (4, 5):
        known = len(compiled.fxremat.plans)
        for _ in range(4):
            compiled(torch.randn(64, length, WIDTH))["loss"].backward()
    assert len(compiled.fxremat.plans) == known + 1
