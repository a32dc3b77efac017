"""Steps that store what the backward reads in fewer bytes: when they do, in how much memory, and the same gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat import Offload, Search
from fxremat.cost.measure import measure
from fxremat.cost.walk import Walk
from fxremat.planning.compressed import ways_to_pack
from fxremat.step.costs import Costs
from tests.dags import few
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")
QUICK = Search(seconds=0.0, progress=False)
WIDTH = 64


class Perceptrons(nn.Module):
    """Residual layers with ReLU and dropout, whose masks are a large part of what the backward reads."""

    def __init__(self, layers: int = 4, broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Dropout(0.1)),
                *(nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)),
            )
            for _ in range(layers)
        )
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if self.broken:
                torch._dynamo.graph_break()
        return x.square().mean()


class Images(nn.Module):
    """Channels weighted apart, with ReLU, dropout and maximum pools: little is read but signs, masks and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.scales = nn.ParameterList(torch.rand(8, 1, 1) + 0.5 for _ in range(8))
        self.last = nn.Linear(8 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, scale in enumerate(self.scales):
            x = nn.functional.dropout(nn.functional.relu(x + scale), 0.1)
            x = nn.functional.max_pool2d(x, 2) if index % 4 == 3 else x
        return self.last(x.flatten(1)).square().mean()


SGD = torch.optim.SGD([nn.Parameter(torch.ones(1))])
MODELS = {"perceptrons": Perceptrons, "images": Images}


def batch(name: str = "perceptrons") -> Tensor:
    shape = (16, 16, WIDTH) if name == "perceptrons" else (8, 3, 32, 32)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def made(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](**options)


def assert_bits(ours: nn.Module, plain: nn.Module, x: Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        mine, its = (step_of(model, lambda model=model: model(x), lambda loss: loss) for model in (ours, plain))
        assert differences(mine, its) == []


def peak_of(model: nn.Module, x: Tensor) -> int:
    model.zero_grad(set_to_none=True)
    return meter.peak_bytes(lambda: model(x).backward())


def rough(name: str, **options: Any) -> Any:
    """A captured step with estimated costs, by which plans are the same on any machine."""
    return fxremat.capture(made(name), (batch(name),), mem="100%", search=QUICK, costs="estimate", **options)


@pytest.mark.parametrize("name", MODELS)
def test_less_memory_is_needed_at_least(name: str) -> None:
    step = rough(name)
    with_it, without = step.plan("min"), step.plan("min", compress=False)
    assert with_it.compression is not None
    assert without.compression is None
    assert with_it.budget < without.budget
    assert step.least() == with_it.budget
    assert "compressed" in str(with_it)


def test_what_packs_less_than_a_way_that_just_fits_is_not_searched(surveys: list[int]) -> None:
    step = rough("perceptrons")
    least = step.plan("min").budget
    assert len(surveys) == 2  # as captured, and with all signs and masks packed
    step.plan(int(1.1 * least))
    assert len(surveys) == 3  # with masks alone it may be faster


@pytest.mark.parametrize("name", MODELS)
def test_of_a_packed_step_only_the_added_ops_run_to_be_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = rough(name).graph
    (packed,) = ways_to_pack(joint, 1, rough(name).options)
    measured = dict[bool, Costs]()
    for walks in (True, False):
        monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path / str(walks)))
        measure(joint)
        with monkeypatch.context() as patch:
            if not walks:
                patch.setattr(Walk, "run", lambda *_: pytest.fail("the whole step ran"))
            measured[walks] = measure(packed, like=None if walks else joint)
    assert measured[True].sizes == measured[False].sizes
    assert measured[True].fresh == measured[False].fresh


def test_the_measured_peak_is_within_the_least_budget() -> None:
    model, x = made("images"), batch("images")
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, mem="min", search=QUICK)
    assert_bits(ours, plain, x)
    assert ours.plan.compression is not None
    assert 0.98 * ours.plan.predicted_peak <= peak_of(ours, x) <= ours.plan.budget


def test_values_are_packed_only_where_that_is_faster() -> None:
    step = rough("perceptrons")
    assert step.plan("100%").compression is None
    faster, slower = step.plan("50%"), step.plan("50%", compress=False)
    assert faster.compression is not None
    assert faster.predicted_time < slower.predicted_time
    assert faster.keep_all_peak == slower.keep_all_peak
    assert faster.keep_all_time == pytest.approx(slower.keep_all_time)
    assert faster.minimum < slower.minimum


