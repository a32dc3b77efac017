"""Weights on the host, updated inside the step: plain training's numbers in a budget below the weights' own size."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from benchmarks import meter, models
from fxremat.host.files import FileTier
from fxremat.ops.parameters import Weights
from fxremat.ops.spent import Spent
from fxremat.settings import Offload, Search
from fxremat.step.program import Role
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")

HOSTED = Offload(weights=True, activations=False)
WIDTH = 96
Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
}


class MLP(nn.Module):
    """Blocks of linear, GELU and dropout; the first and the last share their weight."""

    def __init__(self, tied: bool = True, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)
        )
        if tied:
            self.blocks[-1][0].weight = self.blocks[0][0].weight  # type: ignore[index, union-attr, assignment]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, torch.ones_like(x))


def rows() -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], seed: int) -> float:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def resident(compiled: Any, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters and state that are on the device between steps."""
    homes = compiled._fxremat.backend.weights._homes
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in parameters for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.dim()]
    return sum(t.nbytes for t in (*parameters, *states) if t.data_ptr() not in homes)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(("mlp", name) for name in ("momentum", "AdamW")),
        *(pytest.param("mlp", name, marks=pytest.mark.long) for name in ("SGD", "Adam")),
        *(pytest.param("gpt", name, marks=pytest.mark.long) for name in OPTIMIZERS),
    ],
)
def test_ten_steps_are_those_of_plain_training_in_a_part_of_the_memory(name: str, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    case = models.get("gpt", "small")
    plain, batch = (MLP(), (rows(),)) if name == "mlp" else (case.model(), case.batch())
    ours = copy.deepcopy(plain)
    theirs, mine = make(plain), make(ours)
    losses = [step(plain, theirs, batch, seed) for seed in range(10)]
    model = fxremat.compile(ours, mem="min", search=Search(seconds=0), offload=HOSTED, optimizer=mine)
    assert [step(model, mine, batch, seed) for seed in range(10)] == losses
    for key, value in plain.state_dict().items():
        assert same(model.state_dict()[key], value), key
    peak = meter.peak_bytes(lambda: model(*batch).backward()) + resident(model, mine)
    assert peak <= model.plan.budget
    assert peak == pytest.approx(model.plan.predicted_peak, rel=0.02)
    if name == "mlp":  # parameters, gradients, and Adam's state
        assert model.plan.budget < 0.4 * 4 * sum(p.nbytes for p in plain.parameters())


def test_a_budget_below_the_weights_own_size() -> None:
    torch.manual_seed(0)
    plain = MLP(depth=24)
    ours = copy.deepcopy(plain)
    theirs, mine = (OPTIMIZERS["AdamW"](model) for model in (plain, ours))
    mem = sum(p.nbytes for p in plain.parameters()) * 2 // 3
    model = fxremat.compile(ours, mem=mem, search=Search(seconds=0), offload=HOSTED, optimizer=mine)
    for seed in range(3):
        assert step(model, mine, (rows(),), seed) == step(plain, theirs, (rows(),), seed)
    batch = rows()
    assert meter.peak_bytes(lambda: model(batch).backward()) + resident(model, mine) <= mem
    assert "live on the host" in str(model.plan)


def least(model: nn.Module, make: Make, batch: tuple[Tensor, ...], offload: Offload = HOSTED) -> int:
    other = copy.deepcopy(model)
    with pytest.raises(fxremat.BudgetTooSmall) as small:
        fxremat.compile(
            other,
            mem=1,
            search=Search(seconds=0),
            offload=offload,
            optimizer=make(other),
            example_inputs=batch,
        )
    return small.value.minimum


def compiled(
    share: float, tier: FileTier | None = None, make: Make = OPTIMIZERS["AdamW"], limit: int | None = None
) -> Any:
    """A longer search where the host is limited: what has to live there is what is looked at."""
    torch.manual_seed(0)
    model = MLP(tied=False)
    optimizer = make(model)
    size = 4 * sum(p.nbytes for p in model.parameters())
    return fxremat.compile(
        model,
        mem=int(share * size),
        search=Search(seconds=0 if limit is None else 1),
        offload=Offload(tier=tier or FileTier(), limit=limit, weights=True, activations=False),
        optimizer=optimizer,
        example_inputs=rows(),
    ), optimizer


def test_a_weight_comes_twice_and_leaves_once_a_step() -> None:
    tier = FileTier()
    model, optimizer = compiled(0.25, tier, OPTIMIZERS["SGD"])
    step(model, optimizer, (rows(),), 0)
    hosted = sum(home.nbytes for home in model._fxremat.backend.weights.hosted.values())
    assert hosted > 0
    tier.copies = []
    step(model, optimizer, (rows(),), 1)
    out = sum(c.bytes for c in tier.copies if c.way == "out")
    back = sum(c.bytes for c in tier.copies if c.way == "in")
    assert out == hosted
    assert hosted <= back <= 2 * hosted


def test_a_hundred_steps_take_no_more_than_two() -> None:
    tier = FileTier()
    model, optimizer = compiled(0.4, tier)
    for seed in range(2):
        step(model, optimizer, (rows(),), seed)
    host, device = tier.bytes, meter.peak_bytes(lambda: step(model, optimizer, (rows(),), 0))
    for seed in range(98):
        step(model, optimizer, (rows(),), seed)
    assert tier.bytes == host
    assert meter.peak_bytes(lambda: step(model, optimizer, (rows(),), 0)) <= device


def test_more_memory_hosts_less() -> None:
    hosted = [len(compiled(share)[0]._fxremat.backend.hosted) for share in (0.3, 0.6, 3.0)]
    assert hosted[0] > hosted[1] > hosted[2] == 0


def test_learning_rates_may_change() -> None:
    torch.manual_seed(0)
    plain = MLP(tied=False)
    theirs = OPTIMIZERS["AdamW"](plain)
    model, mine = compiled(0.4)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (theirs, mine)]
    for seed in range(5):
        assert step(plain, theirs, (rows(),), seed) == step(model, mine, (rows(),), seed)
        for scheduler in schedulers:
            scheduler.step()


