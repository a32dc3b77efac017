"""One capture for every size: the budget holds at each, the bits are plain PyTorch's, and a new size costs little."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import fxremat
from benchmarks.meter import peak_bytes
from benchmarks.models.resizable import KINDS, RANGES, ConvNet, gpt, loss_of, pictures, text
from fxremat.graphs.symbolic import Dims, SymbolicGraph
from fxremat.planning import sizes
from fxremat.runtime import sized
from fxremat.settings import Search
from tests.toys import WIDTH, Loss, Stack, rows
from tests.training import gradients_of, same, state_of, unequal

pytestmark = [pytest.mark.usefixtures("torch_ready"), pytest.mark.filterwarnings("ignore:::transformers")]

QUICK: dict[str, Any] = {"search": Search(seconds=0.0, slots=100)}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows with every plan: "nothing" for one from nothing, "known" for one from known programs."""
    found: list[str] = []
    for name, word in (("plan_from_nothing", "nothing"), ("replan", "known")):
        plan = getattr(sizes, name)

        def noting(*args: Any, plan: Callable[..., Any] = plan, word: str = word) -> Any:
            made = plan(*args)
            found.extend([word] if made is not None else [])
            return made

        monkeypatch.setattr(sizes, name, noting)
    return found


@dataclass(frozen=True)
class Result:
    loss: Tensor
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    rng: Tensor

    def differences(self, other: Result) -> list[str]:
        found = [] if same(self.loss, other.loss) else ["loss"]
        found += [*unequal(self.gradients, other.gradients), *unequal(self.state, other.state)]
        return found + ([] if same(self.rng, other.rng) else ["random state"])


