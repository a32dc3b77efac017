"""The pinned tier on a pretended device whose copies are as late as its streams allow: the numbers are plain PyTorch's.

What is late, and what is noted, says `tests/late_copies.py`. Steps that fail leave copies behind; the steps after them
are compared.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxremat
from fxremat.errors import FxrematError
from fxremat.host import default, pinned
from fxremat.host.files import FileTier
from fxremat.host.pinned import PinnedTier
from fxremat.host.tier import HostTier
from fxremat.settings import Offload, Search
from tests.dags import Dag, Layer, Recipe, batch, few, recipes, small_recipes
from tests.late_copies import Device, late_copies
from tests.test_random_models import compiled_within, differences, train
from tests.toys import QUICK, Loss, Stack, rows
from tests.training import same

pytestmark = pytest.mark.usefixtures("torch_ready")

CPU = torch.device("cpu")
NONE = torch.empty(0)
CHANCES = (0.0, 0.0, 0.1, 0.5)


class FailingTier(PinnedTier):
    """Raises where the device would wait for a copy: the one of this number, counted from now on."""

    fails_at: int | None = None

    def release(self, host: Tensor) -> None:
        self._count()
        super().release(host)

    def wait(self, host: Tensor) -> None:
        self._count()
        super().wait(host)

    def _count(self) -> None:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                raise FxrematError("a fault in the middle of a step")


def fail_once(tier: FailingTier, number: int, device: Device, step: Callable[[], object]) -> None:
    """A step that ends at one of its copies, if it has that many."""
    tier.fails_at = number
    try:
        with device.computing():
            step()
    except FxrematError as error:
        assert "a fault in the middle" in str(error)  # noqa: PT017
    tier.fails_at = None


# --- activations --------------------------------------------------------------------------------------------


def check(recipe: Recipe, share: int, solver: str, seed: int) -> Device:
    """Train a random model with late copies, some steps of which fail. Returns the device."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    chance = random.Random(seed)
    plain, tier = Dag(recipe).train(), FailingTier()
    model = copy.deepcopy(plain)
    options = {**QUICK, "offload": tier, "solver": solver, "costs": "estimate"}
    with late_copies(chance.choice(CHANCES), seed) as device:
        compiled = compiled_within(model, share, list(batch()), **options)
        state = copy.deepcopy(compiled.state_dict())
        for _ in range(2):
            fail_once(tier, chance.randrange(12), device, lambda: loss_of(compiled(*batch())).backward())
        compiled.load_state_dict(state)
        with device.computing():
            ours = train(compiled, trained=False, twice=False)
        tier.close()
    fresh = copy.deepcopy(plain)
    theirs = train(plain, trained=False, twice=False)
    if differences(ours, theirs):  # some captured graphs compute otherwise than eager PyTorch: as aot_eager then
        theirs = train(fresh, trained=False, twice=False, call=torch.compile(fresh, backend="aot_eager"))
    assert differences(ours, theirs) == []
    assert device.faults == []
    return device


def loss_of(outputs: Any) -> Tensor:
    loss: Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs
    return loss


@few(1)
@given(small_recipes, st.integers(0, 100), st.sampled_from(["auto", "keep_all"]), st.integers(0, 1000))
def test_random_models_small(recipe: Recipe, share: int, solver: str, seed: int) -> None:
    check(recipe, share, solver, seed)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes, st.integers(0, 100), st.sampled_from(["auto", "keep_all", "autocapper"]), st.integers(0, 1000))
def test_random_models(recipe: Recipe, share: int, solver: str, seed: int) -> None:
    check(recipe, share, solver, seed)


# --- weights ------------------------------------------------------------------------------------------------

HOSTED = Offload(weights=True, activations=False)
Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
}


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> FailingTier:
    """The tier of those who name none."""
    made = FailingTier()
    monkeypatch.setitem(default._default, FileTier, made)
    return made