def test_training_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    model, optimizer = compiled(0.4)
    for seed in range(3):
        step(model, optimizer, (rows(),), seed)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
    wanted = [step(model, optimizer, (rows(),), seed) for seed in range(3, 6)]
    again, other = compiled(0.4)
    weights, state = torch.load(tmp_path / "checkpoint.pt")
    again.load_state_dict(weights)
    other.load_state_dict(state)
    assert [step(again, other, (rows(),), seed) for seed in range(3, 6)] == wanted
    assert resident(again, other) <= again.plan.program.resident  # what was loaded went home as well
    weights, state = torch.load(tmp_path / "checkpoint.pt")
    plain = MLP(tied=False)
    plain.load_state_dict(weights)
    theirs = OPTIMIZERS["AdamW"](plain)
    theirs.load_state_dict(state)
    assert [step(plain, theirs, (rows(),), seed) for seed in range(3, 6)] == wanted


def test_a_fault_in_the_middle_leaves_every_parameter_old_or_new_and_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = compiled(0.4)
    twin, theirs = compiled(0.4)
    for m, o in ((model, optimizer), (twin, theirs)):
        step(m, o, (rows(),), 0)
    old = {k: v.clone() for k, v in model.state_dict().items()}
    step(twin, theirs, (rows(),), 1)
    new = twin.state_dict()
    weights = model._fxremat.backend.weights
    original, calls = type(weights)._single_for, [0]

    def failing(self: Any, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise RuntimeError("a bolt from the blue")
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(type(weights), "_single_for", failing)
        with pytest.raises(RuntimeError, match="a bolt from the blue") as fault:
            step(model, optimizer, (rows(),), 1)
    assert any("4 of 16 parameters were updated" in note for note in fault.value.__notes__)
    kinds = [
        "old" if same(value, old[key]) else "new" if same(value, new[key]) else "broken"
        for key, value in model.state_dict().items()
    ]
    assert (kinds.count("new"), kinds.count("old")) == (4, 12)
    optimizer.zero_grad()
    step(model, optimizer, (rows(),), 2)


def test_what_needs_all_gradients_at_once_is_refused_by_name() -> None:
    model, optimizer = compiled(0.4)
    model(rows()).backward()
    assert all(isinstance(p.grad, Spent) for p in model.parameters())
    with pytest.raises(fxremat.FxrematError, match="clipping by the norm of all"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model(rows()).backward()
    with pytest.raises(fxremat.FxrematError, match=r"optimizer.step\(\) was not called since"):
        model(rows())
    optimizer.step()
    optimizer.zero_grad()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(fxremat.FxrematError, match=r"the gradient of the loss is 0.5, not 1: a GradScaler"):
        (0.5 * model(rows())).backward()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_share_is_of_all_that_the_step_keeps() -> None:
    torch.manual_seed(0)
    plans = []
    for mem in ("100%", "40%"):
        model = MLP(tied=False)
        options = {"optimizer": OPTIMIZERS["AdamW"](model), "example_inputs": rows()}
        plans.append(fxremat.compile(model, mem=mem, search=Search(seconds=0), offload=HOSTED, **options).plan)
    assert not plans[0].program.fetched
    assert plans[1].program.fetched
    assert plans[1].budget == pytest.approx(0.4 * plans[0].budget, abs=2)
    assert plans[0].keep_all_peak == plans[0].predicted_peak
    assert plans[1].minimum < plans[1].budget
    assert plans[0].predicted_peak > 3 * sum(p.nbytes for p in MLP(tied=False).parameters())


def test_a_backward_that_runs_again_is_refused() -> None:
    model, _ = compiled(0.4)
    loss = model(rows())
    loss.backward(retain_graph=True)
    with pytest.raises(fxremat.FxrematError, match=r"optimizer.step\(\) was not called since"):
        loss.backward()


def test_optimizers_that_look_at_all_parameters_are_refused() -> None:
    model = MLP()
    with pytest.raises(fxremat.FxrematError, match="a LBFGS cannot step inside the backward"):
        fxremat.compile(
            model,
            mem="50%",
            offload=HOSTED,
            optimizer=torch.optim.LBFGS(model.parameters()),
            example_inputs=rows(),
        )


def test_options_that_make_no_sense_are_refused() -> None:
    model = MLP()
    with pytest.raises(fxremat.FxrematError, match="and optimizer go together"):
        fxremat.compile(model, mem="50%", offload=HOSTED)
    with pytest.raises(fxremat.FxrematError, match="none of the optimizer's parameters"):
        other = torch.optim.SGD(MLP().parameters(), lr=0.1)
        fxremat.compile(model, mem="50%", offload=HOSTED, optimizer=other, example_inputs=rows())


def test_evaluation_reads_the_weights_where_they_are() -> None:
    model, optimizer = compiled(0.4)
    torch.manual_seed(0)
    plain = MLP(tied=False)
    theirs = OPTIMIZERS["AdamW"](plain)
    for seed in range(2):
        step(model, optimizer, (rows(),), seed)
        step(plain, theirs, (rows(),), seed)
    model.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(model(rows()), plain(rows()))


def test_state_makes_one_trip_a_step_beside_the_weights() -> None:
    tier = FileTier()
    model, optimizer = compiled(0.25, tier)
    for seed in range(2):
        step(model, optimizer, (rows(),), seed)
    weights = model._fxremat.backend.weights
    hosted = sum(home.nbytes for home in weights.hosted.values())
    tier.copies = []
    step(model, optimizer, (rows(),), 2)
    moved = {way: sum(c.bytes for c in tier.copies if c.way == way) for way in ("out", "in")}
    assert moved["out"] == 3 * hosted  # AdamW's two moments and the weight
    assert 3 * hosted <= moved["in"] <= 4 * hosted
    names = [node.name for node in model.plan.backward_graph.graph.nodes]
    update = next(name for name in names if name.endswith("_update") and f"{name[:-7]}_prefetch" in names)
    parameter = update.removesuffix("_update")
    marks = [f"{parameter}_{what}" for what in ("state_prefetch", "state_wait", "update", "state_release")]
    assert [name for name in names if name in marks] == marks
    early = [
        names.index(f"{name[:-7]}_state_wait") - names.index(f"{name[:-7]}_state_prefetch")
        for name in names
        if name.endswith("_update") and f"{name[:-7]}_state_wait" in names
    ]
    assert max(early) > 5  # the copy begins while others work


def test_back_on_the_device_it_is_an_ordinary_model() -> None:
    model, mine = compiled(0.4)
    torch.manual_seed(0)
    plain = MLP(tied=False)
    theirs = OPTIMIZERS["AdamW"](plain)
    for seed in range(2):
        assert step(model, mine, (rows(),), seed) == step(plain, theirs, (rows(),), seed)
    homes = set(model._fxremat.backend.weights._homes)
    ordinary = model.fxremat.to_device()._fxremat.model
    tensors = [*ordinary.parameters(), *(t for s in mine.state.values() for t in s.values())]
    assert not any(tensor.data_ptr() in homes for tensor in tensors)
    for seed in range(2, 4):
        assert step(ordinary, mine, (rows(),), seed) == step(plain, theirs, (rows(),), seed)
    for seed in range(4, 6):
        assert step(model, mine, (rows(),), seed) == step(plain, theirs, (rows(),), seed)
    assert model._fxremat.backend.weights.hosted


def test_while_the_forward_is_called_parameters_of_the_host_have_no_memory() -> None:
    model, optimizer = compiled(0.4)
    step(model, optimizer, (rows(),), 0)
    weights = model._fxremat.backend.weights
    parameters = [weights.parameters()[number] for number in weights.hosted]
    before = [p.clone() for p in parameters]
    with pytest.raises(ValueError, match="on purpose"), weights.seen_on_the_device():
        assert all(p.untyped_storage().nbytes() == 0 for p in parameters)
        raise ValueError("on purpose")
    assert all(p.untyped_storage().nbytes() for p in parameters)
    assert all(map(torch.equal, parameters, before))


def test_a_parameter_with_new_data_takes_its_numbers_home() -> None:
    model, mine = compiled(0.4)
    torch.manual_seed(0)
    plain = MLP(tied=False)
    theirs = OPTIMIZERS["AdamW"](plain)
    step(model, mine, (rows(),), 0)
    step(plain, theirs, (rows(),), 0)
    for m in (model, plain):
        for p in m.parameters():
            p.data = p.data * 0.5
    assert step(model, mine, (rows(),), 1) == step(plain, theirs, (rows(),), 1)
    first = next(iter(model._fxremat.backend.weights.hosted))
    parameter = model._fxremat.backend.weights.parameters()[first]
    good, parameter.data = parameter.data, torch.zeros(3)
    with pytest.raises(fxremat.FxrematError, match="compile the model again"):
        model(rows())
    parameter.data = good
    assert step(model, mine, (rows(),), 2) == step(plain, theirs, (rows(),), 2)


def test_another_shape_is_planned_for_the_same_hosted_weights() -> None:
    model, mine = compiled(0.4)
    torch.manual_seed(0)
    plain = MLP(tied=False)
    theirs = OPTIMIZERS["AdamW"](plain)
    hosted = []
    for seed, count in enumerate((16, 1, 16, 1)):
        batch = (rows()[:count],)
        assert step(model, mine, batch, seed) == step(plain, theirs, batch, seed)
        hosted.append(set(model._fxremat.backend.weights.hosted))
    assert len(model.fxremat.plans) == 2
    assert hosted[0]
    assert all(numbers == hosted[0] for numbers in hosted)


def test_weights_and_activations_travel_together() -> None:
    torch.manual_seed(0)
    plain = MLP(depth=12)
    ours = copy.deepcopy(plain)
    make = OPTIMIZERS["AdamW"]
    batch = (torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0)),)
    alone = least(ours, make, batch)
    together = least(ours, make, batch, Offload(weights=True))
    assert together < alone
    theirs, mine = make(plain), make(ours)
    tier = FileTier()
    options = {"offload": Offload(tier=tier, weights=True), "optimizer": mine}
    model = fxremat.compile(ours, mem=together, search=Search(seconds=0), **options)
    for seed in range(4):
        assert step(model, mine, batch, seed) == step(plain, theirs, batch, seed)
    origins = {
        model.plan.program.version_of[s.reads[0]] in model.plan.program.layout.graph.updates_of
        for s in model.plan.program.steps
        if s.role is Role.WAIT and s.reads
    }
    assert origins == {True, False}  # parameters came, and activations
    peak = meter.peak_bytes(lambda: model(*batch).backward()) + resident(model, mine)
    assert peak <= together
    assert peak == pytest.approx(model.plan.predicted_peak, rel=0.02)


