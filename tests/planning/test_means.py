"""The planner chooses the means: what it chose, what the others would give, and that the choice runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat.planned_step import Means
from fxremat.settings import Search, Slices
from tests.test_device_mem import most

pytestmark = pytest.mark.usefixtures("torch_ready")
QUICK = Search(seconds=0.0, progress=False)
FAST_LINK = fxremat.Device(name="Roofline", flops=1e12, half_flops=1e12, bandwidth=1e11, link=1e11)


class Deep(nn.Module):
    """Narrow layers with dropout between a wide input and a loss."""

    def __init__(self, width: int = 32, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.1)
        return x.square().mean()


class Head(nn.Module):
    """A vocabulary head with its loss, most of the memory of a step, which slices divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2000, 16), nn.Linear(16, 2000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.head(self.embedding(tokens)), tokens)


DEEP, TOKENS = torch.randn(256, 32), torch.arange(512)


@pytest.fixture(scope="module")
def step() -> Any:
    """The step of a deep model, for plans by estimate."""
    torch.set_num_threads(1)
    return fxremat.capture(Deep(), (DEEP,), costs="H100", search=QUICK)


def means_of(plan: Any) -> dict[str, Means]:
    return {means.name: means for means in plan.means}


def the_chosen(plan: Any) -> list[str]:
    return [means.name for means in plan.means if means.chosen]


def test_recomputing_alone_is_enough_where_it_costs_little(step: Any) -> None:
    plan = step.plan("100%", exact=True)
    assert the_chosen(plan) == ["recomputing"]
    assert means_of(plan)["offloading"].why_not.startswith("not tried, as it could save 0.0%")
    assert "exact=True forbids" in means_of(plan)["slices"].why_not
    assert "recomputing: 1.00x in" in str(plan)


def test_without_it_nothing_is_chosen(step: Any) -> None:
    plan = step.plan("60%")
    assert plan.means == ()
    assert "  means  " not in str(plan)


def test_the_host_is_used_where_nothing_else_fits_with_the_bits_of_plain_pytorch() -> None:
    model = Deep()
    least = fxremat.plan(model, (DEEP,), mem="min", costs="estimate", search=QUICK).budget
    budget = int(0.9 * least)
    plain = copy.deepcopy(model)
    compiled = fxremat.compile(model, mem=budget, exact=True, costs="estimate", search=QUICK)
    torch.manual_seed(0)
    compiled(DEEP).backward()
    torch.manual_seed(0)
    plain(DEEP).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert the_chosen(compiled.plan) == ["offloading"]
    assert means_of(compiled.plan)["recomputing"].least == least
    model.zero_grad(set_to_none=True)
    assert meter.peak_bytes(lambda: compiled(DEEP).backward()) <= budget


def test_the_host_is_used_where_it_is_faster_by_a_twentieth(step: Any) -> None:
    mem = "50%"
    fast = step.plan(mem, exact=True, costs=FAST_LINK)
    found = means_of(fast)
    recomputing, offloading = found["recomputing"].slowdown, found["offloading"].slowdown
    assert recomputing is not None
    assert offloading is not None
    assert recomputing >= 1.05 * offloading
    assert the_chosen(fast) == ["offloading"]
    slow = fxremat.Device(name="Slow", flops=1e12, half_flops=1e12, bandwidth=1e11, link=1e8)
    assert the_chosen(step.plan(mem, exact=True, costs=slow)) == ["recomputing"]


def test_a_means_that_is_forbidden_is_not_used_and_the_error_tells_what_each_needs(step: Any) -> None:
    least = step.least()
    mem = int(0.9 * least)
    with pytest.raises(fxremat.BudgetTooSmall, match=r"recomputing: .* at least; exact=False allows slices") as refused:
        step.plan(mem, exact=True, offload=False)
    assert refused.value.minimum == least
    assert means_of(refused.value)["offloading"].why_not == "offload=False forbids it"
    forced = step.plan(mem, exact=True, offload=True)
    assert the_chosen(forced) == ["offloading"]
    assert "recomputing" not in means_of(forced)


