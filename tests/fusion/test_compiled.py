"""`backend="inductor"` from end to end: the budget holds, gradients are Inductor's, and nothing else changes."""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from benchmarks.capture import capture
from benchmarks.combinations import GPT, WORDS
from benchmarks.meter import peak_bytes, training_step
from fxremat.cost import calibrate
from fxremat.cost.region_costs import RegionCosts
from fxremat.errors import FxrematError
from fxremat.fusion.units import Units, alone, by_block, ops_of, unit_bytes
from fxremat.graphs import region
from fxremat.graphs.op_key import op_key
from fxremat.graphs.region import Region, compile_all, forget_kernels, regions_of
from fxremat.planning import compiled, facts, judged
from fxremat.plans import Plan
from fxremat.search.candidate import Frontier
from fxremat.search.survey import survey
from fxremat.settings import Inductor
from fxremat.step.costs import Costs
from fxremat.step.liveness import Sizes
from fxremat.step.program import Program
from fxremat.store import Store
from fxremat.torch_private import storage_watch
from tests.dags import estimated

pytestmark = pytest.mark.usefixtures("torch_ready")
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}  # tolerance of gradients, relative to the largest of a parameter


class Trunk(nn.Module):
    """Convolutions with BatchNorm, then a few equal layers with dropout; returns its loss."""

    def __init__(self, dropout: float = 0.1, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Dropout(dropout), nn.Linear(128, 64))
            for _ in range(layers)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images).flatten(2)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 8, 8, generator=g).to(dtype), torch.randint(10, (8,), generator=g)