def step(model: nn.Module, inputs: Mapping[str, Tensor], call: nn.Module | None = None, seed: int = 5) -> Result:
    """One forward and backward from a seed and from no gradients."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = loss_of((call or model)(**inputs))
    loss.backward()
    found = Result(loss.detach().clone(), gradients_of(model), state_of(model), torch.get_rng_state())
    model.zero_grad()
    return found


def peak_of_step(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    def run() -> object:
        output = model(**inputs)
        loss_of(output).backward()
        return output

    model.zero_grad()
    found = peak_bytes(run)
    model.zero_grad()
    return found


TEXT = ("GPT", "Llama", "BERT", "padded GPT")  # other tests train a GPT of a few sizes every day


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in TEXT)) for name in KINDS])
def test_twelve_sizes_of_one_capture(name: str, captures: list[object], planned: list[str]) -> None:
    kind = KINDS[name]
    torch.manual_seed(0)
    plain = kind.model()
    compiled_model = copy.deepcopy(plain)
    everything = fxremat.plan(copy.deepcopy(plain), dict(kind.inputs(kind.sizes[0])), mem="100%", **QUICK).keep_all_peak
    captures.clear()
    mem = int(kind.share * everything)
    compiled = fxremat.compile(compiled_model, mem=mem, **kind.options, **QUICK)
    for size in kind.sizes:
        inputs = kind.inputs(size)
        assert step(compiled_model, inputs, compiled).differences(step(plain, inputs)) == [], size
        before = len(planned)
        plan = compiled.plan
        assert plan is not None
        peak = peak_of_step(compiled, inputs)
        step(plain, inputs)  # running statistics, too
        assert len(planned) == before, "a known size is planned again"
        assert peak <= mem, size
        assert peak <= plan.predicted_peak <= 1.02 * peak, size
    assert len(captures) == kind.captures
    assert planned.count("nothing") < len(planned) / 2


def compiled_stack(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Loss(Stack())
    return model, fxremat.compile(model, **{"mem": "100MB", "dynamic": True, **QUICK, **options})


OTHER_ORDERS = [pytest.param(order, marks=pytest.mark.long) for order in ((0, 1, 2), (1, 2, 0))]


@pytest.mark.parametrize("order", [(2, 1, 0), *OTHER_ORDERS])
def test_backwards_of_several_sizes_run_in_any_order(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized, "AT_MOST", 1)  # programs are emitted again for their backwards
    torch.manual_seed(0)
    plain = gpt(1)
    model = copy.deepcopy(plain)
    everything = fxremat.plan(model, text((8, 128)), mem="100%", **QUICK).keep_all_peak
    compiled = fxremat.compile(model, mem=int(0.8 * everything), dynamic=True, **QUICK)
    batches = [text((8, 100)), text((2, 20)), text((8, 128))]

    def run(call: nn.Module, own: nn.Module) -> list[dict[str, Tensor | None]]:
        own.zero_grad()
        torch.manual_seed(2)
        losses = [call(**batch) for batch in batches]
        found = []
        for place in order:
            losses[place].backward(retain_graph=True)
            losses[place].backward()
            found.append(gradients_of(own))
        return found

    for ours, theirs in zip(run(compiled, model), run(plain, plain), strict=True):
        assert unequal(ours, theirs) == []


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:.* is called again before the backward of its last call:UserWarning")
def test_a_plan_made_between_a_forward_and_its_backward_changes_nothing(
    shared: bool, planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:  # the budget, as with options that need one graph
        monkeypatch.setattr("fxremat.runtime.module._Training.needs_one_graph", "this test")
    torch.manual_seed(0)
    plain = gpt(1)
    model = copy.deepcopy(plain)
    least = fxremat.plan(model, text((4, 32)), mem="100%", **QUICK).minimum
    compiled = fxremat.compile(model, mem=4 * least, dynamic=True, **QUICK)

    def run(call: nn.Module, own: nn.Module) -> dict[str, Tensor | None]:
        own.zero_grad()
        torch.manual_seed(2)
        first = call(**text((4, 32)))
        second = call(**text((8, 60)))  # planned from nothing: more than twice of what is known
        first.backward()
        call(**text((3, 20))).backward()
        second.backward()
        return gradients_of(own)

    assert unequal(run(compiled, model), run(plain, plain)) == []
    assert planned.count("nothing") == (1 if shared else 2)  # calls that share a budget are planned together


def test_a_batch_of_one_and_an_empty_one(captures: list[object]) -> None:
    model, compiled = compiled_stack()
    for count in (8, 1, 5, 0, 9, 1, 0):
        ours, theirs = step(model, {"x": rows(count)}, _Named(compiled)), step(model, {"x": rows(count)}, _Named(model))
        assert ours.differences(theirs) == [], count
    assert len(captures) == 3


class _Named(nn.Module):
    def __init__(self, call: nn.Module) -> None:
        super().__init__()
        self.call = [call]

    def forward(self, x: Tensor) -> Tensor:
        return self.call[0](x)  # type: ignore[no-any-return]


def test_a_size_that_cannot_fit_is_named_before_anything_ran() -> None:
    model = ConvNet()
    small, large = pictures((2, 12)), pictures((6, 40))
    mem = fxremat.plan(model, small, mem="100%", **QUICK).keep_all_peak
    compiled = fxremat.compile(model, mem=mem, dynamic=True, **QUICK)
    step(model, small, compiled)
    before, rng = state_of(model), torch.get_rng_state()
    with pytest.raises(fxremat.BudgetTooSmall, match="this is for inputs of 6x3x40x40, 6") as caught:
        compiled(**large)
    assert caught.value.minimum > mem
    assert unequal(state_of(model), before) == []
    assert same(torch.get_rng_state(), rng)
    plain = copy.deepcopy(model)
    assert step(model, small, compiled).differences(step(plain, small)) == []
    with pytest.raises(fxremat.BudgetTooSmall, match="6x3x40x40"):
        compiled(**large)


def test_percent_refers_to_the_largest_size() -> None:
    compiled = fxremat.compile(gpt(1), mem="80%", dynamic=RANGES, costs="cpu", **QUICK)
    compiled(**text((4, 32)))
    largest = fxremat.plan(gpt(1), text((8, 128)), mem="80%", costs="cpu", **QUICK)
    assert compiled.plan is not None
    assert compiled.plan.budget == pytest.approx(largest.budget, rel=0.01)
    compiled(**text((8, 100)))
    assert compiled.plan.budget == pytest.approx(largest.budget, rel=0.01)
    compiled(**text((8, 160)))  # above the range, which grows by half
    grown = fxremat.plan(gpt(1), text((8, 240)), mem="80%", costs="cpu", **QUICK)
    assert compiled.plan.budget == pytest.approx(grown.budget, rel=0.01)


@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("last", [1, 9])
def test_a_smaller_last_batch_has_the_budget_of_the_others(dynamic: bool | None, last: int) -> None:
    _, compiled = compiled_stack(mem="60%", dynamic=dynamic)
    budgets = []
    for count in (64, 64, last):
        compiled(rows(count)).backward()
        budgets.append(compiled.plan.budget)
    assert len({*budgets}) == 1


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_sizes_that_came_before_a_larger_one_have_its_budget_from_then_on(dynamic: bool | None) -> None:
    plain, compiled = compiled_stack(mem="60%", dynamic=dynamic)
    recomputed, budgets = [], []
    for count in (64, 64, 256, 64, 64):
        x = {"x": rows(count)}
        assert step(plain, x, compiled).differences(step(plain, x)) == []
        recomputed.append(compiled.plan.program.recomputed > 0)
        budgets.append(compiled.plan.budget)
    assert recomputed == [True, True, True, False, False]
    assert budgets[0] == budgets[1] < 0.4 * budgets[2]
    assert budgets[3] == budgets[4] == budgets[2]


class _Longer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6))

    def forward(self, x: Tensor, count: int) -> Tensor:
        for part in self.parts[:count]:
            x = part(x)
        return x.square().mean()


def test_a_shorter_way_through_the_model_has_a_budget_of_its_own() -> None:
    compiled = fxremat.compile(_Longer(), mem="80%")
    budgets = {}
    for count in (6, 3):
        compiled(rows(64), count).backward()
        budgets[count] = compiled.plan.budget
        compiled.zero_grad()
    assert budgets[3] < budgets[6]


def test_ranges_that_torch_is_told_of(captures: list[object]) -> None:
    compiled = fxremat.compile(gpt(1), mem="80%", costs="cpu", **QUICK)

    def marked(size: tuple[int, int]) -> dict[str, Tensor]:
        batch = text(size)
        for tensor in batch.values():
            torch._dynamo.mark_dynamic(tensor, 1, min=16, max=128)
        return batch

    largest = fxremat.plan(gpt(1), text((8, 128)), mem="80%", costs="cpu", **QUICK)
    captures.clear()
    for length in (32, 100):
        compiled(**marked((8, length)))
        assert compiled.plan is not None
        assert compiled.plan.budget == pytest.approx(largest.budget, rel=0.01)
    assert len(captures) == 1
    compiled(**text((8, 160)))  # out of the range: captured again, for any size
    compiled(**text((8, 170)))
    assert len(captures) == 2


def test_a_plan_tells_of_other_sizes() -> None:
    compiled = fxremat.compile(gpt(1), mem="30MB", dynamic=True, **QUICK)
    compiled(**text((4, 32)))
    plan = compiled.plan
    assert plan is not None
    assert "tokens[1] = 32" in str(plan)
    fixed = fxremat.plan(gpt(1), text((6, 100)), mem="30MB", dynamic=False, **QUICK)
    for there in (plan.at(tokens=(6, 100)), plan.at(tokens={0: 6}).at(tokens=100)):
        assert there.keep_all_peak == fixed.keep_all_peak
        assert there.predicted_peak == fixed.predicted_peak
    for some, all_ in (({"tokens": 100}, (4, 100)), ({"tokens": {0: 6}}, (6, 32)), ({}, (4, 32))):
        assert plan.at(**some).keep_all_peak == plan.at(tokens=all_).keep_all_peak
    assert plan.at().predicted_peak == plan.predicted_peak
    with pytest.raises(fxremat.FxrematError, match="no input 'token' is symbolic in this plan; those of tokens"):
        plan.at(token=3)
    with pytest.raises(fxremat.FxrematError, match=r"tokens = \(6, 100, 3\) has 3 sizes, and tokens has 2"):
        plan.at(tokens=(6, 100, 3))
    for wrong in (1, "3", (4,), {2: 5}, True, {}):
        with pytest.raises(fxremat.FxrematError, match="gives no sizes above 1 of its symbolic dimensions"):
            plan.at(tokens=wrong)
    with pytest.raises(fxremat.FxrematError, match="this plan is of fixed sizes"):
        fixed.at(tokens=3)


class Labelled(nn.Module):
    """Adds its inputs, so that their lengths are one symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, first: Tensor, labels: Tensor) -> Tensor:
        return (self.up(first) + labels).square().mean()


