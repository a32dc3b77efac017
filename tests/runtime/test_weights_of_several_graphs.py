"""Weights on the host in models that are several graphs: the bits of plain training, budgets, and what is refused."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat.ops.parameters import Weights
from fxremat.runtime.calls import Call
from fxremat.settings import Offload, Search
from fxremat.torch_private import holds_gradients
from tests.runtime.test_matrix_of_graphs import WIDTH, Block
from tests.test_device_mem import most
from tests.test_readme import job_of_one
from tests.test_updates_later import LOOPS
from tests.test_weights import OPTIMIZERS
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")

ROWS, CLASSES = 128, 8
QUICK = Search(seconds=0)
LATER = Offload(weights=True, activations=False, updates="step")


class Tied(nn.Module):
    """Graphs with parameters of their own, of which the first and the last are one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.words(y.roll(1))
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x), y)


class Again(nn.Module):
    """One graph that is called four times: each call gives its parameters a part of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x), y)


class Dropped(nn.Module):
    """Leaves blocks out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 0 or random.random() > 0.4:
                x = block(x)
                torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x), y)


class InPython(nn.Module):
    """Has frozen parameters, unused ones, and one that Python reads between the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, CLASSES)
        self.unused, self.factor = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.blocks[0].requires_grad_(False)

    @torch._dynamo.disable
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.scaled(self.blocks[1](self.scaled(self.blocks[0](x))))), y)


MODELS = {kind.__name__: kind for kind in (Tied, Again, Dropped, InPython)}


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


def twins(kind: type[nn.Module], optimizer: str, **options: Any) -> Any:
    """A compiled model, its optimizer, an equal plain model, and its optimizer."""
    torch.manual_seed(0)
    model = kind()
    plain, found = copy.deepcopy(model), []
    for each in (model, plain):
        found.append(OPTIMIZERS[optimizer](each))
    given = {"mem": "70%", "offload": LATER, "search": QUICK, "optimizer": found[0], **options}
    return fxremat.compile(model, **given), found[0], plain, found[1]


def equal(ours: nn.Module, plain: nn.Module) -> bool:
    pairs = [*zip(ours.parameters(), plain.parameters(), strict=True)]
    return all(same(a, b) and same(a.grad, b.grad) for a, b in pairs)


EVERY_DAY = {("Tied", "clip", "min"), ("Again", "accumulate", "70%"), ("InPython", "scale", "70%")}
CASES = [
    pytest.param(*case, marks=() if case in EVERY_DAY else pytest.mark.long)
    for case in itertools.product(MODELS, LOOPS, ("min", "70%"))
]


@pytest.mark.parametrize(("name", "loop", "mem"), CASES)
def test_steps_are_those_of_plain_training(name: str, loop: str, mem: str) -> None:
    ours, own, plain, its = twins(MODELS[name], "AdamW", mem=mem)
    for seed in range(4):
        losses = []
        for model, optimizer in ((ours, own), (plain, its)):
            random.seed(seed)
            losses.append(LOOPS[loop](model, optimizer, batch(seed), seed))
        assert losses[0] == losses[1]
        assert equal(ours, plain), seed
    everyone = [*ours.parameters()]
    assert len(ours._fxremat.backend.weights.hosted) == len({id(p) for p in everyone})


@pytest.mark.parametrize("mem", ["min", "50%", pytest.param("80%", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [Tied, pytest.param(Again, marks=pytest.mark.long)])
def test_the_budget_holds_and_the_prediction_is_exact(kind: type[nn.Module], mem: str) -> None:
    ours, optimizer, _, _ = twins(kind, "momentum", mem=mem, search=Search(seconds=0.3))
    x, y = batch()
    for _ in range(4):
        optimizer.zero_grad()
        ours(x, y).backward()
        optimizer.step()
    optimizer.zero_grad()
    measured = meter.peak_bytes(lambda: ours(x, y).backward())
    assert measured <= ours.plan.budget
    slack = x.nbytes if holds_gradients() else 0
    assert measured <= ours.plan.predicted_peak <= 1.005 * measured + slack
    updating = meter.peak_bytes(optimizer.step)
    assert updating <= ours.plan.budget
    held = 3 * sum(p.nbytes for p in ours.parameters())
    assert ours.plan.keep_all_peak > held  # 100 % is all of it on the device: weights, gradients, and optimizer state
    assert "live on the host; each call brings those that it reads" in str(ours.plan)


def test_calls_that_let_go_bring_their_weights_for_running_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, own, plain, its = twins(Tied, "momentum", mem="100%")
    let_go = Call.let_go
    for seed in range(4):
        for model, optimizer in ((ours, own), (plain, its)):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss = model(*batch(seed))
            if model is ours and seed == 3:
                for call in ours._fxremat.backend.coordinator._step.calls:
                    let_go(call)
            loss.backward()
        assert equal(ours, plain), seed
        own.step(), its.step()


def test_updates_wait_for_the_step_also_where_they_were_to_run_in_the_backward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, own, plain, its = twins(Again, "AdamW", offload=Offload(weights=True))
    with caplog.at_level(logging.WARNING, "fxremat"):
        for seed in range(3):
            for model, optimizer in ((ours, own), (plain, its)):
                LOOPS["accumulate"](model, optimizer, batch(seed), seed)
            assert equal(ours, plain), seed
    told = [record.getMessage() for record in caplog.records if "updated in optimizer.step()" in record.getMessage()]
    assert len(told) == 1


def test_a_backward_that_fails_leaves_gradients_as_they_were() -> None:
    ours, own, plain, its = twins(Again, "momentum")
    for seed in range(4):
        for model, optimizer in ((ours, own), (plain, its)):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            x, y = batch(seed)
            model(x, y).backward()
            if model is ours:
                before = [p.grad.clone() for p in ours.parameters()]
                failing = x.clone().requires_grad_()
                failing.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    (model(failing, y) + model(failing, y)).backward()
                assert failing.grad is None
            torch.manual_seed(seed + 10)
            model(x, y).backward()
        own.step(), its.step()
        # what the failed backward had completed stays, as in plain PyTorch
        assert len(before) == len([*plain.parameters()])


def test_gradients_for_the_caller_are_not_added() -> None:
    ours, own, _, _ = twins(Tied, "momentum")
    x, y = batch()
    for _ in range(3):
        own.zero_grad()
        (gradient,) = torch.autograd.grad(ours(x.requires_grad_(), y), [x])
        assert gradient.shape == x.shape
        assert all(p.grad is None for p in ours.parameters())


def test_a_graph_that_is_kept_gives_its_gradients_twice() -> None:
    ours, _, plain, _ = twins(Again, "momentum")
    for seed in range(3):
        for model in (ours, plain):
            torch.manual_seed(seed)
            model.zero_grad()
            loss = model(*batch(seed))
            loss.backward(retain_graph=True)
            loss.backward()
        assert equal(ours, plain), seed


def test_weights_that_are_loaded_or_brought_back_train_on() -> None:
    ours, own, plain, its = twins(Tied, "AdamW")
    saved = copy.deepcopy(plain.state_dict())
    for seed in range(6):
        if seed == 3:
            for model in (ours, plain):
                model.load_state_dict(saved)
        if seed == 4:
            assert ours.fxremat.to_device() is ours
            assert not ours._fxremat.backend.weights.hosted
        if seed == 5:
            evaluated = [model.eval()(*batch()) for model in (ours, plain)]
            assert same(*evaluated)
            ours.train(), plain.train()
        for model, optimizer in ((ours, own), (plain, its)):
            LOOPS["clip"](model, optimizer, batch(seed), seed)
        assert equal(ours, plain), seed


def test_data_parallel_finds_the_gradients_when_it_reduces_them(tmp_path: Path) -> None:
    ours, own, plain, its = twins(Again, "AdamW")
    with job_of_one(tmp_path):
        parallel = nn.parallel.DistributedDataParallel(ours)
        for seed in range(4):
            for model, optimizer in ((parallel, own), (plain, its)):
                LOOPS["clip"](model, optimizer, batch(seed), seed)
            assert equal(ours, plain), seed


def test_a_budget_below_the_largest_update_is_refused() -> None:
    ours, _, _, _ = twins(Tied, "AdamW", mem=1000)
    with pytest.raises(fxremat.BudgetTooSmall, match=r"optimizer.step\(\) updates the largest parameter") as caught:
        ours(*batch())
    assert caught.value.minimum >= 4 * 4 * WIDTH * 4 * WIDTH


class Shows(Tied):
    """Returns a view of a weight from its first graph."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.words.weight.t()
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return F.cross_entropy(x @ weight, y)