def model_of(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Trunk(**options).to(dtype).train()


def within(model: nn.Module, mem: str | int, random: str | None = None, **options: Any) -> Any:
    return fxremat.compile(model, mem=mem, backend=Inductor(random=random), **options)


def gradients(model: nn.Module, call: Callable[..., Any], given: tuple[Tensor, ...], seed: int = 5) -> list[Tensor]:
    """The loss and all gradients of one step from a seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = call(*given)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def largest_error(ours: list[Tensor], theirs: list[Tensor], least: float = 1e-6) -> float:
    assert len(ours) == len(theirs)
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=least)) for a, b in pairs)


@pytest.mark.usefixtures("always_in_regions")
@pytest.mark.parametrize("mem", [pytest.param("100%", marks=pytest.mark.long), "60%"])
def test_the_budget_holds_and_gradients_are_those_of_inductor(mem: str) -> None:
    plain, ours, eager = (model_of(dropout=0.5, layers=2) for _ in range(3))
    given = batch()
    as_eager = fxremat.compile(eager, mem=mem, example_inputs=given).plan
    call = within(ours, mem, random="inductor")
    theirs = gradients(plain, torch.compile(plain, backend="inductor", dynamic=False), given)
    mine = gradients(ours, call, given)
    assert largest_error(mine, theirs) < DTYPES[torch.float32]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours.named_buffers(), plain.named_buffers(), strict=True))
    plan = call.plan
    assert plan.compiled
    assert plan.budget == as_eager.budget
    step = training_step(call, given)
    ours.zero_grad(set_to_none=True)
    measured = peak_bytes(step)
    assert measured <= plan.budget
    assert measured == pytest.approx(plan.predicted_peak, rel=0.005)


@pytest.mark.usefixtures("always_in_regions")
def test_while_they_are_measured_regions_have_the_only_references_to_what_dies_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone, measured = list[bool](), RegionCosts.measured

    def without_room(costs: Any, key: str, region: Region, inputs: list[Any], alive: int) -> Any:
        monkeypatch.setattr(costs, "_limit", 1)
        watches = [storage_watch(inputs[place]) for place in region.dying - region.donated]
        size = sum(x.nbytes for x in set(inputs))
        assert alive + sum(p.nbytes for p in model.parameters()) >= size
        found = measured(costs, key, region, inputs, alive)
        gone.extend(not is_alive() for is_alive in watches)
        return found

    monkeypatch.setattr(RegionCosts, "measured", without_room)
    model, given = model_of(dropout=0.5, layers=2), batch()
    call = within(model, "60%", random="inductor")
    gradients(model, call, given)
    assert gone
    assert all(gone)
    assert call.plan.compiled
    model.zero_grad(set_to_none=True)
    assert peak_bytes(training_step(call, given)) == pytest.approx(call.plan.predicted_peak, rel=0.005)


def test_what_a_budget_in_percent_refers_to_is_measured_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in eager PyTorch's kernels runs before the first step, too, and recomputes."""
    recomputing, measure = dict[int, bool](), facts.measure

    def watched(graph: Any, *given: Any, order: Any, **options: Any) -> Costs:
        recomputing[id(graph)] = order is not None and len(order()) > len(graph.ops)
        return measure(graph, *given, order=order, **options)

    monkeypatch.setattr(facts, "measure", watched)
    within(model_of(), "60%", example_inputs=batch())
    assert list(recomputing.values()) == [True, True]


@pytest.mark.usefixtures("always_in_regions")
def test_bits_are_the_same_at_every_run_and_masks_at_every_budget_from_a_seed() -> None:
    given, found = batch(), []
    for mem in ("90%", "90%", "60%"):
        model = model_of(dropout=0.5, layers=2)
        call = within(model, mem, random="inductor")
        found += [gradients(model, call, given), gradients(model, call, given)]
    first, *others, less, again = found
    assert all(torch.equal(a, b) for one in others for a, b in zip(first, one, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(less, again, strict=True))
    assert largest_error(less, first) < DTYPES[torch.float32]


@pytest.mark.long
@pytest.mark.usefixtures("always_in_regions")
def test_masks_of_eager_pytorch() -> None:
    plain, ours = model_of(dropout=0.5), model_of(dropout=0.5)
    given = batch()
    call = within(ours, "60%", random="eager")
    assert largest_error(gradients(ours, call, given), gradients(plain, plain, given)) < DTYPES[torch.float32]
    assert torch.rand(()) == _next_number(plain, given)


def _next_number(plain: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    """The generator's next number after a step of the plain model from the same seed."""
    gradients(plain, plain, given)
    return torch.rand(())


@pytest.mark.long
@pytest.mark.usefixtures("always_in_regions")
def test_less_memory_never_means_more_of_it_and_kernels_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    given, model = batch(), model_of(dropout=0.0)
    call = within(model, "100%")
    call(*given).backward()
    compiled_now: list[Region] = []
    monkeypatch.setattr(compiled, "compile_all", lambda new: compile_all([*new, *(compiled_now.extend(new) or ())]))
    plans = [call.plan, *(call.plan.within(f"{percent}%") for percent in (90, 75, 60, 50))]
    peaks = [plan.predicted_peak for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert all(plan.predicted_peak <= plan.budget for plan in plans)
    compiled_now.clear()
    assert [call.plan.within(f"{percent}%").predicted_peak for percent in (90, 60)] == [peaks[1], peaks[3]]
    assert not compiled_now


@pytest.mark.usefixtures("always_in_regions")
def test_a_backward_may_run_twice_and_the_plan_tells_of_its_kernels() -> None:
    """And shows itself."""
    model, given = model_of(dropout=0.0, layers=2), batch()
    call = within(model, "60%")
    loss = call(*given)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(once, model.parameters(), strict=True) if p.grad is not None)
    plan = call.plan
    text = " ".join(str(plan).split())
    assert plan.compiled is not None
    assert f"in {plan.compiled.regions} regions, {plan.compiled.distinct} of them distinct, compiled in" in text
    assert "of keeping everything op by op" in text
    assert max(plan.moments.bytes) == plan.predicted_peak
    assert all(life.bytes > 0 for life in plan.moments.lives)
    assert max(plan.memory.during) == plan.predicted_peak
    assert regions_of(plan.forward_graph.graph)
    assert str(plan.predicted_peak) in plan.to_html()
    events = plan.trace()["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(plan.program.steps)
    assert plan.snapshot()["device_traces"]
    assert plan.diff(plan.within("80%"))
    assert plan.op_by_op.compiled is None
    assert plan.describe(full=True)


@pytest.mark.usefixtures("always_in_regions")
def test_a_step_that_single_ops_run_faster_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled._Search, "_seconds", lambda _, found, single: [*[2.0] * len(found), 1.0])
    model, given = model_of(dropout=0.0, layers=2), batch()
    call = within(model, "70%")
    call(*given).backward()
    assert call.plan.compiled is None
    assert "PyTorch's, op by op: in regions it would take 2 s" in " ".join(str(call.plan).split())
    assert peak_bytes(training_step(call, given)) <= call.plan.budget


@pytest.mark.usefixtures("surveys")
def test_what_cannot_gain_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels()
    monkeypatch.setattr(compiled._Search, "_gain", lambda *_: 0.0)
    call = within(model_of(dropout=0.0, layers=2), "71%")
    call(*batch()).backward()
    assert "PyTorch's, op by op: regions that fit would gain little" in " ".join(str(call.plan).split())
    assert not region._kernels


@pytest.mark.usefixtures("surveys")
@pytest.mark.parametrize(("steps", "pays"), [(1e9, True), (1.0, False)])
def test_regions_are_compiled_where_that_pays_within_a_training(
    steps: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_kernels()
    monkeypatch.setattr(compiled, "STEPS", steps)
    call = within(model_of(dropout=0.0, layers=2), "90%")
    call(*batch()).backward()
    assert bool(region._kernels) is pays


@pytest.mark.long
@pytest.mark.usefixtures("surveys")
def test_seconds_in_regions_are_compared_as_those_of_ops_in_a_step_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of single ops are multiplied by what a step takes of them together; so are those of regions."""
    found: list[float] = []

    def noted(_: Any, in_regions: Sequence[Any], alone: Sequence[Any]) -> list[float]:
        found.append(in_regions[0].time / alone[0].time)
        return [one.time for one in [*in_regions, *alone]]

    monkeypatch.setattr(compiled._Search, "_seconds", noted)
    monkeypatch.setattr(compiled, "LITTLE", -1.0)
    monkeypatch.setattr(compiled, "COMPILING", -1e9)
    monkeypatch.setattr(compiled, "SLOWER", 1e9)
    calibrated = importlib.import_module("fxremat.planning.choosing")
    for factor in (1.0, 50.0):
        monkeypatch.setattr(calibrated, "calibration", lambda *_, factor=factor: factor)
        within(model_of(dropout=0.0), "100%")(*batch())
    assert found[1] == pytest.approx(found[0], rel=0.5)


@pytest.mark.long
def test_what_was_learned_and_measured_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    asked: list[str] = []

    def noted(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: asked.append(name) or function(*given))

    monkeypatch.setattr(calibrate, "_compared", lambda programs, *_: [*[1e-9] * (len(programs) - 1), 1.0])
    monkeypatch.setattr(compiled, "LITTLE", -1.0)
    monkeypatch.setattr(compiled, "COMPILING", -1e9)
    noted(compiled, "shares_of")
    noted(calibrate, "_compared")
    noted(calibrate, "_peak")
    noted(compiled._Search, "_candidates_with")
    noted(compiled._Search, "fastest")
    model, given = model_of(dropout=0.0), batch()
    call = within(model, "70%")
    call(*given).backward()
    assert {"shares_of", "_compared", "_peak"} <= set(asked)
    first, chosen = call.plan.within("70%"), call.plan.within("85%")
    assert asked.count("shares_of") == asked.count("_compared") == 1
    assert "_candidates_with" in asked
    asked.clear()
    again = [call.plan.within("70%"), call.plan.within("85%")]
    assert asked == []
    assert [plan.predicted_time for plan in again] == [first.predicted_time, chosen.predicted_time]
    assert [_kernels_of(plan) for plan in again] == [_kernels_of(first), _kernels_of(chosen)]


def _kernels_of(plan: Plan) -> list[Region]:
    return regions_of(plan.program.layout.graph.module.graph)


@pytest.mark.long
@pytest.mark.usefixtures("always_in_regions")
def test_costs_are_found_again_whatever_is_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also those of functions, which print themselves with where they lie in memory."""
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    model = within(model_of(dropout=0.5), "55%", random="eager")
    model(*batch()).backward()
    (file,) = tmp_path.glob("*.sqlite")
    names = [*Store(file).all("costs")]
    assert any("draw_again" in name for name in names)
    assert not any(" at 0x" in name for name in names)


@pytest.mark.long
@pytest.mark.usefixtures("always_in_regions", "surveys")
def test_a_kept_choice_that_does_not_fit_any_more_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    call = within(model_of(dropout=0.0), "70%")
    call(*batch()).backward()
    looked: list[int] = []
    fastest = compiled._Search.fastest
    monkeypatch.setattr(compiled._Search, "fastest", lambda self, known: looked.append(1) or fastest(self, known))
    call.plan.within("70%")
    assert not looked
    as_it_is = compiled._Search._judged

    def larger(*given: Any) -> Any:
        return as_it_is(*given) if looked else replace(as_it_is(*given), peak=1 << 40)

    monkeypatch.setattr(compiled._Search, "_judged", larger)
    assert call.plan.within("70%").predicted_peak <= call.plan.budget
    assert looked


@pytest.mark.long
@pytest.mark.usefixtures("always_in_regions", "surveys")
@pytest.mark.parametrize(("slower", "cuts"), [(0.0, {"blocks", "pointwise"}), (1e9, {"pointwise"})])
def test_where_regions_are_slower_the_other_way_to_cut_is_tried(
    slower: float, cuts: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: set[str] = set()

    def noted(name: str, cut: Any) -> Any:
        return lambda *given: tried.add(name) or cut(*given)

    known = dict(zip(("pointwise", "blocks"), compiled.CUTS, strict=True))
    monkeypatch.setattr(compiled, "CUTS", tuple(noted(name, cut) for name, cut in known.items()))
    monkeypatch.setattr(compiled, "FASTER", slower)
    call = within(model_of(dropout=0.0, layers=2), "100%")
    call(*batch()).backward()
    assert tried == cuts
    assert peak_bytes(training_step(call, batch())) <= call.plan.budget


@pytest.mark.long
@pytest.mark.usefixtures("always_in_regions")
@pytest.mark.parametrize(("seconds", "tried"), [(0.0, True), (1e6, False)])
def test_the_other_way_to_cut_is_tried_where_that_compiles_quickly(
    seconds: float, tried: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    by_block, judged = compiled.CUTS[1], list[bool]()
    as_it_is = compiled._Search._judged

    def noted(self: Any, candidate: Any, units: Units, *given: Any) -> Any:
        blocks = by_block(candidate.program(), self._single.sizes, 0)
        judged.append({unit for unit in units if unit.compiled} <= set(blocks))
        return as_it_is(self, candidate, units, *given)

    monkeypatch.setattr(compiled._Search, "_judged", noted)
    monkeypatch.setattr(compiled, "_seconds_of_compiling", lambda _: seconds if judged else 0.0)
    monkeypatch.setattr(compiled, "LITTLE", 0.0)
    monkeypatch.setattr(compiled, "STEPS", 1e99)
    monkeypatch.setattr(compiled, "FASTER", 0.0)
    within(model_of(dropout=0.0, layers=2), "100%")(*batch())
    assert judged
    assert any(judged) == tried


@pytest.mark.usefixtures("always_in_regions", "surveys")
def test_all_is_compiled_where_the_budget_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions that gain little in time may gain memory."""
    monkeypatch.setattr(compiled, "worth_compiling", lambda program, *_: alone(program, range(len(program.steps))))

    def more_by_themselves(program: Program, sizes: Sizes, units: Units) -> list[int]:
        return unit_bytes(program, sizes, units) if any(unit.compiled for unit in units) else [1 << 40]

    monkeypatch.setattr(compiled, "unit_bytes", more_by_themselves)
    call = within(model_of(dropout=0.0, layers=2), "70%")
    call(*batch())
    assert call.plan.compiled is not None


@pytest.mark.long
@pytest.mark.usefixtures("always_in_regions")
def test_a_program_that_takes_more_than_foreseen_is_left_for_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peaks: list[int] = []

    def more_at_first(program: Any, *_: Any) -> int:
        peaks.append(1 << 40 if not peaks else 0)
        return peaks[-1]

    monkeypatch.setattr(compiled, "peak_of_step", more_at_first)
    model, given = model_of(dropout=0.0), batch()
    with caplog.at_level(logging.WARNING):
        call = within(model, "70%")
        call(*given).backward()
    assert len(peaks) > 1
    assert "a smaller one is looked for" in caplog.text


@pytest.mark.long
@pytest.mark.usefixtures("always_in_regions")
def test_new_sizes_are_planned_by_themselves() -> None:
    model, given = model_of(dropout=0.0), batch()
    call = within(model, "90%")
    for rows in (8, 4):
        images, labels = given[0][:rows], given[1][:rows]
        plain = copy.deepcopy(model)
        ours = gradients(model, call, (images, labels))
        assert largest_error(ours, gradients(plain, plain, (images, labels))) < 1e-3
    assert not call.plan.sizes


@pytest.mark.usefixtures("always_in_regions")
def test_a_loss_outside_the_model() -> None:
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 4))
    x = torch.randn(64, 32)
    call = within(net, "80%")
    call(x).square().mean().backward()
    ours = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(x).square().mean().backward()
    assert largest_error(ours, [p.grad for p in net.parameters() if p.grad is not None]) < 1e-5
    assert peak_bytes(lambda: call(x).square().mean().backward()) <= call.plan.budget


@pytest.mark.long
@pytest.mark.usefixtures("always_in_regions")
def test_half_precision() -> None:
    dtype = torch.bfloat16
    model, plain = model_of(dtype, dropout=0.0, layers=1), model_of(dtype, dropout=0.0, layers=1)
    given = batch(dtype)
    theirs = gradients(plain, torch.compile(plain, backend="inductor", dynamic=False), given)
    assert largest_error(gradients(model, within(model, "90%"), given), theirs) < DTYPES[dtype]


class Autocast(nn.Sequential):
    """Convolutions with BatchNorm in bfloat16, whose parameters and statistics are of float32."""

    def __init__(self) -> None:
        sizes = itertools.pairwise((3, 16, 16, 16))
        layers = ((nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in sizes)
        super().__init__(*itertools.chain(*layers))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float().square().mean()


@pytest.mark.usefixtures("always_in_regions")
def test_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values that a BatchNorm keeps have the type that its kernels give them, in a region of the backward too."""
    monkeypatch.setattr(compiled, "CUTS", (lambda program, _, __: _backward_alone(program),))
    plain, ours = Autocast(), Autocast()
    ours.load_state_dict(plain.state_dict())
    given = (torch.randn(4, 3, 16, 16),)
    call = within(ours, "90%")
    mine, theirs = gradients(ours, call, given), gradients(plain, plain, given)
    assert largest_error(mine, theirs, least=1e-2) < DTYPES[torch.bfloat16]  # that of a bias before a norm is rounding
    assert call.plan.compiled


def _backward_alone(program: Program) -> Units:
    """Blocks of the backward as regions, after a forward of single ops."""
    late = [unit for unit in by_block(program) if unit.steps[0] >= program.split]
    return (*alone(program, range(program.split)), *late)


@pytest.mark.usefixtures("always_in_regions")
def test_regions_in_slices_run_as_they_are_between_compiled_ones() -> None:
    model, given = model_of(dropout=0.0, layers=2), batch()
    plain = copy.deepcopy(model)
    call = within(model, "60%", slices=True)
    assert largest_error(gradients(model, call, given), gradients(plain, plain, given)) < 1e-3


def test_a_second_plan_in_slices_begins_with_what_the_first_has_learned() -> None:
    tokens = torch.randint(0, WORDS, (4, 40))
    for mem in ("36.5%", "36.2%"):  # less than recomputing needs
        torch.manual_seed(0)
        search = fxremat.Search(seconds=0.2, progress=False)
        model: Any = fxremat.compile(GPT(()), mem=mem, backend="inductor", slices=True, search=search)
        model(tokens).backward()
        assert model.plan.slices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"backend": "triton"}, "backend is 'triton'; it is one of eager, inductor"),
        (lambda: {"backend": "inductor", "offload": True, "solver": "pofo"}, "does not go with 'pofo'"),
        (lambda: {"backend": "inductor", "costs": "estimate"}, 'goes with costs="measure"'),
        (lambda: {"backend": Inductor(random="numpy")}, "random is 'numpy'; it is None or one of inductor, eager"),
        (lambda: {"backend": Inductor(config=["max_autotune"])}, "it is settings of torch._inductor.config by name"),
        (lambda: {"backend": Inductor(config={"max_autotunes": 1})}, "torch._inductor.config has no such setting"),
        (lambda: {"backend": Inductor(config={"triton.cudagraphs": True})}, "keep memory that no budget bounds"),
    ],
)
def test_what_does_not_go_together_is_said_in_a_line(options: Callable[[], Any], message: str) -> None:
    with pytest.raises(FxrematError) as error:
        fxremat.compile(nn.Linear(2, 2), mem="1MiB", **options())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("always_in_regions")
def test_through_the_backend_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels()
    made: list[Region] = []
    monkeypatch.setattr(compiled, "compile_all", lambda new: compile_all([*new, *(made.extend(new) or ())]))
    model, given = model_of(dropout=0.0, layers=1), batch()
    plain = copy.deepcopy(model)
    options: Any = {"mem": "90%", "backend": "inductor"}
    call = torch.compile(model, backend="fxremat", fullgraph=True, options=options)
    assert largest_error(gradients(model, call, given), gradients(plain, plain, given)) < 1e-3
    assert made


def _measured(frontier: Frontier, units: Units, costs: Costs, times: float) -> Any:
    """A program in units, whose regions take so many times what their ops take."""
    program = frontier.keep_all.program()
    taken = {place: times * costs.time_of(ops_of(program, unit)) for place, unit in enumerate(units)}
    return SimpleNamespace(candidate=frontier.keep_all, units=units, seconds_of_units=taken)


def test_what_ops_take_in_regions_is_learned_from_all_that_were_tried() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    joint = capture(layers, torch.randn(256, 64))
    costs = estimated(joint)
    frontier = survey(joint, costs, effort=0.0)
    program = frontier.keep_all.program()
    blocks, single = by_block(program), alone(program, range(len(program.steps)))
    inside = {op_key(joint.nodes[op]) for unit in blocks if unit.compiled for op in ops_of(program, unit)}
    slow, faster = _measured(frontier, blocks, costs, 1.5), _measured(frontier, blocks, costs, 0.99)

    def shares(*tried: Any) -> dict[str, float]:
        found = judged.shares_of(tried, costs, joint)
        return {op.key: share for op, share in zip(joint.ops, found, strict=True)}

    assert set(shares(_measured(frontier, single, costs, 0.5)).values()) == {1.0}
    assert all(share == pytest.approx(1.5 if key in inside else 1.0) for key, share in shares(slow).items())
    assert shares(slow, faster) == shares(faster)
    found = shares(faster)
    gained = sum(costs.seconds[op.index] * (1 - found[op.key]) for op in joint.ops)
    compiled_alone = sum(costs.time_of(ops_of(program, unit)) for unit in blocks if unit.compiled)
    assert gained == pytest.approx(0.01 * compiled_alone, rel=0.5)
    products = [found[op.key] for op in joint.ops if joint.nodes[op.index].target is torch.ops.aten.addmm.default]
    assert set(products) == {1.0}