def test_two_inputs_may_name_the_size_that_they_share() -> None:
    first, labels = torch.randn(4, 32, 8), torch.randn(4, 32, 8)
    varying = {"first": {1: (2, 512)}, "labels": {1: (2, 512)}}
    plan = fxremat.plan(Labelled(), (first, labels), mem="100%", dynamic=varying, **QUICK)
    other = plan.at(first=100)
    for sizes_ in ({"labels": 100}, {"first": 100, "labels": 100}, {"labels": (4, 100, 8), "first": {1: 100}}):
        assert plan.at(**sizes_).keep_all_peak == other.keep_all_peak > plan.keep_all_peak
    differ = r"labels\[1\] and first\[1\] are one size in this plan: first = 100, labels = 60 differ"
    with pytest.raises(fxremat.FxrematError, match=differ):
        plan.at(first=100, labels=60)


def test_sizes_are_fixed_until_another_comes(captures: list[object]) -> None:
    _, compiled = compiled_stack(dynamic=None)
    for count in (8, 8, 9, 10, 8, 20):
        compiled(rows(count))
    assert len(captures) == 2
    _, fixed = compiled_stack(dynamic=False)
    for count in (8, 8, 9, 8, 10):
        fixed(rows(count))
    assert len(captures) == 2 + 3


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH, sparse=True)
        self.stack = Stack(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(self.embedding(x)).square().mean()


def test_what_cannot_be_captured_for_all_sizes_is_captured_for_each(
    captures: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    model = Sparse()
    compiled = fxremat.compile(model, mem="100MB", dynamic=True, **QUICK)
    with pytest.warns(UserWarning, match="sizes are taken as fixed from now on") as told:
        compiled(torch.arange(5))
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "fxremat"):
        warnings.simplefilter("error")
        for count in (7, 9):
            compiled(torch.arange(count))
    assert len(told) == 1
    assert len(captures) == 1 + 3
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records if record.name[:7] == "fxremat"] == [
        "pad inputs to a few sizes, and drop the last, smaller batch"
    ]
    assert compiled.plan is not None
    assert not compiled.plan.sizes


