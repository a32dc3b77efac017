"""The benchmarks' memory meter reads exactly what was allocated, and its stopwatch is fair."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import meter, models

pytestmark = pytest.mark.usefixtures("torch_ready")

KIB = 1024


def test_running_peak() -> None:
    assert meter.running_peak([]) == 0
    assert meter.running_peak([(1, -5), (2, 3)]) == 0
    assert meter.running_peak([(3, -4), (1, 4), (2, 6), (4, 3)]) == 10
    assert meter.running_peak([(1, 8), (1, -8), (2, 8)]) == 8, "equal times keep their order"


def test_known_allocations_are_counted_exactly() -> None:
    """8 KiB stay, 4 KiB come and go twice, then 2 KiB beside the 8: the worst moment is 12 KiB."""

    def step() -> torch.Tensor:
        kept = torch.empty(8 * KIB, dtype=torch.uint8)
        for _ in range(2):
            passing = torch.empty(4 * KIB, dtype=torch.uint8)
            del passing
        torch.empty(2 * KIB, dtype=torch.uint8)
        return kept

    step()
    assert meter.peak_bytes(step) == 12 * KIB
    assert meter.storage_peak(step) == 12 * KIB


def test_what_was_there_before_does_not_count() -> None:
    """Neither as memory of the step nor, when the step releases it, as room for more."""
    before = [torch.empty(64 * KIB, dtype=torch.uint8)]

    def step() -> list[torch.Tensor]:
        before.clear()
        return [torch.empty(KIB, dtype=torch.uint8) for _ in range(3)]

    assert meter.peak_bytes(step) == 3 * KIB


def test_a_block_that_an_earlier_recording_saw_does_not_count_either() -> None:
    """Its address may be that of a block of another size, which was given back when nothing recorded."""
    kept: list[torch.Tensor] = []
    meter.peak_bytes(lambda: kept.append(torch.empty(64 * KIB, dtype=torch.uint8)))

    def step() -> torch.Tensor:
        kept.clear()
        return torch.empty(3 * KIB, dtype=torch.uint8)

    assert meter.peak_bytes(step) == 3 * KIB


def test_views_are_counted_once_and_outputs_of_the_step_count() -> None:
    x = torch.ones(256)

    def step() -> list[torch.Tensor]:
        y = x.neg()
        return [y.view(16, 16), y[3:], y.t()]

    step()
    assert meter.peak_bytes(step) == KIB
    assert meter.storage_peak(step) == KIB


def test_a_linear_training_step_by_hand() -> None:
    """16 x 64 values through a 64 -> 32 layer, the output's gradient given from outside: at the end of
    backward there are the output, still held by the step, and the weight's gradient, and nothing else."""
    layer = nn.Linear(64, 32, bias=False)
    x, gradient = torch.randn(16, 64), torch.randn(16, 32)

    def step() -> None:
        y = layer(x)
        y.backward(gradient)

    step()
    layer.zero_grad()
    assert meter.peak_bytes(step) == 16 * 32 * 4 + 64 * 32 * 4


def test_workspaces_are_seen_by_the_first_meter_only() -> None:
    """A strided convolution of few channels is computed through a reordered copy that no tensor shows."""
    x, weight = torch.randn(1, 3, 64, 64), torch.randn(8, 3, 5, 5)

    def step() -> torch.Tensor:
        return F.conv2d(x, weight)

    step()
    assert meter.storage_peak(step) == step().nbytes
    assert meter.peak_bytes(step) >= meter.storage_peak(step)


@pytest.mark.long
@pytest.mark.parametrize("name", models.ALL)
def test_the_meters_agree_on_the_models(name: str) -> None:
    """They differ by workspaces alone, which are a small part of any of these peaks."""
    case = models.get(name, "small")
    model, batch = case.model(), case.batch()
    peak = meter.model_peak(model, batch)
    assert all(p.grad is None for p in model.parameters())
    seen = meter.storage_peak(meter.training_step(model, batch))
    assert seen <= peak <= 1.15 * seen


def test_step_times_alternate_and_take_the_least() -> None:
    order: list[str] = []
    ticks = iter([0, 3, 3, 4, 4, 6, 6, 7, 7, 12, 12, 20])  # starts and ends of six steps: a b | b a | a b

    best = meter.step_times(
        [lambda: order.append("a"), lambda: order.append("b")], repeats=3, clock=lambda: next(ticks)
    )

    assert "".join(order) == "ab" + "abbaab"
    assert best == [1, 1]


@pytest.mark.long
@pytest.mark.parametrize("name", models.ALL)
def test_models_are_reproducible(name: str) -> None:
    case = models.get(name, "small")
    state = torch.get_rng_state()
    first, second = case.model(), case.model()
    assert torch.equal(torch.get_rng_state(), state), "building a model leaves the global RNG alone"
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
    for a, b, c in zip(case.batch(1), case.batch(1), case.batch(2), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert first(*case.batch()).shape == ()


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="deep_chain"):
        models.get("alexnet")
