"""`fxremat.capture`: one capture and one measurement, for any number of plans."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.planning.replan import order_of_least
from fxremat.settings import Offload, Search

HOSTED = Offload(weights=True)
QUICK: dict[str, Any] = {"search": Search(seconds=0)}
x = torch.linspace(-1, 1, 64 * 16).reshape(64, 16)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return rows.square().mean()


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.fixture(scope="module")
def step() -> fxremat.CapturedStep:
    torch.manual_seed(0)
    return fxremat.capture(Deep(), (x,), costs="estimate", **QUICK)


pytestmark = pytest.mark.usefixtures("torch_ready")


def test_plans_of_a_captured_step_are_those_of_plan(step: fxremat.CapturedStep, captures: list[object]) -> None:
    made = {mem: step.plan(mem) for mem in ("100%", "60%", 400_000)}
    offloaded = step.plan("60%", offload=True)
    assert captures == []
    assert offloaded.chosen.transfers
    torch.manual_seed(0)
    model = Deep()
    for mem, plan in made.items():
        other = fxremat.plan(model, (x,), mem=mem, costs="estimate", **QUICK)
        assert str(plan) == str(other)
        assert [plan.program.steps, plan.graph.digest] == [other.program.steps, other.graph.digest]


def test_the_frontier_and_the_least_budget_are_those_of_plans(step: fxremat.CapturedStep) -> None:
    least = step.least()
    assert step.frontier[-1][0] == least == step.plan("min").predicted_peak == step.plan("min").budget
    with pytest.raises(fxremat.BudgetTooSmall) as error:
        step.plan(least - 1)
    assert error.value.minimum == least


def test_a_profile_of_a_step_needs_no_other_capture(step: fxremat.CapturedStep, captures: list[object]) -> None:
    assert "What would save most" in str(step.profile())
    assert captures == []


def test_a_plan_knows_its_step(step: fxremat.CapturedStep) -> None:
    plan = step.plan("60%")
    assert plan.step is not None
    assert str(plan.within("80%")) == str(step.plan("80%"))
    assert plan.step.graph is step.graph


def test_the_least_budget_trains_with_the_same_bits() -> None:
    torch.manual_seed(0)
    plain, model = Deep(), Deep()
    model.load_state_dict(plain.state_dict())
    compiled = fxremat.compile(model, "min", example_inputs=(x,), **QUICK)
    assert compiled.plan is not None
    peak = peak_bytes(lambda: compiled(x).backward())
    plain(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert peak <= compiled.plan.budget == compiled.plan.minimum


def test_the_least_budget_at_near_sizes_comes_from_known_programs(caplog: pytest.LogCaptureFixture) -> None:
    settings: Any = {"dynamic": True, "costs": "estimate", **QUICK}
    model = fxremat.compile(Deep(), "min", **settings)
    with caplog.at_level("INFO"):
        for rows in (64, 72, 200):
            model(x.repeat(4, 1)[:rows]).backward()
            least = model.plan.budget  # type: ignore[union-attr]
            fresh = fxremat.plan(Deep(), (x.repeat(4, 1)[:rows],), mem="min", **settings).budget
            assert fresh <= least <= 1.02 * fresh
    assert [line for line in caplog.messages if "known programs" in line and "72" in line]
    assert "no known program is near enough" in caplog.text  # at 200 rows


def wide() -> nn.Module:
    """At few rows the gradients of its parameters are the peak, and nothing is worth running again."""
    parts = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)) for _ in range(4))
    return nn.Sequential(*parts, nn.Flatten(0), Mean())


class Mean(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.square().mean()


def test_a_call_that_recomputes_nothing_at_its_least_leaves_later_ones_theirs() -> None:
    settings: Any = {"dynamic": True, "costs": "estimate", **QUICK}
    model = fxremat.compile(wide(), "min", **settings)
    for count in (20, 1000, 950):
        given = torch.randn(count, 32)
        model(given).backward()
        fresh = fxremat.plan(wide(), (given,), mem="min", **settings).budget
        assert model.plan.budget <= 1.05 * fresh, count  # type: ignore[union-attr]


def test_ops_are_measured_in_the_order_of_the_nearest_known_plan() -> None:
    settings: Any = {"dynamic": True, "costs": "estimate", **QUICK}
    small, large, other = (
        fxremat.plan(wide(), (torch.randn(count, 32),), mem="100%", **settings) for count in (20, 1000, 950)
    )
    graph = other.graph
    for known in ([small, large], [large, small]):
        order = order_of_least(known, graph)
        assert order == large.alternatives.candidates[-1].order().ops
        assert len(order) > len(graph.ops)  # ops run again
    assert order_of_least([small], graph) is None
    assert order_of_least([], graph) is None


@pytest.mark.parametrize("options", [{"slices": True}, {"offload": True}], ids=str)
def test_the_least_budget_with_other_options(options: dict[str, Any]) -> None:
    step = fxremat.capture(Deep(), (x,), costs="estimate", **options, **QUICK)
    plan = step.plan("min")
    assert plan.predicted_peak <= plan.budget
    with pytest.raises(fxremat.BudgetTooSmall):
        step.plan(plan.budget - 1)


def test_a_step_of_symbolic_sizes_has_plans_for_all(captures: list[object]) -> None:
    step = fxremat.capture(Deep(), (x,), dynamic=True, costs="estimate", mem="50%", **QUICK)
    assert len(captures) == 1
    assert step.sizes == "rows[0] = 64"
    assert step.resizable_inputs == {"rows"}
    longer = step.at(rows=100)
    assert longer.sizes == "rows[0] = 100"
    fixed = fxremat.plan(Deep(), (x.repeat(2, 1)[:100],), mem="min", dynamic=False, costs="estimate", **QUICK)
    assert longer.least() == fixed.budget
    assert longer.plan("60%").predicted_peak <= longer.plan("60%").budget
    assert len(captures) == 2  # that of fixed sizes


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda step: step.plan("60%", backend="inductor", costs="measure"), "backend='inductor' changes what is"),
        (lambda step: step.plan("60%", method="step"), "method='step' changes what is captured"),
        (lambda step: step.plan("60%", offload=HOSTED, optimizer=sgd()), "changes what is captured"),
        (lambda step: step.plan("60%", method="training_step"), "method='training_step' changes what is captured"),
        (lambda step: step.plan("60%", serach=3), "unknown option 'serach', did you mean 'search'?"),
        (lambda step: step.at(rows=5), "this step is of fixed sizes"),
        (lambda step: step.plan("sixty"), "mem='sixty' is not a budget"),
    ],
)
def test_what_a_step_refuses(step: fxremat.CapturedStep, call: Any, says: str) -> None:
    with pytest.raises(fxremat.FxrematError, match=says.replace("(", r"\(").replace("?", r"\?")) as error:
        call(step)
    assert "\n" not in str(error.value)


def test_what_needs_no_gradient_is_not_captured() -> None:
    with pytest.raises(fxremat.FxrematError, match=r"nothing to (plan|train)"):
        fxremat.capture(Deep().requires_grad_(False), (x,), costs="estimate", **QUICK)
    with pytest.raises(fxremat.FxrematError, match="eval mode"):
        fxremat.capture(Deep().eval(), (x,), costs="estimate", **QUICK)
    model = Deep()
    assert fxremat.capture(model, (x,), costs="estimate", **QUICK).graph.model == "Deep"
    assert all(parameter.grad is None for parameter in model.parameters())


class WithDropout(Deep):
    """Masks can be packed, so that several ways to run the step are planned."""

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = nn.functional.dropout(torch.relu(layer(rows)))
        return rows.square().mean()


class Held:
    """Something that a caller of the planner has in a variable."""


@pytest.mark.parametrize("options", [{}, {"slices": True}, {"exact": True}], ids=str)
def test_a_refusal_holds_nothing_of_those_who_asked(options: dict[str, Any]) -> None:
    step = fxremat.capture(WithDropout(), (x,), costs="estimate", **QUICK, **options)

    def refused() -> weakref.ref[Held]:
        held = Held()
        with contextlib.suppress(fxremat.BudgetTooSmall):
            step.plan(1)
        return weakref.ref(held)

    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()
