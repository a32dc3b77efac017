"""The planner chooses the means: what it chose, what the others would give, and that the choice runs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from benchmarks.combinations import GPT, WORDS
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


def test_slices_that_take_longer_than_recomputing_are_not_used(step: Any) -> None:
    for mem in ("60%", "45%"):
        sliced = step.plan(mem, slices=True)
        assert sliced.predicted_time <= step.plan(mem).predicted_time
        assert not sliced.slices


def test_recomputation_that_only_a_search_fits_is_preferred_to_slow_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxremat.search.refine.PAGES", 2_000_000)  # searches as long as users'
    monkeypatch.setattr("fxremat.search.improve.PATIENCE", 500)
    tokens = torch.randint(0, WORDS, (4, 40))
    gpt = fxremat.capture(GPT(()), (tokens,), costs="estimate", search=Search(seconds=5.0, progress=False))
    sliced = gpt.plan("42%", slices=True)  # before the search of the plan to compare with
    assert sliced.predicted_time <= gpt.plan("42%").predicted_time


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
            if float(x.detach().sum()) > 1e9:
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


class Wide(nn.Module):
    """Layers whose parameters take most of the memory of a step."""

    def __init__(self, width: int = 96, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def on_a_device(model: nn.Module, device_mem: str, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters())
    given: Any = {"device_mem": device_mem, "optimizer": optimizer, "exact": True, "search": QUICK} | options
    return fxremat.compile(model, **given), optimizer


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, *, backwards: int = 1, steps: int = 2) -> None:
    for _ in range(steps):
        for _ in range(backwards):
            model(x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("exact", [True, None])
def test_a_call_that_does_not_fit_changes_nothing_for_the_next(exact: bool | None) -> None:
    model = Wide()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    compiled, optimizer = on_a_device(model, "1700kB", exact=exact, costs="estimate")
    for trained in (False, True):
        with pytest.raises(fxremat.BudgetTooSmall):
            compiled(torch.randn(10_000, 96))
        assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
        assert bool(compiled.fxremat.plans) is trained
        loop(compiled, optimizer, torch.randn(32, 96))
        assert compiled.plan.predicted_time == compiled.plan.keep_all_time
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_weights_go_to_the_host_when_a_later_call_needs_it() -> None:
    model, x = Wide(), torch.randn(32, 96)
    plain = copy.deepcopy(model)
    compiled, mine = on_a_device(model, "1500kB")
    compiled(x)
    assert the_chosen(compiled.plan) == ["recomputing"]
    theirs = torch.optim.AdamW(plain.parameters())
    for each, optimizer in ((compiled, mine), (plain, theirs)):
        loop(each, optimizer, x, backwards=3)  # from the second backward on, gradients wait
    assert the_chosen(compiled.plan) == ["weights on the host"]
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    compiled(torch.randn(64, 96)).backward()
    assert "for the inputs of an earlier call" in means_of(compiled.plan)["recomputing"].why_not


def test_a_captured_step_is_planned_for_other_memory_of_a_device() -> None:
    model, x = Wide(), torch.randn(32, 96)
    given: Any = {"optimizer": torch.optim.AdamW(model.parameters()), "costs": "estimate", "search": QUICK}
    step = fxremat.capture(model, (x,), device_mem="3MB", **given)
    for options in ({"device_mem": "4MB"}, {"optimizer": "sgd"}, {"device_mem": "1500kB"}):
        there = fxremat.plan(model, (x,), **{"device_mem": "3MB"} | given | options)
        assert step.plan(**options).budget == there.budget
    with pytest.raises(fxremat.BudgetTooSmall):
        step.plan(device_mem="900kB")
    assert step.plan("100%").predicted_time
    assert step.least() == fxremat.plan(model, (x,), mem="min", costs="estimate", search=QUICK).budget


def test_the_error_names_weights_on_the_host_too() -> None:
    compiled, _ = on_a_device(Wide(), "100kB")
    said = r"offloading: .* at least; weights on the host: .* at least"
    with pytest.raises(fxremat.BudgetTooSmall, match=said) as refused:
        compiled(torch.randn(32, 96))
    assert [means.name for means in refused.value.means if means.least][-1] == "weights on the host"


def test_why_weights_cannot_live_on_the_host_is_said() -> None:
    class Clamped(Wide):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layers[0].weight.clamp_(-1, 1)
            return super().forward(x)

    model = Clamped()
    said = r"recomputing: .* at least; .*weights on the host: not possible, as forward writes to"
    compiled, optimizer = on_a_device(model, "1MB")
    with pytest.raises(fxremat.BudgetTooSmall, match=said):
        compiled(torch.randn(32, 96))
    with pytest.raises(fxremat.BudgetTooSmall, match=said):
        fxremat.plan(
            model, torch.randn(32, 96), device_mem="1MB", optimizer=optimizer, exact=True, costs="measure", search=QUICK
        )


def test_copies_have_the_options_that_the_user_gave() -> None:
    compiled, optimizer = on_a_device(Wide(), "1MB")
    x = torch.randn(32, 96)
    loop(compiled, optimizer, x)
    assert the_chosen(compiled.plan) == ["weights on the host"]
    copied = copy.deepcopy(compiled)
    with pytest.raises(fxremat.BudgetTooSmall, match=r"recomputing: .* at least"):
        copied(x)  # the optimizer is the original's, so that its parameters stay
    loaded = pickle.loads(pickle.dumps(compiled))
    loaded(x).backward()
    assert the_chosen(loaded.plan) == ["weights on the host"]


def test_only_what_would_work_is_advised(step: Any) -> None:
    for options in ({"slices": False}, {"slices": True}):
        with pytest.raises(fxremat.BudgetTooSmall) as refused:
            step.plan(1, exact=True, **options)
        assert "exact=False" not in str(refused.value)
    with pytest.raises(fxremat.BudgetTooSmall, match="exact=False allows slices, with which"):
        step.plan(1, exact=True)


def test_kernels_of_a_captured_step_are_those_that_it_was_captured_for() -> None:
    step = fxremat.capture(Deep(layers=3), (DEEP,), search=QUICK)
    why = means_of(step.plan("100%", exact=False))["compiled kernels"].why_not
    assert why == "the step was captured for PyTorch's kernels"
    step = fxremat.capture(Deep(layers=3), (DEEP,), exact=False, search=QUICK)
    for options, was in (({"exact": True}, "exact=False"), ({"costs": "H100"}, "costs='measure'")):
        (name, value), *_ = options.items()
        changes = f"{name}={value!r} changes what is captured, and this step was captured with {was}"
        with pytest.raises(fxremat.FxrematError, match=changes):
            step.plan("100%", **options)


def test_sizes_that_change_have_means_too() -> None:
    options: Any = {"exact": True, "offload": False, "dynamic": {"x": {0: (2, 512)}}}
    compiled = fxremat.compile(Deep(layers=3), mem="90%", search=QUICK, **options)
    for rows in (256, 192, 64):
        compiled(DEEP[:rows].clone()).backward()
    assert len(compiled.fxremat.plans) == 3
    for plan in compiled.fxremat.plans:
        assert means_of(plan)["recomputing"].peak == plan.predicted_peak


def test_a_new_plan_in_place_of_a_saved_one_has_all_means(tmp_path: Any) -> None:
    fxremat.plan(Deep(layers=2), (DEEP,), mem="90%", search=QUICK).save(tmp_path / "plan")
    compiled = fxremat.compile(Deep(layers=2), mem=1000, exact=False, plan=tmp_path / "plan", search=QUICK)
    with pytest.raises(fxremat.BudgetTooSmall, match=r"; slices: .* at least; offloading and slices: .* at least"):
        compiled(DEEP[:100])


def test_sizes_that_another_plan_has_marked_are_fixed_where_they_must_be() -> None:
    x, options = DEEP.clone(), {"costs": "estimate", "search": QUICK}
    fxremat.plan(Deep(layers=3), (x,), mem="90%", dynamic={"x": {0: (2, 512)}}, **options)
    marks = dict(vars(x))
    assert fxremat.plan(Deep(layers=3), (x,), mem="90%", exact=True, **options).means
    assert vars(x) == marks


def test_torch_compile_takes_no_memory_of_a_device() -> None:
    compiled = torch.compile(Deep(layers=2), backend="fxremat", options={"device_mem": "1GiB", "exact": True})
    with pytest.raises(Exception, match="device_mem counts the parameters of a model, and this is a graph"):
        compiled(DEEP)
