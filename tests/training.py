"""Training a model for a few steps and recording all that could differ from plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import models
from benchmarks.models import Case

STEPS = 3
EVERY_DAY = ("gpt",)  # of the models that every promise is tested on; convolutions are among the random models


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Losses, gradients, final values and random state that a short training run left behind; tensors are copies."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]  # of each step
    state: dict[str, Tensor]  # parameters and buffers at the end
    rng: Tensor


def in_both_sizes(everyday: tuple[str, ...] = EVERY_DAY) -> list[Any]:
    """Parameters (size, name) of a fixture whose runs many tests look at.

    The small models that are named are trained every day, the others and those of full size with `-m long`.
    """
    return [
        pytest.param(
            (size, name),
            id=f"{name}-{size}",
            marks=[] if size == "small" and name in everyday else pytest.mark.long,
        )
        for size in ("small", "full")
        for name in models.MAIN
    ]


def train(model: nn.Module, case: Case, device: str = "cpu") -> Trace:
    """Three steps of SGD with momentum from a fixed RNG state, on a new batch each time."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*(t.to(device) for t in case.batch(step)))
        loss.backward()
        losses.append(loss.detach().clone())
        gradients.append(gradients_of(model))
        optimizer.step()
    rng = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    model.zero_grad()
    return Trace(losses=losses, gradients=gradients, state=state_of(model), rng=rng)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that a state_dict leaves out."""
    return {
        name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())
    }


def differences(trace: Trace, plain: Trace) -> list[str]:
    """Names of everything in `trace` that is not bit for bit as in `plain`, in order of appearance."""
    found = [f"loss {i}" for i, pair in enumerate(zip(trace.losses, plain.losses)) if not same(*pair)]
    for i, (ours, theirs) in enumerate(zip(trace.gradients, plain.gradients, strict=True)):
        found += [f"gradient {i} of {name}" for name in unequal(ours, theirs)]
    found += [f"value of {name}" for name in unequal(trace.state, plain.state)]
    return found + ([] if same(trace.rng, plain.rng) else ["RNG state"])


def unequal(ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> list[str]:
    """Keys that one of the two lacks or whose tensors differ in a bit."""
    return [
        name
        for name in {**theirs, **ours}
        if name not in ours or name not in theirs or not same(ours[name], theirs[name])
    ]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Both None, or equal in dtype, shape and every bit (NaN equals itself, 0.0 is not -0.0)."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def least_budget(model: nn.Module, step: Callable[[nn.Module], object], **options: Any) -> int:
    """The announced minimum: what BudgetTooSmall says when `step(compiled)` is asked to fit in one byte."""
    try:
        step(fxremat.compile(model, mem=1, **options))
    except fxremat.BudgetTooSmall as error:
        return error.minimum
    raise AssertionError("a training step fitted in one byte")