def test_slices_are_for_those_who_allow_rounding() -> None:
    model = Head()
    exact = fxremat.plan(model, (TOKENS,), mem="100%", exact=True, costs="H100", search=QUICK)
    half: Any = {"mem": exact.keep_all_peak // 2, "costs": "H100", "search": QUICK}
    with pytest.raises(fxremat.BudgetTooSmall, match="exact=False allows slices"):
        fxremat.plan(model, (TOKENS,), exact=True, **half)
    assert the_chosen(fxremat.plan(model, (TOKENS,), exact=False, **half)) == ["slices"]
    with pytest.raises(fxremat.BudgetTooSmall):
        fxremat.plan(model, (TOKENS,), exact=False, slices=False, **half)
    forced = fxremat.plan(model, (TOKENS,), exact=True, slices=Slices(max_parts=8), **half)
    assert the_chosen(forced) == ["slices"]


def test_the_least_budget_is_that_of_all_means(step: Any) -> None:
    plan = step.plan("min", exact=True)
    assert plan.predicted_peak <= plan.budget == step.plan("min", offload=True).budget < step.least()
    assert the_chosen(plan) == ["offloading"]
    assert means_of(plan)["recomputing"].least == step.least()


def test_compiled_kernels_are_among_the_means() -> None:
    compiled = fxremat.compile(Deep(layers=3), mem="100%", exact=False, search=QUICK)
    compiled(DEEP).backward()
    kernels = means_of(compiled.plan)["compiled kernels"]
    assert bool(compiled.plan.compiled) is kernels.chosen
    assert kernels.chosen or kernels.why_not == compiled.plan.not_compiled
    for options in ({"exact": True}, {"exact": False, "backend": "eager"}):
        plain = fxremat.compile(Deep(layers=3), mem="100%", example_inputs=(DEEP,), search=QUICK, **options)
        assert plain.plan.compiled is None
        assert "forbid" in means_of(plain.plan)["compiled kernels"].why_not


def test_a_captured_step_is_planned_by_choice_without_another_capture(step: Any, captures: list[object]) -> None:
    assert the_chosen(step.plan("60%", exact=True))
    assert the_chosen(step.plan("70%", exact=False))
    assert not captures


def test_weights_live_on_the_host_where_nothing_else_fits_on_the_device() -> None:
    torch.manual_seed(0)
    model, x = Deep(width=96, layers=8), torch.randn(32, 96)
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters())
    everything = most(copy.deepcopy(plain), torch.optim.AdamW(plain.parameters()), (x,))
    device_mem, mine = int(0.6 * everything), torch.optim.AdamW(model.parameters())
    compiled = fxremat.compile(model, device_mem=device_mem, optimizer=mine, exact=True, search=QUICK)
    torch.manual_seed(1)
    assert most(compiled, mine, (x,)) <= device_mem
    torch.manual_seed(1)
    most(plain, theirs, (x,))
    assert the_chosen(compiled.plan) == ["weights on the host"]
    assert [means.name for means in compiled.plan.means if means.least][:2] == ["recomputing", "offloading"]
    compiled.fxremat.to_device()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_weights_stay_where_an_optimizer_cannot_run_so_or_is_only_named() -> None:
    model, x = Deep(width=96, layers=8), torch.randn(32, 96)
    small: Any = {"device_mem": "600kB", "exact": True, "costs": "estimate", "search": QUICK}
    for optimizer in ("adamw", torch.optim.Adafactor(model.parameters()), None):
        with pytest.raises(fxremat.BudgetTooSmall, match=r"recomputing: .* at least; offloading: .* at least"):
            fxremat.plan(model, (x,), optimizer=optimizer, **small)


def test_a_model_of_several_graphs_trains_with_what_the_user_named() -> None:
    class Broken(Deep):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:4]:
                x = torch.tanh(layer(x))
            if float(x.sum()) > 1e9:
                return x.sum()
            return super().forward(x)

    model = Broken(layers=8)
    plain = copy.deepcopy(model)
    compiled = fxremat.compile(model, mem="80%", exact=False, search=QUICK)
    for _ in range(3):
        for each in (compiled, plain):
            torch.manual_seed(2)
            each.zero_grad(set_to_none=True)
            each(DEEP).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_sizes_are_planned_one_by_one() -> None:
    compiled = fxremat.compile(Deep(layers=3), mem="60%", exact=True, costs="estimate", search=QUICK)
    for rows in (256, 192):
        compiled(DEEP[:rows]).backward()
    assert len(compiled.fxremat.plans) == 2
    assert all(plan.means for plan in compiled.fxremat.plans)


def test_it_is_true_or_false() -> None:
    with pytest.raises(fxremat.FxrematError, match="exact is 'yes'; it is True, False, or None"):
        fxremat.compile(Deep(), mem="60%", exact="yes")  # type: ignore[arg-type]


def test_what_was_chosen_is_in_a_saved_plan(step: Any, tmp_path: Any) -> None:
    plan = step.plan("60%", exact=True)
    plan.save(tmp_path / "plan.json")
    assert fxremat.Plan.load(tmp_path / "plan.json").means == plan.means