def test_offloading_takes_sizes_as_fixed_and_says_so_where_others_were_asked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled_stack(offload=True, dynamic=None)
    with pytest.warns(UserWarning, match="what waits on the host is planned for one size"):
        _, compiled = compiled_stack(offload=True)
    compiled(rows(8))
    assert not compiled.plan.sizes


def test_the_third_fixed_plan_is_warned_of_with_what_would_help(caplog: pytest.LogCaptureFixture) -> None:
    _, compiled = compiled_stack(dynamic=False)
    for count in (3, 4):
        compiled(rows(count))
    records = [record for record in caplog.records if record.name.startswith("fxremat")]
    assert not [record for record in records if record.levelno >= logging.WARNING]
    for count in (5, 6):
        compiled(rows(count))
    records = [record for record in caplog.records if record.name.startswith("fxremat")]
    (record,) = [record for record in records if record.levelno >= logging.WARNING]
    assert "fxremat.compile(..., dynamic=True) captures it once for all sizes" in record.getMessage()


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.stack(x)
        return logits.square().mean(), logits


@pytest.mark.filterwarnings("ignore:the loss reads outputs")
def test_outputs_beside_the_loss_may_be_read_at_every_size() -> None:
    torch.manual_seed(0)
    plain = WithLogits()
    model = copy.deepcopy(plain)
    compiled = fxremat.compile(model, mem="100MB", dynamic=True, **QUICK)

    def run(call: nn.Module, own: nn.Module, count: int, both: bool) -> list[Tensor | None]:
        own.zero_grad()
        torch.manual_seed(1)
        loss, logits = call(rows(count))
        (loss + logits.sin().mean() if both else loss).backward()
        return [loss, *gradients_of(own).values(), torch.get_rng_state()]

    for count, both in ((8, False), (12, True), (8, True), (20, False), (7, True)):
        pairs = zip(run(compiled, model, count, both), run(plain, plain, count, both), strict=True)
        assert all(same(a, b) for a, b in pairs), count


