"""Offloading end to end: the budget holds, the numbers are plain PyTorch's, nothing leaks, faults are survived."""

from __future__ import annotations

import contextlib
import gc
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from benchmarks import meter, models
from fxremat.__main__ import main as command_line
from fxremat.cost.link import measure_link
from fxremat.host.files import FileTier
from fxremat.settings import Offload, Search
from fxremat.show.page_data import page_data
from fxremat.step.kinds import host_bytes
from fxremat.step.program import Role
from fxremat.transfers.activations import most_on_host
from fxremat.units import format_bytes
from tests.toys import Loss, Stack, rows
from tests.training import Trace, differences, in_both_sizes, train

pytestmark = pytest.mark.usefixtures("torch_ready")

EFFORT = {"small": 0.0, "full": 1.0}  # how good a plan is does not matter to what is promised
PERCENT = {"small": (60,), "full": (25, 40, 60, 80, 100)}


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    mem: int | str
    plan: fxremat.Plan
    alone: float | None  # predicted seconds without offloading; None where there is no plan
    measured: int
    trace: Trace

    def __repr__(self) -> str:
        return f"mem={self.mem}: {self.plan.budget=} {self.plan.predicted_peak=} {self.measured=}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Runs:
    plain: Trace
    minimum: int
    minimum_alone: int
    runs: tuple[Run, ...]


@pytest.fixture(params=in_both_sizes(everyday=("gpt",)), scope="module")
def runs(request: pytest.FixtureRequest) -> Runs:
    return _runs(*request.param)


@cache
def _runs(size: models.Size, name: str) -> Runs:
    torch.set_num_threads(1)
    case = models.get(name, size)

    effort = EFFORT[size]

    alone = fxremat.plan(case.model(), case.batch(), mem="100%", search=Search(seconds=effort))
    found = [_run(case, "min", alone, effort)]
    minimum = found[0].plan.minimum
    assert found[0].plan.budget == minimum
    for percent in PERCENT[size]:
        with contextlib.suppress(fxremat.BudgetTooSmall):
            found.append(_run(case, f"{percent}%", alone, effort))
    return Runs(
        plain=train(case.model(), case),
        minimum=minimum,
        minimum_alone=alone.minimum,
        runs=tuple(found),
    )


def _run(case: models.Case, mem: int | str, alone: fxremat.Plan, effort: float) -> Run:
    options: Any = {"search": Search(seconds=effort)}
    model = fxremat.compile(case.model(), mem=mem, offload=True, example_inputs=case.batch(), **options)
    budget = model.plan.budget
    seconds = alone.within(budget).predicted_time if budget >= alone.minimum else None
    trace = train(model, case)
    model.zero_grad(set_to_none=True)
    measured = meter.peak_bytes(meter.training_step(model, case.batch()))
    return Run(mem=mem, plan=model.plan, alone=seconds, measured=measured, trace=trace)


def test_the_measured_peak_is_within_the_budget_and_as_predicted(runs: Runs) -> None:
    for run in runs.runs:
        assert run.measured <= run.plan.budget, run
        assert run.measured == pytest.approx(run.plan.predicted_peak, rel=0.02), run


def test_the_numbers_are_those_of_plain_pytorch(runs: Runs) -> None:
    for run in runs.runs:
        assert differences(run.trace, runs.plain) == [], run


def test_offloading_never_needs_more_memory_nor_more_time(runs: Runs) -> None:
    assert runs.minimum <= runs.minimum_alone
    for run in runs.runs:
        if run.alone is not None:
            assert run.plan.predicted_time <= run.alone * (1 + 1e-9), run


@pytest.fixture
def tier() -> FileTier:
    return FileTier()


def compiled(tier: FileTier, mem: int | str = "55%", depth: int = 6) -> fxremat.api.Rematerialized:
    torch.manual_seed(0)
    return fxremat.compile(
        Loss(Stack(depth)), mem=mem, offload=tier, example_inputs=rows(), solver="keep_all"
    )


def step(model: nn.Module, seed: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    model(rows()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture
def wanted() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return step(Loss(Stack()))


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))


def test_offloading_alone_recomputes_nothing(tier: FileTier, wanted: list[torch.Tensor]) -> None:
    model = compiled(tier)
    roles = {s.role for s in model.plan.program.steps}
    assert Role.OFFLOAD in roles
    assert Role.RECOMPUTE not in roles
    assert same(step(model), wanted)
    assert tier.bytes > 0