def trained_on_the_host(
    make: Make, offload: Offload = HOSTED
) -> tuple[fxremat.api.Rematerialized, torch.optim.Optimizer]:
    """A model in a budget that not all of parameters, gradients, state and activations fit."""
    torch.manual_seed(0)
    model = Loss(Stack())
    optimizer = make(model)
    compiled = fxremat.compile(
        model,
        mem="45%",
        search=Search(seconds=0),
        costs="estimate",
        optimizer=optimizer,
        example_inputs=rows(),
        offload=offload,
    )
    return compiled, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, device: Device | None = None) -> Tensor:
    """One step of training, whose forward and backward a device computes; returns the loss."""
    torch.manual_seed(seed)
    optimizer.zero_grad()
    with device.computing() if device else contextlib.nullcontext():
        loss = model(rows())
        loss.backward()
    optimizer.step()
    return loss.detach()


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of what the host reads between steps: parameters, and their optimizer state."""
    parameters = [p.detach() for p in model.parameters()]
    states = [t for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    return [t.clone() for t in (*parameters, *states)]


def check_weights(tier: HostTier, make: Make, offload: Offload) -> None:
    """Train three steps, after each of which the host reads what is home."""
    torch.manual_seed(0)
    plain = Loss(Stack())
    theirs = make(plain)
    with late_copies() as device:
        model, mine = trained_on_the_host(make, offload=offload)
        for seed in range(3):
            assert torch.equal(step(model, mine, seed, device), step(plain, theirs, seed))
            for ours, other in zip(numbers(model, mine), numbers(plain, theirs), strict=True):
                assert same(ours, other)
        tier.close()
    assert device.copies
    assert device.faults == []


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("AdamW", False),
        ("momentum", True),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("AdamW", True), ("momentum", False))),
    ],
)
def test_weights_on_the_host(name: str, activations: bool, tier: FailingTier) -> None:
    check_weights(tier, OPTIMIZERS[name], Offload(weights=True, activations=activations))


def test_each_parameter_is_old_or_new_after_a_fault(tier: FailingTier) -> None:
    torch.manual_seed(0)
    plain = Loss(Stack())
    theirs = OPTIMIZERS["AdamW"](plain)
    old = [p.detach().clone() for p in plain.parameters()]
    step(plain, theirs, 0)
    with late_copies() as device:
        for number in (1, 9, 25):
            model, mine = trained_on_the_host(OPTIMIZERS["AdamW"])
            fail_once(tier, number, device, lambda: step(model, mine, 0))  # noqa: B023
            found = [p.detach().clone() for p in model.parameters()]
            device.finish()
            for ours, read, before, after in zip(model.parameters(), found, old, plain.parameters(), strict=True):
                assert same(ours, before) or same(ours, after)
                assert same(ours, read)  # what the host had read was final
        tier.close()
    assert device.faults == []


# --- what the pretended device notices -----------------------------------------------------------------------


def finish_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pinned._StreamLane, "finish", lambda self, key: None)


def nothing_is_held(patch: pytest.MonkeyPatch) -> None:
    whole = pinned._Copying
    patch.setattr(pinned, "_Copying", lambda key, source, target, event: whole(key, NONE, NONE, event))


def copies_wait_for_no_op(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.late_copies.Stream.wait_stream", lambda self, other: None)


def copies_count_as_over_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.late_copies.Event.query", lambda self: True)


MANY_COPIES = Recipe(tuple(Layer(kind, 0, 0) for kind in ("linear", "tanh") * 6), 0, False)


def test_many_copies_without_a_mistake() -> None:
    assert check(MANY_COPIES, 30, "keep_all", 0).copies >= 40


@pytest.mark.parametrize(
    ("mistake", "noticed"),
    [
        (finish_waits_for_nothing, "numbers"),
        (nothing_is_held, "a copy reads memory that was let go"),
        (copies_count_as_over_at_once, "numbers"),
        (copies_wait_for_no_op, "a copy reads what an op may still use"),
    ],
)
def test_a_mistake_is_noticed(
    mistake: Callable[[pytest.MonkeyPatch], None], noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=r"gradient of|loss|output" if noticed == "numbers" else noticed):
        check(MANY_COPIES, 30, "keep_all", 0)


def test_a_host_that_reads_too_soon_is_noticed(tier: FailingTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingTier, "synchronize", lambda self: None)
    with pytest.raises(AssertionError, match="same"):
        check_weights(tier, OPTIMIZERS["AdamW"], offload=HOSTED)