def test_host_mem_limits_what_lives_on_the_host() -> None:
    free, _ = compiled(0.3)
    most = 150_000
    with pytest.raises(fxremat.BudgetTooSmall) as small:
        compiled(0.3, limit=most)
    minimum = small.value.minimum
    assert minimum > free.plan.minimum
    share = (minimum + 1) / (4 * sum(p.nbytes for p in free.parameters()))  # with more, none need live there
    tier = FileTier()
    model, optimizer = compiled(share, tier, limit=most)
    for seed in range(2):
        step(model, optimizer, (rows(),), seed)
    assert 0 < tier.bytes <= most


def test_host_mem_counts_what_pinned_memory_takes_for_parameters_and_state() -> None:
    class InPowersOfTwo(FileTier):
        in_powers = True

    most = 150_000
    with pytest.raises(fxremat.BudgetTooSmall) as small:
        compiled(0.3, FileTier(), limit=most)
    with pytest.raises(fxremat.BudgetTooSmall) as smaller:
        compiled(0.3, InPowersOfTwo(), limit=most)
    assert smaller.value.minimum > small.value.minimum
    share = (smaller.value.minimum + 1) / (4 * sum(p.nbytes for p in MLP(tied=False).parameters()))
    model, _ = compiled(share, InPowersOfTwo(), limit=most)
    joint, hosted = model.plan.graph, model.plan.weights.hosted
    sizes = [joint.shown[value].meta["val"].nbytes for value in hosted]
    assert 0 < sum(3 * (1 << (size - 1).bit_length()) for size in sizes) <= most  # with two moments of AdamW