def test_views_of_weights_between_graphs_are_refused() -> None:
    ours, _, _, _ = twins(Shows, "momentum")
    with pytest.raises(fxremat.FxrematError, match="forward returns a view of parameter 0 of the optimizer"):
        ours(*batch())


class Writes(Tied):
    """Clamps a weight, in a graph of its own or in one with other ops."""

    alone = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[0].up.weight.clamp_(-1, 1)  # type: ignore[union-attr, operator]
        if self.alone:
            torch._dynamo.graph_break()
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize(("alone", "named"), [(True, "a parameter"), (False, "the parameter blocks.0.up.weight")])
def test_a_forward_that_writes_to_a_weight_is_refused(alone: bool, named: str) -> None:
    ours, _, _, _ = twins(Writes, "momentum")
    ours.alone = alone
    with pytest.raises(fxremat.FxrematError, match=f"forward writes to {named}, "):
        ours(*batch())


def test_what_may_be_on_the_host_has_to_have_room_for_the_weights() -> None:
    limit = 2**20
    ours, own, plain, its = twins(
        Tied, "momentum", mem="40%", offload=Offload(weights=True, updates="step", limit=limit)
    )
    for seed in range(4):
        for model, optimizer in ((ours, own), (plain, its)):
            LOOPS["clip"](model, optimizer, batch(seed), seed)
        assert equal(ours, plain)
    assert ours.plan.hosted <= limit - sum(p.nbytes for p in ours.parameters())