def test_the_plan_says_what_goes_out_and_how_much_of_it_is_hidden(tier: FileTier) -> None:
    plan = compiled(tier).plan
    assert "offloads" in str(plan)
    assert "hidden behind ops" in str(plan)
    assert "tanh" not in plan.forward_graph.print_readable(print_output=False)
    assert "_offload" in plan.forward_graph.print_readable(print_output=False)
    assert "_wait" in plan.backward_graph.print_readable(print_output=False)


def test_two_hundred_steps_take_no_more_than_two(tier: FileTier) -> None:
    model = compiled(tier)
    for _ in range(2):
        step(model)
    host, device = tier.bytes, meter.peak_bytes(meter.training_step(model, (rows(),)))
    for _ in range(198):
        step(model)
    assert tier.bytes == host
    model.zero_grad(set_to_none=True)
    assert meter.peak_bytes(meter.training_step(model, (rows(),))) == device


def test_a_backward_that_is_never_called_gives_its_memory_back(
    tier: FileTier, wanted: list[torch.Tensor]
) -> None:
    model = compiled(tier)
    step(model)
    host = tier.bytes
    for _ in range(5):
        model(rows())
        gc.collect()
    assert same(step(model), wanted)
    assert tier.bytes <= 2 * host


def test_two_forwards_before_one_backward(tier: FileTier) -> None:
    def two(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model.zero_grad(set_to_none=True)
        first, second = model(rows(seed=1)), model(rows(seed=2))
        (second + 2 * first).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    plain = two(Loss(Stack()))
    assert same(two(compiled(tier)), plain)


def test_a_backward_that_runs_again_reads_the_host_again(tier: FileTier) -> None:
    model = compiled(tier)
    torch.manual_seed(3)
    loss = model(rows())
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert same([p.grad for p in model.parameters() if p.grad is not None], first)


@pytest.mark.parametrize("where", ["offload", "release", "prefetch", "wait"])
def test_a_fault_in_the_middle_of_a_step_is_an_error_and_the_next_step_works(
    where: str, tier: FileTier, wanted: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compiled(tier)
    calls = [0]
    original = getattr(FileTier, where)

    def failing(self: FileTier, *args: object) -> object:
        calls[0] += 1
        if calls[0] == 2:
            raise fxremat.FxrematError("the disk is full")
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FileTier, where, failing)
        with pytest.raises(fxremat.FxrematError, match="the disk is full"):
            step(model)
    assert same(step(model), wanted)


def test_an_exception_between_forward_and_backward(tier: FileTier, wanted: list[torch.Tensor]) -> None:
    model = compiled(tier)
    try:
        loss = model(rows())
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        del loss
    assert same(step(model), wanted)


def test_an_exception_in_a_hook_of_the_backward(tier: FileTier, wanted: list[torch.Tensor]) -> None:
    model = compiled(tier)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a hook")

    handle = next(model.parameters()).register_hook(fail)
    with pytest.raises(ValueError, match="a hook"):
        step(model)
    handle.remove()
    assert same(step(model), wanted)


def test_threads_train_models_of_their_own(tier: FileTier, wanted: list[torch.Tensor]) -> None:
    trained = [compiled(tier) for _ in range(2)]
    for model in trained:
        step(model)
    losses: list[float] = []

    def work(model: nn.Module) -> None:
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            loss = model(rows())
            loss.backward()
            losses.append(float(loss.detach()))

    threads = [threading.Thread(target=work, args=(model,)) for model in trained]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 10
    assert same(step(trained[0]), wanted)


def test_the_host_s_limit_is_respected_and_named() -> None:
    model, options = Loss(Stack()), {"example_inputs": rows(), "solver": "keep_all"}
    whole = fxremat.compile(model, mem="55%", offload=True, **options).plan
    assert whole.chosen.transfers is not None
    little = whole.chosen.transfers.bytes // 3
    limited = fxremat.compile(model, mem="90%", offload=Offload(limit=little), **options).plan
    assert limited.chosen.transfers is not None
    assert limited.chosen.transfers.bytes <= little
    with pytest.raises(
        fxremat.BudgetTooSmall, match=r"Offload\(limit=\d+\) is what binds: with a higher limit, \d+ bytes"
    ):
        fxremat.compile(model, mem="55%", offload=Offload(limit=little), **options)
    with pytest.raises(fxremat.BudgetTooSmall) as small:
        fxremat.compile(model, mem=1, offload=Offload(limit=little), **options)
    assert "limit" not in str(small.value)
    fxremat.compile(model, mem=small.value.minimum, offload=Offload(limit=little), **options)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(fxremat.FxrematError, match=r"offload is 'disk'; it is True, False, a host tier"):
        fxremat.compile(Stack(), mem="50%", offload="disk")


def test_an_estimate_needs_no_copies() -> None:
    plan = fxremat.plan(
        Loss(Stack()), rows(), mem="55%", offload=True, solver="keep_all", costs="A100-40GB"
    )
    assert plan.link is not None
    assert plan.link.to_host == 24e9
    assert plan.chosen.transfers is not None


@pytest.mark.parametrize(
    "solver",
    [
        "pofo",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("autocapper", "offload_greedy", "opportunist", "vdnn")
        ),
    ],
)
def test_a_solver_of_chains_can_be_asked_by_name(solver: str) -> None:
    case = models.get("gpt", "small")
    tier = FileTier(to_host=1e9, from_host=1e9)
    model = fxremat.compile(
        case.model(), mem="70%", offload=tier, solver=solver, example_inputs=case.batch()
    )
    assert meter.peak_bytes(meter.training_step(model, case.batch())) <= model.plan.budget
    assert differences(train(model, case), train(case.model(), case)) == []