def test_torch_compile_with_changing_sizes(captures: list[object]) -> None:
    torch.manual_seed(0)
    plain = Loss(Stack())
    model = copy.deepcopy(plain)
    options = {"mem": "100MB", **QUICK}
    compiled = torch.compile(model, backend="fxremat", options=options, dynamic=True)
    for count in (8, 12, 5):
        ours, theirs = step(model, {"x": rows(count)}, _Named(compiled)), step(plain, {"x": rows(count)}, _Named(plain))
        assert ours.differences(theirs) == []
    assert len(captures) == 1


def test_torch_compile_with_changing_sizes_and_offloading_says_what_to_write() -> None:
    options = {"mem": "100MB", "offload": True, **QUICK}
    compiled: Any = torch.compile(Loss(Stack()), backend="fxremat", options=options, dynamic=True)
    with pytest.raises(Exception, match=r"offloading needs inputs of fixed sizes: torch.compile\(..., dynamic=False\)"):
        compiled(rows(8))


class Enlarged(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(2, 4, 3, padding=1), how

    def forward(self, x: Tensor) -> Tensor:
        size = [side + 3 for side in x.shape[2:]] if "scale_factor" not in self.how else None
        return F.interpolate(self.conv(x), size, **self.how).square().mean()


ENLARGED: dict[str, dict[str, Any]] = {
    "bilinear by half": {"mode": "bilinear", "scale_factor": 1.5},
    "nearest twice": {"mode": "nearest", "scale_factor": 2.0},
    "bicubic to a size": {"mode": "bicubic", "align_corners": True},
    "without aliasing": {"mode": "bilinear", "antialias": True},
}


LATER = ("nearest twice", "bilinear by half", "bicubic to a size")


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.long] * (how in LATER)) for how in ENLARGED])
def test_interpolation_of_any_size(how: str, captures: list[object]) -> None:
    torch.manual_seed(0)
    plain = Enlarged(**ENLARGED[how])
    model = copy.deepcopy(plain)
    compiled = fxremat.compile(model, mem="100MB", dynamic=True, **QUICK)
    for size in ((2, 7, 9), (3, 10, 4), (2, 5, 5)):
        x = torch.randn(size[0], 2, *size[1:])
        ours, theirs = step(model, {"x": x}, _Named(compiled)), step(plain, {"x": x}, _Named(plain))
        assert ours.differences(theirs) == []
    assert len(captures) == 1


def test_twice_a_size_that_was_halved_adds_no_guard_on_its_parity(captures: list[object]) -> None:
    class Hourglass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(2, 4, 3, stride=2), nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(F.interpolate(F.gelu(self.down(x)), scale_factor=2)).square().mean()

    compiled = fxremat.compile(Hourglass(), mem="100MB", dynamic=True, **QUICK)
    for height, width in ((9, 12), (10, 13), (11, 13), (12, 11)):
        compiled(torch.randn(2, 2, height, width)).backward()
    assert len(captures) == 1