def test_hosted_parameters_are_no_memory_of_the_device() -> None:
    ours, own, _, _ = twins(Tied, "momentum")
    for _ in range(3):
        LOOPS["clip"](ours, own, batch(), 0)
    weights: Weights = ours._fxremat.backend.weights
    everything = list(ours.parameters())
    assert {p.data_ptr() for p in everything} <= weights._homes
    assert {id(p.grad) for p in everything} == {id(g) for g in weights._gradients.values()}


def test_what_torch_compile_breaks_moves_no_weights() -> None:
    model = Tied()
    optimizer = OPTIMIZERS["momentum"](model)
    given = {"mem": "90%", "offload": LATER, "optimizer": optimizer, "search": QUICK}
    ours = torch.compile(model, backend="fxremat", options=given)
    with pytest.raises(fxremat.FxrematError, match=r"moved there by the module that fxremat\.compile returns"):
        ours(*batch())


class Normalized(Tied):
    """Has running statistics, and a residual stream that takes more than the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.blocks)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block, statistics in zip(self.blocks, self.statistics, strict=True):
            x = statistics(block(x))
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize("share", [1.9, 3.0])
def test_weights_go_to_the_host_where_nothing_else_fits_on_the_device(share: float) -> None:
    """A call that is refused, perhaps after some of its graphs, has drawn no numbers and changed no statistics."""
    torch.manual_seed(0)
    model = Normalized()
    plain = copy.deepcopy(model)
    own, its = (OPTIMIZERS["AdamW"](each) for each in (model, plain))
    size = sum(p.nbytes for p in model.parameters())
    device_mem = int(share * size) + 3 * 2**16
    ours = fxremat.compile(model, device_mem=device_mem, optimizer=own, exact=True, search=QUICK)
    for seed in range(5):
        losses = [LOOPS["clip"](*each, batch(seed), seed) for each in ((ours, own), (plain, its))]
        assert losses[0] == losses[1]
        assert equal(ours, plain), seed
        assert all(map(same, ours.buffers(), plain.buffers()))
    assert len(ours._fxremat.backend.weights.hosted) == len(list(model.parameters()))
    assert ours.plan.predicted_peak <= ours.plan.budget
    assert most(ours, own, batch()) <= device_mem
