"""A random op that runs again draws the same numbers and leaves the generator as it found it."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.ops.random import GeneratorStates, draw_again, draw_saving, generator_of

pytestmark = pytest.mark.usefixtures("torch_ready")
DROPOUT = torch.ops.aten.native_dropout.default


def test_the_first_draw_is_the_plain_one_and_later_ones_repeat_it() -> None:
    x = torch.ones(64)
    torch.manual_seed(1)
    plain = DROPOUT(x, 0.5, True)
    torch.manual_seed(1)
    state, *first = draw_saving(DROPOUT, x, 0.5, True)
    torch.rand(10)
    now = torch.get_rng_state()
    again = draw_again(state, DROPOUT, x, 0.5, True)
    assert torch.equal(first[0], plain[0])
    assert torch.equal(again[0], first[0])
    assert torch.equal(again[1], first[1])
    assert torch.equal(torch.get_rng_state(), now)


def test_the_generator_is_put_back_after_a_failure() -> None:
    state = torch.get_rng_state()
    torch.rand(3)
    now = torch.get_rng_state()

    def fails() -> None:
        torch.rand(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        draw_again(state, fails)
    assert torch.equal(torch.get_rng_state(), now)


def test_drawing_again_takes_the_memory_of_the_op_alone() -> None:
    x = torch.ones(5000)
    state, *_ = draw_saving(DROPOUT, x, 0.5, True)
    again = peak_bytes(lambda: draw_again(state, DROPOUT, x, 0.5, True))
    assert again == peak_bytes(lambda: DROPOUT(x, 0.5, True))


def test_states_of_all_generators_are_replayed_and_put_back() -> None:
    states = GeneratorStates({torch.device("cpu")})
    first = torch.randn(5), torch.rand(3)
    now = torch.get_rng_state()
    with states.replayed():
        assert torch.equal(torch.randn(5), first[0])
        assert torch.equal(torch.rand(3), first[1])
    assert torch.equal(torch.get_rng_state(), now)
    with states.replayed():
        torch.randn(100)  # more than before
    assert torch.equal(torch.get_rng_state(), now)


def test_keeping_the_states_takes_none_of_torchs_memory() -> None:
    assert peak_bytes(lambda: GeneratorStates(set())) == 0


def test_the_generator_is_that_of_the_device_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", ("first", "second"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    with FakeTensorMode():
        here, there = torch.ones(1), torch.ones(1, device="cuda:0")
    assert generator_of((there, here), {}) == "first"
    assert generator_of((0.5, [there]), {"device": None}) == "first"
    assert generator_of((here, there), {}) is torch.default_generator
    assert generator_of(((2, 3),), {}) is torch.default_generator
    assert generator_of(((2, 3),), {"device": torch.device("cuda", 0)}) == "first"
    assert generator_of((here,), {"device": torch.device("cuda")}) == "second"
    assert generator_of((there,), {"device": torch.device("cpu")}) is torch.default_generator


class Choosing(nn.Module):
    """Draws from a generator of Python's that it has itself, which dynamo would repeat at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.own.random() < 0.5:
            y = y.relu()
        return self.second(y).square().mean() * self.own.uniform(1, 2)


def test_generators_of_the_model_go_on_from_call_to_call() -> None:
    model = Choosing()
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, mem="100%", search=fxremat.Search(seconds=0.0, progress=False))
    for _ in range(6):
        x = torch.randn(4, 8)
        mine, its = ours(x), plain(x)
        mine.backward()
        its.backward()
        assert torch.equal(mine, its)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert model.own.getstate() == plain.own.getstate()
