"""Slices in a sharded model: every rank cuts the same regions, and gradients are those of FSDP2 up to rounding."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fxremat
from fxremat.settings import Search
from tests.ranks import run_ranks
from tests.slices.models import VOCABULARY, Words
from tests.slices.test_models import CLOSE, error

pytestmark = [pytest.mark.usefixtures("torch_ready"), pytest.mark.long]

BUDGETS = ("60%", "35%")


def sharded(model: Words) -> Words:
    """The model with each block, and the rest, sharded over all ranks."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def cross_entropy(model: Words, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model.logits(x).flatten(0, 1), y.flatten())


def _in_slices(rank: int, world: int) -> list[tuple[str, float, int]]:
    """For each budget: what is cut, the worst error of a gradient, and the least budget."""
    torch.manual_seed(0)
    model = Words(cross_entropy)
    plain, ours = sharded(copy.deepcopy(model)), sharded(model)
    torch.manual_seed(rank)
    tokens = torch.randint(0, VOCABULARY, (4, 64))
    plain(tokens, tokens).backward()
    found = []
    for mem in BUDGETS:
        torch._dynamo.reset()
        ours.zero_grad()
        compiled = fxremat.compile(ours, mem=mem, slices=True, search=Search(seconds=0.0))
        compiled(tokens, tokens).backward()
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        worst = max(error(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)  # type: ignore[union-attr]
        found.append((str(compiled.plan.slices), worst, compiled.plan.minimum))
    return found


def test_a_sharded_model_runs_in_slices(tmp_path: Path) -> None:
    first, second = run_ranks(_in_slices, 2, tmp_path)
    for mine, other in zip(first, second, strict=True):
        assert mine[0] == other[0] != "()"
        assert mine[2] == other[2]
        assert max(mine[1], other[1]) <= CLOSE