class Positions(nn.Module):
    """A table of positions fixes the length; nothing fixes the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.stack = nn.Parameter(torch.ones(6, WIDTH)), Stack(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x + self.table).square().mean()


def test_a_size_that_the_model_fixes_is_not_said_to_change(captures: list[object]) -> None:
    shapes = {"x": {0: (2, 8), 1: (2, 8)}}
    compiled = fxremat.compile(Positions(), mem="100MB", dynamic=shapes, **QUICK)
    for count in (3, 5, 8):
        compiled(torch.ones(count, 6, WIDTH))
    assert compiled.plan is not None
    assert str(compiled.plan.sizes) == "x[0] = 8"
    assert len(captures) == 1


class Branching(nn.Module):
    """Long inputs take another way than short ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x if x.shape[0] < 20 else x.flip(0).exp()).square().mean()


def test_a_plan_does_not_speak_of_sizes_that_take_another_way(captures: list[object]) -> None:
    compiled = fxremat.compile(Branching(), mem="100MB", dynamic=True, **QUICK)
    compiled(rows(8))
    assert compiled.plan is not None
    compiled.plan.at(x=12)
    with pytest.raises(fxremat.FxrematError, match=r"is for x\[0\] = 8: x = 30 takes another way through the model"):
        compiled.plan.at(x=30)
    compiled(rows(30))
    assert compiled.plan.at(x=24).predicted_peak < compiled.plan.predicted_peak
    assert len(captures) == 2


def test_sizes_that_are_equal_change_together_in_a_plan_for_others() -> None:
    compiled = fxremat.compile(ConvNet(), mem="1GB", dynamic=True, **QUICK)
    compiled(**pictures((3, 16)))
    assert compiled.plan is not None
    fixed = fxremat.plan(ConvNet(), pictures((5, 32)), mem="1GB", dynamic=False, **QUICK)
    assert compiled.plan.at(images=(5, 3, 32, 32)).keep_all_peak == fixed.keep_all_peak


class Shifted(nn.Module):
    """The usual step of a language model: inputs are two parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.stack, self.head = nn.Embedding(50, WIDTH), Stack(2), nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stack(self.embedding(tokens))).flatten(0, 1), targets.flatten())


class Factors(nn.Module):
    """Numbers that are made of sizes: one of them is 0.0 at times, others round with every step."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(2).double()

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        y = self.stack(x.double() * (n * 0.1 * 0.3) + (n * 0.1 + n * 0.2))
        return (y * torch.arange(n).unsqueeze(1) * ((n - 8) / 4)).square().mean()


class Tabled(nn.Module):
    """A table fixes all sizes after all."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.stack = nn.Parameter(torch.ones(6, WIDTH)), Stack(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x + self.table).view(-1, 2).square().mean()


class Mixed(nn.Module):
    """Dropout of what a product reads transposed: its gradient has another layout than torch traces."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.out = Stack(2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.stack(x).transpose(1, 2) @ self.stack(x)).square().mean()


def shifted(count: int) -> dict[str, Tensor]:
    text_ = torch.randint(50, (count, 2 * count + 1), generator=torch.Generator().manual_seed(count))
    return {"tokens": text_[:, :-1], "targets": text_[:, 1:]}


TURNS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]], tuple[int, ...]]] = {
    "parts of a tensor": (Shifted, shifted, (4, 3, 7, 12)),
    "factors of sizes": (Factors, lambda count: {"x": rows(count)}, (8, 9, 16, 8, 23)),
    "products of transposed parts": (Mixed, lambda count: {"x": rows(count * 8).view(count, 8, WIDTH)}, (16, 20, 5)),
    "a table": (Tabled, lambda count: {"x": rows(6) * count}, (1, 2, 3)),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.long)])
