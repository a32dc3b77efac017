"""Weights on the host that `optimizer.step()` updates: accumulation, clipping by the norm and GradScaler."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter, models
from fxremat.host.files import FileTier
from fxremat.settings import Offload, Search
from fxremat.torch_private import torch_release
from tests.test_weights import MLP, OPTIMIZERS, WIDTH, least, resident, rows
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")

LATER = Offload(weights=True, activations=False, updates="step")
Loop = Callable[[nn.Module, torch.optim.Optimizer, tuple[Tensor, ...], int], list[float]]


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], seed: int) -> list[float]:
    """Three micro-batches, whose gradients are added up, with the zeros of the last step."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(3):
        loss = model(*batch) / 3
        loss.backward()
        losses.append(float(loss.detach()))
    optimizer.step()
    optimizer.zero_grad(set_to_none=seed % 2 == 0)
    return losses


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], seed: int) -> list[float]:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return [float(loss.detach()), float(norm)]


def scale(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], seed: int) -> list[float]:
    """The second step meets an infinite gradient, and is left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss = model(*batch)
    scaler.scale(loss).backward()
    if seed == 1:
        next(iter(model.parameters())).grad.fill_(torch.inf)  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [float(loss.detach()), scaler.get_scale()]


def close(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], seed: int) -> list[float]:
    """A closure that runs forward and backward, and drops the gradients of the step before."""
    torch.manual_seed(seed)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(*batch)
        loss.backward()
        return loss.detach()

    return [float(optimizer.step(closure))]  # type: ignore[arg-type]


LOOPS: dict[str, Loop] = {"accumulate": accumulate, "clip": clip, "scale": scale, "close": close}


def gradients_on_the_device(compiled: Any, optimizer: torch.optim.Optimizer) -> int:
    hosted = {g.data_ptr() for g in compiled._fxremat.backend.weights._gradients.values()}
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return sum(p.grad.nbytes for p in parameters if p.grad is not None and p.grad.data_ptr() not in hosted)


EVERY_DAY = {("accumulate", "momentum", 0.5), ("clip", "momentum", 0.0)}
EVERY_DAY |= {("scale", "AdamW", 0.0), ("close", "AdamW", 0.0)}
CASES = [
    pytest.param(*case, marks=() if case in EVERY_DAY else pytest.mark.long)
    for case in itertools.product(LOOPS, ("momentum", "AdamW"), (0.0, 0.5, 1.0))
]


@pytest.mark.parametrize(("loop", "kind", "share"), CASES)
def test_steps_are_those_of_plain_training(loop: str, kind: str, share: float) -> None:
    make = OPTIMIZERS[kind]
    torch.manual_seed(0)
    plain, batch = MLP(tied=share > 0), (rows(),)
    ours = copy.deepcopy(plain)
    theirs, mine = make(plain), make(ours)
    most = 6 * sum(p.nbytes for p in plain.parameters())
    low = least(ours, make, batch, LATER)
    mem = int(low + share * (most - low))
    model = fxremat.compile(ours, mem=mem, search=Search(seconds=0), offload=LATER, optimizer=mine)
    for seed in range(4):
        assert LOOPS[loop](model, mine, batch, seed) == LOOPS[loop](plain, theirs, batch, seed)
        for ours_, theirs_ in zip(model.parameters(), plain.parameters(), strict=True):
            assert same(ours_, theirs_)
            assert same(ours_.grad, theirs_.grad)
    assert bool(model._fxremat.backend.weights.hosted) == (share < 1)
    states = zip(mine.state_dict()["state"].values(), theirs.state_dict()["state"].values(), strict=True)
    assert all(same(a[key], b[key]) for a, b in states for key in b)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.0, 0.3], ids=["least", "more"])
def test_every_part_of_a_step_is_within_the_budget(share: float) -> None:
    """Forward and backward, with gradients that are there already, and the updates; of a smaller model every day."""
    torch.manual_seed(0)
    ours, batch = models.get("gpt", "small").model(), models.get("gpt", "small").batch()
    make = OPTIMIZERS["AdamW"]
    mine = make(ours)
    low = 1.03 * least(ours, make, batch, LATER)
    mem = int(low + share * 4 * sum(p.nbytes for p in ours.parameters()))
    model = fxremat.compile(ours, mem=mem, search=Search(seconds=0), offload=LATER, optimizer=mine)
    accumulate(model, mine, batch, 0)
    for _ in range(2):
        held = resident(model, mine) + gradients_on_the_device(model, mine)
        assert meter.peak_bytes(lambda: model(*batch).backward()) + held <= mem
    held = resident(model, mine) + gradients_on_the_device(model, mine)
    assert meter.peak_bytes(mine.step) + held <= mem
    assert model.plan.predicted_peak <= mem


def test_every_group_of_parameters_counts_with_its_own_settings() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        biases = [p for p in model.parameters() if p.dim() == 1]
        others = [p for p in model.parameters() if p.dim() > 1]
        return torch.optim.AdamW([{"params": biases}, {"params": others, "amsgrad": True}], lr=0.01)

    torch.manual_seed(0)
    ours = MLP(tied=False)
    mine, mem = make(ours), least(ours, make, (rows(),), LATER)
    model = fxremat.compile(ours, mem=mem, search=Search(seconds=0), offload=LATER, optimizer=mine)
    accumulate(model, mine, (rows(),), 0)
    held = resident(model, mine) + gradients_on_the_device(model, mine)
    assert meter.peak_bytes(lambda: model(rows()).backward()) + held <= mem
    held = resident(model, mine) + gradients_on_the_device(model, mine)
    assert meter.peak_bytes(mine.step) + held <= mem


def test_gradients_that_the_user_assigns_count() -> None:
    torch.manual_seed(0)
    plain = MLP(tied=False)
    ours = copy.deepcopy(plain)
    theirs, mine = OPTIMIZERS["Adam"](plain), OPTIMIZERS["Adam"](ours)
    mem = least(ours, OPTIMIZERS["Adam"], (rows(),), LATER)
    model = fxremat.compile(ours, mem=mem, search=Search(seconds=0), offload=LATER, optimizer=mine)
    for one, optimizer in ((model, mine), (plain, theirs)):
        torch.manual_seed(3)
        one(rows()).backward()
        for parameter in one.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5
        one(rows()).backward()
        optimizer.step()
    assert all(map(same, model.parameters(), plain.parameters()))


class Summed(MLP):
    """Two parameters with one gradient, which autograd gives each in memory of its own."""

    def __init__(self) -> None:
        super().__init__(tied=False, depth=2)
        self.one, self.other = nn.Parameter(torch.randn(16, WIDTH)), nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.one + self.other)


def pair(plain: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], mem: int | str | None = None) -> Any:
    """Two models with their optimizers: a compiled one, at the least budget unless another is given, and a plain one.
    """
    ours = copy.deepcopy(plain)
    theirs, mine = make(plain), make(ours)
    mem = least(ours, make, (rows(),), LATER) if mem is None else mem
    model: Any = fxremat.compile(ours, mem=mem, search=Search(seconds=0), offload=LATER, optimizer=mine)
    return (model, mine), (plain, theirs)


def test_parameters_with_one_gradient_do_not_share_its_memory() -> None:
    torch.manual_seed(0)
    mine, theirs = pair(Summed(), OPTIMIZERS["AdamW"], "100%")
    for seed in range(2):
        assert accumulate(*mine, (rows(),), seed) == accumulate(*theirs, (rows(),), seed)
    assert all(same(a.grad, b.grad) for a, b in zip(mine[0].parameters(), theirs[0].parameters(), strict=True))
    assert all(map(same, mine[0].parameters(), theirs[0].parameters()))


@pytest.mark.parametrize("hosted", [True, False])
def test_a_fused_optimizer_unscales_gradients_itself(hosted: bool) -> None:
    torch.manual_seed(0)
    fused = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)  # noqa: E731
    mine, theirs = pair(MLP(tied=False), fused, None if hosted else "100%")
    for model, optimizer in (mine, theirs):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            scaler.scale(model(rows())).backward()
            if seed == 1:
                next(iter(model.parameters())).grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
    assert all(map(same, mine[0].parameters(), theirs[0].parameters()))
    assert all(same(a.grad, b.grad) for a, b in zip(mine[0].parameters(), theirs[0].parameters(), strict=True))


def test_hooks_before_and_after_a_step_find_its_gradients() -> None:
    torch.manual_seed(0)
    found: list[list[float]] = []
    mine, theirs = pair(MLP(tied=False), OPTIMIZERS["AdamW"])
    for model, optimizer in (mine, theirs):
        norms: list[float] = []
        found.append(norms)

        def clipped(*_: Any, model: nn.Module = model) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

        def noted(*_: Any, model: nn.Module = model, norms: list[float] = norms) -> None:
            norms.append(float(sum(p.grad.norm() for p in model.parameters() if p.grad is not None)))

        optimizer.register_step_post_hook(noted)
        accumulate(model, optimizer, (rows(),), 0)
        optimizer.register_step_pre_hook(clipped)
        accumulate(model, optimizer, (rows(),), 1)
    assert found[0] == found[1]
    assert all(map(same, mine[0].parameters(), theirs[0].parameters()))


def test_a_parameter_on_the_host_that_is_frozen_later_stays_as_it_is() -> None:
    """Where the step is captured again, which torch 2.11 does not do, it is refused."""
    torch.manual_seed(0)
    (model, optimizer), (plain, theirs) = pair(MLP(tied=False), OPTIMIZERS["AdamW"])
    for one, stepping in ((model, optimizer), (plain, theirs)):
        clip(one, stepping, (rows(),), 0)
        stepping.zero_grad()
        next(iter(one.parameters())).requires_grad_(False)
    if torch_release() >= (2, 13):
        with pytest.raises(fxremat.FxrematError, match=r"has no gradient for .*freeze parameters before"):
            clip(model, optimizer, (rows(),), 1)
        return
    assert clip(model, optimizer, (rows(),), 1) == clip(plain, theirs, (rows(),), 1)
    assert all(map(same, model.parameters(), plain.parameters()))


def test_frozen_and_unused_parameters_stay_as_they_are() -> None:
    torch.manual_seed(0)
    plain = MLP(tied=False)
    plain.spare = nn.Linear(3, 3)
    plain.blocks[1][0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    ours = copy.deepcopy(plain)
    theirs, mine = OPTIMIZERS["AdamW"](plain), OPTIMIZERS["AdamW"](ours)
    model = fxremat.compile(ours, mem="60%", search=Search(seconds=0), offload=LATER, optimizer=mine)
    for seed in range(2):
        assert clip(model, mine, (rows(),), seed) == clip(plain, theirs, (rows(),), seed)
    assert all(map(same, model.parameters(), plain.parameters()))


def test_a_fault_in_an_update_keeps_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tier = FileTier()
    ours = MLP(tied=False)
    mine = OPTIMIZERS["AdamW"](ours)
    mem = least(ours, OPTIMIZERS["AdamW"], (rows(),), LATER)
    offload = Offload(tier=tier, weights=True, activations=False, updates="step")
    model = fxremat.compile(ours, mem=mem, search=Search(seconds=0), offload=offload, optimizer=mine)
    clip(model, mine, (rows(),), 0)
    mine.zero_grad()
    model(rows()).backward()
    before = [p.grad.clone() for p in model.parameters()]
    weights = model._fxremat.backend.weights
    whole, calls = weights._update, iter(range(99))

    def failing(*arguments: Any) -> None:
        if next(calls) == 5:
            raise RuntimeError("no more")
        whole(*arguments)

    monkeypatch.setattr(weights, "_update", failing)
    with pytest.raises(RuntimeError, match="no more") as caught:
        mine.step()
    assert "5 of 16 parameters were updated before this happened" in caught.value.__notes__[0]
    assert all(same(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_bad_settings_say_what_would_work() -> None:
    with pytest.raises(fxremat.FxrematError, match='it is "backward" or "step"'):
        Offload(weights=True, updates="later")
    with pytest.raises(fxremat.FxrematError, match="goes with weights=True"):
        Offload(updates="step")
    assert repr(LATER) == "Offload(activations=False, weights=True, updates='step')"