def check(name: str, share: int, offload: bool) -> None:
    torch._dynamo.reset()
    step = rough(name, offload=offload)
    least, everything = step.plan("min").budget, step.plan("100%").keep_all_peak
    plan = step.plan(least + (everything - least) * share // 100)
    model, x = made(name), batch(name)
    plain = copy.deepcopy(model)
    assert_bits(fxremat.compile(model, plan=plan, offload=offload), plain, x)


any_budget = given(name=st.sampled_from(sorted(MODELS)), share=st.integers(0, 40), offload=st.booleans())


@few(3)
@any_budget
def test_bits_at_any_budget(name: str, share: int, offload: bool) -> None:
    check(name, share, offload)


@pytest.mark.long
@few(40)
@any_budget
def test_bits_at_many_budgets(name: str, share: int, offload: bool) -> None:
    check(name, share, offload)


def test_several_graphs_within_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets, packed = {}, dict[bool | None, int]()

    def spied(*arguments: Any) -> list[Any]:
        found = list(ways_to_pack(*arguments))
        packed[compress] = packed.get(compress, 0) + len(found)
        return found

    monkeypatch.setattr("fxremat.planning.graph_programs.ways_to_pack", spied)
    for compress in (None, False):
        torch._dynamo.reset()
        model, x = made("perceptrons", broken=True), batch()
        plain = copy.deepcopy(model)
        ours = fxremat.compile(model, mem="min", search=QUICK, compress=compress)
        assert_bits(ours, plain, x, steps=4)
        budgets[compress] = ours.plan.minimum
    assert packed[None] > 0 == packed[False]
    assert budgets[None] <= 1.001 * budgets[False]


def test_a_saved_plan_stores_the_same(tmp_path: Path) -> None:
    plan = rough("perceptrons").plan("50%")
    plan.save(tmp_path / "plan.json")
    assert plan.compression is not None
    assert fxremat.Plan.load(tmp_path / "plan.json").compression == plan.compression
    model, x = made("perceptrons"), batch()
    plain = copy.deepcopy(model)
    assert_bits(fxremat.compile(model, plan=tmp_path / "plan.json"), plain, x)


def test_a_saved_plan_says_that_less_may_do_where_packing_was_not_tried(tmp_path: Path) -> None:
    plan = rough("perceptrons").plan("100%")
    plan.save(tmp_path / "plan.json")
    read = fxremat.Plan.load(tmp_path / "plan.json")
    assert plan.minimum < read.minimum
    assert f"({read.minimum} bytes) or less" in " ".join(str(read).split())


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mem", ["45%", "min"])
def test_sizes_that_change_are_planned_without(mem: str, dynamic: bool | None) -> None:
    model = made("perceptrons")
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, mem=mem if dynamic is None else "70%", dynamic=dynamic, search=QUICK)
    for size in (16, 12, 16, 8):
        assert_bits(ours, plain, batch()[:size], steps=1)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_rounded_values_take_less_time_at_a_small_budget_and_keep_gradients_near(dtype: str) -> None:
    step = rough("perceptrons")
    rounded, exact = step.plan("45%", compress=dtype), step.plan("45%")
    assert rounded.compression is not None
    assert rounded.compression.rounded
    assert rounded.predicted_time < exact.predicted_time
    assert f"as {dtype}" in str(rounded)
    model, x = made("perceptrons"), batch()
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, plan=rounded)
    mine, its = (step_of(each, lambda each=each: each(x), lambda loss: loss) for each in (ours, plain))
    assert mine.values["loss"] == its.values["loss"]  # only the backward reads what was rounded
    errors = [
        float((mine.gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in its.gradients.items()
        if gradient is not None
    ]
    assert 0 < max(errors) < (0.02 if dtype == "int8" else 0.06)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compress": "int4"}, "compress is 'int4'; it is None, False, or one of int8, fp8"),
        ({"compress": "int8", "exact": True}, "is a means that the user names; leave exact out"),
        ({"compress": "int8", "exact": False, "mem": "min"}, "is a means that the user names; leave exact out"),
        ({"compress": 0}, "compress is 0; it is None, False, or one of int8, fp8"),
        ({"compress": "int8", "backend": "inductor"}, 'does not go with backend="inductor"'),
        ({"compress": "int8", "slices": True}, "does not go with slices"),
        ({"compress": "int8", "offload": Offload(weights=True), "optimizer": SGD}, "does not go with weights on the h"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(fxremat.FxrematError, match=words):
        fxremat.compile(made("perceptrons"), **{"mem": "60%", **options})


def test_a_model_of_several_graphs_is_not_rounded() -> None:
    ours = fxremat.compile(made("perceptrons", broken=True), mem="60%", compress="int8")
    with pytest.raises(fxremat.FxrematError, match="compress='int8' needs one"):
        ours(batch())
