"""Compiled regions with values that wait on the host: the budget holds, and gradients are Inductor's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from benchmarks import models
from benchmarks.meter import peak_bytes, training_step
from fxremat.graphs.region import Region
from fxremat.settings import Offload, Search
from fxremat.step.program import Role
from tests.fusion.test_compiled import DTYPES, batch, model_of

pytestmark = pytest.mark.usefixtures("torch_ready", "always_in_regions")


def compiled(model: nn.Module, mem: int | str, offload: bool | Offload = True) -> Any:
    search = Search(seconds=0.5, progress=False)
    return fxremat.compile(copy.deepcopy(model), mem=mem, backend="inductor", offload=offload, search=search)


def unet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    case = models.get("unet", "small")
    return case.model(), case.batch(0)


@pytest.mark.parametrize(
    ("made", "mem"),
    [
        pytest.param(lambda: (model_of(dropout=0.0, layers=2), batch()), "60%", id="trunk-60%"),
        *(pytest.param(unet, mem, id=f"unet-{mem}", marks=pytest.mark.long) for mem in ("38%", "50%")),
    ],
)
def test_regions_and_copies_to_the_host_share_a_budget(made: Any, mem: str) -> None:
    torch.manual_seed(0)
    plain, batch = made()
    model = compiled(plain, mem)
    for seed in range(2):
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(seed)
            one(*batch).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            largest = float(theirs.grad.abs().max())
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=DTYPES[torch.float32] * largest)
    plan = model.plan
    assert plan.compiled
    assert plan.compiled.chosen.transfers
    roles = {step.role for step in plan.program.steps}
    assert {Role.OFFLOAD, Role.PREFETCH} <= roles
    assert any(isinstance(node.target, Region) for node in plan.backward_graph.graph.nodes)
    peak = peak_bytes(training_step(model, batch))
    assert peak <= plan.budget
    assert peak == pytest.approx(plan.predicted_peak, rel=0.01)
    assert plan.modules.total.offloaded == plan.compiled.chosen.transfers.bytes
    assert "with nothing on the host" in " ".join(str(plan).split())

    again = compiled(plain, mem)  # chosen as before, from what is stored
    again(*batch).backward()
    assert again.plan.predicted_peak == plan.predicted_peak
    assert again.plan.compiled.chosen.transfers.bytes == plan.compiled.chosen.transfers.bytes


@pytest.mark.long
def test_a_limit_on_the_host_holds() -> None:
    torch.manual_seed(0)
    plain, batch = unet()
    model = compiled(plain, "60%", Offload(limit="400KiB"))
    model(*batch).backward()
    transfers = model.plan.running.chosen.transfers
    assert transfers is None or transfers.bytes <= 400 * 1024


def test_what_fits_without_copies_makes_none() -> None:
    model = compiled(model_of(layers=1), "8MiB")
    model(*batch()).backward()
    assert model.plan.running.chosen.transfers is None