def test_the_speed_of_a_tier_is_measured_once_a_machine_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, cpu = FileTier(to_host=1e8, from_host=5e7), torch.device("cpu")
    link = measure_link(tier, cpu, 1_000_000)
    assert 0.5e8 < link.to_host <= 1e8
    assert 2.5e7 < link.from_host <= 5e7

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(FileTier, "offload", refuse)
    assert measure_link(tier, cpu, 1_040_000) == link


def test_the_command_line_plans_with_offloading(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "tests.test_offloading:factory", "--mem", "60%", "--offload"]
    assert command_line(arguments) == 0
    assert "whatever is recomputed or offloaded" in " ".join(capsys.readouterr().out.split())
    assert command_line([*arguments, "--host-mem", "4"]) in (0, 2)


def factory() -> tuple[nn.Module, torch.Tensor]:
    return Loss(Stack()), rows()


def test_a_page_shows_ops_and_copies() -> None:
    plan = fxremat.plan(Loss(Stack()), rows(), mem="55%", offload=True, solver="keep_all")
    assert plan.chosen.transfers
    data = page_data(plan)
    drawn = data["plans"][data["chosen"]]
    assert {lane for lane, *_ in drawn["copies"]} == {"to the host", "from the host"}
    assert len(drawn["copies"]) == len(plan.chosen.transfers.copies)
    assert len(drawn["host"]) == len(drawn["starts"])
    assert max(drawn["host"]) == max(host_bytes(plan.program, plan.costs.sizes)) > 0
    kept = fxremat.plan(Loss(Stack()), rows(), mem="100%")
    assert not any(one["copies"] or one["host"] for one in page_data(kept)["plans"])


class InPowersOfTwo(FileTier):
    """A tier that takes memory as CUDA's pinned memory is taken."""

    in_powers = True


def test_a_limit_counts_what_pinned_memory_takes() -> None:
    model, options = Loss(Stack()), {"example_inputs": rows()[:-5], "solver": "keep_all"}
    whole = fxremat.compile(model, mem="55%", offload=InPowersOfTwo(), **options).plan
    assert whole.chosen.transfers is not None
    assert whole.link is not None
    taken = most_on_host(whole.chosen.transfers.program, whole.costs, whole.link)
    assert taken > whole.chosen.transfers.bytes
    assert f"({format_bytes(taken)} of pinned memory, taken in powers of two)" in " ".join(str(whole).split())
    for limit in (taken // 2, taken - 1):
        limited = fxremat.compile(model, mem="90%", offload=Offload(tier=InPowersOfTwo(), limit=limit), **options).plan
        assert limited.chosen.transfers is not None
        assert most_on_host(limited.chosen.transfers.program, limited.costs, whole.link) <= limit
    with pytest.raises(fxremat.BudgetTooSmall, match=r"Offload\(limit=\d+\) is what binds"):
        fxremat.compile(model, mem="55%", offload=Offload(tier=InPowersOfTwo(), limit=taken - 1), **options)