def test_programs_whose_sizes_change(name: str, dynamic: bool | None) -> None:
    make, inputs, counts = TURNS[name]
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    compiled = fxremat.compile(model, mem="1GB", dynamic=dynamic, **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in counts:
            ours, theirs = step(model, inputs(count), compiled), step(plain, inputs(count))
            assert ours.differences(theirs) == [], count


def test_questions_change_nothing_for_the_model(planned: list[str]) -> None:
    _, compiled = compiled_stack(mem="90%")
    compiled(rows(64))
    plan = compiled.plan
    plan.at(**{"input 1": 160})
    plan.within("95%")
    with pytest.raises(fxremat.BudgetTooSmall):
        plan.within(1)
    compiled(rows(60))
    assert compiled.plan.budget == plan.budget
    other = plan.within("95%")
    assert other.budget == pytest.approx(plan.budget * 95 / 90, abs=2)
    assert other.within("90%").predicted_peak == plan.predicted_peak


def test_a_number_that_shapes_nothing_is_planned_once(planned: list[str], captures: list[object]) -> None:
    torch.manual_seed(0)
    plain = Scaled()
    model = copy.deepcopy(plain)
    compiled = fxremat.compile(model, mem="1GB", **QUICK)
    for factor in range(2, 9):
        for call, own in ((compiled, model), (plain, plain)):
            own.zero_grad()
            call(rows(8), 1, factor).backward()
        assert unequal(gradients_of(model), gradients_of(plain)) == []
    assert len(captures) == 2
    assert len(planned) == 1


def test_a_graph_break_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are not tried as fixed where none was symbolic."""
    traced: list[int] = []

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x.sum()

    import fxremat.torch_private as private

    settings = private.capture_settings
    monkeypatch.setattr(private, "capture_settings", lambda dynamic: traced.append(1) or settings(dynamic))
    compiled = fxremat.compile(Broken(), mem="1GB", fullgraph=True, **QUICK)
    with pytest.raises(fxremat.CaptureError):
        compiled(rows(8).requires_grad_())
    assert len(traced) == 1


class Scaled(nn.Module):
    """Numbers among the inputs: one that sizes are made of, and one that is a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(2, dropout=0.0)

    def forward(self, x: Tensor, times: int, factor: float) -> Tensor:
        return (self.stack(x.repeat(times, 1)) * times * factor).square().mean()


def test_numbers_among_the_inputs_may_change() -> None:
    torch.manual_seed(0)
    plain = Scaled()
    model = copy.deepcopy(plain)
    compiled = fxremat.compile(model, mem="100MB", **QUICK)
    for count, times, factor in ((8, 2, 0.5), (8, 3, 0.5), (9, 4, 0.25), (8, 2, 2.0), (5, 7, 0.3)):
        arguments = (rows(count), times, factor)
        results = []
        for call, own in ((compiled, model), (plain, plain)):
            own.zero_grad()
            loss = call(*arguments)
            loss.backward()
            results.append([loss, *gradients_of(own).values()])
        assert all(same(a, b) for a, b in zip(*results, strict=True)), (count, times, factor)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic": ({"dynamic": "yes"}, "dynamic is 'yes'; it is None, True, False, or"),
    "a number for dynamic": ({"dynamic": 1}, "dynamic is 1; it is None, True, False, or"),
    "no mapping": ({"dynamic": [2, 8]}, "dynamic is .2, 8.; it is None, True, False, or the least and the largest"),
    "no range": ({"dynamic": {"x": {0: 8}}}, "the least and the largest size by input and dimension"),
    "no end": ({"dynamic": {"x": {0: Dim("rows", min=2)}}}, "the least and the largest size by input and dimension"),
    "upside down": ({"dynamic": {"x": {0: (8, 2)}}}, "2 at least"),
    "one": ({"dynamic": {"x": {0: (1, 2)}}}, "2 at least"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused_in_one_line(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(fxremat.FxrematError, match=message):
        fxremat.compile(Loss(Stack()), mem="1GB", **options)


def test_a_dimension_that_is_not_there_is_refused() -> None:
    compiled = fxremat.compile(Stack(), mem="1GB", dynamic={"x": {2: (2, 8)}}, **QUICK)
    for wrong, says in (("y", "dynamic names 'y'; the model's inputs are x"), ("xx", "did you mean 'x'")):
        unknown = fxremat.compile(Stack(), mem="1GB", dynamic={wrong: {0: (2, 8)}}, **QUICK)
        with pytest.raises(fxremat.FxrematError, match=says):
            unknown(torch.ones(4, 4))
    with pytest.raises(fxremat.FxrematError, match="dynamic names dimensions 2 of 'x', which has 2"):
        compiled(rows(8))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class _InTwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList((Stack(2), Stack(2)))

    def forward(self, x: Tensor) -> Tensor:
        first = self.stacks[0](x)
        torch._dynamo.graph_break()
        return self.stacks[1](first).square().mean()


@pytest.mark.parametrize("make", [lambda: Loss(Stack(2)), _InTwoParts])
def test_slices_of_one_long_tensor_are_planned_once(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    resized: list[Dims] = []
    at = SymbolicGraph.at
    monkeypatch.setattr(SymbolicGraph, "at", lambda graph, dims: resized.append(dims) or at(graph, dims))
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    compiled = fxremat.compile(model, mem="1GB", **QUICK)
    data = rows(100)
    for number, x in enumerate((data[:8], data[8:14], data[14:22], data[22:30], data[31:39], data[40:48])):
        if number == 3:
            resized.clear()
        ours, theirs = step(model, {"x": x}, compiled), step(plain, {"x": x})
        assert ours.differences(theirs) == [], number
    assert not resized
    assert "offset" not in str(compiled.plan)


class _Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack, self.beta, self.temperature = Stack(2), 0.5, 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.stack(x) / self.temperature
        return y.square().mean() + self.beta * y.abs().mean()


def test_numbers_that_change_are_not_taken_for_sizes(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = _Annealed()
    model = copy.deepcopy(plain)
    compiled = fxremat.compile(model, mem="1GB", **QUICK)
    for number in range(8):
        for each in (plain, model):
            each.beta = 0.5 + max(0, number - 1) / 8
            each.temperature = 1.0 + max(0, number - 4) / 8
        ours, theirs = step(model, {"x": rows(8)}, compiled), step(plain, {"x": rows(8)})
        assert ours.differences(theirs) == [], number
    assert "combinations of input sizes" not in caplog.text


class _WithPositions(nn.Module):
    """A model with a table of 512 positions, of which the inputs never use more than a few."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.stack = nn.Embedding(512, WIDTH), Stack(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x + self.positions.weight[: x.shape[1]]).square().mean()


@pytest.mark.parametrize("dynamic", [None, True])
def test_percent_does_not_refer_to_sizes_that_the_model_merely_allows(dynamic: bool | None) -> None:
    compiled = fxremat.compile(_WithPositions(), mem="80%", dynamic=dynamic, **QUICK)
    for length in (16, 12, 9):
        compiled(torch.randn(32, length, WIDTH)).backward()
        if length == 16:
            most = compiled.plan.keep_all_peak
        assert compiled.plan.budget <= 0.81 * most, length


@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["fixed", "dynamic"])
def test_a_smaller_step_may_take_what_an_earlier_one_took(options: dict[str, Any]) -> None:
    """With frozen layers there is nothing to recompute, and a percentage of what is left would be too little."""
    x = rows()
    alone = Loss(Stack(depth=4))
    frozen = [*alone.parameters()][:-2]
    compiled = fxremat.compile(copy.deepcopy(alone), mem="80%", **QUICK, **options)
    compiled(x).backward()
    before = compiled.plan.budget
    for each in (*frozen, *[*compiled.parameters()][:-2]):
        each.requires_grad_(False)
    for _ in range(2):
        assert peak_bytes(lambda: compiled(x).backward()) <= before
        assert compiled.plan.budget == before
    with pytest.raises(fxremat.BudgetTooSmall):
        fxremat.compile(alone, mem="80%", **QUICK, **options)(x)
