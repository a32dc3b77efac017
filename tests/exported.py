"""Small plans of every kind, each made once for all tests of what plans are exported to.

    PLANS["offload"]()      a plan whose values wait on the host
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat.plans import Plan
from fxremat.settings import Offload, Search

WIDTH, ROWS, WORDS = 16, 256, 512


class Deep(nn.Module):
    """Six times linear and tanh; with its loss, or without."""

    def __init__(self, depth: int = 6, loss: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() if self.loss else x


class Words(nn.Module):
    """A layer and a head over many words, whose logits need most."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.up(x))), y)


def rows() -> Tensor:
    return torch.ones(ROWS, WIDTH)


def planned(model: nn.Module, mem: str | int, *inputs: Tensor, **options: object) -> Plan:
    """The plan of a model for inputs, by default a few rows; nothing is measured or searched for."""
    given = {"search": Search(seconds=0), "costs": "estimate"} | options
    plan: Plan = fxremat.plan(model, inputs or (rows(),), mem=mem, **given)  # type: ignore[arg-type, call-overload]
    return plan


@cache
def plain() -> Plan:
    """Some ops run again."""
    return planned(Deep(), "60%")


@cache
def keep_all() -> Plan:
    """Nothing runs again."""
    return planned(Deep(), "100%")


@cache
def outside() -> Plan:
    """The loss is outside of the model."""
    return planned(Deep(loss=False), "80%")


@cache
def offload() -> Plan:
    """Values wait on the host."""
    return planned(Deep(), "50%", offload=True)


@cache
def weights() -> Plan:
    """Weights live on the host, with the state of their optimizer."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"offload": Offload(weights=True, activations=False), "optimizer": optimizer, "example_inputs": rows()}
    compiled = fxremat.compile(model, mem="60%", search=Search(seconds=0), costs="estimate", **options)  # type: ignore[arg-type]
    plan: Plan = compiled.plan
    return plan


@cache
def slices() -> Plan:
    """The head over the vocabulary runs in slices."""
    words = torch.zeros(ROWS, dtype=torch.long)
    return planned(Words(), "50%", rows(), words, slices=True)


PLANS: dict[str, Callable[[], Plan]] = {
    "plain": plain,
    "keep_all": keep_all,
    "outside": outside,
    "offload": offload,
    "weights": weights,
    "slices": slices,
}
