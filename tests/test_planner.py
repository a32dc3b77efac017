"""The survey of what memory buys, and the choice from it."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import fxremat
from fxremat.__main__ import main as command_line
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.planning import frontier_cache as memo
from fxremat.search import survey as planner
from fxremat.search.survey import survey
from fxremat.units import format_bytes
from tests.saved_steps import saved

pytestmark = pytest.mark.usefixtures("torch_ready")


class Deep(nn.Module):
    """Twelve times linear and tanh, wide batch: activations outweigh gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


INPUTS = (torch.ones(256, 16),)


def test_the_fastest_that_fits_is_chosen() -> None:
    frontier = survey(*saved("deep"))
    for budget in (frontier.minimum, frontier.minimum * 2, frontier.keep_all.peak):
        chosen = frontier.within(budget)
        assert chosen.peak <= budget
        assert chosen.time == min(p.time for p in frontier.candidates if p.peak <= budget)
    assert frontier.within(frontier.keep_all.peak).time == frontier.keep_all.time


def test_less_memory_never_leads_to_a_faster_plan() -> None:
    """Whatever is asked for first; and what is known of smaller budgets does not depend on the larger one."""
    plans = {mem: fxremat.plan(Deep(), INPUTS, mem=mem, costs="estimate") for mem in ("90%", "40%", "65%")}
    times = [plans[mem].predicted_time for mem in ("40%", "65%", "90%")]
    assert times == sorted(times, reverse=True)
    below = [[p for p in plan.frontier if p[0] <= plans["40%"].budget] for plan in plans.values()]
    assert below[0] == below[1] == below[2] != []
    for plan in plans.values():
        for (peak, seconds), (less, longer) in itertools.pairwise(plan.frontier):
            assert less < peak
            assert longer >= seconds


def test_too_small_a_budget_names_the_least_that_works() -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        fxremat.plan(Deep(), INPUTS, mem=1000, costs="estimate")
    plan = fxremat.plan(Deep(), INPUTS, mem=caught.value.minimum, costs="estimate")
    assert plan.predicted_peak == caught.value.minimum == plan.minimum


@pytest.mark.parametrize("solver", ["keep_all", "periodic", "persistent", "input_drop", "auto"])
def test_every_solver_makes_plans_that_train(solver: str) -> None:
    torch.manual_seed(0)
    model = Deep()
    model(*INPUTS).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    mem = "100%" if solver == "keep_all" else "90%"
    fxremat.compile(model, mem=mem, solver=solver, costs="estimate")(*INPUTS).backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))  # type: ignore[arg-type]


def test_an_unknown_solver_is_refused_with_the_known_ones() -> None:
    with pytest.raises(FxrematError, match=r"keep_all, periodic, .*persistent, .*input_drop"):
        fxremat.plan(Deep(), INPUTS, mem="60%", solver="best", costs="estimate")


def test_blocks_of_very_long_chains_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MOST_BLOCKS", 3)
    monkeypatch.setattr(memo, "_latest", OrderedDict())
    work = [0.0, 1.0, 10.0, 12.0, 20.0, 22.0, 29.0]
    assert planner._thin([0, 1, 2, 3, 4, 5], work, 3) == [1, 3, 5]
    plan = fxremat.plan(Deep(), INPUTS, mem="100%", costs="estimate")
    assert len(plan.chain.blocks) <= 4


def test_a_plan_shows_itself() -> None:
    plan = fxremat.plan(Deep(), INPUTS, mem="50%", costs="H100")
    text = str(plan)
    for words in (
        "H100 (estimated times)",
        "budget",
        "predicted peak",
        "least budget",
        "gradients to return",
    ):
        assert words in text
    assert str(plan.schedule) in " ".join(text.split())
    assert plan.timeline.peak >= plan.predicted_peak
    assert plan.timeline.time == pytest.approx(plan.predicted_time)


def test_planning_needs_training_mode_and_known_options() -> None:
    with pytest.raises(FxrematError, match=r"eval mode.*model\.train\(\)"):
        fxremat.plan(Deep().eval(), INPUTS, mem="60%")
    with pytest.raises(FxrematError, match="unknown option 'speed'; there are mem, device_mem, exact, plan, solver"):
        fxremat.compile(Deep(), mem="60%", speed=1)
    with pytest.raises(FxrematError, match="compiled already"):
        fxremat.compile(fxremat.compile(Deep(), mem="60%"), mem="50%")
    with pytest.raises(FxrematError, match="is a function"):
        fxremat.compile(factory, mem="60%")  # type: ignore[arg-type]


def test_an_error_of_planning_is_one_line_and_changes_nothing() -> None:
    model = Deep()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(BudgetTooSmall) as caught:
        fxremat.compile(model, mem=1, example_inputs=INPUTS, costs="estimate")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Outside(Deep):
    """Returns its last value: the loss is the caller's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_loss_outside_the_model_is_planned_for() -> None:
    output = 256 * 16 * 4
    sizes = fxremat.plan(Outside(), INPUTS, mem="100%", costs="estimate").costs.sizes
    assert 0 <= sizes.outside - 4 * output < 100, "and some numbers"
    plan = fxremat.plan(Outside(), INPUTS, mem="100%", loss="1MB", costs="estimate")
    assert plan.costs.sizes.outside == 10**6
    assert plan.predicted_peak > 10**6


def factory() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """For the command line."""
    return Deep(), INPUTS


COMMAND = ["plan", "tests.test_planner:factory", "--mem"]


def test_the_command_line_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line([*COMMAND, "70%"]) == 0
    printed = capsys.readouterr().out
    assert "predicted peak" in printed
    assert "schedule: F" in printed
    assert command_line([*COMMAND, "10"]) == 2
    printed, complaint = capsys.readouterr()
    assert printed == ""
    assert "no schedule fits in 10 bytes" in complaint


def test_the_command_line_writes_the_page_and_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    saved = tmp_path / "plan.json"
    assert command_line([*COMMAND, "70%", "--report", str(out), "--save", str(saved)]) == 0
    assert f"budget          {format_bytes(fxremat.Plan.load(saved).budget)}" in capsys.readouterr().out
    assert '"title":"' in out.read_text()
    assert " trains in " in out.read_text()
