"""Forward and backward compiled whole: budgets hold, gradients are torch.compile's, and the fastest is chosen."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes, training_step
from fxremat.cost import calibrate
from fxremat.errors import FxrematError
from fxremat.graphs import region
from fxremat.planning import compiled
from fxremat.settings import Inductor
from tests.fusion.test_compiled import batch, gradients, largest_error, model_of
from tests.toys import Words, tokens

pytestmark = pytest.mark.usefixtures("torch_ready")
WHOLE = Inductor(random="inductor", whole_graphs=True)


@pytest.fixture
def whole_graphs_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of whole graphs that fit are taken, however long they take."""
    monkeypatch.setattr(compiled, "CLEARLY", 1e9)
    monkeypatch.setattr(compiled._Search, "_seconds", lambda _, found, single: [1e9] * len([*found, *single]))


def measured(model: nn.Module, call: Any, given: tuple[Tensor, ...]) -> int:
    training_step(call, given)()
    model.zero_grad(set_to_none=True)
    return peak_bytes(training_step(call, given))


@pytest.mark.usefixtures("whole_graphs_win")
@pytest.mark.parametrize("share", [110, pytest.param(85, marks=pytest.mark.long)])
def test_the_budget_holds_and_gradients_are_those_of_torch_compile(share: int) -> None:
    plain, ours, stock = (model_of(dropout=0.5, layers=2) for _ in range(3))
    given, theirs = batch(), torch.compile(plain, backend="inductor", dynamic=False)
    budget = measured(plain, theirs, given) * share // 100
    plain, theirs = stock, torch.compile(stock, backend="inductor", dynamic=False)
    call: Any = fxremat.compile(ours, mem=budget, backend=WHOLE)
    assert largest_error(gradients(ours, call, given), gradients(plain, theirs, given)) < 2e-5
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours.named_buffers(), plain.named_buffers(), strict=True))
    plan = call.plan
    assert plan.compiled
    assert plan.compiled.regions == 2
    ours.zero_grad(set_to_none=True)
    assert measured(ours, call, given) <= budget
    ours.zero_grad(set_to_none=True)
    assert measured(ours, call, given) == pytest.approx(plan.predicted_peak, rel=1e-3)


def test_whole_graphs_fit_where_single_ops_do_not() -> None:
    model, given = Words(), tokens()
    with pytest.raises(fxremat.BudgetTooSmall) as raised:
        fxremat.compile(Words(), mem=1, example_inputs=given)
    budget = raised.value.minimum * 9 // 10
    with pytest.raises(fxremat.BudgetTooSmall):
        fxremat.compile(Words(), mem=budget, backend=Inductor(whole_graphs=False), example_inputs=given)
    call: Any = fxremat.compile(model, mem=budget, backend=WHOLE, example_inputs=given)
    assert call.plan.minimum <= call.plan.predicted_peak <= call.plan.budget == budget
    assert measured(model, call, given) == pytest.approx(call.plan.predicted_peak, rel=1e-3)
    with pytest.raises(fxremat.BudgetTooSmall, match=f"least that does is {raised.value.minimum}"):
        fxremat.compile(Words(), mem=budget // 4, backend=WHOLE, example_inputs=given)
    half: Any = fxremat.compile(model, mem=budget // 2, backend=WHOLE, example_inputs=given)  # torch's partitioner
    assert measured(model, half, given) == pytest.approx(half.plan.predicted_peak, rel=1e-3)
    assert half.plan.predicted_peak <= budget // 2


@pytest.mark.usefixtures("whole_graphs_win")
def test_what_kernels_take_while_they_are_tuned_is_not_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_region = region.compile_region

    def tuned_at_first(*args: Any) -> Any:
        run, runs = compile_region(*args), []

        def call(inputs: list[Any]) -> Any:
            if not runs:
                runs.append(torch.empty(1 << 22).sum())
            return run(inputs)

        return call

    monkeypatch.setattr(region, "compile_region", tuned_at_first)
    model, given = Words(), tokens()
    backend = Inductor(random="inductor", whole_graphs=True, config={"debug": False})  # kernels of its own
    call: Any = fxremat.compile(model, mem="100%", backend=backend, example_inputs=given)
    region.forget_kernels()
    assert call.plan.compiled.regions == 2
    assert measured(model, call, given) == pytest.approx(call.plan.predicted_peak, rel=1e-3)


@pytest.mark.usefixtures("whole_graphs_win")
def test_what_was_chosen_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tokens()
    first: Any = fxremat.compile(Words(), mem="100%", backend=WHOLE, example_inputs=given)
    monkeypatch.setattr(compiled._Search, "whole", lambda _: pytest.fail("it is searched again"))
    again: Any = fxremat.compile(Words(), mem="100%", backend=WHOLE, example_inputs=given)
    assert again.plan.predicted_peak == first.plan.predicted_peak
    assert again.plan.compiled.regions == first.plan.compiled.regions == 2


def test_a_step_that_cannot_be_run_before_training_is_not_compiled_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibrate, "has_room", lambda *_: False)
    monkeypatch.setattr(calibrate, "remembered", lambda _, __, ___, measure: measure())
    monkeypatch.setattr(compiled, "CUTS", ())
    with caplog.at_level(logging.WARNING):
        call: Any = fxremat.compile(Words(), mem="100%", backend=WHOLE, example_inputs=tokens())
    assert call.plan.compiled is None


class Cached(nn.Module):
    """Attention whose keys are appended to an empty cache, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.dropout = nn.Linear(32, 32), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x).view(4, 16, 4, 8).transpose(1, 2)
        keys = torch.cat([torch.tensor([]), keys], -2)
        return (self.dropout(keys @ keys.transpose(-2, -1)) @ keys).square().mean()


@pytest.mark.usefixtures("whole_graphs_win")
def test_what_is_appended_to_an_empty_tensor_lies_otherwise_where_it_is_compiled() -> None:
    ours, plain, given = Cached(), Cached(), (torch.randn(4, 16, 32),)
    plain.load_state_dict(ours.state_dict())
    call: Any = fxremat.compile(ours, mem="200%", backend=WHOLE)
    theirs = torch.compile(plain, dynamic=False)
    assert largest_error(gradients(ours, call, given), gradients(plain, theirs, given)) < 2e-5
    assert call.plan.compiled.regions == 2


def test_a_setting_that_is_no_answer_is_refused() -> None:
    with pytest.raises(FxrematError, match="whole_graphs is 'yes'; it is None, True or False"):
        Inductor(whole_graphs="yes")  # type: ignore[arg-type]