class Of(nn.Module):
    """A function of a module with these parts."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def clamped(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.first.weight.clamp_(-0.05, 0.05)
    return model.second(model.first(x)).square().mean()


def renormed(model: Any, x: Tensor, words: Tensor) -> Tensor:
    return model.second(model.first(x)).square().mean() + model.words(words).square().mean()


def two_layers(function: Callable[..., Any]) -> Of:
    torch.manual_seed(0)
    parts = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    return Of(function, **parts, words=nn.Embedding(7, 3, max_norm=0.5))


WORDS = torch.arange(20) % 7
WRITES: dict[str, tuple[Callable[[], Of], tuple[Tensor, ...], str]] = {
    "clamp": (lambda: two_layers(clamped), (rows(),), "first.weight"),
    "max_norm": (
        lambda: two_layers(renormed),
        (rows(), WORDS),
        "words.weight",
    ),
}
QUICK: dict[str, Any] = {"search": Search(seconds=0)}


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("clamp", 0.0),
        ("max_norm", 1.0),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("clamp", 1.0), ("max_norm", 0.0))),
    ],
)
def test_a_parameter_that_forward_writes_to_is_named_and_nothing_is_changed(kind: str, share: float) -> None:
    """The step would update one of two copies of it: at the least budget that ended in a segmentation fault."""
    make, batch, name = WRITES[kind]
    model = make()
    optimizer = OPTIMIZERS["AdamW"](model)
    before = {key: (value.data_ptr(), value.clone()) for key, value in model.state_dict().items()}
    mem = int(share * (1 << 30)) or 1
    compiled = fxremat.compile(model, mem=mem, offload=HOSTED, optimizer=optimizer, **QUICK)
    with pytest.raises(fxremat.FxrematError, match=f"forward writes to the parameter {name}, which") as error:
        compiled(*batch)
    assert "another optimizer" in str(error.value)
    for key, value in model.state_dict().items():
        assert value.data_ptr() == before[key][0]
        assert same(value, before[key][1])
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("kind", WRITES)
def test_a_parameter_that_forward_writes_to_may_have_another_optimizer(kind: str) -> None:
    make, batch, name = WRITES[kind]

    def train(mem: str | None) -> tuple[list[float], dict[str, Tensor]]:
        plain: Any = make()
        parts = dict(plain.named_parameters())
        other = torch.optim.AdamW([parts.pop(name)], lr=1e-2)
        optimizer = torch.optim.AdamW(parts.values(), lr=1e-2)
        model = plain
        if mem is not None:
            model = fxremat.compile(plain, mem=mem, offload=HOSTED, optimizer=optimizer, **QUICK)
        losses = []
        for seed in range(3):
            other.zero_grad()
            losses.append(step(model, optimizer, batch, seed))
            other.step()
        return losses, plain.state_dict()

    (losses, state), (wanted, theirs) = train("min"), train(None)
    assert losses == wanted
    assert all(same(state[key], theirs[key]) for key in theirs)


RETURNS: dict[str, Callable[..., Any]] = {  # the loss, and what a caller may read beside it
    "a part of the loss": lambda m, x: ((y := m.second(m.first(x))).square().mean(), y.mean()),
    "a transposed weight": lambda m, x: (m.second(m.first(x)).square().mean(), m.first.weight.t()),
    "a detached weight": lambda m, x: (m.second(m.first(x)).square().mean(), m.second.weight.detach()),
    "a weight": lambda m, x: (m.second(m.first(x)).square().mean(), m.second.weight),
    "an op with effects": lambda m, x: (
        m.second(m.first(x)).square().mean()
        + torch.linalg.cholesky(x @ x.mT + 1e3 * torch.eye(len(x))).sum()
        + torch.linalg.cholesky(m.first.weight @ m.first.weight.mT + 1e3 * torch.eye(WIDTH)).sum(),
        x,
    ),
}


@pytest.mark.parametrize("kind", RETURNS)
def test_models_that_return_more_than_their_loss_train_at_the_least_budget(kind: str) -> None:
    def train(mem: str | None) -> tuple[list[Tensor], dict[str, Tensor]]:
        model: Any = two_layers(RETURNS[kind])
        optimizer = OPTIMIZERS["AdamW"](model)
        if mem is not None:
            model = fxremat.compile(model, mem=mem, offload=HOSTED, optimizer=optimizer, **QUICK)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            loss, beside = model(rows())
            seen += [loss.detach().clone(), beside.detach().clone()]
            loss.backward()
            optimizer.step()
        return seen, model.state_dict()

    (seen, state), (wanted, plain) = train("min"), train(None)
    assert all(map(same, seen, wanted))
    assert all(same(state[key], plain[key]) for key in plain)


def test_a_loss_may_be_weighed_beside_another_output_and_not_scaled() -> None:
    model: Any = two_layers(RETURNS["a part of the loss"])
    optimizer = OPTIMIZERS["SGD"](model)
    compiled = fxremat.compile(model, mem="100%", offload=HOSTED, optimizer=optimizer, **QUICK)
    loss, other = compiled(rows())
    (loss + 0.5 * other).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss, other = compiled(rows())
    with pytest.raises(fxremat.FxrematError, match=r"of the model's scalar outputs are 0.5, 0.25, not 1"):
        (0.5 * loss + 0.25 * other).backward()


def test_a_view_of_a_weight_that_lives_on_the_host_is_refused_by_name() -> None:
    def function(model: Any, x: Tensor) -> Any:
        loss = model.second(model.first(x)).square().mean()
        return (loss, model.first.weight.t()) if len(x) == 3 else loss

    model: Any = two_layers(function)
    optimizer = OPTIMIZERS["AdamW"](model)
    mem = least(model, OPTIMIZERS["AdamW"], (rows(),))
    compiled = fxremat.compile(model, mem=mem, offload=HOSTED, optimizer=optimizer, **QUICK)
    step(compiled, optimizer, (rows(),), 0)
    with pytest.raises(fxremat.FxrematError, match=r"a view of the parameter first.weight, which lives on the host"):
        compiled(rows()[:3])


def test_a_plan_leaves_nothing_on_the_optimizer() -> None:
    model = MLP(tied=False)
    optimizer = OPTIMIZERS["AdamW"](model)
    for _ in range(2):
        fxremat.plan(model, rows(), mem="40%", offload=HOSTED, optimizer=optimizer, **QUICK)
    assert not optimizer._optimizer_step_pre_hooks
    compiled: Any = fxremat.compile(model, mem="40%", offload=HOSTED, optimizer=optimizer, **QUICK)
    for seed in range(2):
        step(compiled, optimizer, (rows(),), seed)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    compiled.fxremat.to_device()
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks


def test_flat_parameters_take_their_own_bytes_on_the_host() -> None:
    """Parameters that are views of one storage: of torch.nn.utils.vector_to_parameters, or sharded."""
    plain = MLP(tied=False)
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    make, tier = OPTIMIZERS["SGD"], FileTier()
    theirs, mine = make(plain), make(ours)
    size = sum(p.nbytes for p in ours.parameters())
    options = {"offload": Offload(tier=tier, weights=True, activations=False), "optimizer": mine, **QUICK}
    mem = fxremat.plan(ours, rows(), mem=1 << 30, **options).minimum
    assert mem < size
    compiled = fxremat.compile(ours, mem=mem, **options)
    for seed in range(3):
        assert step(compiled, mine, (rows(),), seed) == step(plain, theirs, (rows(),), seed)
    weights = compiled._fxremat.backend.weights
    assert weights.hosted
    assert tier.bytes <= size
    for number, parameter in enumerate(weights.parameters()):  # none keeps the storage of all on the device
        assert number in weights.hosted or parameter.untyped_storage().nbytes() == parameter.nbytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="after torch.compile, CUDA builds of PyTorch refuse a backward in a forked child",
)
def test_a_forked_child_trains_weights_of_its_own() -> None:
    model, optimizer = compiled(0.3)
    step(model, optimizer, (rows(),), 0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            losses = [step(model, optimizer, (rows(),), seed) for seed in (1, 2)]
            changed = [not same(value, before[key]) for key, value in model.state_dict().items()]
            code = 0 if all(changed) and losses else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert all(same(value, before[key]) for key, value in model.state_dict().items())
    step(model, optimizer, (rows(),), 1)


# --- a device that is not the CPU: meta stands for it ---------------------------------------------------------

META = torch.device("meta")


@pytest.mark.parametrize("fused", [False, True], ids=["counts on the host", "counts on the device"])
def test_state_that_was_loaded_on_the_host_goes_to_the_device_with_its_parameter(fused: bool) -> None:
    model = MLP(tied=False, depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    step(model, optimizer, (rows(),), 0)  # on the CPU, as where a checkpoint is loaded
    weights = Weights(optimizer, FileTier(), META)
    for parameter in weights.parameters():
        weights._bring_state(parameter)
        state = optimizer.state[parameter]
        assert {state["exp_avg"].device, state["exp_avg_sq"].device} == {META}
        assert state["step"].device == (META if fused else torch.device("cpu"))


def test_parameters_that_stay_on_the_device_bring_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    brought: list[Tensor] = []
    monkeypatch.setattr(Weights, "_bring_state", lambda _, parameter: brought.append(parameter))
    optimizer = OPTIMIZERS["AdamW"](MLP(tied=False, depth=2))
    weights = Weights(optimizer, FileTier(), torch.device("cpu", 0))  # no parameter calls its device so
    weights.settle({1})
    assert [id(p) for p in brought] == [id(p) for k, p in enumerate(weights.parameters()) if k != 1]


def test_counts_of_steps_on_the_device_are_not_read_by_the_host() -> None:
    optimizer = torch.optim.SGD([parameter := nn.Parameter(torch.ones(3, device=META))], lr=0.1)
    weights, shell = Weights(optimizer, FileTier(), META), nn.Parameter(torch.ones(3, device=META))
    optimizer.state[parameter] = {"step": torch.ones((), device=META)}  # reading it raises
    single: Any = SimpleNamespace(state={}, param_groups=[{}], step=lambda: None)
    weights._single[0] = (single, shell)
    weights.update(parameter.data, torch.ones(3, device=META), False, 0)
    assert weights.updated == {0}

    def fail() -> None:
        raise MemoryError

    single.step = fail
    with pytest.raises(MemoryError):
        weights.update(parameter.data, torch.ones(3, device=META), False, 0)


def test_solvers_of_activations_are_refused() -> None:
    model = MLP()
    optimizer = OPTIMIZERS["SGD"](model)
    with pytest.raises(fxremat.FxrematError, match="places transfers of activations alone"):
        fxremat.compile(model, mem="50%", offload=Offload(weights=True), optimizer=optimizer, solver="pofo")


def test_the_least_budget_of_a_plan_is_that_of_a_compiled_model() -> None:
    """An optimizer allocates otherwise while PyTorch compiles; it is measured as it runs in a step."""

    def settings(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters())
        return {"search": Search(seconds=0), "offload": HOSTED, "optimizer": optimizer}

    x = torch.ones(4, 8)
    made = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)) for _ in range(2)]
    planned = fxremat.plan(made[0], (x,), mem="100%", **settings(made[0]))
    compiled = fxremat.compile(made[1], mem="100%", example_inputs=(x,), **settings(made[1]))
    assert compiled.plan is not None
    assert (planned.minimum, planned.keep_all_peak) == (compiled.plan.minimum, compiled.plan.keep_all_peak)


def four_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def loss_of_a_step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("updates", ["backward", "step"])
def test_a_parameter_that_is_replaced_in_the_model_is_computed_with(
    updates: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer goes on with the one before until it is given the new one, as without fxremat."""
    found = []
    for ours in (True, False):
        model = four_layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if ours:
            offload = Offload(weights=True, updates=updates)
            model = fxremat.compile(model, mem="16KiB", offload=offload, optimizer=optimizer)
        for step in range(6):
            if step == 2:
                torch.manual_seed(1)
                model[1].weight = nn.Parameter(torch.randn(16, 16))
            if step == 4:
                optimizer.add_param_group({"params": [model[1].weight]})
            found.append(loss_of_a_step(model, optimizer))
    assert found[:6] == found[6:]
    assert "1 of the 8 parameters that the step updates are no longer the model's" in caplog.text


def test_an_optimizer_of_none_of_the_model_s_parameters_any_more_is_refused() -> None:
    model = four_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = fxremat.compile(model, mem="70%", offload=Offload(weights=True), optimizer=optimizer)
    loss_of_a_step(compiled, optimizer)
    compiled.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(fxremat.FxrematError, match="none of the optimizer's parameters is one of the model's"):
        compiled(torch.ones(8, 16))


def test_a_learning_rate_may_be_a_tensor_and_an_optimizer_s_own_error_is_told_as_such() -> None:
    found = []
    for ours in (True, False):
        model = four_layers()
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
        if ours:
            model = fxremat.compile(model, mem="90%", offload=Offload(weights=True), optimizer=optimizer)
        for _ in range(3):
            found.append(loss_of_a_step(model, optimizer))
    assert found[:3] == found[3:]
    model = four_layers()
    capturable = torch.optim.Adam(model.parameters(), capturable=True)
    compiled = fxremat.compile(model, mem="90%", offload=Offload(weights=True), optimizer=capturable)
    with pytest.raises(fxremat.FxrematError, match=r"Adam cannot update a parameter of \(16, 16\): .*capturable=True"):
        compiled(torch.ones(8, 16)).sum().backward()
